"""Budget: the time of one call of `run`, and how it is divided among the trials.

Times are seconds; moments are those of time.perf_counter.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from dpbench.measure.stopping import GPU_LEAST_S, LEAST_S
from dpbench.records import Case, Effort, Status, Trial, words
from dpbench.records.grouping import grouped
from dpbench.records.spelling import dashed
from dpbench.records.words import count

SHARED = 0.9
"""The share of the remaining budget that is divided among the trials; the rest is a reserve."""
OVERHEAD_S = 1.0
"""The first estimate of a trial's seconds without timed steps; successful trials update it."""
GPU_S, FURTHER_GPU_S = 4.5, 1.5
"""The assumed seconds of a trial on one GPU, without timed steps, and those of each further GPU.

They are the start of the runtime and of its libraries, which takes 3 to 5 s, and a context on each
GPU. That it takes more than a second per GPU was reported of dask-cuda ("LocalCudaCluster
startup-time scales with >1 second per GPU"). No run of dpbench has measured either.
"""


@dataclass(kw_only=True)
class Budget:
    """The time of one call of `run`: what its trials have taken, and what is left for the others.

    No trial but the first starts after `deadline_s`. If `settles`, the run goes on until its
    answers are settled, and no round beyond those that every case needs is expected to end after
    `settle_by_s`. `effort` is that of a trial for which enough time is left.
    """

    deadline_s: float
    settle_by_s: float
    settles: bool
    effort: Effort
    ahead: Counter[Case] = field(default_factory=Counter)
    """How many trials of each case are still to be measured, as far as it is known."""
    reserved: int = 0
    """The number of trials for which time is reserved."""
    _taken_s: dict[Case, list[float]] = field(default_factory=dict)
    """The seconds of each case's trials that this call has measured."""
    _first: frozenset[Case] | None = None
    """The unit with which the call begins; None before it is known."""
    _overhead_s: float = OVERHEAD_S

    @property
    def left_s(self) -> float:
        """Return the rest of the budget; infinity without a budget."""
        return self.deadline_s - time.perf_counter()

    @property
    def _settling_s(self) -> float:
        return self.settle_by_s - time.perf_counter()

    def spent(self) -> bool:
        """Return whether no further trial may start.

        One trial may always start, so that the same command, given again, reaches the end of a run.
        """
        return bool(self._taken_s) and self.left_s <= 0

    def took(self, trials: Sequence[Trial], seconds: float) -> None:
        """Add the trials of one worker, which took `seconds` in all."""
        for trial in trials:
            self._taken_s.setdefault(trial.case, []).append(seconds / len(trials))
        self.ahead -= Counter(trial.case for trial in trials)
        self.reserved -= len(trials)
        if all(trial.status is Status.OK for trial in trials):
            timed_s = sum(step.seconds for trial in trials for step in trial.steps)
            self._overhead_s += 0.3 * ((seconds - timed_s) / len(trials) - self._overhead_s)

    def usual_s(self, trials: Counter[Case]) -> float:
        """Return the expected seconds of trials: the mean of the case's trials so far.

        For other cases, it is the mean of those on as many devices or, without any, what is
        `assumed_s`, longer or shorter as the trials so far were longer or shorter than assumed.
        """
        own = {case: statistics.mean(each) for case, each in self._taken_s.items()}
        alike = grouped(
            (case.devices, seconds) for case, each in self._taken_s.items() for seconds in each
        )
        means = {devices: statistics.mean(each) for devices, each in alike.items()}
        scale = statistics.mean(
            [seconds / self._assumed_s(case) for case, seconds in own.items()] or [1.0]
        )
        return sum(
            number * (own.get(case) or means.get(case.devices) or scale * self._assumed_s(case))
            for case, number in trials.items()
        )

    def _assumed_s(self, case: Case) -> float:
        return assumed_s(case) + self.effort.budget_s

    def fitting(self, units: Iterable[Sequence[Case]], share: float) -> frozenset[Case]:
        """Return the cases of the units whose trials ahead fit into a share of what is left."""

        def needed_s(unit: Sequence[Case]) -> float:
            return self.usual_s(Counter({case: self.ahead[case] for case in unit}))

        found = [*units]
        if self._first is None:
            self._first = first_of(found, needed_s)
        return fitting(found, needed_s, share * self.left_s, self._first)

    def remaining_s(self) -> float | None:
        """Return the expected seconds of the rest of the run; None if unknown."""
        expected_s = self.usual_s(self.ahead)
        if self.settles:
            expected_s = max(expected_s, self._settling_s)
        expected_s = max(0.0, min(expected_s, self.left_s))
        return expected_s if math.isfinite(expected_s) else None

    def allows(self, cases: Sequence[Case], *, needed: bool) -> bool:
        """Return whether a round of these cases, which is `needed` or not, may begin.

        On CPUs, trials of the needed rounds are shortened instead.
        """
        if not self._taken_s:
            return True
        round_s = self.usual_s(Counter(cases))
        if not needed:
            return round_s <= self._settling_s
        return not self.spent() and (not on_gpus(cases) or round_s <= self.left_s)

    def trial(self, group: Sequence[Case]) -> Effort:
        """Return the effort for the next trial.

        On CPUs, a trial takes at most an equal share of the remaining time.
        """
        if on_gpus(group):
            return replace(self.effort, least_s=min(GPU_LEAST_S, self.effort.budget_s))
        left_s = self._settling_s if self.settles else self.left_s
        if math.isinf(left_s):
            return self.effort
        share_s = SHARED * left_s / max(1, self.reserved) - self._overhead_s
        return replace(self.effort, budget_s=min(self.effort.budget_s, max(LEAST_S, share_s)))

    def shortage(self) -> str:
        """Return a warning that the budget is too short for the trials ahead, or ""."""
        trials = self.ahead.total()
        needed_s = trials * (self._overhead_s + LEAST_S)
        if not trials or needed_s <= self.left_s:
            return ""
        return (
            f"the budget is too short: {count(trials, 'more trial')} would take at least"
            f" {words.time(needed_s)} ({words.time(self._overhead_s)} per trial in addition to its"
            f" steps), but {words.time(max(0.0, self.left_s))} of the budget is left; the last"
            f" trials will be left out. Give a larger {dashed('budget')}, or fewer"
            f" {dashed('devices')} or {dashed('models')}"
        )


def assumed_s(case: Case) -> float:
    """Return the assumed seconds of a case's first trial beside those of its timed steps."""
    if case.device_kind != "cuda":
        return OVERHEAD_S
    return GPU_S + FURTHER_GPU_S * (len(set(case.gpus)) - 1)


def first_of(
    units: Iterable[Sequence[Case]], needed_s: Callable[[Sequence[Case]], float]
) -> frozenset[Case]:
    """Return the first unit with trials ahead, with which a call begins also if it does not fit."""
    return next((frozenset(unit) for unit in units if needed_s(unit) > 0), frozenset())


def fitting(
    units: Iterable[Sequence[Case]],
    needed_s: Callable[[Sequence[Case]], float],
    budget_s: float,
    first: Collection[Case],
) -> frozenset[Case]:
    """Return the cases of the units, the most needed first, that fit into a budget of seconds.

    A unit is taken whole if its seconds, which `needed_s` returns, fit beside those before it. The
    unit `first` is always taken.
    """
    left_s = budget_s
    found: set[Case] = set()
    for unit in units:
        seconds = needed_s(unit)
        if seconds <= left_s or first == {*unit}:
            found.update(unit)
            left_s -= seconds
    return frozenset(found)


def on_gpus(cases: Sequence[Case]) -> bool:
    """Return whether the cases use GPUs."""
    return any(case.device_kind == "cuda" for case in cases)
