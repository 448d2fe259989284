"""A watched script sees the same as without dpbench: signals, streams, arguments and exit."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from dpbench.observe import imports
from tests.commands import COMMAND, ROOT
from tests.marked import patience
from tests.observe.watched_scripts import run

pytestmark = pytest.mark.slow

TRAIN = """
import atexit, os, signal, sys
import torch

model = torch.nn.Linear(4, 1)


def train(steps=30):
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad.zero_()


"""
"""The head of scripts. An optimizer would load torch._dynamo, as long a wait as torch itself."""


class Script:
    """A script in a folder of its own, which runs alone or watched.

    What it prints for the test begins with ">", and thus differs from what dpbench prints.
    """

    def __init__(self, folder: Path, source: str, path: str = "train.py") -> None:
        self.folder = folder
        self.path = path
        (folder / path).write_text(source)
        self.errors = ""

    def run(self, *arguments: str, watched: bool, module: bool = False) -> tuple[int, list[str]]:
        """Run it, and return its exit code (negative: the signal that ended it) and its lines."""
        command = [*COMMAND, "watch"] if watched else [sys.executable]
        script = ["-m", "train"] if module else [self.path]
        done = subprocess.run(
            [*command, *script, *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=patience(120),
            check=False,
        )
        self.errors = done.stderr
        return done.returncode, [line for line in done.stdout.splitlines() if line[:1] == ">"]

    def query(self, sql: str) -> list[tuple]:
        with closing(sqlite3.connect(self.folder / "dpbench.db")) as db:
            return db.execute(sql).fetchall()


STATE = """
import sys
argv = [*sys.argv]
import json, os, signal, threading, typing


FILE = ("__file__", "__cached__")
torch_is_there = False


def look():
    main = sys.modules["__main__"]
    return {
        "arguments": sys.argv,
        "path": sys.path,
        # the interpreter removes the file before it calls the functions at exit
        "main": sorted(key for key in vars(main) if key[:2] == "__" and key not in FILE),
        "file": torch_is_there or [getattr(main, key) for key in FILE],
        "is main": vars(main) is globals(),
        "spec": str(main.__spec__ and main.__spec__.name),
        "future": train.__annotations__["steps"] is int,
        "handlers": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
        "previous": str(signal.signal(signal.SIGTERM, signal.SIG_DFL)),
        "blocked": str(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "threads": threading.active_count(),
        "hooks": [sys.excepthook is sys.__excepthook__, sys.gettrace(), sys.getprofile()],
        "streams": [sys.stdout is sys.__stdout__, sys.stdout.encoding, sys.stdout.errors],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
    }


def train(steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


seen = [argv, look(), sorted(map(str, __import__("warnings").filters))]
os.environ["OMP_NUM_THREADS"] = "3"
import torch

torch_is_there = True
seen += [look(), torch.get_num_threads(), len(os.listdir("/proc/self/task"))]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train(20)


@__import__("atexit").register
def last():
    print(">" + json.dumps([*seen, look()]))
"""


@pytest.mark.parametrize("module", [False, True], ids=["file", "module"])
def test_a_watched_script_sees_what_it_sees_alone(
    module: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after its import of torch, and in the functions that run at exit."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = Script(tmp_path, STATE)
    (code, [alone]), (watched_code, [watched]) = (
        script.run("16", "--lr", "1", watched=watched, module=module) for watched in (False, True)
    )
    assert code == watched_code == 0, script.errors
    for at, (one, other) in enumerate(
        zip(json.loads(alone[1:]), json.loads(watched[1:]), strict=True)
    ):
        assert one == other, f"look {at}"
    assert len(script.query("SELECT id FROM run")) == 1


TWICE = (
    TRAIN
    + """
atexit.register(lambda: print("> at exit", flush=True))


def phase(name, number):
    try:
        train()
        os.kill(os.getpid(), getattr(signal, number))
        train()
        print(">", name, "ends", flush=True)
    except KeyboardInterrupt:
        print(">", name, "interrupted", flush=True)
    finally:
        print(">", name, "cleans up", flush=True)


phase("training", sys.argv[1])
phase("tuning", sys.argv[2])
"""
)


@pytest.mark.parametrize(
    ("first", "second"), [("SIGINT", "SIGINT"), ("SIGINT", "SIGTERM"), ("SIGHUP", "SIGINT")]
)
def test_signals_are_those_of_the_script_also_after_the_first(
    first: str, second: str, tmp_path: Path
) -> None:
    script = Script(tmp_path, TWICE)
    alone = script.run(first, second, watched=False)
    assert script.run(first, second, watched=True) == alone, script.errors
    ((status, reason),) = script.query(
        "SELECT DISTINCT run.status, reason FROM run JOIN trial ON run_id=run.id"
    )
    ended = alone[0] == 0
    assert status == ("finished" if ended else "interrupted")
    assert ("interrupted" in reason) != ended


OWN = """
import multiprocessing, time

# as Lightning does
if signal.getsignal(signal.SIGTERM) in (None, signal.SIG_DFL):
    signal.signal(signal.SIGTERM, lambda *_: print("> saves", flush=True))
train()
os.kill(os.getpid(), signal.SIGTERM)


def wait(pipe):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    pipe.send("there")
    time.sleep(60)


ours, theirs = multiprocessing.Pipe()
child = multiprocessing.get_context("fork").Process(target=wait, args=(theirs,))
child.start()
ours.recv()
child.terminate()
child.join()
print("> child", child.exitcode, flush=True)
pid = os.fork()
if pid == 0:
    sys.exit(5)
print("> fork", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
sys.excepthook = lambda kind, error, trace: print(">", kind, error, trace.tb_lineno, flush=True)
train()
raise RuntimeError("mine")
"""


def test_handlers_children_and_hooks_are_those_of_the_script(tmp_path: Path) -> None:
    script = Script(tmp_path, TRAIN + OWN)
    code, lines = alone = script.run(watched=False)
    assert code == 1
    assert lines[:3] == ["> saves", "> child -15", "> fork 5"]
    assert script.run(watched=True) == alone, script.errors
    # a forked process stores no run, and an error is no interruption
    assert script.query("SELECT status FROM run") == [("finished",)]


def test_an_interrupt_that_the_script_does_not_catch_ends_its_process(tmp_path: Path) -> None:
    script = Script(tmp_path, TRAIN + "train()\nraise KeyboardInterrupt\n")
    # by SIGINT, or with code 1, if torch runs Python code at exit
    alone = script.run(watched=False)
    assert script.run(watched=True) == alone, script.errors
    assert script.errors.count("Traceback") == 1
    assert script.query("SELECT status FROM run") == [("interrupted",)]


LEAVES = """
import time

time.sleep(1)  # samples are taken
train()
print("> ended", time.time(), flush=True)
os.mkdir("elsewhere")
os.chdir("elsewhere")
time.sleep(1)
sys.stdout.close()
sys.stderr.close()
"""


def test_the_folder_the_streams_and_the_files_of_the_script_may_be_any(tmp_path: Path) -> None:
    """It leaves its folder, closes its streams, and has files with names of dpbench's modules."""
    code_folder = tmp_path / "code"
    code_folder.mkdir()
    for name in ("psutil", "jinja2"):
        (code_folder / f"{name}.py").write_text('raise SystemExit("the file of the script")')
    script = Script(tmp_path, TRAIN + "train()\n" + LEAVES, "code/train.py")
    code, [line] = script.run(watched=True)
    assert code == 0
    assert (tmp_path / "reports/latest/index.html").exists()
    assert script.query("SELECT 1 FROM series LIMIT 1")
    # a run starts with its loop, and not when it is stored
    ((status, started_s, first_s),) = script.query(
        "SELECT DISTINCT run.status, run.started, trial.started FROM run, trial"
    )
    assert status == "finished"
    assert started_s == first_s < float(line.split()[-1]) - 1


@pytest.mark.parametrize(
    ("end", "code"), [("-1", 255), ("260", 4), ("None", 0), ("True", 1), ("'x'", 1)]
)
def test_the_exit_code_is_that_of_the_interpreter(end: str, code: int, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"import sys\nsys.exit({end})")
    assert run(file) == code
    assert subprocess.run([sys.executable, file], check=False).returncode == code


def test_the_import_of_a_module_is_awaited_and_not_hastened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "awaited_once.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    finders = [*sys.meta_path]
    calls: list[int] = []
    imports.after("awaited_once", lambda: calls.append(sys.modules["awaited_once"].value))
    assert importlib.util.find_spec("awaited_once")
    assert not calls
    module = importlib.import_module("awaited_once")
    assert calls == [1]
    assert sys.meta_path == finders
    assert not vars(module.__loader__).get("exec_module")
    imports.after("awaited_once", lambda: calls.append(2))
    assert calls == [1, 2]
