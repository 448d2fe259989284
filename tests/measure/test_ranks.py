"""Ranks: they listen on loopback alone, report typed failures, and do not outlive their call."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import dpbench
from dpbench.measure import ranks
from dpbench.measure.failures import of_end, of_rank
from dpbench.records import Status
from dpbench.records.trial import Failure, in_order
from tests.amounts import amounts
from tests.marked import NAME, Mark, marked, patience
from tests.measure.listening import Seen, real_address

ROOT = Path(dpbench.__file__).parent.parent
REAL = real_address()
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
needs_a_real_address = pytest.mark.skipif(
    REAL is None, reason="no interface has an IPv4 address outside loopback"
)
pytestmark = linux


# ---------------------------------------------------------------- sockets


def preset() -> dict[str, str]:
    """Return the variables of a user whose ranks use a real interface."""
    name, address = REAL or ("", "")
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
    return (
        {**dict.fromkeys(names, name), "MASTER_ADDR": address, "MASTER_PORT": "29500"}
        if REAL
        else {}
    )


def check(works: Sequence[str], variables: Mapping[str, str], prefix: Sequence[str] = ()) -> None:
    """Watch the sockets of works, such as a trial or the ranks of the probe, in another process."""
    env = os.environ | variables | {"PYTHONPATH": str(ROOT)}
    command = [*prefix, sys.executable, "-m", "tests.measure.listening", *works]
    done = subprocess.run(
        command,
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(200),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for work, line in zip(works, done.stdout.splitlines(), strict=True):
        told: dict[str, Any] = json.loads(line)
        listening, reached = (
            {(ip, port) for ip, port in told[name]} for name in ("listening", "reached")
        )
        found = Seen(told["ended"], listening=listening, reached=reached, attacked=told["attacked"])
        assert found.ended == "ok", work
        listeners = len({port for _, port in found.listening})
        assert listeners >= (2 if work != "strategies" else 4), (
            f"{work}: each rank listens: the watch was blind"
        )
        assert (found.attacked > 0) == (work == "strategies"), work
        assert found.outside() == set(), work
        assert found.reached == set(), f"{work}: reached by an address outside loopback"


def test_no_process_of_any_strategy_listens_outside_loopback_or_obeys_a_hostile_message() -> None:
    check(["strategies", "probe"], preset())


@pytest.fixture
def own_host_name(tmp_path: Path) -> list[str]:
    """Return a command prefix that resolves this machine's name to a real interface's address."""
    if REAL is None:
        pytest.skip("no interface has an IPv4 address outside loopback")
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{REAL[1]} {socket.gethostname()}\n")
    prefix = ["unshare", "-rm", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh"]
    asked = [
        *prefix,
        sys.executable,
        "-c",
        "import socket; print(socket.gethostbyname(socket.gethostname()))",
    ]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare command")
    if done.stdout.strip() != REAL[1]:
        pytest.skip(
            "no mount namespace with another /etc/hosts:"
            f" {done.stderr.strip() or done.stdout.strip()}"
        )
    return prefix


def test_no_process_listens_outside_loopback_whatever_the_host_name_resolves_to(
    own_host_name: list[str],
) -> None:
    check(["trial"], {}, own_host_name)


@needs_a_real_address
def test_the_watch_sees_a_listener_outside_loopback_and_reaches_it() -> None:
    code = (
        "import socket; s = socket.create_server(('0.0.0.0', 0)); print(s.getsockname()[1],"
        " flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        found = Seen()
        found.look()
        child.communicate("\n")
    assert found.outside() == found.reached == {("0.0.0.0", port)}


def test_the_loopback_interface_is_found_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {
        "en0": [SimpleNamespace(address="192.0.2.7", family=socket.AF_INET)],
        "lo0": [SimpleNamespace(address="127.0.0.1", family=socket.AF_INET)],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: named)
    assert ranks.loopback() == "lo0"
    del named["lo0"]
    with pytest.raises(OSError, match=r"127\.0\.0\.1.*ip link set lo up"):
        ranks.loopback()


# ---------------------------------------------------------------- calls


@pytest.fixture
def mark() -> Iterator[Mark]:
    with marked() as mark:
        yield mark


PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
import psutil, torch
import torch.distributed as dist
from dpbench.measure import ranks
folder = Path(sys.argv[1])
{entry}
found = {{}}
try:
    found["results"] = ranks.run(entry, 2, folder, "gloo")
except ranks.RanksFailed as failed:
    found["text"], found["failures"] = str(failed), [one.to_json() for one in failed.failures]
found["left"] = [process.pid for process in psutil.Process().children()]
found["files"] = [path.name for path in folder.iterdir() if path.name.startswith("ranks-")]
print(json.dumps(found))
"""


MOTHER = """
import json, os, sys
import psutil, torch, torch._dynamo
from dpbench.measure import ranks
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setsid()
        for number, name in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
        os.environ.update(request["variables"])
        sys.argv = ["-c", request["folder"]]
        try:
            exec(request["code"], {"__name__": "__main__"})
            sys.stdout.flush()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Forks a fresh process for each program that it reads, as the server does: to load torch takes
seconds.
"""


@pytest.fixture(scope="module")
def mother() -> Iterator[tuple[subprocess.Popen[str], Mark]]:
    """Yield the process that forks one for each call, and the mark of both."""
    with marked() as mark:
        command, env = (
            [sys.executable, "-c", MOTHER],
            os.environ | mark.env | {"PYTHONPATH": str(ROOT)},
        )
        with subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            yield process, mark


Call = Callable[..., SimpleNamespace]


@pytest.fixture
def called(mother: tuple[subprocess.Popen[str], Mark], tmp_path: Path) -> Iterator[Call]:
    """Yield a function that runs `entry` in two ranks of a fresh process, see `call`.

    End what it has left.
    """
    process, mark = mother
    yield partial(call, mother, tmp_path)
    for left in mark.alive():
        if left.pid != process.pid:
            left.kill()


def call(
    mother: tuple[subprocess.Popen[str], Mark],
    folder: Path,
    entry: str,
    *,
    orphans: int = 0,
    **variables: str,
) -> SimpleNamespace:
    """Run `entry` in two ranks of a fresh process.

    Return the results or the failures, and check what was left.
    """
    process, mark = mother
    assert process.stdin is not None
    assert process.stdout is not None
    request = {
        "code": PROGRAM.format(entry=textwrap.dedent(entry)),
        "folder": str(folder),
        "variables": variables,
        "out": str(folder / "out"),
        "err": str(folder / "err"),
    }
    print(json.dumps(request), file=process.stdin, flush=True)
    assert process.stdout.readline() == "0\n", (folder / "err").read_text()
    found = SimpleNamespace(**json.loads((folder / "out").read_text().splitlines()[-1]))
    found.failures = [Failure.from_json(one) for one in getattr(found, "failures", [])]
    assert found.left == [], "a rank has outlived the call"
    assert found.files == [], "the ranks' folder has outlived the call"
    assert mark.settles(1 + orphans) == "", "only the process that forks is left"
    return found


WAIT = """
def wait():
    dist.all_reduce(torch.zeros(1))
"""


def test_results_come_in_rank_order_from_one_group_in_a_private_folder(called: Call) -> None:
    entry = """
    def entry(rank):
        total = torch.tensor(rank + 1)
        dist.all_reduce(total)
        names = (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "GLOO_SOCKET_IFNAME",
            "NCCL_SOCKET_IFNAME",
            "TP_SOCKET_IFNAME",
        )
        unset = [
            name
            for name in ("MASTER_ADDR", "MASTER_PORT", "NCCL_COMM_ID")
            if name not in os.environ
        ]
        private, = folder.glob("ranks-*")
        mode = private.stat().st_mode & 0o777
        return [rank, int(total), [os.environ[name] for name in names], unset, mode, "x" * 10**6]
    """
    found = called(entry, **preset(), NCCL_COMM_ID="192.0.2.1:4000").results
    lo = ranks.loopback()
    assert [one[:3] for one in found] == [
        [rank, 3, [str(rank), str(rank), "2", lo, f"={lo}", lo]] for rank in range(2)
    ]
    assert found[0][3] == ["MASTER_ADDR", "MASTER_PORT", "NCCL_COMM_ID"]
    assert found[0][4] == 0o700
    assert len(found[1][5]) == 10**6


def test_a_rank_that_raises_is_reported_and_its_waiting_peer_is_ended(called: Call) -> None:
    entry = WAIT + textwrap.dedent("""
    def entry(rank):
        if rank == 1:
            raise ArithmeticError("planted \\udcff")
        wait()
    """)
    found = called(entry)
    (failure,) = found.failures
    assert (failure.rank, failure.exception, failure.status) == (
        1,
        "ArithmeticError",
        Status.FAILED,
    )
    assert failure.reason.startswith("ArithmeticError: planted \udcff [")
    assert "raise ArithmeticError" not in failure.reason
    assert "in entry" in failure.traceback
    assert failure.exit_status is None
    assert found.text == f"rank 1: {failure.reason}"


def test_the_rank_that_failed_first_is_raised_when_others_fail_later(called: Call) -> None:
    entry = """
    from multiprocessing.connection import Connection
    parent, send = psutil.Process(), Connection.send_bytes
    def entry(rank):
        # the parent is stopped from the first report to the second, and so reads both at once
        def report(pipe, data):
            if rank == 1:
                parent.suspend()
                while parent.status() != psutil.STATUS_STOPPED:
                    time.sleep(0.001)
            send(pipe, data)
            (folder / "reported").touch() if rank == 1 else parent.resume()
        Connection.send_bytes = report
        if rank == 1:
            raise ArithmeticError("first")
        while not (folder / "reported").exists():
            time.sleep(0.001)
        raise ValueError("second")
    """
    found = called(entry)
    assert [failure.exception for failure in found.failures] == ["ArithmeticError", "ValueError"]
    assert found.text.startswith("rank 1: ArithmeticError: first")


def test_a_rank_that_raised_keeps_its_connections_until_its_peers_are_ended(called: Call) -> None:
    entry = WAIT + textwrap.dedent("""
    def entry(rank):
        wait()
        if rank == 1:
            raise RuntimeError("planted")
        try:
            wait()
        finally:
            os.abort()  # as NCCL's watchdog does when a connection is lost
    """)
    (failure,) = called(entry).failures
    assert (failure.rank, failure.exception) == (1, "RuntimeError")


def test_a_rank_that_cannot_write_its_log_still_reports_its_own_error(called: Call) -> None:
    entry = """
    def entry(rank):
        if rank == 0:
            time.sleep(3600)
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
        raise ArithmeticError("planted")
    """
    (failure,) = called(entry).failures
    assert (failure.rank, failure.exception) == (1, "ArithmeticError")


def test_a_rank_that_dies_within_its_report_is_a_failure(called: Call) -> None:
    entry = """
    from multiprocessing.connection import Connection
    def entry(rank):
        def cut(pipe, data):
            os.write(pipe.fileno(), len(data).to_bytes(4, "big") + data[:4])
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            Connection.send_bytes = cut
        return "a result"
    """
    (failure,) = called(entry).failures
    assert (failure.rank, failure.exit_status) == (1, -signal.SIGKILL)


@pytest.mark.parametrize(
    ("name", "advice"), [("SIGKILL", "another process sent the signal"), ("SIGSEGV", "")]
)
def test_a_rank_that_a_signal_ends_is_the_cause_of_its_peers_lost_connection(
    called: Call, name: str, advice: str
) -> None:
    entry = WAIT + textwrap.dedent(f"""
    def entry(rank):
        wait()
        if rank == 1:
            os.kill(os.getpid(), signal.{name})
        wait()
    """)
    failures = called(entry).failures
    assert (failures[0].rank, failures[0].exception) == (1, "")
    assert failures[0].exit_status == -getattr(signal, name)
    assert f"killed by {name}" in failures[0].reason
    assert advice in failures[0].reason
    assert ("its resident set reached" in failures[0].reason) == (name == "SIGKILL")
    assert all(later.perhaps_secondary for later in failures[1:])


def test_a_rank_that_is_found_dead_after_its_peers_report_is_the_cause(called: Call) -> None:
    entry = """
    def entry(rank):
        if rank == 0:
            (folder / "lost").touch()
            raise RuntimeError("as torch raises for a lost connection")
        while not (folder / "lost").exists():
            time.sleep(0.001)
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    failures = called(entry).failures
    assert [failure.rank for failure in failures] == [1, 0]
    assert failures[0].exit_status == -signal.SIGKILL


def test_a_rank_is_found_dead_while_its_own_child_holds_its_pipe(called: Call) -> None:
    entry = """
    def entry(rank):
        if rank == 0:
            time.sleep(3600)
        if os.fork() == 0:
            os.closerange(0, 3)  # but not the pipe
            time.sleep(3600)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    (failure,) = called(entry, orphans=1).failures
    assert (failure.rank, failure.exit_status) == (1, -signal.SIGKILL)


def test_a_rank_that_leaves_without_a_result_is_a_failure(called: Call) -> None:
    entry = WAIT + textwrap.dedent("""
    def entry(rank):
        os._exit(0) if rank == 0 else wait()
    """)
    failures = called(entry).failures
    assert (failures[0].rank, failures[0].exit_status) == (0, 0)
    assert amounts(failures[0].reason) == ["0"], "the exit status"


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (("os._exit(3)", "os._exit(3)"), "exit status 3"),
        (("signal.raise_signal(signal.SIGTERM)", "os._exit(3)"), "killed by SIGTERM"),
    ],
    ids=["exit", "SIGTERM"],
)
def test_the_reason_names_every_rank_that_ended(
    called: Call, ends: tuple[str, str], said: str
) -> None:
    entry = f"""
    def entry(rank):
        (folder / str(rank)).touch()
        while not (folder / str(1 - rank)).exists():
            time.sleep(0.001)
        {ends[0]} if rank == 0 else {ends[1]}
    """
    found = called(entry)
    assert {failure.rank for failure in found.failures} == {0, 1}
    assert {text[0] for text in found.text.split("rank ")[1:]} == {"0", "1"}
    assert found.text.count("ended without a result") == 2
    assert said in found.text
    assert "exit status 3" in found.text


def test_a_rank_that_ignores_sigterm_is_killed(called: Call) -> None:
    entry = """
    def entry(rank):
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (folder / "ignored").touch()
            time.sleep(3600)
        while not (folder / "ignored").exists():
            time.sleep(0.001)
        raise ArithmeticError("planted")
    """
    (failure,) = called(entry).failures
    assert failure.rank == 1


def test_ranks_die_with_the_process_that_started_them(tmp_path: Path, mark: Mark) -> None:
    # one write for each line, because the ranks share the pipe; `print` may write the line and its
    # end separately
    code = PROGRAM.format(
        entry="def entry(rank):\n    os.write(1, b'here\\n')\n    time.sleep(3600)"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), NAME: mark.value}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], env=env, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        try:
            assert [parent.stdout.readline() for _ in range(2)] == [b"here\n"] * 2
        finally:
            parent.kill()
    assert mark.settles(0) == ""


# ---------------------------------------------------------------- records


def failure(rank: int, at_s: float, error: BaseException) -> Failure:
    return of_rank(error, rank, at_s)


LOST = RuntimeError("Connection closed by peer")
DIED = of_end(-signal.SIGABRT, 1, 2.0)


@pytest.mark.parametrize(
    "record",
    [
        failure(0, 1.5, KeyError("a\n\udcff")),
        failure(1, 2.5, torch.OutOfMemoryError("GPU 1 has")),
        DIED,
    ],
    ids=lambda record: record.exception or "death",
)
def test_a_record_survives_its_way_between_processes(record: Failure) -> None:
    assert Failure.from_json(record.to_json()) == record
    assert "\n" not in record.to_json()
    assert isinstance(Failure.from_json(record.to_json()).status, Status)


@pytest.mark.parametrize(
    ("records", "first"),
    [
        (
            [failure(0, 1.0, LOST), DIED],
            1,
        ),  # found dead after its peer has reported the lost connection
        ([failure(0, 1.0, LOST), failure(1, 1.1, MemoryError())], 1),
        ([failure(0, 1.0, ArithmeticError()), DIED], 0),  # which no death of a peer causes
        ([failure(0, 3.0, ArithmeticError()), DIED], 1),
        ([failure(1, 1.1, LOST), failure(0, 1.0, LOST)], 0),
        ([failure(1, 1.0, LOST), failure(0, 1.1, ArithmeticError())], 1),
        ([failure(0, 1.0, ArithmeticError()), failure(1, 1.1, MemoryError())], 0),
    ],
)
def test_the_cause_is_the_first_record(records: list[Failure], first: int) -> None:
    ordered = in_order(records)
    assert ordered[0].rank == first
    assert sorted(map(id, ordered)) == sorted(map(id, records))


def test_lack_of_memory_and_lost_peers_are_told_apart_by_type() -> None:
    assert failure(0, 0.0, MemoryError()).status is Status.OOM
    assert not failure(0, 0.0, torch.OutOfMemoryError("GPU 0 has")).perhaps_secondary
    assert failure(0, 0.0, LOST).perhaps_secondary
    assert not failure(0, 0.0, ValueError("Connection closed by peer")).perhaps_secondary
