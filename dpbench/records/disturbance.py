"""Disturbance: whether other processes disturbed a trial, and what they can have taken from it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable

from dpbench.records.case import Case
from dpbench.records.load import LIMIT, TICK_S, Load, Measured, OfCores
from dpbench.records.trial import Trial

NOISY = "NOISY"
SPARE_CORES = 0.25
"""The number of cores, besides those that a case leaves free, that others may take in a trial.

A rank that shares its core delays all ranks: on a machine with many cores, half a core is a small
fraction of the capacity, but may double the step of a case with a rank on each core.
"""


def busy(load: Measured, cases: Collection[Case] = ()) -> bool:
    """Return whether others take too much of the cores for `cases`, or of a GPU, if it is known."""
    return _takes_cores(load.cores, cases) or any(gpu.busy for gpu in load.gpus)


def _takes_cores(load: OfCores, cases: Collection[Case]) -> bool:
    return isinstance(load, Load) and load.taken > _limit(cases, load.cores)


def _limit(cases: Collection[Case], cores: int) -> float:
    """Return the fraction of the cores that others may take before a run of `cases`.

    Cases on GPUs tolerate what leaves them the cores that they need.
    """
    if not cases or any(case.device_kind != "cuda" for case in cases):
        return LIMIT
    return min(tolerated(case, cores) for case in cases) / cores


def told(load: Measured, cases: Collection[Case] = ()) -> str:
    """Return, as text, what others use too much of, or why the load is unknown."""
    found = [str(gpu) for gpu in load.gpus if gpu.busy]
    cores = load.cores
    if isinstance(cores, Load) and (not found or _takes_cores(cores, cases)):
        found.insert(0, f"{cores}, above the limit of {_limit(cases, cores.cores):.0%}")
    return "; ".join(found) or str(cores)


def noisy(trial: Trial) -> bool:
    """Return whether others used a GPU of the trial, or took too many cores, if this is known."""
    load = trial.facts.foreign_load
    taken = load is not None and load.taken * load.cores > tolerated_in(trial, load.cores)
    return taken or any(gpu.busy for gpu in trial.facts.foreign_gpus)


def by_round(trials: Iterable[Trial]) -> tuple[frozenset[int], dict[int, float]]:
    """Return the NOISY rounds of a case's trials, and what others can have taken in each."""
    last = {trial.round: trial for trial in trials}
    taken = {number: part for number, trial in last.items() if (part := taken_from(trial))}
    return frozenset(number for number, trial in last.items() if noisy(trial)), taken


def taken_from(trial: Trial) -> float:
    """Return the part of a core that others can have taken from a trial's case.

    Others are assumed to use first the cores that the case leaves free. The rest of their use
    counts, with one tick per core for the kernel's rounding. The result is 0 if the load is unknown
    or below one tick per core, or if the GPUs compute for nearly the whole step. It is infinite if
    others used a GPU.
    """
    if any(gpu.busy for gpu in trial.facts.foreign_gpus):
        return math.inf
    load = trial.facts.foreign_load
    if load is None or _is_gpu_bound(trial):
        return 0.0
    used = load.taken * load.cores
    rounding = load.cores * TICK_S / load.seconds
    if used <= rounding:
        return 0.0
    return max(0.0, used + rounding - free_cores(trial.case, load.cores))


def free_cores(case: Case, cores: int) -> float:
    """Return how many of the `cores` of each machine a case leaves free; 0 if this is unknown."""
    if not _cores_known(case):
        return 0.0
    return max(0.0, cores - needed_cores(case, cores))


def _cores_known(case: Case) -> bool:
    return case.traits.cores_known and case.device_kind in ("cpu", "cuda")


def tolerated_in(trial: Trial, cores: int) -> float:
    """Return the number of cores that others may take during a trial before it is NOISY.

    If a GPU computes for nearly the whole step, it is all `cores`: the host cannot have lengthened
    the step by more than the fraction `LIMIT`. Otherwise it is that of `tolerated`.
    """
    return float(cores) if _is_gpu_bound(trial) else tolerated(trial.case, cores)


def _is_gpu_bound(trial: Trial) -> bool:
    share = gpu_share(trial)
    return share is not None and share >= 1 - LIMIT


def gpu_share(trial: Trial) -> float | None:
    """Return the share of the median step in which the busiest GPU computes; None if unknown."""
    busy_s = trial.facts.gpu_busy_s
    return busy_s / statistics.median(trial.timed) if busy_s and trial.timed else None


def gpu_busy_s(trial: Trial) -> float | None:
    """Return the seconds in which the busiest GPU computes in a profiled step; None if unknown."""
    profiled = trial.readings("kernel_busy_s").values()
    return max((statistics.median(each) for each in profiled), default=None)


def tolerated(case: Case, cores: int) -> float:
    """Return the number of cores that others may take during a case's trial before it is NOISY.

    For CPU devices, it is the fraction `LIMIT` of the `cores` of a machine or, if this is less, the
    number of cores that the devices leave free, plus `SPARE_CORES`. For GPUs, each of which needs
    a core, and each worker of a DataLoader another one, it is the number that these leave free,
    plus `SPARE_CORES`.
    """
    if not _cores_known(case):
        return LIMIT * cores
    free = free_cores(case, cores) + SPARE_CORES
    return free if case.device_kind == "cuda" else min(LIMIT * cores, free)


def shared(case: Case) -> str:
    """Return, as text, what other processes may take from a case."""
    return "the cores or a GPU" if case.device_kind == "cuda" else "the cores"


def needed_cores(case: Case, cores: int) -> float:
    """Return how many of the `cores` of each machine a case keeps busy."""
    if case.traits.loads:
        return max(1, case.loader)
    if case.device_kind == "cuda":
        return case.devices / case.hosts + max(0, case.loader)
    return cores if case.traits.all_cores else case.devices / case.hosts
