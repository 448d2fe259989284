"""Steady: when a series of steps has warmed up, and when enough of it has been measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dpbench.records import words

WINDOW = 64
"""Steps over which the noise of a series must have stayed as it is to count as known."""
STABLE = 0.05
"""How far, of itself, the noise may move within the window."""


def warmup(series: Sequence[float], *, least: int = 0) -> int:
    """Return how many steps at the beginning of a series belong to its warm-up, `least` of them anyway.

    A test of two halves: the second tells what is usual. From the beginning, steps go as long as the median of a few
    lies outside the usual's middle four fifths; a single slow step does not count, nor a slow one later on. A series
    that goes on like that up to its half has not been measured long enough.
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
    """Decide from a worker's own series when it has measured enough; `reason` says why it ended.

    The series is precise enough, or its noise itself is known (more steps of this process would not tell more: other
    processes will), or its budget of seconds or steps is spent.
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
        """Return how many of the steps so far belong to the warm-up."""
        return warmup(self._series, least=self.least_warmup)

    def add(self, seconds: float) -> None:
        """Take one step into account."""
        self._series.append(seconds)

    def finished(self) -> bool:
        """Tell whether the series is precise enough, or time or steps have run out."""
        timed = self._series[self.warmup :]
        if len(timed) >= self.min_steps:
            self._noise.append((len(timed), _noise(timed)))
            if half_width(timed) <= self.precision:
                self.reason = f"precise: the median is known to {self.precision:.1%}"
            elif self._is_known(len(timed)):
                self.reason = f"noise is known: the median to {half_width(timed):.1%}, unchanged over {WINDOW} steps"
            elif sum(timed) >= self.budget_s:
                self.reason = f"budget: {words.exact(self.budget_s)} s of steps"
        if not self.reason and len(timed) >= self.max_steps:
            self.reason = f"steps: {self.max_steps}"
        return bool(self.reason)

    def _is_known(self, steps: int) -> bool:
        """Tell whether the noise has stayed as it is for a window of steps, asked at each block in it."""
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

    Below six values there is no such interval: even the whole range covers the median less often.
    """
    ordered, n = sorted(series), len(series)
    if n < 6:
        return math.inf
    low = math.floor(n / 2 - 0.98 * math.sqrt(n))
    return (ordered[n - 1 - low] - ordered[low]) / 2 / ordered[n // 2]
