"""Arrivals: which rank arrives last at a collective, and for how long the others wait for it.

A collective ends on all ranks at almost the same time, so that its duration on one rank does not
tell the transfer from the wait. The arrivals are comparable where all ranks have one clock: on one
machine, or in traces that the collectives themselves align.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpbench.records import Trial
from dpbench.records.activity import RANK_WAIT


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a timed step: each rank's wait for the last one.

    `step` counts the timed steps. The ranks are in the order of their devices.
    """

    step: int
    waits_s: tuple[float, ...]

    @property
    def last(self) -> int:
        """Return the rank that arrived last."""
        return min(range(len(self.waits_s)), key=lambda rank: self.waits_s[rank])


def of_trial(trial: Trial) -> tuple[Collective, ...]:
    """Return the collectives of a trial's timed steps in order; none if the arrivals are unknown.

    Those of a trace are its buckets. On CPUs, the exposed reductions count, one per backward.
    """
    waits = trial.grouped.series(RANK_WAIT)
    if len(waits) < max(2, trial.case.devices):
        return ()
    steps = trial.by_column
    place_of = {number: place for place, number in enumerate(steps.timed(range(len(steps))))}
    every = zip(
        next(iter(waits.values())).times,
        zip(*(waits[device].values for device in sorted(waits)), strict=True),
        strict=True,
    )
    return tuple(
        Collective(step=place_of[number], waits_s=waits_s)
        for time_s, waits_s in sorted(every)
        if (number := bisect_left(steps.ends, time_s)) in place_of
    )


def waiting(trial: Trial) -> list[float]:
    """Return the longest wait at each collective, summed over each timed step, in seconds.

    A step cannot become shorter by more if no rank is late, because the rank that waits longest
    does not arrive earlier. The clocks of traces agree within milliseconds only; no wait is longer
    than its step.
    """
    return _of_steps(trial, lambda one: max(one.waits_s))


@dataclass(frozen=True)
class Order:
    """The order in which ranks arrive on average; `waits_s` has the mean wait of each rank."""

    waits_s: tuple[float, ...]

    @classmethod
    def of(cls, collectives: Sequence[Collective]) -> Order:
        """Return the order at these collectives, of which there is at least one."""
        every = zip(*(one.waits_s for one in collectives), strict=True)
        return cls(tuple(math.fsum(waits) / len(collectives) for waits in every))

    @property
    def last(self) -> int:
        """Return the rank that waits least."""
        return self.waits_s.index(min(self.waits_s))

    @property
    def first(self) -> int:
        """Return the rank that waits longest."""
        return self.waits_s.index(max(self.waits_s))

    @property
    def late(self) -> list[int]:
        """Return `last`, and all that wait less than half as long as the one that waits longest."""
        most_s = max(self.waits_s)
        return [
            rank
            for rank, wait_s in enumerate(self.waits_s)
            if rank == self.last or wait_s < most_s / 2
        ]

    def apart(self, trial: Trial) -> list[float]:
        """Return how much longer `first` waits than `last` in each timed step, in seconds.

        It is negative in a step in which `last` waits longer, so that the mean is about 0 for ranks
        that are late in turn.
        """
        return _of_steps(trial, lambda one: one.waits_s[self.first] - one.waits_s[self.last])


def _of_steps(trial: Trial, seconds_of: Callable[[Collective], float]) -> list[float]:
    seconds = [0.0] * len(trial.timed)
    for one in of_trial(trial):
        seconds[one.step] += seconds_of(one)
    return [
        max(-step_s, min(wait_s, step_s))
        for wait_s, step_s in zip(seconds, trial.timed, strict=True)
    ]
