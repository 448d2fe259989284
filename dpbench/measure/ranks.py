"""Ranks: run one forked process per rank, in a process group on the loopback interface.

The ranks find each other through a `FileStore` in a folder that only this user can enter. torch's
rendezvous over TCP is not used, because it listens on every network interface without
authentication and unpickles the data that it receives. Collectives also connect over the loopback
interface, even if the user's environment variables name another.

The ranks of a launch by torchrun or srun, on one or several machines, meet through the store of the
launch, at the address in torch's environment variables. The user's variables then choose the
network interface.

Each forked rank reports its result, or the record of its failure, as JSON through a separate pipe,
to which no other rank can write.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import psutil

from dpbench.hardware import processes
from dpbench.measure.failures import of_end, of_rank, together
from dpbench.records.trial import Failure, in_order

TIMEOUT = timedelta(seconds=60)
"""The longest time that a rank waits for its peers, in joining and in each collective."""
POLL_S = 0.1
"""The seconds between two checks of whether a rank's process has ended.

The closing of its pipe is no reliable sign, because child processes of the rank may keep it open.
"""
SETTLE_S = 0.5
"""The seconds for which the parent waits to detect the deaths of other ranks.

It waits after a failure that another rank's death may have caused, and after a death, because other
ranks may end at the same time.
"""
GRACE_S = 1.0
"""The seconds that a rank has to end between SIGTERM and SIGKILL."""
_FORK = get_context("fork")
_OVER_TCP = ("MASTER_ADDR", "MASTER_PORT", "NCCL_COMM_ID", "NCCL_RAS_ADDR")
"""Variables with TCP addresses, which ranks of one parent remove."""


class RanksFailed(RuntimeError):
    """At least one rank failed; `failures` has the failure records, the likely cause first."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        super().__init__(together(failures))
        self.failures = tuple(failures)


def loopback() -> str:
    """Return the name of the network interface with the address 127.0.0.1.

    Raises OSError if it is missing.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and one.address == "127.0.0.1" for one in addresses):
            return name
    raise OSError(
        "no network interface has the address 127.0.0.1, which ranks need to connect; "
        "bring the loopback interface up (Linux: ip link set lo up)"
    )


def _stay_on(interface: str, size: int) -> None:
    """Let this process connect to its parent's `size` ranks over one network interface only."""
    for name in _OVER_TCP:
        os.environ.pop(name, None)
    os.environ |= {
        "LOCAL_WORLD_SIZE": str(size),
        "GLOO_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
        # without "=", NCCL accepts every name with this prefix
        "NCCL_SOCKET_IFNAME": f"={interface}",
    }


def store_of_launch(key: str) -> Any:
    """Return the part of a launch's key-value store through which one trial's ranks meet.

    `key` is different in each trial.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore(key, TCPStore(address, port, is_master=False, timeout=TIMEOUT))


def join(
    store: Any, backend: str, rank: int, size: int, *, local_rank: int, timeout: timedelta = TIMEOUT
) -> None:
    """Join the group of `size` ranks as `rank`, and wait for all others.

    The ranks find each other through `store`. `timeout` is the longest time that this rank waits
    for its peers, now and in each collective; after it, torch.distributed raises its error.
    """
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(size)}
    # else torch's watchdog of NCCL aborts a rank whose GPU fails before the rank can report it
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def run(entry: Callable[[int], Any], count: int, folder: Path, backend: str) -> list[Any]:
    """Call `entry(rank)` in `count` forked processes, one per rank of a process group.

    Return the results in rank order; they must be JSON-serializable. `folder` must exist; the ranks
    use a temporary folder in it. If a rank fails, the others are terminated. All ranks have ended
    when this function returns or raises. The calling process must not have run a multi-threaded
    tensor operation, nor initialised CUDA.

    Raises RanksFailed if a rank raises or ends without a result, and OSError if the loopback
    interface is missing.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-", dir=folder) as private:  # its mode is 0700
        interface = loopback()

        def join_as(rank: int) -> None:
            from torch.distributed import FileStore  # type: ignore[attr-defined]  # not in its stubs

            _stay_on(interface, count)
            store = FileStore(f"{private}/store", count)
            join(store, backend, rank, count, local_rank=rank)

        ranks: list[_RankProcess] = []
        try:
            for number in range(count):
                ranks.append(
                    _RankProcess(number, partial(_be_rank, entry, join_as, number, os.getpid()))
                )
            return _results(ranks)
        finally:
            _end(ranks)


class _RankProcess:
    """The parent's view of one rank's process.

    `result` is the JSON text that the rank reported, and `failure` the record of its failure. While
    the rank runs, both are None.
    """

    def __init__(self, number: int, be: Callable[[Connection], NoReturn]) -> None:
        self.number = number
        self._killed_before = processes.killed_for_memory()
        self.result: str | None = None
        self.failure: Failure | None = None
        self.pipe, theirs = _FORK.Pipe(duplex=False)
        self.process = _FORK.Process(target=be, args=(theirs,), name=f"rank-{number}")
        self.process.start()
        theirs.close()  # before the next fork, so that no other rank can write to it

    @property
    def pending(self) -> bool:
        return self.result is None and self.failure is None

    def look(self) -> None:
        """Receive the report if it has arrived, or record that the rank ended without one."""
        # read before polling, because the last message precedes the end
        ended = self.process.exitcode is not None
        if self.pipe.poll():
            self._receive()
        elif ended:
            self._died()

    def _receive(self) -> None:
        try:
            kind, _, text = self.pipe.recv_bytes().decode().partition(" ")
        except (EOFError, OSError):  # OSError: the rank died within its message
            self._died()
            return
        if kind == "result":
            self.result = text
        else:
            self.failure = Failure.from_json(text)

    def _died(self) -> None:
        at_s = time.perf_counter()
        self.process.join(GRACE_S)  # the pipe closes shortly before the exit status is available
        peak_bytes = processes.peak_of_children()  # at least the peak of this rank
        self.failure = of_end(
            self.process.exitcode, self.number, at_s, self._killed_before, peak_bytes
        )


def _results(ranks: Sequence[_RankProcess]) -> list[Any]:
    """Return all ranks' results in rank order; raise RanksFailed soon after the first failure."""
    deadline_s = float("inf")
    while (
        pending := [rank for rank in ranks if rank.pending]
    ) and time.perf_counter() < deadline_s:
        connection.wait(
            [*(rank.pipe for rank in pending), *(rank.process.sentinel for rank in pending)], POLL_S
        )
        for rank in pending:
            rank.look()
        if failures := [rank.failure for rank in ranks if rank.failure]:
            first = in_order(failures)[0]
            wait_s = SETTLE_S if first.perhaps_secondary or first.exit_status is not None else 0.0
            deadline_s = min(deadline_s, time.perf_counter() + wait_s)
    if failures := [rank.failure for rank in ranks if rank.failure]:
        raise RanksFailed(in_order(failures))
    return [json.loads(rank.result or "null") for rank in ranks]


def _end(ranks: Sequence[_RankProcess]) -> None:
    """Terminate the running ranks, with SIGTERM and then SIGKILL, and wait for their ends."""
    for send in ("terminate", "kill"):
        for rank in ranks:
            getattr(rank.process, send)()
        deadline_s = time.perf_counter() + GRACE_S
        for rank in ranks:
            rank.process.join(max(0.0, deadline_s - time.perf_counter()))
    for rank in ranks:
        rank.pipe.close()


def _be_rank(
    entry: Callable[[int], Any],
    join_as: Callable[[int], None],
    rank: int,
    parent: int,
    pipe: Connection,
) -> NoReturn:
    """Run one rank in this process: send its result or failure to `pipe`, and exit.

    `parent` is the parent's process id. After a failure, the rank waits until the parent ends it,
    because its exit could cause failures in other ranks. The process exits without Python's
    cleanup, which could hang.
    """
    processes.die_with_parent(parent)
    # inherited handlers do not run inside a collective
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        import torch.distributed as dist

        join_as(rank)
        result = json.dumps(entry(rank))
        dist.destroy_process_group()  # only after success: it would wait for peers that failed
        pipe.send_bytes(f"result {result}".encode())
    except BaseException as error:
        failure = of_rank(error, rank, time.perf_counter())
        with suppress(OSError):  # the log is on a full disk
            print(failure.traceback, file=sys.stderr, flush=True)
        pipe.send_bytes(f"failure {failure.to_json()}".encode())
        # stay alive until the parent ends this rank: its exit would break connections and cause
        # failures in its peers
        while os.getppid() == parent:
            time.sleep(POLL_S)
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)
