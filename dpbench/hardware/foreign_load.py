"""Foreign load: measure the share of this process's cores that other processes use, and wait until it is low.

The kernel counts the CPU time of each core and of each process. The time of a process includes that of the children
that it has reaped. The foreign load is the busy time of the cores minus the CPU time of this process tree. Steal is the
time that a hypervisor gave to other virtual machines. If the counts do not exist, or do not describe the capacity of
this process, the load is reported as unknown, never as low.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dpbench.hardware.processes import CORES, TICKS_PER_S, Ticks, parse_ticks
from dpbench.records import Trial

LIMIT = 0.10
"""The fraction of the cores' capacity that other processes and steal may take; above it, a measurement is NOISY."""
WINDOW_S = 0.5
SHORTEST_S = 0.2
"""The minimum duration of a measurement; if it were shorter, the rounding to ticks of 10 ms would dominate."""
PATIENCE_S = 30.0
PATIENCE = "DPBENCH_PATIENCE"
"""The environment variable that sets the default of --patience, in seconds."""
COUNTED = 0.5
"""The fraction of the elapsed core-seconds that the kernel must account for; otherwise the load is unknown."""
NOISY = "NOISY"
FACT = "foreign_load"
"""The key of the foreign load in the provenance of a run and of a trial."""

_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max", None),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
"""Files with a container's CPU quota in control groups of versions 2 and 1, each with its file for the period."""


def patience(given_s: float | None = None) -> float:
    """Return the seconds to wait for a low load: `given_s`, else the environment variable's, else the default."""
    if given_s is not None:
        return given_s
    text = os.environ.get(PATIENCE, str(PATIENCE_S))
    with suppress(ValueError):
        if 0 <= (seconds := float(text)) < float("inf"):
            return seconds
    raise ValueError(f"{PATIENCE} must be a number of seconds, 0 or more, got {text!r}")


def wait(patience_s: float, say: Callable[[str], None]) -> Measured:
    """Measure the foreign load until it is low or `patience_s` seconds have passed; return the last measurement.

    If the first measurement is high, `say` is called with one line of text before the wait.
    """
    deadline_s = time.monotonic() + patience_s
    load = measure()
    if busy(load) and patience_s > 0:
        say(f"busy machine: {load}; waiting up to {patience_s:.0f} s for a low load (--patience)")
    while busy(load) and time.monotonic() < deadline_s:
        load = measure()
    return load


def measure(seconds: float = WINDOW_S) -> Measured:
    """Wait for `seconds`, and return the foreign load of that time."""
    before = snapshot()
    time.sleep(seconds)
    return since(before)


def since(before: Snapshot | UnknownLoad) -> Measured:
    """Return the foreign load from a snapshot until now."""
    return before if isinstance(before, UnknownLoad) else _to(before, snapshot())


def busy(load: Measured) -> bool:
    """Return whether the load is known and, with steal included, exceeds `LIMIT`."""
    return isinstance(load, Load) and load.taken > LIMIT


def during(trial: Trial) -> Measured:
    """Return the foreign load during a trial, as stored with the trial."""
    facts = trial.provenance.get(FACT)
    return UnknownLoad("no load is stored with the trial") if facts is None else Load(**facts)


def noisy(trial: Trial) -> bool:
    """Return whether the load during a trial is known and, with steal included, exceeds `LIMIT`."""
    return busy(during(trial))


def snapshot() -> Snapshot | UnknownLoad:
    """Return the CPU time that the cores and this process tree have used until now."""
    if not CORES:
        return UnknownLoad("this system does not provide the list of cores that a process may use")
    quota = _quota()
    if quota is not None and quota < len(CORES):
        return UnknownLoad(
            f"a quota of {quota:g} CPUs limits this container, but /proc/stat counts all {len(CORES)} cores"
        )
    try:
        ticks = parse_ticks(Path("/proc/stat").read_bytes())
    except (OSError, ValueError) as error:
        return UnknownLoad(f"/proc/stat cannot be read: {error}")
    mine = {core: ticks[core] for core in CORES if core in ticks}
    return Snapshot(time_s=time.monotonic(), ticks=mine, own_s=_own_s())


def _to(before: Snapshot, now: Snapshot | UnknownLoad) -> Measured:
    return now if isinstance(now, UnknownLoad) else between(before, now)


def between(before: Snapshot, now: Snapshot) -> Measured:
    """Return the foreign load between two snapshots."""
    cores = before.ticks.keys() & now.ticks.keys()
    seconds = now.time_s - before.time_s
    capacity_s = len(cores) * seconds

    def passed_s(count: Callable[[Ticks], int]) -> float:
        return sum(max(0, count(now.ticks[core]) - count(before.ticks[core])) for core in cores) / TICKS_PER_S

    if seconds < SHORTEST_S:
        return UnknownLoad(f"{seconds:.2f} s are too short for a measurement")
    counted_s = passed_s(lambda ticks: ticks.total)
    if counted_s <= COUNTED * capacity_s:
        return UnknownLoad(f"the kernel accounts for {counted_s:.2f} of {capacity_s:.2f} core-seconds")
    foreign_s = max(0.0, passed_s(lambda ticks: ticks.busy) - (now.own_s - before.own_s))
    steal_s = passed_s(lambda ticks: ticks.steal)
    return Load(foreign=foreign_s / capacity_s, steal=steal_s / capacity_s, cores=len(cores), seconds=seconds)


def _own_s() -> float:
    """Return the CPU seconds of this process and its descendants, including the children that each has reaped."""
    import psutil

    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.Error):  # the process has ended; its parent's count includes it from now on
            spent = process.cpu_times()
            total += spent.user + spent.system + spent.children_user + spent.children_system
    return total


def _quota() -> float | None:
    """Return the number of CPUs whose time this container may use; None without a quota."""
    for limit, period in _QUOTAS:
        with suppress(OSError, ValueError):
            words = Path(limit).read_text().split() + (Path(period).read_text().split() if period else [])
            quota = float(words[0])
            return quota / float(words[1]) if quota > 0 else None
    return None


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Cumulative CPU time at one moment: ticks by core, and seconds of this process tree."""

    time_s: float
    ticks: Mapping[int, Ticks]
    own_s: float


@dataclass(frozen=True, kw_only=True)
class Load:
    """The fractions of the cores' capacity, 0 to 1, that were unavailable to this process tree for some seconds.

    `foreign` is the fraction that other processes used, `steal` the fraction that a hypervisor gave to other virtual
    machines.
    """

    foreign: float
    steal: float
    cores: int
    seconds: float

    @property
    def taken(self) -> float:
        """Return the sum of both fractions."""
        return self.foreign + self.steal

    def __str__(self) -> str:
        return (
            f"other processes took {self.foreign:.0%}, and the hypervisor {self.steal:.0%}, of {self.cores} core(s) "
            f"over {self.seconds:.1f} s; the limit is {LIMIT:.0%}"
        )


@dataclass(frozen=True)
class UnknownLoad:
    """The reason why the foreign load is unknown."""

    reason: str

    def __str__(self) -> str:
        return f"the load of other processes is unknown: {self.reason}"


Measured = Load | UnknownLoad
