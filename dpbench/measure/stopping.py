"""Stopping: decide when a series of steps has warmed up, when it is long enough, and which cases need another round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dpbench.analysis import stats, summary
from dpbench.records import Case, Trial, words
from dpbench.records.trial import Estimate
from dpbench.records.words import count

WINDOW = 64
"""The number of steps over which the noise of a series must stay constant before it counts as known."""
STABLE = 0.05
"""The largest relative deviation of the noise from its median within the window."""


def warmup(series: Sequence[float], *, least: int = 0) -> int:
    """Return the number of steps at the beginning of a series that belong to its warm-up, at least `least`.

    The second half of the series defines a usual range, from its 10th to its 90th percentile. Small groups of steps are
    dropped from the beginning until the median of the next group is in this range; a median ignores single slow steps.
    If this drops the whole first half, the series is too short to show where warm-up ends, and about half of its length
    is returned. For a series of fewer than 12 steps, `least` is returned, but at most the length of the series.
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
    """The rule that ends a worker's series of steps; `reason` says why the series ended.

    A series ends when its median is precise enough, when its noise is known, or when the budget in seconds or the
    maximum number of steps is reached. Once the noise is known, further rounds in other processes add more information
    than further steps.
    """

    budget_s: float
    min_steps: int = 10
    max_steps: int = 1000
    precision: float = 0.005
    least_warmup: int = 0
    reason: str = ""
    _series: list[float] = field(default_factory=list)
    _noise: list[tuple[int, float]] = field(default_factory=list)

    @property
    def warmup(self) -> int:
        """Return the number of steps so far that belong to the warm-up."""
        return warmup(self._series, least=self.least_warmup)

    def add(self, seconds: float) -> None:
        """Add the duration of one step to the series."""
        self._series.append(seconds)

    def finished(self) -> bool:
        """Return whether the series is long enough; once it is, `reason` is set."""
        timed = self._series[self.warmup :]
        if len(timed) >= self.min_steps:
            self._noise.append((len(timed), _noise(timed)))
            if half_width(timed) <= self.precision:
                self.reason = f"precise: the median is known to {self.precision:.1%}"
            elif self._is_known(len(timed)):
                self.reason = f"noise is known: constant over {WINDOW} steps; median known to {half_width(timed):.1%}"
            elif sum(timed) >= self.budget_s:
                self.reason = f"budget: {words.exact(self.budget_s)} s of steps"
        if not self.reason and len(timed) >= self.max_steps:
            self.reason = f"steps: {self.max_steps}"
        return bool(self.reason)

    def _is_known(self, steps: int) -> bool:
        """Return whether the noise, computed after each block, has stayed constant over the last `WINDOW` steps."""
        recent = [noise for count, noise in self._noise if count > steps - WINDOW]
        whole = any(count <= steps - WINDOW for count, _ in self._noise)
        middle = statistics.median(recent)
        return whole and len(recent) >= 4 and max(abs(noise - middle) for noise in recent) <= STABLE * middle


def _noise(series: Sequence[float]) -> float:
    """Return the interquartile range of a series as a fraction of its median."""
    low, middle, high = np.percentile(series, [25, 50, 75])
    return float((high - low) / middle)


def half_width(series: Sequence[float]) -> float:
    """Return half the width of the median's 95 % interval, from order statistics, as a fraction of the median.

    Return infinity for fewer than six values: even their whole range contains the median with less than 95 %
    probability.
    """
    ordered, n = sorted(series), len(series)
    if n < 6:
        return math.inf
    low = math.floor(n / 2 - 0.98 * math.sqrt(n))
    return (ordered[n - 1 - low] - ordered[low]) / 2 / ordered[n // 2]


AUTO = "auto"
LEAST, MOST = 3, 200
PRECISION = 0.01


@dataclass
class UntilPrecise:
    """The rule that adds rounds until every speed-up is precise.

    A speed-up is precise if the half-width of its 95 % interval is at most the fraction `precision` of its value.

    A case without a speed-up, such as a baseline, is measured as long as another case needs it. If no case has a
    speed-up, the step time must reach the precision. No case gets more than `most` rounds.
    """

    precision: float = PRECISION
    least: int = LEAST
    most: int = MOST
    _series: dict[Case, dict[int, list[float]]] = field(default_factory=dict)

    def add(self, trial: Trial) -> None:
        """Add the timed steps of a trial; an untrusted trial adds none."""
        self._series.setdefault(trial.case, {}).update(summary.measured([trial]))

    @property
    def name(self) -> str:
        """Return the name of the rule with its precision."""
        return f"{AUTO} {self.precision:g}"

    def wanted(self, cases: Sequence[Case], number: int) -> list[Case]:
        """Return the cases for round `number`.

        They are all cases in the first `least` rounds, then the imprecise cases and their baselines, and none from
        round `most` on.
        """
        if number < self.least:
            return list(cases)
        if number >= self.most:
            return []
        open_ = {case: base for case, base, found in self._judged(cases) if interval_half_width(found) > self.precision}
        needed = {*open_, *filter(None, open_.values())}
        return [case for case in cases if case in needed]

    def reasons(self, cases: Sequence[Case]) -> dict[str, str]:
        """Return, by case label, the precision that each judged case reached and the reason why it got no more rounds.

        The reason is the first word: `precise`, `rounds` or `budget`.
        """
        found = {}
        for case, base, estimate in self._judged(cases):
            width, quantity = interval_half_width(estimate), "speed-up" if base else "step"
            ended = "precise" if width <= self.precision else "rounds" if estimate.n >= self.most else "budget"
            found[case.label] = (
                f"{ended}: {quantity} known to {width:.1%} after {count(estimate.n, 'round')}"
                + _outlook(estimate if base and ended != "precise" else None)
            )
        return found

    def _judged(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Case | None, Estimate]]:
        """Yield (case, baseline, speed-up) for each case whose interval decides when to stop.

        If no case has a baseline, yield (case, None, duration of a step).
        """
        series = {case: found for case, found in self._series.items() if found}
        bases = {case: base for case in cases if case in series and (base := summary.baseline_in(case, series))}
        for case, base in bases.items():
            yield case, base, stats.ratio(series[base], series[case])
        if not bases:
            for case in cases:
                if case in series:
                    yield case, None, stats.median(series[case])


def _outlook(ratio: Estimate | None) -> str:
    """Return the verdict on a ratio, or the number of rounds that would decide it, as text."""
    if ratio is None:
        return ""
    said = stats.verdict(ratio)
    if said != "undecided":
        return f", {said}"
    more = stats.rounds_to_decide(ratio) - ratio.n
    return f", undecided: about {count(more, 'more round')} would decide" if more < MOST else ", undecided"


def interval_half_width(estimate: Estimate) -> float:
    """Return half the width of an estimate's interval as a fraction of its value; infinity for a single round."""
    return (estimate.high - estimate.low) / 2 / estimate.value if estimate.n > 1 else float("inf")
