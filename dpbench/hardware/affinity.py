"""Affinity: the cores available to this process, binding threads to one core, and the busy time of each core."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_TOPOLOGY = Path("/sys/devices/system/cpu")
TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
"""The kernel's ticks per second; it counts the time of cores in ticks."""
_here = threading.local()


def spread(cores: Sequence[int], topology: Path = _TOPOLOGY) -> tuple[int, ...]:
    """Return logical cores in an order in which cores that share a physical core with an earlier one come last."""
    seen: Counter[str] = Counter()
    turn = {}
    for core in sorted(cores):
        whole = str(core)
        with suppress(OSError):  # not every system provides the topology
            whole = (topology / f"cpu{core}" / "topology" / "thread_siblings_list").read_text()
        turn[core] = seen[whole]
        seen[whole] += 1
    return tuple(sorted(turn, key=lambda core: (turn[core], core)))


CORES: tuple[int, ...] = spread([*os.sched_getaffinity(0)]) if hasattr(os, "sched_getaffinity") else ()
"""The cores available to this process when it loaded this module; empty where the system cannot bind threads."""


def stay(number: int) -> None:
    """Bind the calling thread to the core at position `number`; threads that the thread starts inherit the binding.

    Without this binding, schedulers that pack threads on few cores leave two threads on one core for milliseconds after
    they wake. Does nothing where threads cannot be bound.
    """
    core = CORES[number % len(CORES)] if CORES else None
    if core is None or getattr(_here, "core", None) == core:
        return
    with suppress(OSError):  # binding is forbidden, or the core was removed: run unbound
        if getattr(_here, "before", None) is None:
            _here.before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})
        _here.core = core


def roam() -> None:
    """Restore the cores that the calling thread could use before `stay` bound it."""
    if (before := getattr(_here, "before", None)) is not None:
        with suppress(OSError):
            os.sched_setaffinity(0, before)
    _here.core = _here.before = None


@contextmanager
def staying(number: int) -> Iterator[None]:
    """Bind the calling thread to the core at position `number` inside the context."""
    stay(number)
    try:
        yield
    finally:
        roam()


def parse_ticks(stat: bytes) -> dict[int, Ticks]:
    """Return the ticks of each core from the content of /proc/stat."""
    cores: dict[int, Ticks] = {}
    for line in stat.splitlines()[1:]:  # the first line is the sum
        if not line.startswith(b"cpu"):
            break
        name, *columns = line.split()
        # user nice system idle iowait irq softirq steal; user includes guest time
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, columns[:8])
        busy = user + nice + system + irq + softirq
        cores[int(name[3:])] = Ticks(busy, steal, busy + idle + iowait + steal)
    return cores


class Ticks(NamedTuple):
    """A core's busy time, its steal time (a hypervisor ran other guests), and its total time, in kernel ticks."""

    busy: int
    steal: int
    total: int
