"""Stopping: decide when a series of steps is long enough, and which cases get more rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from dpbench.analysis import stats, summary
from dpbench.records import Case, Trial, words
from dpbench.records.trial import Estimate
from dpbench.records.words import count

WINDOW = 64
"""The noise of a series counts as known if it stays nearly constant over this number of steps."""
STABLE = 0.05
"""The largest deviation of constant noise from its median over the window, as a fraction."""
AUTO = "auto"
LEAST, MOST = 3, 200
PRECISION = 0.01
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
class UntilPrecise:
    """The rule that adds rounds until every speed-up is precise.

    A speed-up is precise if half the width of its 95 % interval is at most the fraction `precision`
    of its value. As long as a case's speed-up is not precise, the case and its baseline are
    measured in every round. If no case has a speed-up, the step time of every case must become
    precise instead. Every case gets at least `least` and at most `most` rounds.
    """

    precision: float = PRECISION
    least: int = LEAST
    most: int = MOST
    _series: dict[Case, stats.Timed] = field(default_factory=dict)

    def add(self, trial: Trial) -> None:
        """Add a trial's step times to its case, if the trial is trusted (`Trial.trusted`)."""
        summary.add(self._series, trial)

    @property
    def name(self) -> str:
        """Return the name of the rule and its precision, such as "auto 0.01"."""
        return f"{AUTO} {self.precision:g}"

    def wanted(self, cases: Sequence[Case], number: int) -> list[Case]:
        """Return the cases to measure in round `number`, which counts from 0.

        The first `least` rounds measure all cases. Each later round measures the cases that are not
        yet precise, and their baselines. The list is empty from round `most` on.
        """
        if number < self.least:
            return list(cases)
        if number >= self.most:
            return []
        open_ = {
            case: base
            for case, base, estimate in self._judged(cases)
            if interval_half_width(estimate) > self.precision
        }
        needed = {*open_, *filter(None, open_.values())}
        return [case for case in cases if case in needed]

    def reasons(self, cases: Sequence[Case]) -> dict[str, str]:
        """Return, by label of each judged case, a text that says why it got no more rounds.

        The judged cases are those with a baseline or, if no case has one, all measured cases. The
        text begins with the reason, which is `precise`, `rounds` (the case had the maximum number
        of rounds) or `budget`. The precision that was reached follows.
        """
        reasons = {}
        for case, base, estimate in self._judged(cases):
            width = interval_half_width(estimate)
            quantity = "speed-up" if base else "step time"
            ended = (
                "precise"
                if width <= self.precision
                else "rounds"
                if estimate.n >= self.most
                else "budget"
            )
            reasons[case.label] = (
                f"{ended}: {quantity} known to within {width:.1%} after"
                f" {count(estimate.n, 'round')}"
                + _outlook(estimate if base and ended != "precise" else None)
            )
        return reasons

    def _judged(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Case | None, Estimate]]:
        """Yield (case, baseline, speed-up) for each measured case that has a measured baseline.

        If no case has one, yield (case, None, step time in seconds) for each measured case.
        """
        series = {case: self._series[case] for case in cases if self._series.get(case)}
        speedups = summary.speedups(series)
        for case, speedup in speedups.items():
            yield case, summary.baseline_in(case, series), speedup
        if not speedups:
            for case, times in series.items():
                yield case, None, stats.median(times)


def _outlook(ratio: Estimate | None) -> str:
    """Return the verdict on a speed-up (such as "faster") as text to append to a reason.

    For "undecided", it has the number of further rounds that would decide the verdict, unless it is
    too large. Empty if `ratio` is None.
    """
    if ratio is None:
        return ""
    verdict = stats.verdict(ratio)
    if verdict != "undecided":
        return f", {verdict}"
    more = stats.rounds_to_decide(ratio) - ratio.n
    needed = (
        f": about {count(more, 'more round')} would show whether it is faster, slower or the same"
    )
    return f", undecided{needed if more < MOST else ''}"


def interval_half_width(estimate: Estimate) -> float:
    """Return half the width of an interval as a fraction of the value; infinity for one round."""
    return (estimate.high - estimate.low) / 2 / estimate.value if estimate.n > 1 else float("inf")


class RoundsRule(Protocol):
    """The rule that decides which cases get another round.

    The run adds every ended trial to the rule, first the trials of earlier sessions.
    """

    @property
    def name(self) -> int | str:
        """Return the fixed number of rounds, or the rule's name; the plan's hash contains it."""

    def add(self, trial: Trial) -> None:
        """Add an ended trial, on which later decisions can depend."""

    def wanted(self, cases: Sequence[Case], number: int) -> list[Case]:
        """Return the cases to measure in round `number`, which counts from 0; none ends the run."""

    def reasons(self, cases: Sequence[Case]) -> dict[str, str]:
        """Return, by each case's label, the reason why the case got no more rounds."""


@dataclass(frozen=True)
class Fixed:
    """The rule that measures every case in `name` rounds."""

    name: int

    def add(self, trial: Trial) -> None:
        """Do nothing: a fixed number of rounds does not depend on the trials."""

    def wanted(self, cases: Sequence[Case], number: int) -> list[Case]:
        """Return all cases if `number`, which counts from 0, is below the number of rounds."""
        return list(cases) if number < self.name else []

    def reasons(self, cases: Sequence[Case]) -> dict[str, str]:
        """Return an empty dictionary: the plan itself fixes the number of rounds."""
        return {}


def shortage(left_s: float, trials: int, overhead_s: float) -> str:
    """Return a warning that `left_s` seconds of budget are too short for `trials` trials, or "".

    It is never too short for 0 trials. `overhead_s` is the measured time in seconds of a trial
    without its steps.
    """
    needed_s = trials * (overhead_s + LEAST_S)
    if not trials or needed_s <= left_s:
        return ""
    return (
        f"the budget is too short: {words.count(trials, 'more trial')} would take at least"
        f" {words.time(needed_s)} ({words.time(overhead_s)} per trial in addition to its steps),"
        f" but {words.time(max(0.0, left_s))} of the budget is left; the last trials will be"
        " skipped. Give a larger --budget, or fewer --devices or --models"
    )
