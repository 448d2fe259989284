"""Every command in the README or a document runs as written, in a folder with its files."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.scripts import claims
from dpbench.measure import run as runner
from dpbench.measure.server import Server
from dpbench.predict import machine
from dpbench.records import Case
from dpbench.store import Naming
from tests.exported import DP, command, made, stored
from tests.predict.test_stored import single, write
from tests.project.test_docs import COMMANDS, DOCS, README, ROOT, TEN
from tests.runs import BareServer
from tests.strategies.test_users_own import MINE

SHORTER = {
    "run": ("--rounds", "1", "--budget", "1"),
    "loaders": ("--rounds", "1", "--examples", "1", "--workers", "0,1"),
}
"""Options that end a command early; the others are run exactly as they are written."""
ELSEWHERE = {
    "examples/starved_loader.py": "test_a_starved_loader_is_named",
    "doctor": "test_the_command_measures_this_machine",
    "gate": "test_a_script",
    "--compile": "test_the_time_of_compilation_is_apart_from_the_steps",
    "--find-max-batch": "test_the_command_prints_a_line_a_case",
}
"""Commands and options that take long, and the tests that run them."""
HERE = [one for one in dict.fromkeys(map(tuple, TEN + COMMANDS)) if not ELSEWHERE.keys() & {*one}]
MODULE = re.findall(r"```python\n# mymodel.py\n(.*?)```", README, re.S)[0]
RUNS = re.compile(r"[0-9a-f]{8}")


TRAIN = """
import torch

dataset = list(range(999))
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(20):
    optimizer.zero_grad()
    net(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""


def modules(folder: Path) -> None:
    """Write the modules that commands name."""
    (folder / "pkg").mkdir()
    (folder / "mymodel.py").write_text(MODULE)
    (folder / "pkg" / "mod.py").write_text(f"{MODULE}\nobj = net\n")
    (folder / "mine.py").write_text(MINE.replace("FACTOR", "1.0"))
    (folder / "data.py").write_text("train = list(range(999))\n")
    (folder / "train.py").write_text(TRAIN)


def files(folder: Path, arguments: Sequence[str]) -> Sequence[str]:
    """Write the files that a command names.

    Return its arguments with the ids of runs that exist.
    """
    modules(folder)
    (folder / "mine.toml").write_text(machine.text_of_machine("rtx-3090-x8"))
    shutil.copy(ROOT / "tests" / "data" / "published.csv", folder / "FILE.csv")
    for rank in range(2):
        shutil.copy(
            ROOT / "tests" / "data" / "traces" / f"x128-rank{rank}.json.gz",
            folder / f"rank{rank}.json.gz",
        )
    if arguments[0] in ("run", "loaders"):
        return arguments
    if "--from" in arguments:  # a prediction for GPUs needs steps that one such GPU has run
        model = arguments[arguments.index("--models") + 1]
        write(
            folder / "dpbench.db",
            [(single(n, model=model, size=size), n / 1e4) for n in (32, 64) for size in SIZES],
        )
    trials = [made(case, number=n, at_s=5e3 + n) for n in range(3) for case in (DP, ALONE)]
    named = [
        argument[1:] for argument in arguments if argument.startswith("@") and argument != "@last"
    ]
    for naming in (Naming(name=name) for name in named):
        stored(folder / "dpbench.db", *trials, naming=naming)
    stored(folder / "other.db", *trials)
    ids = iter([stored(folder / "dpbench.db", *trials)[:8] for _ in range(2)])
    return [next(ids) if RUNS.fullmatch(argument) else argument for argument in arguments]


SIZES = ("small", "full")
ALONE = Case(model="mlp", strategy="single", batch_size=64)


def test_commands_that_are_run_elsewhere_are_run_there() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in ELSEWHERE.values() if f"def {name}(" not in tests] == []
    assert len(TEN) == 10
    assert len(COMMANDS) > 15
    assert DOCS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all runs, because each would load torch again.

    Its folder has the same modules as theirs.
    """
    folder = tmp_path_factory.mktemp("server")
    modules(folder)
    with Server(folder) as server, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        server.prepare()
        patch.undo()
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("arguments", HERE, ids=" ".join)
def test_a_command_of_a_document_runs(
    arguments: tuple[str, ...],
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(runner, "Server", lambda scratch: BareServer(server))
    monkeypatch.syspath_prepend(tmp_path)
    dpbench = command(tmp_path, monkeypatch, capfd)
    code, out, err = dpbench(*files(tmp_path, arguments), *SHORTER.get(arguments[0], ()))
    assert code == 0, f"dpbench {shlex.join(arguments)}\n{err}"
    assert out or any(tmp_path.glob("trace*")), err


@pytest.mark.slow
def test_the_tables_of_the_claims_are_those_that_its_commands_print() -> None:
    text = claims.PAGE.read_text()
    assert len(claims.RESULT.findall(text)) == text.count("<!-- result") == 3
    assert len(claims.MEASURED.findall(text)) == text.count("<!-- measured") == 1
    assert claims.renewed(text) == text, "run: python benchmarks/scripts/claims.py"
