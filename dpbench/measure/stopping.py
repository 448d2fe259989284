"""Stopping: decide when a series of steps has warmed up, and when it is long enough."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dpbench.records import words

WINDOW = 64
"""The number of steps over which the noise of a series must stay constant to count as known."""
STABLE = 0.05
"""The largest relative change of the noise within the window."""


def warmup(series: Sequence[float], *, least: int = 0) -> int:
    """Return the number of steps at the beginning of a series that belong to its warm-up, at least `least`.

    The usual range is that from the 10th to the 90th percentile of the second half of the series. Steps are dropped
    from the beginning in small groups as long as the median of the next group is outside this range. The median ignores
    single slow steps. If this drops the whole first half, the series is too short to show where warm-up ends, and about
    half of its length is returned. For fewer than 12 steps, `least` is returned, but at most their number.
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
    """The rule that ends a worker's series of steps; `reason` gives the cause.

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
        """Return whether the noise has stayed constant over the last window of steps, checked once per block."""
        recent = [noise for count, noise in self._noise if count > steps - WINDOW]
        whole = any(count <= steps - WINDOW for count, _ in self._noise)
        middle = statistics.median(recent)
        return whole and len(recent) >= 4 and max(abs(noise - middle) for noise in recent) <= STABLE * middle


def _noise(series: Sequence[float]) -> float:
    """Return the interquartile range as a fraction of the median."""
    low, middle, high = np.percentile(series, [25, 50, 75])
    return float((high - low) / middle)


def half_width(series: Sequence[float]) -> float:
    """Return half the 95 % interval of the median, by order statistics, as a fraction of the median.

    Return infinity for fewer than six values: even their whole range contains the median with less than 95 %
    probability.
    """
    ordered, n = sorted(series), len(series)
    if n < 6:
        return math.inf
    low = math.floor(n / 2 - 0.98 * math.sqrt(n))
    return (ordered[n - 1 - low] - ordered[low]) / 2 / ordered[n // 2]
