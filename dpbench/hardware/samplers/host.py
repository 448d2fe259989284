"""Host sampler: memory and CPU use of the run's processes, the cores and other processes.

All samples have device -1. Metrics named `*_ratio` are rates over the time since the previous
reading; the first reading does not have them. A new process is added to the watched tree up to 0.5
s after its start; until then its CPU time counts as foreign. Memory pages that forked processes
share are counted once for each process. Only the files of watched processes, found by the lists of
children that Linux keeps for each thread, are read, because reading all of /proc would use several
percent of a core.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dpbench.hardware.processes import TICKS_PER_S, Ticks, parse_ticks
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
        except OSError:  # ended between being listed and being read
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
    except psutil.NoSuchProcess:
        return frozenset()


log = logging.getLogger(__name__)

CLOCK_INTERVAL_S = 0.5
"""The minimum seconds between readings of clocks, which on some kernels query each core."""
SHORTEST_INTERVAL_S = 0.2
"""The minimum seconds between readings of CPU times.

In a shorter interval, the rounding of the kernel's counts to 10 ms would dominate.
"""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_CPU_CLOCK = 2  # CPUCLOCK_SCHED of the kernel's posix-timers.h, which clock_getcpuclockid(3) uses


@contextmanager
def start(
    devices: Sequence[int], interval_s: float, root: int | None = None
) -> Iterator[list[Sample]]:
    """Sample the host and the process tree of `root`, in a list that grows until the `with` ends.

    `root` defaults to `root_pid()`. `devices` is unused. The list stays empty without /proc/stat.
    """
    samples: list[Sample] = []
    if sys.platform != "linux" or not Path("/proc/stat").exists():
        log.info("this run has no samples of the host, because these need /proc/stat of Linux")
        yield samples
        return
    tree = ProcessTree(root_pid() if root is None else root)
    before: list[CpuTimes] = []

    def read() -> None:
        now = take_reading(tree.pids())
        for metric, value in {**levels(now), **(rates(before[-1], now) if before else {})}.items():
            samples.append(Sample(now.time_s, HOST, metric, value))
        before[:] = [now]

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


@dataclass(frozen=True, kw_only=True)
class CpuTimes:
    """The cumulative CPU times at the moment `time_s`.

    `core_ticks` has the times of each core in kernel ticks of 1/`TICKS_PER_S` seconds. `process_s`
    has the seconds of each watched process by process id, and `own_s` those of the sampler process.
    `rss_bytes` is the resident memory of all watched processes.
    """

    time_s: float
    core_ticks: Mapping[int, Ticks]
    process_s: Mapping[int, float]
    own_s: float
    rss_bytes: int


def take_reading(pids: Collection[int]) -> CpuTimes:
    """Return the present reading of the cores and of those processes `pids` that still run."""
    before_s = time.perf_counter()
    process_s: dict[int, float] = {}
    rss_bytes = 0
    for pid in pids:
        with suppress(OSError):
            # one system call with a resolution of 1 ns; /proc/PID/stat counts in steps of 10 ms
            process_s[pid] = time.clock_gettime((~pid << 3) | _CPU_CLOCK)
            rss_bytes += int(read_file(f"/proc/{pid}/statm").split()[1]) * _PAGE_BYTES
    core_ticks = parse_ticks(read_file("/proc/stat", 1 << 18))
    return CpuTimes(
        time_s=(before_s + time.perf_counter()) / 2,
        core_ticks=core_ticks,
        process_s=process_s,
        own_s=time.process_time(),
        rss_bytes=rss_bytes,
    )


def levels(now: CpuTimes) -> dict[str, float]:
    """Return the load average and the resident memory, by metric, from one reading.

    The resident memory is left out if no watched process exists.
    """
    load = {"load_1m": os.getloadavg()[0]}
    return {**load, "rss_bytes": float(now.rss_bytes)} if now.process_s else load


def rates(before: CpuTimes, now: CpuTimes) -> dict[str, float]:
    """Return the CPU use of cores and processes, by metric, between two readings.

    A process counts only if both readings include it, because the CPU time before its first reading
    belongs to no interval. The CPU time of the sampler process counts as neither the watched tree's
    nor foreign.
    """
    elapsed_s = now.time_s - before.time_s
    both = now.process_s.keys() & before.process_s.keys()
    process_s = sum(max(0.0, now.process_s[pid] - before.process_s[pid]) for pid in both)
    rates_now: dict[str, float] = {}
    all_busy = 0
    for core, ticks in now.core_ticks.items():
        earlier = before.core_ticks.get(core, ticks)
        busy, total = ticks.busy - earlier.busy, ticks.total - earlier.total
        all_busy += busy
        if total > 0:  # the kernel's counts may stay the same or decrease
            rates_now[f"core{core}_utilization_ratio"] = max(0, busy) / total
    if now.process_s:
        rates_now["process_cpu_ratio"] = process_s / elapsed_s
    own_s = now.own_s - before.own_s
    rates_now["foreign_cpu_ratio"] = (
        max(0.0, all_busy / TICKS_PER_S - process_s - own_s) / elapsed_s
    )
    return rates_now
