"""Foreign load: the share of the cores' time that other processes use, and the wait for a low one.

The foreign load is the busy time of this process's cores minus the CPU time of this process tree
(with the children that it has reaped), as a fraction of the cores' capacity. Steal is the time that
a hypervisor gave to other virtual machines. If the kernel's counts do not exist, or do not describe
the capacity of this process (as in a container with a CPU quota), the load is unknown, never low.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dpbench.hardware.processes import CORES, TICKS_PER_S, Ticks, parse_ticks
from dpbench.records import Case, Trial

LIMIT = 0.10
"""The fraction of the cores' capacity that others may take before a measurement is NOISY.

For a trial, `tolerated` may be less.
"""
SPARE_CORES = 0.25
"""The number of cores, besides those that a case leaves free, that others may take in a trial.

A rank that shares its core delays all ranks: on a machine with many cores, half a core is a small
fraction of the capacity, but may double the step of a case with a rank on each core.
"""
WINDOW_S = 0.5
SHORTEST_S = 0.2
"""The minimum duration of a measurement, below which the rounding to ticks would dominate."""
PATIENCE_S = 30.0
PATIENCE = "DPBENCH_PATIENCE"
"""The environment variable that sets the default of --patience, in seconds."""
COUNTED = 0.5
"""If the kernel counts at most this fraction of the core-seconds, the load is unknown."""
NOISY = "NOISY"
FACT = "foreign_load"
"""The key of the foreign load in the provenance of a run and of a trial."""

_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max", None),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
"""The files of a container's CPU quota and of its period.

Version 2 of control groups has both values in one file; version 1 has two files.
"""


def patience(given_s: float | None = None) -> float:
    """Return the maximum seconds to wait for a low load.

    This is `given_s`, else the value of DPBENCH_PATIENCE, else the default. Raises ValueError if
    the environment variable is not a number of 0 or more.
    """
    if given_s is not None:
        return given_s
    text = os.environ.get(PATIENCE, str(PATIENCE_S))
    with suppress(ValueError):
        if 0 <= (seconds := float(text)) < float("inf"):
            return seconds
    raise ValueError(
        f"the environment variable {PATIENCE} must be a number of seconds, 0 or more, but is"
        f" {text!r}"
    )


def wait(patience_s: float, say: Callable[[str], None]) -> Measured:
    """Return the first foreign load that is not high, or the last within `patience_s` seconds.

    If the first measurement is high and `patience_s` is above 0, `say` is called with one line of
    text before the wait. An unknown load ends the wait.
    """
    deadline_s = time.monotonic() + patience_s
    load = measure()
    if busy(load) and patience_s > 0:
        say(
            f"busy machine: {load}; dpbench waits up to {patience_s:.0f} s for a low load (set by"
            " --patience)"
        )
    while busy(load) and time.monotonic() < deadline_s:
        load = measure()
    return load


def measure(seconds: float = WINDOW_S) -> Measured:
    """Return the foreign load during the next `seconds` seconds."""
    before = snapshot()
    time.sleep(seconds)
    return since(before)


def since(before: Snapshot | UnknownLoad, roots: Collection[int] = ()) -> Measured:
    """Return the foreign load between the snapshot `before` and now.

    For `roots`, see `snapshot`.
    """
    return before if isinstance(before, UnknownLoad) else _to(before, snapshot(roots))


def busy(load: Measured) -> bool:
    """Return whether the load is known, and foreign load plus steal exceed `LIMIT`."""
    return isinstance(load, Load) and load.taken > LIMIT


def during(trial: Trial) -> Measured:
    """Return the foreign load that is stored with a trial."""
    facts = trial.provenance.get(FACT)
    return UnknownLoad("no load is stored with the trial") if facts is None else Load(**facts)


def noisy(trial: Trial) -> bool:
    """Return whether others took more cores than `tolerated` during a trial, if this is known."""
    load = during(trial)
    return isinstance(load, Load) and load.taken * load.cores > tolerated(trial.case, load.cores)


def tolerated(case: Case, cores: int) -> float:
    """Return the number of cores that others may take during a trial before it is NOISY.

    It is the fraction `LIMIT` of the `cores` of a machine or, if this is less, the number of cores
    that the devices of a CPU case leave free, plus `SPARE_CORES`.
    """
    if case.device_kind != "cpu" or case.traits.observed:
        return LIMIT * cores
    used = cores if case.traits.all_cores else case.devices / case.hosts
    if case.traits.loads:
        used = max(1, case.loader)
    return min(LIMIT * cores, max(0.0, cores - used) + SPARE_CORES)


def snapshot(roots: Collection[int] = ()) -> Snapshot | UnknownLoad:
    """Return the CPU time that the cores and this process tree have used until now.

    The processes `roots` and their descendants count as part of this tree. If the system does not
    provide these times, return an unknown load with the reason.
    """
    if not CORES:
        return UnknownLoad("this system does not provide the list of cores that a process may use")
    quota = _quota()
    if quota is not None and quota < len(CORES):
        return UnknownLoad(
            f"a quota of {quota:g} CPUs limits this container to less than its {len(CORES)}"
            " core(s), and /proc/stat ignores quotas"
        )
    try:
        ticks = parse_ticks(Path("/proc/stat").read_bytes())
    except (OSError, ValueError) as error:
        return UnknownLoad(f"/proc/stat cannot be read: {error}")
    usable = {core: ticks[core] for core in CORES if core in ticks}
    return Snapshot(time_s=time.monotonic(), ticks=usable, own_s=_own_s({os.getpid(), *roots}))


def _to(before: Snapshot, now: Snapshot | UnknownLoad) -> Measured:
    return now if isinstance(now, UnknownLoad) else between(before, now)


def between(before: Snapshot, now: Snapshot) -> Measured:
    """Return the foreign load between two snapshots.

    It is unknown if the time between them is below `SHORTEST_S` seconds, or if the kernel counted
    at most the fraction `COUNTED` of the cores' time.
    """
    cores = before.ticks.keys() & now.ticks.keys()
    seconds = now.time_s - before.time_s
    capacity_s = len(cores) * seconds

    def passed_s(count: Callable[[Ticks], int]) -> float:
        return (
            sum(max(0, count(now.ticks[core]) - count(before.ticks[core])) for core in cores)
            / TICKS_PER_S
        )

    if seconds < SHORTEST_S:
        return UnknownLoad(
            f"the measurement took {seconds:.2f} s, which is less than the minimum of"
            f" {SHORTEST_S} s"
        )
    counted_s = passed_s(lambda ticks: ticks.total)
    if counted_s <= COUNTED * capacity_s:
        return UnknownLoad(
            f"the kernel's counts cover only {counted_s:.2f} of {capacity_s:.2f} core-seconds"
        )
    foreign_s = max(0.0, passed_s(lambda ticks: ticks.busy) - (now.own_s - before.own_s))
    steal_s = passed_s(lambda ticks: ticks.steal)
    return Load(
        foreign=foreign_s / capacity_s,
        steal=steal_s / capacity_s,
        cores=len(cores),
        seconds=seconds,
    )


def _own_s(roots: Collection[int]) -> float:
    """Include the children that each process has reaped."""
    import psutil

    total = 0.0
    for root in roots:
        # a process that has ended is in its parent's count from now on
        with suppress(psutil.Error):
            top = psutil.Process(root)
            for process in (top, *top.children(recursive=True)):
                with suppress(psutil.Error):
                    spent = process.cpu_times()
                    total += spent.user + spent.system + spent.children_user + spent.children_system
    return total


def _quota() -> float | None:
    """Return the CPU quota of this container in CPUs, such as 1.5; None if there is none."""
    for limit, period in _QUOTAS:
        with suppress(OSError, ValueError):
            words = Path(limit).read_text(encoding="utf-8").split() + (
                Path(period).read_text(encoding="utf-8").split() if period else []
            )
            quota = float(words[0])
            return quota / float(words[1]) if quota > 0 else None
    return None


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The cumulative CPU times at the moment `time_s` of the monotonic clock.

    `ticks` has the times of each core in kernel ticks of 1/`TICKS_PER_S` seconds. `own_s` is the
    CPU time of this process tree in seconds.
    """

    time_s: float
    ticks: Mapping[int, Ticks]
    own_s: float


@dataclass(frozen=True, kw_only=True)
class Load:
    """The fractions, from 0 to 1, of the cores' time that others took during a period.

    Other processes used `foreign`, and a hypervisor gave `steal` to other virtual machines. `cores`
    is the number of cores, and `seconds` the duration of the period.
    """

    foreign: float
    steal: float
    cores: int
    seconds: float

    @property
    def taken(self) -> float:
        """Return the sum of `foreign` and `steal`."""
        return self.foreign + self.steal

    def __str__(self) -> str:
        return (
            f"other processes took {self.foreign:.0%}, and other virtual machines took"
            f" {self.steal:.0%}, of the time of {self.cores} core(s) during {self.seconds:.1f} s;"
            f" the limit for the sum is {LIMIT:.0%}"
        )


@dataclass(frozen=True)
class UnknownLoad:
    """A foreign load that could not be measured, with the reason."""

    reason: str

    def __str__(self) -> str:
        return f"the load of other processes is unknown: {self.reason}"


Measured = Load | UnknownLoad


def plain(load: Measured) -> dict[str, float | str]:
    """Return a load as a dict to store; an unknown one has the key `unknown`, with the reason."""
    return {"unknown": load.reason} if isinstance(load, UnknownLoad) else asdict(load)
