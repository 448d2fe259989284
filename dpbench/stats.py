"""Statistics: medians with bootstrap intervals over rounds and steps, and the rule that ends a series.

Rounds are fresh processes, and differ from each other more than the steps within one do; so intervals resample
rounds first, then the steps inside each (a hierarchical bootstrap). With fewer than three rounds an interval says
little, and `Estimate.n` says how many there were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dpbench.records import Estimate

Rounds = Mapping[int, Sequence[float]]
"""The measured step seconds of one case, by round."""
Vectors = Mapping[int, Sequence[Sequence[float]]]
"""By round and step, a number for each device; a round that has one figure has one step."""

RESAMPLES = 2000
CONFIDENCE = 0.95


def median(rounds: Rounds, *, seed: int = 0) -> Estimate:
    """Return the median over rounds of each round's median, with its interval."""
    keys = sorted(rounds)
    draws = _draws(rounds, keys, np.random.default_rng(seed))
    value = float(np.median([np.median(rounds[key]) for key in keys]))
    return _estimate(value, np.median(draws, axis=1), len(keys))


def ratio(numerator: Rounds, denominator: Rounds, *, paired: bool = True, seed: int = 0) -> Estimate:
    """Return median(numerator) / median(denominator) with its interval.

    Rounds of one run that both have are resampled together, so that a drift between rounds cancels; rounds of
    different runs are not `paired`, and each side is resampled alone.
    """
    (top, above), (bottom, below), n = _resampled(numerator, denominator, paired, seed)
    return _estimate(top / bottom, above / below, n)


def difference(first: Rounds, second: Rounds, *, seed: int = 0) -> Estimate:
    """Return median(first) - median(second) with its interval, resampled as in `ratio`."""
    (one, ones), (other, others), n = _resampled(first, second, True, seed)
    return _estimate(one - other, ones - others, n)


def first_over_rest(vectors: Vectors, *, seed: int = 0) -> Estimate:
    """Return device 0's median over the mean of the other devices' medians, with its interval."""
    return _of_medians(vectors, lambda each: each[..., 0] / each[..., 1:].mean(axis=-1), seed)


def most_over_mean(vectors: Vectors, *, seed: int = 0) -> Estimate:
    """Return the largest of the devices' medians over the mean of all, with its interval; at least 1."""
    return _of_medians(vectors, lambda each: each.max(axis=-1) / each.mean(axis=-1), seed)


def _of_medians(
    vectors: Vectors, function: Callable[[NDArray[np.float64]], NDArray[np.float64]], seed: int
) -> Estimate:
    """Return a function of the devices' medians over rounds of each round's median, with its interval.

    A step is resampled with all its devices, so that what they share cancels.
    """
    pools = [np.asarray(vectors[key], dtype=float) for key in sorted(vectors)]
    generator = np.random.default_rng(seed)
    chosen = generator.integers(len(pools), size=(RESAMPLES, len(pools)))
    medians = np.empty((*chosen.shape, pools[0].shape[1]))
    for number, pool in enumerate(pools):
        here = chosen == number
        picks = generator.integers(len(pool), size=(int(here.sum()), len(pool)))
        medians[here] = np.median(pool[picks], axis=1)
    value = function(np.median([np.median(pool, axis=0) for pool in pools], axis=0))
    return _estimate(float(value), function(np.median(medians, axis=1)), len(pools))


_Side = tuple[float, NDArray[np.float64]]
"""A median, and its resamples."""


def _resampled(first: Rounds, second: Rounds, paired: bool, seed: int) -> tuple[_Side, _Side, int]:
    """Return both sides' medians with their resamples, and the rounds behind them."""
    generator = np.random.default_rng(seed)
    common = sorted(set(first) & set(second)) if paired else []
    if common:
        first, second = ({key: side[key] for key in common} for side in (first, second))
    chosen = generator.integers(len(common), size=(RESAMPLES, len(common))) if common else None
    draws = [_draws(side, sorted(side), generator, chosen) for side in (first, second)]
    values = [float(np.median([np.median(side[key]) for key in side])) for side in (first, second)]
    one, other = ((value, np.median(drawn, axis=1)) for value, drawn in zip(values, draws, strict=True))
    return one, other, min(len(first), len(second))


def _draws(
    rounds: Rounds, keys: Sequence[int], generator: np.random.Generator, chosen: NDArray[np.int64] | None = None
) -> NDArray[np.float64]:
    """Return an array (resamples, rounds) of medians of resampled steps in resampled rounds."""
    if chosen is None:
        chosen = generator.integers(len(keys), size=(RESAMPLES, len(keys)))
    pools = [np.asarray(rounds[key], dtype=float) for key in keys]
    medians = np.empty(chosen.shape)
    for number, pool in enumerate(pools):
        here = chosen == number
        picks = generator.integers(len(pool), size=(int(here.sum()), len(pool)))
        medians[here] = np.median(pool[picks], axis=1)
    return medians


def _estimate(value: float, draws: NDArray[np.float64], n: int) -> Estimate:
    """Return the percentile interval around a value."""
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(draws, [tail, 100 - tail])
    return Estimate(value, float(min(low, value)), float(max(high, value)), n)


def verdict(estimate: Estimate, *, margin: float = 0.01) -> str:
    """Say what a ratio's interval decides: faster (above 1), slower, same (within the margin) or undecided."""
    if 1 - margin <= estimate.low and estimate.high <= 1 + margin:
        return "same"
    if estimate.low > 1:
        return "faster"
    if estimate.high < 1:
        return "slower"
    return "undecided"


@dataclass
class Stopping:
    """Decide from a worker's own series when it has measured enough; `reason` says why it ended."""

    budget_s: float
    min_steps: int = 10
    max_steps: int = 1000
    precision: float = 0.005
    reason: str = ""
    _series: list[float] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        """Take one step into account."""
        self._series.append(seconds)

    def finished(self) -> bool:
        """Tell whether the series is precise enough, or time or steps have run out."""
        if len(self._series) >= self.min_steps:
            if half_width(self._series) <= self.precision:
                self.reason = f"precise: the median is known to {self.precision:.1%}"
            elif sum(self._series) >= self.budget_s:
                self.reason = f"budget: {self.budget_s:.3g} s of steps"
        if not self.reason and len(self._series) >= self.max_steps:
            self.reason = f"steps: {self.max_steps}"
        return bool(self.reason)


def half_width(series: Sequence[float]) -> float:
    """Return half the 95 % interval of the median, by order statistics, as a fraction of the median.

    Below six values there is no such interval: even the whole range covers the median less often.
    """
    ordered, n = sorted(series), len(series)
    if n < 6:
        return math.inf
    low = math.floor(n / 2 - 0.98 * math.sqrt(n))
    return (ordered[n - 1 - low] - ordered[low]) / 2 / ordered[n // 2]
