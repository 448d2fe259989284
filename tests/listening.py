"""List the sockets at which processes of dpbench listen: `python -m tests.listening trial probe`.

Prints for each of the named works, a trial and the probe's ranks, a line of JSON: how the work ended, every address
that was listened at, and those of them that a client reached by one of the machine's own addresses outside loopback.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from dpbench.measure.server import Server
from dpbench.records import Case, Effort

LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
Address = tuple[str, int]


def real_address() -> Address | None:
    """Return an interface's name and IPv4 address outside loopback; None where the machine has none."""
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family is socket.AF_INET and not one.address.startswith("127."):
                return name, one.address  # type: ignore[return-value]
    return None


@dataclass
class Seen:
    """What a watch saw."""

    ended: str = ""
    listening: set[Address] = field(default_factory=set)
    reached: set[Address] = field(default_factory=set)

    def outside(self) -> set[Address]:
        """Return the addresses outside loopback."""
        return {one for one in self.listening if one[0] not in LOOPBACK}

    def look(self) -> None:
        """Add the addresses at which the processes below this one listen now, and try to connect to the new ones."""
        now: set[Address] = set()
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                held = getattr(process, "net_connections", None) or process.connections  # before psutil 6
                now |= {(one.laddr.ip, one.laddr.port) for one in held("inet") if one.status == psutil.CONN_LISTEN}
        for address in now - self.listening:
            self._connect(address)
        self.listening |= now

    def _connect(self, address: Address) -> None:
        here = real_address()
        if here is not None:
            with suppress(OSError), socket.create_connection((here[1], address[1]), timeout=5):
                self.reached.add(address)


def watch(work: Callable[[], str]) -> Seen:
    """Do the work, and look at the sockets of its processes during the whole time."""
    seen, over = Seen(), threading.Event()

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
    effort = Effort(budget_s=0.3, warmup_steps=1, min_steps=4, max_steps=10**6, block_steps=2, memory_by_phase=False)
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder)) as server:
        done = server.run(case, effort, 0, 120)
    return done.status.value if done.steps else done.reason


def probe() -> str:
    """Let the probe's ranks measure an all-reduce."""
    from dpbench.probe import collective  # which loads torch: a trial's parent needs none

    return "ok" if collective._measured(2, "gloo", {"reduce": [32 * 1024, 2**20]})["reduce"] else "no figures"


if __name__ == "__main__":
    for work in sys.argv[1:]:
        found = asdict(watch({"trial": trial, "probe": probe}[work]))
        print(json.dumps({name: value if name == "ended" else sorted(value) for name, value in found.items()}))
    sys.stdout.flush()
    os._exit(0)
