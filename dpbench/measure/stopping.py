"""Stopping: decide when a series of steps is long enough, and which cases get more rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import numpy as np

from dpbench.analysis import decision, stats, summary
from dpbench.records import Case, Trial, words
from dpbench.records.options import AUTO
from dpbench.records.words import count

WINDOW = 64
"""The noise of a series counts as known if it stays nearly constant over this number of steps."""
STABLE = 0.05
"""The largest deviation of constant noise from its median over the window, as a fraction."""
LEAST_S = 0.05
"""The least seconds of timed steps of each trial on CPUs, as long as the budget is not spent."""
GPU_LEAST_S = 0.5
"""The same on GPUs, where no budget shortens a trial, and a clock needs time to settle."""


def warmup(series: Sequence[float], *, least: int = 0) -> int:
    """Return the number of steps at the beginning of a series of step times that are its warm-up.

    The usual range of step times extends from the 10th to the 90th percentile of the second half of
    the series. Groups of three to five steps are dropped from the beginning until the median of the
    next group is in the usual range; a median is not affected by a single slow step. If all groups
    of the first half are dropped, the series is too short to show where its warm-up ends, and the
    result is about half of its length. The result is at least `least`, but never more than the
    length of the series. For a series of fewer than 12 steps, it is the smaller of the two.
    """
    n = len(series)
    few = max(3, min(5, n // 8))
    least = min(least, n)
    if n < 4 * few:
        return least
    low, high = np.percentile(series[n // 2 :], [10, 90])
    cut = 0
    while cut < n // 2 and not low <= statistics.median(series[cut : cut + few]) <= high:
        cut += few
    return max(least, cut)


@dataclass
class Stopping:
    """The rule that ends a worker's series of steps.

    A series ends when its median is precise, when its noise is known, or when the timed steps reach
    the total duration `budget_s` (in seconds) or the number `max_steps`. Before `min_steps` timed
    steps, only `max_steps` ends the series. The median is precise if half the width of its 95 %
    interval is at most the fraction `precision` of the median. The noise, which is the relative
    interquartile range, is known if it stays nearly constant; from then on, further steps add less
    information than further rounds in other processes. At least `least_warmup` steps count as
    warm-up. Before `least_s` seconds of timed steps, too, only `max_steps` ends the series.
    `reason` says why the series ended; it is empty until then.
    """

    budget_s: float
    min_steps: int = 10
    max_steps: int = 1000
    precision: float = 0.005
    least_warmup: int = 0
    least_s: float = 0.0
    reason: str = ""
    _series: list[float] = field(default_factory=list)
    _noise: list[tuple[int, float]] = field(default_factory=list)

    @property
    def warmup(self) -> int:
        """Return the number of steps known so far to be the warm-up of the series."""
        return warmup(self._series, least=self.least_warmup)

    def add(self, seconds: float) -> None:
        """Add the duration of one step in seconds."""
        self._series.append(seconds)

    def restart(self) -> None:
        """Count all steps so far as warm-up."""
        self.least_warmup = max(self.least_warmup, len(self._series))
        self._noise.clear()
        self.reason = ""

    def finished(self) -> bool:
        """Return whether the series has enough steps, and set `reason` if it has."""
        timed = self._series[self.warmup :]
        if len(timed) >= self.min_steps and sum(timed) >= self.least_s:
            self._noise.append((len(timed), _noise(timed)))
            if half_width(timed) <= self.precision:
                self.reason = (
                    f"precise: the median step time is known to within {self.precision:.1%}"
                )
            elif self._is_known(len(timed)):
                self.reason = (
                    f"noise is known: the spread of the step times hardly changed over {WINDOW}"
                    f" steps; the median step time is known to within {half_width(timed):.1%}"
                )
            elif sum(timed) >= self.budget_s:
                self.reason = (
                    f"budget: {words.exact(self.budget_s)} s of timed steps, the most that a trial"
                    " may take"
                )
        if not self.reason and len(timed) >= self.max_steps:
            self.reason = (
                f"steps: {count(self.max_steps, 'timed step')}, the most that a trial may take"
            )
        return bool(self.reason)

    def _is_known(self, steps: int) -> bool:
        """Return whether the noise was nearly constant over the last `WINDOW` timed steps.

        It is computed after each block of steps.
        """
        recent = [noise for count, noise in self._noise if count > steps - WINDOW]
        whole = any(count <= steps - WINDOW for count, _ in self._noise)
        middle = statistics.median(recent)
        return (
            whole
            and len(recent) >= 4
            and max(abs(noise - middle) for noise in recent) <= STABLE * middle
        )


def _noise(series: Sequence[float]) -> float:
    low, middle, high = np.percentile(series, [25, 50, 75])
    return float((high - low) / middle)


def half_width(series: Sequence[float]) -> float:
    """Return half the width of the median's 95 % interval as a fraction of the median.

    The interval is from order statistics. Infinity for fewer than six values, because even their
    whole range then contains the true median with a probability below 95 %.
    """
    ordered = sorted(series)
    n = len(series)
    if n < 6:
        return math.inf
    low = math.floor(n / 2 - 0.98 * math.sqrt(n))
    return (ordered[n - 1 - low] - ordered[low]) / 2 / ordered[n // 2]


@dataclass
class UntilDecided:
    """The rule that adds rounds until every answer of the run is settled.

    After each number of rounds in `stats.LOOKS` it derives the answers from the trials so far, and
    until the next look, it measures only the cases on which an answer still depends
    (`decision.unsettled`). After the last look, no case is measured.
    """

    _trials: list[Trial] = field(default_factory=list)
    _open: frozenset[Case] = frozenset()

    name: ClassVar[str] = AUTO
    least: ClassVar[int] = stats.LOOKS[0]
    looks: ClassVar[int] = len(stats.LOOKS)

    def add(self, trial: Trial) -> None:
        """Add an ended trial."""
        self._trials.append(trial.summary())

    def wanted(self, cases: Sequence[Case], number: int) -> list[Case]:
        """Return the cases to measure in round `number`, which counts from 0."""
        if number < self.least:
            return list(cases)
        if number in stats.LOOKS:
            self._open = self.unsettled()
        if number >= stats.LOOKS[-1]:
            return []
        return [case for case in cases if case in self._open]

    def unsettled(self) -> frozenset[Case]:
        """Return the cases on which an answer depends that the trials so far do not settle."""
        asked = decision.questions(summary.rows(self._trials))
        needed = (decision.unsettled(one, decision.decide(one)) for one in asked)
        return frozenset().union(*needed)


@dataclass(frozen=True)
class Fixed:
    """The rule that measures every case in `name` rounds."""

    name: int
    looks: ClassVar[int] = 1

    @property
    def least(self) -> int:
        """Return the number of rounds."""
        return self.name

    def add(self, trial: Trial) -> None:
        """Do nothing: a fixed number of rounds does not depend on the trials."""

    def wanted(self, cases: Sequence[Case], number: int) -> list[Case]:
        """Return all cases if `number`, which counts from 0, is below the number of rounds."""
        return list(cases) if number < self.name else []

    def unsettled(self) -> frozenset[Case]:
        """Return no case: a fixed number of rounds does not depend on the answers."""
        return frozenset()


RoundsRule: TypeAlias = Fixed | UntilDecided
"""The rule that decides which cases get another round.

The run adds every ended trial to the rule, first those of earlier sessions. `name` is the fixed
number of rounds or the rule's name, for the plan's hash; `least` is the number of rounds in which
every case is measured, and `looks` is how often the rule looks at the results (see `Trial.looks`).
"""
