"""What all tests share: one thread per operation, a fixed seed, fixtures, and marks for GPUs.

A test is skipped without the GPUs that its mark requires. `--fast` leaves out slow tests, takes a
sample of many parameters, and skips a test at the moment at which it would start a process. With
`--no-skips`, a test or a file of tests that is skipped fails, and an expected failure does not.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import pytest

from dpbench.hardware import processes
from dpbench.hardware.samplers import host
from dpbench.measure import batch_search
from dpbench.measure import run as runner
from dpbench.measure.server import Server
from dpbench.records import siblings
from dpbench.store import Store
from tests import commands, exported, standing_in
from tests.engine import rungs

gc.disable()  # until all tests are collected: see pytest_collection_finish
# before torch is loaded: later has no effect; the threads of a strategy that uses all cores would
# spin while they wait
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
os.environ["DPBENCH_PATIENCE"] = "0"  # runs neither wait for a quiet machine nor repeat trials
# Python 3.14's default imports the main module again before workers of a DataLoader start, but
# scripts that tests watch in this process have no `if __name__ == "__main__"`
multiprocessing.set_start_method("fork")

# a GPU machine's own Python may lack it: the tests that need it are then left out
with suppress(ModuleNotFoundError):
    import hypothesis

    hypothesis.settings.register_profile(
        "dpbench", deadline=None, derandomize=True, print_blob=True
    )
    hypothesis.settings.load_profile("dpbench")


@pytest.fixture(autouse=True)
def _one_thread_and_seed() -> Iterator[None]:
    import torch

    torch.set_num_threads(1)
    # torch.manual_seed writes down the stack for each accelerator
    torch.default_generator.manual_seed(0)
    yield
    processes.roam()  # a trial in this process stays on its device's core


@pytest.fixture(autouse=True)
def _threads_switch_often(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let Python switch threads as often as it can, so that a missing wait shows.

    Not where tests measure time.
    """
    before = sys.getswitchinterval()
    if not any(map(request.node.get_closest_marker, ("alone", "gpu", "multi_gpu"))):
        sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def all_gpus_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide no GPU from the samplers, and let them watch this process and its children."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv(host.ROOT_PID, str(os.getpid()))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a store that does not exist yet."""
    return tmp_path / "store.db"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store."""
    with Store.create(tmp_path / "store.db") as store:
        yield store


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Replace processes by stand-ins, and temporary files by files that a test can read."""
    with standing_in.quick(monkeypatch, tmp_path):
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[commands.Folder]:
    """A folder in which a user starts commands."""
    with commands.folder(tmp_path) as folder:
        yield folder


@pytest.fixture
def dpbench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> exported.Command:
    """Call the command line in this process, in a separate folder.

    Return exit code, stdout and stderr.
    """
    return exported.command(tmp_path, monkeypatch, capfd)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests of this process that only need trials: each new one loads torch."""
    with Server(tmp_path_factory.mktemp("server")) as server:
        server.prepare()  # here, and not in the folder of the first test that uses it
        yield server


@pytest.fixture
def one_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the runs and searches of this process share one server."""
    for module in (runner, batch_search):
        monkeypatch.setattr(module, "Server", lambda scratch: nullcontext(server))


@pytest.fixture
def short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the small LSTM have 6 tokens a row.

    An emulated device runs the operations of each token from Python.
    """
    from dpbench.models import lstm

    monkeypatch.setitem(lstm.DIMS, "small", lstm.DIMS["small"]._replace(tokens=6))


@contextmanager
def lock(path: Path, kind: int) -> Iterator[IO[str]]:
    """Hold a lock known to all processes of this run, exclusive (LOCK_EX) or shared (LOCK_SH)."""
    with path.open("a") as file:
        fcntl.flock(file, kind)
        yield file


Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)
Once = Callable[[str, Callable[[Path], Any]], Any]


@pytest.fixture(scope="session")
def once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Call a function with a new folder of a name, once for all processes of this run.

    Return what it returned.

    Each process gets a copy by pickle. The tests of all processes read the folder, so that none may
    write there.
    """
    base = tmp_path_factory.getbasetemp()
    base = base.parent if hasattr(request.config, "workerinput") else base

    def call(name: str, make: Callable[[Path], Any]) -> Any:
        folder, result = base / name, base / f"{name}.pickle"
        with lock(base / f"{name}.lock", fcntl.LOCK_EX):
            if not result.exists():
                folder.mkdir(exist_ok=True)
                result.write_bytes(pickle.dumps(make(folder)))
            return pickle.loads(result.read_bytes())

    return call


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="run the tests of all schedules, and not a sample"
    )
    parser.addoption(
        "--fast", action="store_true", help="leave out tests that are slow or start a process"
    )
    parser.addoption(
        "--no-skips", action="store_true", help="what is skipped fails, as without a library"
    )


STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}
TOOLS = {"git", "uname", "fc-list"}
"""Short commands that a library, or the record of a run's host and commit, may call."""
FAST_PARAMETERS = 6
"""Sets of parameters of one test that `--fast` runs, at most."""
in_test = False
kept_from_a_process = False


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("fast"):
        sys.addaudithook(_skip_at_a_process)


def _skip_at_a_process(event: str, arguments: tuple[Any, ...]) -> None:
    """Skip the test, or the tests of the fixture, that is about to start a process.

    Python calls this hook.
    """
    if (
        event in STARTS
        and in_test
        and not (event == "subprocess.Popen" and Path(str(arguments[0])).name in TOOLS)
    ):
        global kept_from_a_process
        kept_from_a_process = True
        pytest.skip("starts a process")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip a test that fails because dpbench caught the exception of `_skip_at_a_process`.

    A trial, for instance, catches it.
    """
    global kept_from_a_process
    kept_from_a_process = False
    try:
        return (yield)
    except Exception:
        if kept_from_a_process:
            pytest.skip("starts a process")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a test that is skipped fail, if `--no-skips` is given."""
    return _unless_skipped(item.config, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let a file of tests that is skipped fail, if `--no-skips` is given."""
    return _unless_skipped(collector.config, (yield))


def _unless_skipped(config: pytest.Config, report: Report) -> Report:
    # pytest counts a test that is expected to fail as skipped
    if report.skipped and not hasattr(report, "wasxfail") and config.getoption("no_skips"):
        report.outcome = "failed"
    return report


@contextmanager
def turn(item: pytest.Item) -> Iterator[None]:
    """Run no other test at the same time as one marked `alone`.

    Processes queue for their turn: without the first lock, tests that share the second could keep a
    test that wants it alone waiting for ever.
    """
    # pytest-xdist's: this process runs all tests, one after the other
    if not hasattr(item.config, "workerinput"):
        yield
        return
    folder = item.config._tmp_path_factory.getbasetemp().parent  # type: ignore[attr-defined]
    kind = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    with lock(folder / "queue", fcntl.LOCK_EX) as queue, lock(folder / "turn", kind):
        fcntl.flock(queue, fcntl.LOCK_UN)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Wait for the test's turn.

    Processes that start from now on are the test's, and not pytest's own.
    """
    global in_test
    with turn(item):
        in_test = True
        try:
            return (yield)
        finally:
            in_test = False


def _fast(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the tests of `--fast`.

    Of one with many parameters, some that are spread over all of them.
    """
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not any(map(item.get_closest_marker, ("slow", "browser", "alone"))):
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in groups.values():
        count = min(len(group), FAST_PARAMETERS)
        yield from (group[number * len(group) // count] for number in range(count))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that need more GPUs than this machine has, with the reason; order the tests.

    Tests marked `alone` come first: each waits for the tests that are running, and the tests after
    it wait for it, which takes longest beside a slow test. Slow tests follow: a slow test at the
    end would run while the other processes have nothing left to do.
    """
    import torch

    items.sort(
        key=lambda item: (
            item.get_closest_marker("alone") is None,
            item.get_closest_marker("slow") is None,
        )
    )
    if config.getoption("fast"):
        kept = set(_fast(items))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]

    if not config.getoption("all"):
        kept = set(filter(rungs.in_sample, items))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]

    count = torch.cuda.device_count()
    # torch.manual_seed would keep the seed for GPUs with the text of the whole stack: 0.7 ms a call
    if not count:
        for kind in (torch.cuda, torch.xpu):
            kind.manual_seed_all = lambda seed: None
    for item in items:
        for mark in item.iter_markers("sibling"):
            if not siblings.present(*mark.args):
                item.add_marker(pytest.mark.skip(reason=f"needs dpbench.{mark.args[0]}"))
    for mark, needed in (("gpu", 1), ("multi_gpu", 2)):
        if count < needed:
            reason = f"{mark}: needs {needed} CUDA device(s), torch sees {count} here"
            for item in items:
                if item.get_closest_marker(mark):
                    item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Let the collector skip all objects made so far: torch and the tests have a million."""
    # the first optimizer of a process loads it, and so would each rank that is forked before
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Let the collector skip what a file of tests leaves, such as compiled graphs and modules.

    A trial collects five times. With the objects that some files leave, each collection takes a
    tenth of a second.
    """
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


# a suite started in the background inherits an ignored SIGINT, one under nohup an ignored SIGHUP,
# and so would every command to which a test sends them; handlers end where a process starts another
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A real browser without a network; see `tests.browsing`."""
    from tests import browsing

    with browsing.driven(tmp_path_factory.mktemp("profile"), browsing.FLAGS) as driver:
        yield driver
