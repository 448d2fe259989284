"""Host sampler: the use of each core, and the clock of the fastest.

All samples have device -1. A core's use is that since the previous reading, so that the first
reading has none. The process tree of a run, whose memory on GPUs is not foreign, is found by the
lists of children that Linux keeps for each thread, because reading all of /proc would use several
percent of a core.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from dpbench.hardware.processes import Ticks, parse_ticks
from dpbench.hardware.readings import reading
from dpbench.hardware.samplers import every
from dpbench.records import HOST, Sample

ROOT_PID = "DPBENCH_ROOT_PID"
"""The environment variable with the process id of the root of the watched process tree."""


def root_pid() -> int:
    """Return the process id of the watched tree's root: `ROOT_PID`, or this process's parent."""
    return int(os.environ.get(ROOT_PID) or os.getppid())


class ProcessTree:
    """The process `root` and its descendants, without the sampler process.

    The tree is read again if the last reading is `refresh_s` seconds old. `now` is the clock, in
    seconds.
    """

    def __init__(
        self, root: int, refresh_s: float = 0.5, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.root = root
        self.refresh_s = refresh_s
        self._now = now
        self._walked_s = -float("inf")
        self._pids: frozenset[int] = frozenset()

    def pids(self) -> frozenset[int]:
        """Return the process ids of the tree, read at most `refresh_s` seconds ago.

        Some processes may have ended.
        """
        if self._now() - self._walked_s >= self.refresh_s:
            self._walked_s = self._now()
            self._pids = descendants(self.root) - {os.getpid()}
        return self._pids


def descendants(root: int) -> frozenset[int]:
    """Return the process ids of `root` and all its descendants; empty if `root` has ended."""
    if not has_children_files():
        return _descendants_by_psutil(root)
    pids: set[int] = set()
    todo = [root]
    while todo:
        pid = todo.pop()
        try:
            todo += _children(pid)
        except (OSError, ValueError):  # ended between being listed and being read
            continue
        pids.add(pid)
    return frozenset(pids)


def has_children_files() -> bool:
    """Return whether this kernel lists each thread's children (CONFIG_PROC_CHILDREN)."""
    return os.access(f"/proc/self/task/{os.getpid()}/children", os.R_OK)


def read_file(path: str, most_bytes: int = 1 << 16) -> bytes:
    """Return up to `most_bytes` of a /proc file, with as few system calls as possible."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, most_bytes)
    finally:
        os.close(descriptor)


def _children(pid: int) -> list[int]:
    """The kernel lists the children separately for each thread."""
    children: list[int] = []
    with os.scandir(f"/proc/{pid}/task") as threads:
        for thread in threads:
            try:
                children += map(int, read_file(f"{thread.path}/children").split())
            except FileNotFoundError:  # a thread that has ended
                continue
    return children


def _descendants_by_psutil(root: int) -> frozenset[int]:
    import psutil

    try:
        return frozenset(
            (root, *(child.pid for child in psutil.Process(root).children(recursive=True)))
        )
    except psutil.Error:
        return frozenset()


log = logging.getLogger(__name__)

CLOCK_INTERVAL_S = 0.5
"""The minimum seconds between readings of clocks, which on some kernels query each core."""
SHORTEST_INTERVAL_S = 0.2
"""The minimum seconds between readings of CPU times.

In a shorter interval, the rounding of the kernel's counts to 10 ms would dominate.
"""


@contextmanager
def start(devices: Sequence[int], interval_s: float) -> Iterator[list[Sample]]:
    """Sample the host, in a list that grows until the `with` ends.

    `devices` is unused. The list stays empty without /proc/stat.
    """
    samples: list[Sample] = []
    if sys.platform != "linux" or not Path("/proc/stat").exists():
        log.info("this run has no samples of the host, because these need /proc/stat of Linux")
        yield samples
        return
    before: dict[int, Ticks] = {}

    def read() -> None:
        nonlocal before
        now_s = time.perf_counter()
        now = reading("/proc/stat", lambda: parse_ticks(read_file("/proc/stat", 1 << 18))) or {}
        for core, ratio in utilization(before, now).items():
            samples.append(Sample(now_s, HOST, f"core{core}_utilization_ratio", ratio))
        before = now

    def read_clock() -> None:
        now_s = time.perf_counter()
        clock_hz = cpu_clock_hz()
        if clock_hz is not None:
            samples.append(Sample(now_s, HOST, "cpu_clock_hz", clock_hz))

    with ExitStack() as stack:
        stack.enter_context(every(max(interval_s, SHORTEST_INTERVAL_S), read))
        if cpu_clock_hz() is not None:
            stack.enter_context(every(max(interval_s, CLOCK_INTERVAL_S), read_clock))
        yield samples


def cpu_clock_hz(folder: str = "/sys/devices/system/cpu") -> float | None:
    """Return the highest clock, in Hz, of the cores that this process may use; None if unknown.

    An idle core's lower clock is not representative of the working cores.
    """
    clocks_hz = []
    for core in os.sched_getaffinity(0):
        with suppress(OSError, ValueError):
            clocks_hz.append(int(read_file(f"{folder}/cpu{core}/cpufreq/scaling_cur_freq")) * 1e3)
    return max(clocks_hz, default=None)


def utilization(before: Mapping[int, Ticks], now: Mapping[int, Ticks]) -> dict[int, float]:
    """Return the fraction of the time between two readings in which each core was busy."""
    busy = {}
    for core, ticks in now.items():
        earlier = before.get(core, ticks)
        if ticks.total > earlier.total:  # the kernel's counts may stay the same or decrease
            busy[core] = max(0, ticks.busy - earlier.busy) / (ticks.total - earlier.total)
    return busy
