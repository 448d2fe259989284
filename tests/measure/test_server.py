"""The server: each outcome of a worker becomes a trial, and no process or file of it remains."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import dpbench
from dpbench.analysis import validity
from dpbench.hardware import processes
from dpbench.measure import server as module
from dpbench.measure.ranks import TIMEOUT
from dpbench.measure.request import UNWRITTEN
from dpbench.measure.server import Server, WorkerEnd
from dpbench.records import Case, Effort, Phase, Status, Verified
from tests.marked import NAME, Mark, marked, patience, poll
from tests.runs import bare

ROOT = Path(dpbench.__file__).parent.parent
WHOLE = Effort(budget_s=0.05, warmup_steps=1, min_steps=2, max_steps=4, block_steps=2)
QUICK = bare(WHOLE)
MLP = Case(model="mlp", strategy="single", batch_size=8)
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
pytestmark = linux


def case(model: str, strategy: str = "single", devices: int = 1) -> Case:
    schedule = "reference" if strategy == "dp" else ""
    return Case(model=model, strategy=strategy, devices=devices, batch_size=8, schedule=schedule)


@pytest.fixture(scope="module")
def mark():
    with marked() as mark, pytest.MonkeyPatch.context() as patch:
        patch.setenv(NAME, mark.value)
        yield mark


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(autouse=True)
def _nothing_stays(mark: Mark):
    yield
    left = mark.settles(count=1)
    for process in mark.alive():  # one test's leftovers are not the next one's
        if "dpbench.measure.worker" not in process.cmdline() or process.ppid() != os.getpid():
            process.kill()
    assert left == "", "only the server may be left"
    assert all(
        process.status() != psutil.STATUS_ZOMBIE
        for process in psutil.Process().children(recursive=True)
    )


def trial(server: Server, wanted: Case, limit_s: float = 60.0, number: int = 0):
    return server.run(wanted, QUICK, number, limit_s)


def works(server: Server) -> bool:
    found = trial(server, MLP)
    assert found.status is Status.OK, found.reason
    return True


# -- a trial


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("dp", 2), ("ddp", 2)])
def test_a_trial_is_ok_verified_and_complete(server, strategy, devices):
    wanted = case("mlp", strategy, devices)
    before_s, epoch_s = time.perf_counter(), time.time()
    found = server.run(wanted, WHOLE, 7, 60.0)
    after_s = time.perf_counter()
    assert (found.status, found.case, found.round) == (Status.OK, wanted, 7), found.reason
    assert found.verified in (Verified.BITWISE, Verified.WITHIN_TOLERANCE)
    # the engine's first forwards run in turns, so that it settles in the second step
    assert [step.warmup for step in found.steps][:3] == [True, strategy == "dp", False]
    assert len([step for step in found.steps if not step.warmup]) >= QUICK.min_steps
    assert abs(found.started_s - epoch_s) < 60
    # times are on the clock that all processes of the machine share
    assert all(before_s < step.start_s < step.end_s < after_s for step in found.steps)
    assert {span.device for span in found.spans} >= set(range(devices))
    assert {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER} <= {span.phase for span in found.spans}
    assert any(memory.device == -1 and memory.peak_bytes > 1 << 20 for memory in found.memory)
    assert {"start_s", "verify_s", "build_s"} <= set(found.setup)
    assert found.provenance["torch"]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_ranks_with_a_loss_over_valid_items_are_timed_and_labelled(server, strategy):
    found = trial(server, case("tests.hungry:OVER_VALID_ITEMS", strategy, 2))
    assert found.status is Status.OK, found.reason
    assert found.verified in (Verified.BITWISE, Verified.WITHIN_TOLERANCE)
    averaging = found.provenance["averaging"]
    assert averaging["rows"] == 7
    assert 0.001 < averaging["low"] <= averaging["high"] < 1
    assert "averaging" in {rule.key for rule in validity.troubles([found], 2)}
    assert "averaging" not in trial(server, case("mlp", strategy, 2)).provenance


PID_MODEL = """
import os
from dpbench.models import mlp
from dpbench.models.mlp import batch, loss
def build(size):
    with open({path!r}, "a") as file:
        file.write(f"{{os.getpid()}} {{os.getppid()}}\\n")
    return mlp.build(size)
"""
STATEFUL = """
import torch
from dpbench.models import mlp
from dpbench.models.mlp import batch, loss
def build(size):
    assert not hasattr(torch, "left_behind"), "another trial's process"
    torch.left_behind = True
    torch.set_flush_denormal(True)
    return mlp.build(size)
def _():
    pass
"""
NOISY = r"""
import os, sys
from dpbench.models.mlp import batch, build, loss
print('{"exit": 0, "pid": 1}', flush=True)
os.write(1, b'{"exit": 0}\n' * 3)
os.write(2, b"\xff\xfe" * 50000)
sys.stderr.write("x" * 100000)
assert sys.stdin.read() == "", "requests are not for models"
"""
BROKEN = {
    "absent": ("import a_module_that_is_not_there", ("a_module_that_is_not_there", "absent:")),
    "raises": ("1/0", ("ZeroDivisionError", "raises.py")),
    "unreadable": ("x = (", ("SyntaxError", "unreadable.py")),
    "vacant": ("", ("build", "missing")),
    "exits": ("import sys; sys.exit(3)", ("SystemExit",)),
}
"""Modules that hold no model, by name: their text, and words of the reason that a trial gives."""


@pytest.fixture(scope="module")
def user(tmp_path_factory) -> Path:
    """The folder of a user's modules."""
    folder = tmp_path_factory.mktemp("user")
    texts = {name: text for name, (text, _) in BROKEN.items()}
    texts |= {
        "pid_model": PID_MODEL.format(path=str(folder / "pids")),
        "stateful": STATEFUL,
        "noisy": NOISY,
    }
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def server(mark, scratch, user):
    """One server for many tests: no test may affect the next one through it.

    It works in the user's folder, and its environment asks for two threads an operation.
    """
    with pytest.MonkeyPatch.context() as patch, Server(scratch) as server:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        patch.setenv("OMP_NUM_THREADS", "2")
        patch.delenv("MKL_NUM_THREADS")
        patch.chdir(user)  # a server takes its current folder from its parent's when it starts
        yield server


def test_each_trial_has_a_fresh_process_that_one_server_has_forked(server, user):
    trials = [trial(server, case("pid_model:")) for _ in range(6)]
    assert [t.status for t in trials] == [Status.OK] * 6, trials[0].reason
    pids, parents = zip(
        *(line.split() for line in (user / "pids").read_text().splitlines()), strict=True
    )
    assert len(set(pids)) == 6
    assert len(set(parents)) == 1, "forked, so that none waits for torch to be imported"
    assert not {*pids, *parents} & {str(os.getpid())}
    assert all(t.setup["start_s"] > 0 for t in trials)


def test_state_that_a_model_leaves_in_its_process_does_not_reach_the_next(server):
    first = trial(server, case("stateful:"))
    second = trial(server, case("stateful:"))
    # within one trial it is built twice: once to verify
    assert first.reason == second.reason
    assert "another trial's process" in first.reason


# -- workers that misbehave


def test_a_model_whose_batches_have_other_rows_than_asked_is_not_timed(server):
    found = trial(server, case("tests.hungry:TWICE_THE_ROWS"))
    assert (found.status, found.steps) == (Status.FAILED, ())
    assert "model tests.hungry:TWICE_THE_ROWS: batch(" in found.reason
    assert "first dimension" in found.reason


def test_a_worker_that_aborts_is_a_failed_trial_naming_the_signal(server):
    found = trial(server, case("tests.hungry:DIES"))
    assert found.status is Status.FAILED
    assert "SIGABRT" in found.reason
    assert "forward" in found.reason, "faulthandler's stack is among the last words"
    assert works(server)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("RAISES", ("ArithmeticError: planted in forward", "hungry.py")),
        ("EXITS", ("SystemExit", "planted exit")),
        ("INTERRUPTS", ("KeyboardInterrupt",)),
        ("VANISHES", ("without a result", "exit status 0")),
        ("RAISES_SURROGATE", ("FileNotFoundError", "no weights at model-")),
    ],
)
def test_a_worker_that_raises_or_leaves_is_a_failed_trial_saying_how(server, model, words):
    found = trial(server, case(f"tests.hungry:{model}"))
    assert found.status is Status.FAILED
    assert all(word in found.reason for word in words), found.reason
    assert found.steps == ()
    assert works(server)


@pytest.mark.parametrize("model", ["SLEEPS", "SLEEPS_IN_REPLICA_1"])
def test_a_worker_that_hangs_is_a_timeout_with_its_python_stacks(server, model):
    began_s = time.monotonic()
    found = trial(server, case(f"tests.hungry:{model}", "dp", 2), limit_s=2)
    assert found.status is Status.TIMEOUT
    assert time.monotonic() - began_s >= 2
    assert "2 s" in found.reason
    assert "--limit" in found.reason
    assert "deliberately_asleep" in found.reason
    assert works(server)


def test_memory_that_is_not_there_is_oom_on_the_named_device(server):
    found = trial(server, case("tests.hungry:CPU_IN_REPLICA_1", "dp", 2))
    assert found.status is Status.OOM, found.reason
    assert re.match(r"out of memory on [^;]*cpu:1;", found.reason), found.reason
    assert "cpu:0" not in found.reason
    assert "smaller batch" in found.reason
    found = trial(server, case("tests.hungry:CPU"))
    assert found.status is Status.OOM, found.reason
    assert works(server)


def test_memory_that_is_not_there_in_one_rank_is_oom_not_a_broken_connection(server):
    found = trial(server, case("tests.hungry:CPU_IN_RANK_1", "ddp", 2))
    assert found.status is Status.OOM, found.reason
    assert "rank 1" in found.reason
    assert works(server)


def test_a_rank_that_hangs_is_a_timeout_with_its_stack_and_no_rank_stays(server):
    found = trial(server, case("tests.hungry:SLEEPS_IN_RANK_1", "ddp", 2), limit_s=2)
    assert found.status is Status.TIMEOUT, found.reason
    assert "deliberately_asleep" in found.reason
    assert works(server)


def test_a_rank_that_raises_tells_its_own_error_not_its_peers_broken_connections(server):
    began_s = time.monotonic()
    found = trial(server, case("tests.hungry:RAISES_IN_RANK_1", "ddp", 2))
    assert found.status is Status.FAILED
    assert "rank 1" in found.reason
    assert "ArithmeticError: planted in one rank" in found.reason
    assert "onnection" not in found.reason
    assert time.monotonic() - began_s < TIMEOUT.total_seconds(), (
        "the other rank is not waited for until it times out"
    )
    assert works(server)


def test_a_rank_that_aborts_is_a_failed_trial_and_no_rank_stays(server):
    found = trial(server, case("tests.hungry:DIES_IN_RANK_1", "ddp", 2))
    assert found.status is Status.FAILED
    assert (
        "SIGABRT" in found.reason or "signal 6" in found.reason.lower() or "-6" in found.reason
    ), found.reason
    assert works(server)


def test_what_a_worker_started_ends_with_it(server, mark):
    found = trial(server, case("tests.hungry:LEAVES_A_CHILD"))
    assert found.status is Status.OK, found.reason
    assert mark.settles(count=1) == ""


def test_a_models_own_output_does_not_corrupt_the_protocol(server):
    found = trial(server, case("noisy:"))
    assert found.status is Status.OK, found.reason
    assert works(server)


@pytest.mark.parametrize("name", BROKEN)
def test_a_model_that_cannot_be_imported_is_a_failed_trial_that_says_which(server, name):
    ended = trial(server, case(f"{name}:"))
    assert ended.status is Status.FAILED
    assert all(word in ended.reason for word in BROKEN[name][1]), ended.reason


def test_a_model_module_that_does_not_exist_is_named(server):
    found = trial(server, case("no_such_package.models:net"))
    assert found.status is Status.FAILED
    assert "no_such_package" in found.reason
    assert "--model" in found.reason
    assert works(server)


# -- signals from outside

KILLED = """
import os, signal, time
from pathlib import Path
from types import SimpleNamespace
from dpbench.models import mlp

def build(size):
    path = Path({path!r})
    who, number, left = path.read_text().split()
    if int(left) and (who != "rank" or os.environ.get("RANK") == "1"):
        written = path.with_suffix(".new")
        written.write_text(f"{{who}} {{number}} {{int(left) - 1}}")
        written.replace(path)  # at once: another rank may be reading the file
        os.kill(os.getppid() if who == "server" else os.getpid(), int(number))
        time.sleep(60)
    return mlp.build(size)

net = SimpleNamespace(build=build, batch=mlp.batch, loss=mlp.loss)
"""
KILLS = [("worker", "SIGKILL"), ("worker", "SIGTERM"), ("server", "SIGKILL"), ("rank", "SIGKILL")]


class Killed:
    """A model that signals its worker, the server or its rank in its first attempts."""

    def __init__(self, folder: Path) -> None:
        self.path, self._file = folder / "killed.py", folder / "kills"
        self.path.write_text(KILLED.format(path=str(self._file)))

    def plan(self, who: str, name: str, times: int) -> None:
        self._file.write_text(f"{who} {int(signal.Signals[name])} {times}")

    @property
    def left(self) -> int:
        return int(self._file.read_text().split()[-1])

    def attempted(self, server: Server, who: str):
        """Run what a signal may end: with ranks a trial, else the check of the model."""
        if who == "rank":
            return trial(server, case(f"{self.path}:net", "ddp", 2))
        return server.check(case(f"{self.path}:net"), 60.0)


@pytest.fixture
def killed(tmp_path) -> Killed:
    return Killed(tmp_path)


@pytest.mark.parametrize(("who", "name"), KILLS)
def test_a_signal_from_outside_costs_one_attempt(server, killed, caplog, who, name):
    killed.plan(who, name, 1)
    found = killed.attempted(server, who)
    assert found.status is Status.OK, found.reason
    assert [name in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(("who", "name"), KILLS)
def test_a_second_signal_from_outside_is_recorded_as_a_kill(server, mark, killed, who, name):
    assert works(server)
    old = the_server(mark)
    killed.plan(who, name, 9)
    found = killed.attempted(server, who)
    assert found.status is Status.KILLED
    assert name in found.reason
    assert killed.left == 7, "two attempts, and not more"
    if who == "server":
        assert "server" in found.reason
        assert mark.settles(count=0) == "", "the worker sleeps after the kill"
    assert works(server)
    assert (the_server(mark).pid != old.pid) is (who == "server")


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT"])
def test_a_crash_is_a_failure_that_is_not_tried_again(server, killed, name):
    killed.plan("worker", name, 9)
    found = killed.attempted(server, "worker")
    assert found.status is Status.FAILED
    assert name in found.reason
    assert killed.left == 8


def test_a_process_that_was_killed_for_memory_has_failed_and_is_not_tried_again(
    server, killed, monkeypatch
):
    counts = iter(range(99))
    monkeypatch.setattr(processes, "killed_for_memory", lambda: next(counts))
    killed.plan("worker", "SIGKILL", 9)
    found = killed.attempted(server, "worker")
    assert found.status is Status.FAILED
    assert "memory ran out" in found.reason
    assert killed.left == 8


# -- a full disk, and a server that does not answer


def test_a_worker_that_cannot_write_its_trials_for_a_time_is_a_killed_trial(server):
    found = trial(server, case("tests.hungry:WRITES_NO_FILES"))
    assert found.status is Status.KILLED
    assert "could not write its files" in found.reason
    assert works(server)


def test_a_full_disk_is_an_error_that_names_the_folder_and_the_variable(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "probe").symlink_to("/dev/full")
    with pytest.raises(OSError, match=rf"{tmp_path}.*TMPDIR") as raised:
        WorkerEnd(exit_status=UNWRITTEN).failure(1.0, tmp_path)
    assert raised.value.errno == errno.ENOSPC


def test_a_folder_of_temporary_files_that_was_removed_is_an_error_that_names_the_variable(tmp_path):
    with Server(tmp_path / "gone") as own, pytest.raises(OSError, match="TMPDIR") as raised:
        trial(own, MLP)
    assert raised.value.errno == errno.ENOENT


def test_a_server_that_does_not_answer_is_a_failed_trial_and_the_next_gets_a_new_one(
    server, mark, monkeypatch
):
    assert works(server)
    old = the_server(mark)
    monkeypatch.setattr(module, "START_LIMIT_S", 0.2)
    old.suspend()
    found = trial(server, MLP)
    monkeypatch.undo()
    assert found.status is Status.FAILED
    assert "did not answer" in found.reason
    assert not old.is_running()
    assert works(server)


# -- the server itself


def the_server(mark: Mark) -> psutil.Process:
    servers = [
        p
        for p in mark.alive()
        if "dpbench.measure.worker" in p.cmdline() and p.ppid() == os.getpid()
    ]
    assert len(servers) == 1
    return servers[0]


def test_a_server_killed_in_the_middle_is_replaced_and_the_trial_is_tried_once_more(
    server, mark, user, caplog
):
    assert works(server)
    old = the_server(mark)
    (user / "passing").write_text("0")  # rank 1 hangs in the first attempt alone
    killed = []

    def kill():
        killed.append(poll(lambda: (user / "passing").read_text() == "-1"))
        killed.append(len(old.children(recursive=True)) >= 3)  # the worker and its ranks
        old.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    wanted = replace(case("tests.hungry:STUBBORN_WHEN_TOLD", "ddp", 2), batch_size=16)
    found = trial(server, wanted)
    killer.join()
    assert killed == [True, True]
    assert found.status is Status.OK, found.reason
    assert ["SIGKILL" in record.getMessage() for record in caplog.records] == [True]
    assert mark.settles(count=1) == "", "the workers and ranks of the first attempt have ended"
    assert works(server)
    assert the_server(mark).pid != old.pid


def test_the_server_has_one_thread_to_fork_from(server, mark):
    assert works(server)
    assert the_server(mark).num_threads() == 1


def test_an_idle_server_that_died_is_replaced_without_losing_a_trial(server, mark):
    assert works(server)
    old = the_server(mark)
    old.send_signal(signal.SIGKILL)
    poll(lambda: old.status() == psutil.STATUS_ZOMBIE)
    assert works(server)


def test_closing_leaves_no_process_no_zombie_no_descriptor_and_no_folder_for_the_next_server(
    tmp_path, mark
):
    def descriptors():
        return psutil.Process().num_fds()

    present = {process.pid for process in mark.alive()}
    before = descriptors()
    for model in (
        "mlp",
        "tests.hungry:DIES",
    ):  # a new server often has the address, and so the id, of the last one
        with Server(tmp_path) as own:
            assert works(own)
            trial(own, case(model))
        assert {process.pid for process in mark.alive()} <= present
        assert descriptors() == before
        assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith("trial")] == []
    with Server(tmp_path):
        pass  # one that was never asked is nothing to end
    assert {process.pid for process in mark.alive()} <= present


@pytest.mark.alone
def test_the_server_dies_with_its_parent_and_so_do_workers_and_ranks(tmp_path):
    code = """
        import sys
        from pathlib import Path
        from dpbench.records import Case, Effort
        from dpbench.measure.server import Server
        with Server(Path(sys.argv[1])) as server:
            print("there", flush=True)
            model = "tests.hungry:STUBBORN_IN_RANK_1"
            case = Case(model=model, strategy="ddp", batch_size=8, devices=2)
            server.run(case, Effort(), 0, 600)
    """
    with marked() as own:
        env = os.environ | own.env | {"PYTHONPATH": str(ROOT)}
        parent = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], env=env, cwd=ROOT
        )
        # the parent, its server, the worker, two ranks
        poll(lambda: len(own.alive()) >= 5, 30)
        assert len(own.alive()) >= 5
        time.sleep(0.5)  # so that the ranks are at work
        parent.kill()
        parent.wait()
        assert own.settles(0) == ""


def test_the_server_has_run_no_tensor_operation_and_touched_no_cuda(tmp_path):
    """One multi-threaded operation in the server would hang its children."""
    code = """
        import json, sys
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        class Recorder(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                seen.append(str(function))
                return function(*args, **(kwargs or {}))

        seen = []
        with Recorder():
            from dpbench.measure.worker.__main__ import serve
            serve()
        folders = ("dpbench.models.", "dpbench.strategies.")
        loaded = [name for name in sys.modules if name.startswith(folders)]
        result = {"seen": seen, "cuda": torch.cuda.is_initialized(), "loaded": loaded}
        result["pandas"] = "pandas" in sys.modules
        open(sys.argv[1], "w").write(json.dumps(result))
    """
    output = tmp_path / "result.json"
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(output)],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=True,
        timeout=patience(60),
    )
    result = json.loads(output.read_text())
    assert result["seen"] == []
    assert result["cuda"] is False
    assert result["pandas"] is False, (
        "only readers make tables, and every command with a worker would wait for it"
    )
    public = [
        path
        for folder in ("models", "strategies")
        for path in (ROOT / "dpbench" / folder).glob("[!_]*.py")
    ]
    plugs = {f"dpbench.{path.parent.name}.{path.stem}" for path in public}
    assert plugs <= set(result["loaded"]), "every plug is loaded before the first fork"


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc")
def test_workers_have_one_thread_an_operation_whatever_the_parent_has(server):
    assert works(server)
    variables = Path(f"/proc/{server._process.pid}/environ").read_text().split("\0")
    assert {"OMP_NUM_THREADS=1", "MKL_NUM_THREADS=1"} <= set(variables)


def test_nothing_but_its_log_is_left_in_the_scratch_folder_that_another_trial_could_trip_over(
    server, scratch
):
    assert works(server), "the server writes its log when it starts"
    first = {entry.name for entry in scratch.iterdir()}
    assert works(server)
    assert works(server)
    new = {entry.name for entry in scratch.iterdir()} - first
    assert len(new) in (0, 2), "each trial has its own folder"
