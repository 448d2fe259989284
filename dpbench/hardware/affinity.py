"""Cores: which ones this process was given, threads that stay on one of them, and how long each core was busy."""

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
"""The kernel's ticks, in which it counts the time of cores."""
_here = threading.local()


def spread(cores: Sequence[int], topology: Path = _TOPOLOGY) -> tuple[int, ...]:
    """Order logical cores so that those which share a physical one with an earlier one come last."""
    seen: Counter[str] = Counter()
    turn = {}
    for core in sorted(cores):
        whole = str(core)
        with suppress(OSError):  # not every system tells
            whole = (topology / f"cpu{core}" / "topology" / "thread_siblings_list").read_text()
        turn[core] = seen[whole]
        seen[whole] += 1
    return tuple(sorted(turn, key=lambda core: (turn[core], core)))


CORES: tuple[int, ...] = spread([*os.sched_getaffinity(0)]) if hasattr(os, "sched_getaffinity") else ()
"""The cores that this process might use when it loaded this module; none where the system cannot bind threads."""


def stay(number: int) -> None:
    """Keep the calling thread on one core, counted among those of the process; threads that it starts inherit it.

    Schedulers that gather threads on few cores leave two of them on one for milliseconds after they wake.
    """
    core = CORES[number % len(CORES)] if CORES else None
    if core is None or getattr(_here, "core", None) == core:
        return
    with suppress(OSError):  # where binding is forbidden, or the core was taken away, threads run where they can
        if getattr(_here, "before", None) is None:
            _here.before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})
        _here.core = core


def roam() -> None:
    """Let the calling thread use the cores again that it used before it stayed on one."""
    if (before := getattr(_here, "before", None)) is not None:
        with suppress(OSError):
            os.sched_setaffinity(0, before)
    _here.core = _here.before = None


@contextmanager
def staying(number: int) -> Iterator[None]:
    """Keep the calling thread on one core for a while."""
    stay(number)
    try:
        yield
    finally:
        roam()


def parse_ticks(stat: bytes) -> dict[int, Ticks]:
    """Return the ticks of each core from the text of /proc/stat."""
    cores: dict[int, Ticks] = {}
    for line in stat.splitlines()[1:]:  # the first line is the sum
        if not line.startswith(b"cpu"):
            break
        name, *columns = line.split()
        # user nice system idle iowait irq softirq steal; guest time is already in user
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, columns[:8])
        busy = user + nice + system + irq + softirq
        cores[int(name[3:])] = Ticks(busy, steal, busy + idle + iowait + steal)
    return cores


class Ticks(NamedTuple):
    """How long a core was busy, how long a hypervisor gave it to others, and all of its time; in the kernel's ticks."""

    busy: int
    steal: int
    total: int
