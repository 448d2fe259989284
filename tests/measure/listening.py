"""List where dpbench's processes listen.

    python -m tests.measure.listening trial strategies probe

Prints for each of the named works, a trial, a trial of every strategy, and the probe's ranks, a
line of JSON: how the work ended, every address that was listened at, and those of them that a
client reached by one of the machine's own addresses outside loopback. Each address of the work
`strategies` also gets a hostile message over loopback; the trials must end as without it, and
nothing in the message may be executed.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from dpbench.measure.server import Server
from dpbench.records import Case, Effort, Status, registry
from tests.runs import TWO_STEPS, bare

LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
Address = tuple[str, int]


def real_address() -> Address | None:
    """Return an interface's name and IPv4 address outside loopback.

    None where the machine has none.
    """
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family is socket.AF_INET and not one.address.startswith("127."):
                return name, one.address  # type: ignore[return-value]
    return None


@dataclass
class Seen:
    """What a watch saw."""

    ended: str = ""
    hostile: bytes = b""
    """The bytes to send to each address; nothing is sent if there are none."""
    listening: set[Address] = field(default_factory=set)
    reached: set[Address] = field(default_factory=set)
    attacked: int = 0

    def outside(self) -> set[Address]:
        """Return the addresses outside loopback."""
        return {one for one in self.listening if one[0] not in LOOPBACK}

    def look(self) -> None:
        """Add the addresses where processes below listen, and try to connect to the new ones."""
        now: set[Address] = set()
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                # before psutil 6
                held = getattr(process, "net_connections", None) or process.connections
                now |= {
                    (one.laddr.ip, one.laddr.port)
                    for one in held("inet")
                    if one.status == psutil.CONN_LISTEN
                }
        for address in now - self.listening:
            self._connect(address)
        self.listening |= now

    def _connect(self, address: Address) -> None:
        here = real_address()
        if here is not None:
            with suppress(OSError), socket.create_connection((here[1], address[1]), timeout=5):
                self.reached.add(address)
        if self.hostile:
            with (
                suppress(OSError),
                socket.create_connection((address[0], address[1]), timeout=5) as client,
            ):
                client.sendall(self.hostile)
                self.attacked += 1


def watch(work: Callable[[], str], hostile: bytes = b"") -> Seen:
    """Do the work, and look at its processes' sockets all the while."""
    seen, over = Seen(hostile=hostile), threading.Event()

    def look() -> None:
        while not over.wait(0.03):
            seen.look()

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        seen.ended = work()
    finally:
        over.set()
        watcher.join()
    return seen


def trial() -> str:
    """Run a trial of ddp with two ranks; return its status and reason."""
    case = Case(model="mlp", strategy="ddp", devices=2, batch_size=8)
    effort = Effort(budget_s=0.3, warmup_steps=1, min_steps=4, max_steps=10**6, block_steps=2)
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder)) as server:
        done = server.run(case, bare(effort), 0, 120)
    return done.status.value if done.steps else done.reason


class Touch:
    """An object whose pickle makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self._path),)


def message(path: Path) -> bytes:
    """Return bytes that make a folder if unpickled, with and without their length in front."""
    data = pickle.dumps(Touch(path))
    return len(data).to_bytes(8, "little") + data + data


def strategies() -> str:
    """Run a trial of every strategy, most with two devices.

    Return their outcome: "ok", or the first failure.
    """
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder)) as server:
        for name in registry.names("strategies"):
            traits = registry.traits(name)
            devices = 1 if traits.one_device else 2
            case = Case(model="mlp", strategy=name, devices=devices, batch_size=8)
            done = server.run(
                replace(case, schedule="reference" if traits.scheduled else ""), TWO_STEPS, 0, 120
            )
            if done.status not in (Status.OK, Status.SKIPPED):
                return f"{name}: {done.reason}"
            print(name, done.status, file=sys.stderr)
    return "ok"


def probe() -> str:
    """Let the probe's ranks measure an all-reduce."""
    from dpbench.doctor.probe import all_reduce  # which loads torch: a trial's parent needs none

    return "ok" if [*all_reduce.figures(2, "gloo", (32 * 1024, 2**20))] else "no figures"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        mark = Path(name) / "executed"
        for work in sys.argv[1:]:
            hostile = message(mark) if work == "strategies" else b""
            found = watch({"trial": trial, "strategies": strategies, "probe": probe}[work], hostile)
            if mark.exists():
                found.ended = "a hostile message was executed"
            listed = {"listening": sorted(found.listening), "reached": sorted(found.reached)}
            print(json.dumps({"ended": found.ended, "attacked": found.attacked, **listed}))
    sys.stdout.flush()
    os._exit(0)
