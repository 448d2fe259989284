"""Statistics: medians and ratios, with intervals by a hierarchical bootstrap, and verdicts.

Rounds run in fresh processes and differ more than the steps within one. Resampling therefore draws
rounds first, then steps within each drawn round. A few rounds understate their variance, so the
bootstrap's spread is widened by sqrt(n / (n - 1)), and the interval is Student's t with n - 1
degrees of freedom (Hesterberg, "What Teachers Should Know About the Bootstrap", 2015, section 5.3).
The interval of a single round covers only the variation between its steps. An estimate from fewer
than three rounds, or with an interval that spans more than a factor of 4, is computed but not shown
(`Estimate.doubt`), and its verdict is "undecided".

The interval that is shown decides the verdict. Estimates that are judged together have wider
intervals (Bonferroni, see `together`), so that all contain the true values with 95 %.

Other processes take cores from cases with several processes first, an error that no interval
contains. A comparison therefore leaves out the NOISY rounds of both sides if at least three rounds
remain; otherwise it is in doubt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from dpbench.records.trial import Estimate
from dpbench.records.work import middle_ratio

Rounds = Mapping[int, Sequence[float]]
"""The durations of one case's timed steps in seconds, by round."""


class Timed(dict[int, Sequence[float]]):
    """The durations of one case's timed steps in seconds, by round, and its NOISY rounds.

    In a NOISY round, other processes used too much of the cores.
    """

    def __init__(
        self,
        rounds: Mapping[int, Sequence[float]] | Iterable[tuple[int, Sequence[float]]] = (),
        noisy: Iterable[int] = (),
    ) -> None:
        super().__init__(rounds)
        self.noisy = frozenset(noisy)


Array = NDArray[np.float64]
Places = NDArray[np.int32]
Vectors = Mapping[int, Array]
"""Arrays of shape (steps, devices) by round; a quantity read once per round has one step."""

RESAMPLES = 2000
WITHIN = 400
"""In `balance`, each round's steps are resampled at most this often; each use of it picks one."""
NETWORK = 10
"""The most columns that `_row_medians` sorts by comparing them: 4 rounds have 10 pairs."""
CELLS = 4_000_000
"""The most pairs of rounds in all resamples; with many rounds, there are fewer resamples."""
CONFIDENCE = 0.95
LOOKS = (4, 6, 9, 14, 21, 31)
"""The rounds after which a run that stops once its answers are decided looks at its results.

The intervals hold at all looks together (Bonferroni), so that stopping early makes no verdict less
certain. The growing distances keep the number of looks small.
"""
MARGIN = 0.01
"""The relative difference up to which two cases count as the same."""


@dataclass(frozen=True)
class Percentile:
    """A percentile, in seconds, of the durations of all steps of all rounds.

    `steps` is their number. `low` and `high` are the ends of its 95 % interval, None if there are
    too few steps for one; the percentile is then not shown.
    """

    value: float
    low: float | None
    high: float | None
    steps: int

    @property
    def doubt(self) -> str:
        """Return the reason why the percentile must not be shown; "" if it may."""
        return "too few steps" if self.low is None else ""


def percentile(rounds: Rounds, share: float) -> Percentile:
    """Return the duration below which `share` of all steps lies, as numpy.percentile does.

    The interval is that of the order statistics, which assumes independent steps but no
    distribution. Its ends are the durations of two steps, because the number of steps below the
    true percentile is binomial. The 95th percentile needs 72 steps, the 99th 368.
    """
    pooled = np.sort(np.concatenate([np.asarray(steps, dtype=float) for steps in rounds.values()]))
    n = len(pooled)
    tail = (1 - CONFIDENCE) / 2
    middle = n * share
    reach = 6 * math.sqrt(n * share * (1 - share)) + 2  # beyond `reach`, bdtr is 0 or 1
    ranks = np.arange(max(0, int(middle - reach)), min(n, int(middle + reach) + 1))
    first, last = ranks[0] + np.searchsorted(scipy.special.bdtr(ranks, n, share), [tail, 1 - tail])
    low, high = (
        (float(pooled[first - 1]), float(pooled[last])) if first >= 1 and last < n else (None, None)
    )
    return Percentile(float(np.percentile(pooled, 100 * share)), low, high, n)


def median(rounds: Rounds, *, seed: int = 0) -> Estimate:
    """Return the median over rounds of each round's median, of values with any sign."""
    ((each, draws),) = _medians([rounds], seed)
    # not the exponential of the median logarithm, which differs if the number of rounds is even
    value = float(np.median(each))
    middles = _row_medians(draws)
    n = len(rounds)
    if min(value, middles.min()) <= 0:
        return Estimate(value, *_interval(value, _widen(middles, n), n), n)
    found = _exponential(math.log(value), _widen(np.log(middles), n), n)
    return around(value, found)


def around(value: float, rough: Estimate) -> Estimate:
    """Return an estimate of `value` with the interval of `rough`, extended to contain `value`."""
    return replace(rough, value=value, low=min(rough.low, value), high=max(rough.high, value))


def mean(rounds: Rounds) -> Estimate:
    """Return the mean over rounds of each round's mean duration, which must be above 0.

    The interval is Student's over the logarithms of the rounds' means; that of a single round
    covers only the variation between its steps.
    """
    means = np.array([np.mean(steps) for steps in rounds.values()])
    varying = means if len(means) > 1 else np.asarray(next(iter(rounds.values())), dtype=float)
    value = float(means.mean())
    n = len(varying)
    error = float(np.log(varying).std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    factor = math.exp(min(700.0, float(_quantile(n, CONFIDENCE)) * error)) if error else 1.0
    return Estimate(value, value / factor, value * factor, len(means))


def ratio(
    numerator: Rounds,
    denominator: Rounds,
    *,
    paired: bool = True,
    level: float = CONFIDENCE,
    seed: int = 0,
) -> Estimate:
    """Return the ratio of the step time of `numerator` to that of `denominator`.

    If `paired`, both series must come from one run: the medians of the same round are divided, and
    the estimate is the Hodges-Lehmann centre of these ratios on a logarithmic scale. Disturbances
    of a whole round cancel, and an outlying round has little influence. If not `paired`, or without
    common rounds, every round of one series is compared with every round of the other, and the
    estimate is the median of the ratios. NOISY rounds are left out if enough others remain (see
    `Timed`).
    """
    common, sides, disturbed = _compared(numerator, denominator, paired=paired)
    (top, tops), (bottom, bottoms) = (
        map(np.log, one) for one in _medians(sides, seed, together=common)
    )
    n = min(len(top), len(bottom))
    if common:
        value = _centre(top - bottom)
        draws = _widen(_centre(tops - bottoms), n)
    else:
        count = min(len(tops), len(bottoms))
        value = np.median(top[:, None] - bottom[None, :])
        # resample each side's centre: computing all pairs of rounds in every resample would cost
        # too much
        above, below = _centre(tops[:count]), _centre(bottoms[:count])
        draws = _widen(above, len(top)) - _widen(below, len(bottom))
    return replace(_exponential(float(value), draws, n, level=level), noisy=disturbed)


def _compared(first: Rounds, second: Rounds, *, paired: bool) -> tuple[bool, list[Rounds], bool]:
    """Return whether rounds are paired, the rounds to compare, and whether some are NOISY.

    Pairs are of common rounds. NOISY rounds of either series are left out if enough others remain.
    """
    common = sorted(set(first) & set(second)) if paired else []
    if common:
        kept, disturbed = _quiet(common, noisy(first) | noisy(second))
        pairs: list[Rounds] = [
            {number: side[number] for number in kept} for side in (first, second)
        ]
        return True, pairs, disturbed
    chosen = [_quiet([*side], noisy(side)) for side in (first, second)]
    sides: list[Rounds] = [
        {n: side[n] for n in kept} for side, (kept, _) in zip((first, second), chosen, strict=True)
    ]
    return False, sides, any(disturbed for _, disturbed in chosen)


def noisy(rounds: Rounds) -> frozenset[int]:
    """Return the NOISY rounds of a series; only `Timed` has any."""
    return rounds.noisy if isinstance(rounds, Timed) else frozenset()


def _quiet(rounds: Sequence[int], noisy: Collection[int]) -> tuple[Sequence[int], bool]:
    """Return the rounds not in `noisy` and False or, if they are too few, all rounds and True."""
    kept = [number for number in rounds if number not in noisy]
    enough = len(kept) >= Estimate.ROUNDS or len(kept) == len(rounds)
    return (kept, False) if enough else (rounds, True)


def mean_ratio(numerator: Rounds, denominator: Rounds) -> Estimate:
    """Return the ratio of the mean step of `numerator` to that of `denominator`.

    The rounds are those of `ratio`. The interval is Student's over the logarithms of the rounds'
    means, or of their ratios in common rounds.
    """
    common, sides, disturbed = _compared(numerator, denominator, paired=True)
    top, bottom = (np.log([np.mean(side[number]) for number in sorted(side)]) for side in sides)
    n = min(len(top), len(bottom))
    parts = [top - bottom] if common else [top, bottom]
    error = math.sqrt(sum(part.var(ddof=1) / len(part) for part in parts)) if n > 1 else 0.0
    value = float(top.mean() - bottom.mean())
    half = float(_quantile(n, CONFIDENCE)) * error
    return Estimate(
        math.exp(value), math.exp(value - half), math.exp(value + half), n, noisy=disturbed
    )


def quotient(
    numerator: Estimate,
    denominator: Estimate,
    above: Sequence[float] = (),
    below: Sequence[float] = (),
) -> Estimate:
    """Return `numerator` divided by `denominator`.

    `above` and `below` are random draws of their errors, as logarithms, paired by index so that
    common errors cancel. Without draws, the errors count as independent.
    """
    value = numerator.value / denominator.value
    if above and len(above) == len(below):
        low, high = middle_ratio(above, below)
        return Estimate(value, value * math.exp(low), value * math.exp(high), 0)
    up = math.hypot(
        math.log(numerator.high / numerator.value), math.log(denominator.value / denominator.low)
    )
    down = math.hypot(
        math.log(numerator.value / numerator.low), math.log(denominator.high / denominator.value)
    )
    low, high = value * math.exp(-down), value * math.exp(up)
    n = min(numerator.n, denominator.n)
    disturbed = numerator.noisy or denominator.noisy
    return Estimate(value, low, high, n, noisy=disturbed)


def inverse(estimate: Estimate) -> Estimate:
    """Return 1 divided by a ratio."""
    return replace(estimate, value=1 / estimate.value, low=1 / estimate.high, high=1 / estimate.low)


def difference(first: Rounds, second: Rounds, *, level: float = CONFIDENCE) -> Estimate:
    """Return the median of `first` minus the median of `second` in seconds.

    Common rounds are used, or all if there are none, without NOISY ones if enough others remain
    (see `Timed`).
    """
    common, sides, disturbed = _compared(first, second, paired=True)
    (one, ones), (other, others) = _medians(sides, together=common)
    value = float(np.median(one) - np.median(other))
    n = min(len(one), len(other))
    count = min(len(ones), len(others))
    draws = _row_medians(ones[:count]) - _row_medians(others[:count])
    low, high = _interval(value, _widen(draws, n), n, level=level)
    return Estimate(value, low, high, n, signed=True, level=level, noisy=disturbed)


@dataclass(frozen=True)
class Balance:
    """The imbalance of devices as two ratios of their medians.

    `first` is device 0's median over the mean of the others', `most` the largest over the mean of
    all.
    """

    first: Estimate
    most: Estimate


def balance(vectors: Vectors) -> Balance:
    """Return the imbalance of the devices, with intervals.

    A device's median is the median over rounds of each round's median. A step is resampled with all
    its devices, so that common disturbances cancel.
    """
    pools = [vectors[key] for key in sorted(vectors)]
    rounds, resamples = _drawn_steps(tuple(map(len, pools)), RESAMPLES)
    draws = np.empty((*rounds.shape, pools[0].shape[1]))
    for number, (pool, (counts, picks)) in enumerate(zip(pools, resamples, strict=True)):
        draws[rounds == number] = _of_devices(pool, counts)[picks]
    values = device_medians(vectors)
    resampled = _row_medians(draws.swapaxes(1, 2))

    def estimate(function: Callable[[Array], Array]) -> Estimate:
        value = float(function(values))
        wide = _widen(np.log(function(resampled)), len(vectors))
        return replace(_exponential(math.log(value), wide, len(vectors)), value=value)

    return Balance(
        first=estimate(lambda one: one[..., 0] / one[..., 1:].mean(axis=-1)),
        most=estimate(lambda one: one.max(axis=-1) / one.mean(axis=-1)),
    )


def beside(series: Sequence[Sequence[float]]) -> Array:
    """Return several devices' series as shape (steps, devices), as long as the shortest."""
    steps = min(map(len, series))
    return np.array([one[:steps] for one in series], dtype=float).T


def device_medians(vectors: Vectors) -> Array:
    """Return, for each device, the median over rounds of the median over each round's steps."""
    return np.asarray(np.median([np.median(steps, axis=0) for steps in vectors.values()], axis=0))


def _medians(
    sides: Sequence[Rounds], seed: int = 0, *, together: bool = False
) -> list[tuple[Array, Array]]:
    """Return for each series its rounds' medians, and those resampled, (resamples, rounds).

    If `together`, each resample draws the same rounds of all series.
    """
    pools = [
        [np.sort(np.asarray(side[key], dtype=float)) for key in sorted(side)] for side in sides
    ]
    drawn = _drawn(tuple(tuple(map(len, pool)) for pool in pools), seed, RESAMPLES, together)
    steps = [np.concatenate(pool) for pool in pools]
    draws = [
        (one.take(low) + one.take(high)) / 2 for one, (low, high) in zip(steps, drawn, strict=True)
    ]
    middles = [
        np.array([(one[(len(one) - 1) // 2] + one[len(one) // 2]) / 2 for one in pool])
        for pool in pools
    ]
    return list(zip(middles, draws, strict=True))


@lru_cache(maxsize=64)
def _drawn(
    sides: tuple[tuple[int, ...], ...], seed: int, resamples: int, together: bool
) -> tuple[tuple[NDArray[np.intp], NDArray[np.intp]], ...]:
    """Draw resamples of several series, given the number of steps of each round by series.

    Return for each series the two middle steps of each resampled round, as two arrays of shape
    (resamples, rounds). A step is an index into the concatenated rounds, each sorted. The draws are
    cached: all phases of a case have equal numbers of steps.
    """
    generator = np.random.default_rng(seed)
    chosen = _choose(len(sides[0]), resamples, generator)
    middles = []
    for side, sizes in enumerate(sides):
        if side and not together:
            chosen = _choose(len(sizes), resamples, generator)
        low, high = (np.empty(chosen.shape, dtype=np.intp) for _ in range(2))
        for number, n in enumerate(sizes):
            here = chosen == number
            before = sum(sizes[:number])
            first, second = _middles(n, int(here.sum()), generator)
            low[here] = before + first
            high[here] = before + second
        middles.append((low, high))
    return tuple(middles)


@lru_cache(maxsize=4)
def _drawn_steps(
    sizes: tuple[int, ...], resamples: int
) -> tuple[NDArray[np.int64], tuple[tuple[Places, NDArray[np.int64]], ...]]:
    """Draw resamples of the steps of several devices, given the number of steps of each round.

    Return the rounds of each resample, shape (resamples, rounds); and for each round, resamples of
    its steps (see `_counts`) and the index of one of them for each time that the round was drawn.
    """
    generator = np.random.default_rng(0)
    rounds = _choose(len(sizes), resamples, generator)
    draws = []
    for number, n in enumerate(sizes):
        count = int((rounds == number).sum())
        # the variation between rounds is larger
        few = min(count, WITHIN) if len(sizes) > 1 else count
        counts = _counts(n, few, generator)
        draws.append(
            (counts, generator.integers(few, size=count) if few < count else np.arange(count))
        )
    return rounds, tuple(draws)


def _choose(rounds: int, resamples: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Return indices drawn with replacement, as an array of shape (resamples, rounds)."""
    most = CELLS // (rounds * (rounds + 1) // 2)
    return generator.integers(rounds, size=(max(200, min(resamples, most)), rounds))


def _middles(n: int, count: int, generator: np.random.Generator) -> tuple[Places, Places]:
    """Return the two middle steps of `count` resamples of `n` steps, as ranks in ascending order.

    The steps need not be drawn. The k-th smallest of n uniform numbers has the distribution Beta(k,
    n - k + 1), and each of the larger ones is uniform above it. The step at the rank of such a
    number is distributed as the k-th smallest step of a resample (David and Nagaraja, "Order
    Statistics", 2003, sections 2.1 and 2.5).
    """
    middle = (n + 1) // 2
    first = generator.beta(middle, n - middle + 1, size=count)
    low = np.minimum((n * first).astype(np.int32), n - 1)
    if n % 2:
        return low, low
    second = 1 - (1 - first) * generator.random(count) ** (1 / (n - middle))
    return low, np.minimum((n * second).astype(np.int32), n - 1)


def _counts(n: int, count: int, generator: np.random.Generator) -> Places:
    """Return how often each of `n` steps was drawn in each resample: shape (count, n)."""
    picks = generator.integers(n, size=(count, n)) + n * np.arange(count)[:, None]
    return np.bincount(picks.ravel(), minlength=count * n).reshape(count, n).astype(np.int32)


def _of_devices(pool: Array, counts: Places) -> Array:
    """Return each device's median in each resample of one round, shape (resamples, devices).

    `pool` has shape (steps, devices); `counts` has how often each resample has drawn each step.
    """
    n = len(pool)
    medians = []
    before = n * np.arange(len(counts), dtype=np.int32)
    for steps, order in zip(pool.T, pool.argsort(axis=0).T, strict=True):
        reached = counts.take(order, axis=1).cumsum(dtype=np.int32)  # each resample adds n
        low, high = (
            reached.searchsorted(before + rank, side="right") - before
            for rank in ((n - 1) // 2, n // 2)
        )
        medians.append((steps[order[low]] + steps[order[high]]) / 2)
    return np.stack(medians, axis=1)


def _centre(values: Array) -> Array:
    """Return the Hodges-Lehmann centre along the last axis: the median of all pairs' means."""
    first, second = np.triu_indices(values.shape[-1])
    return _row_medians((values[..., first] + values[..., second]) / 2)


def _row_medians(values: Array) -> Array:
    n = values.shape[-1]
    if n > NETWORK:
        return np.asarray(np.median(values, axis=-1))
    # an odd-even transposition sort of whole columns: numpy would sort every row by itself, which
    # takes longer
    columns = [values[..., i] for i in range(n)]
    for turn in range(n):
        for i in range(turn % 2, n - 1, 2):
            columns[i : i + 2] = np.minimum(*columns[i : i + 2]), np.maximum(*columns[i : i + 2])
    return np.asarray((columns[(n - 1) // 2] + columns[n // 2]) / 2)


def _widen(draws: Array, n: int) -> Array:
    """Widen the draws, because resampling n rounds understates their variance."""
    return draws * math.sqrt(n / (n - 1)) if n > 1 else draws


def _exponential(value: float, draws: Array, n: int, *, level: float = CONFIDENCE) -> Estimate:
    """Return the estimate of exp(value); the arguments are those of `_interval`.

    The interval of two rounds at a high level may be too wide for a floating-point number.
    """
    low, high = _interval(value, draws, n, level=level)
    widest = 700.0
    return Estimate(
        math.exp(value),
        math.exp(max(-widest, low)),
        math.exp(min(widest, high)),
        n,
        level=level,
    )


def _interval(
    value: float, draws: Array, n: int, *, level: float = CONFIDENCE
) -> tuple[float, float]:
    """Return the ends of the interval: Student's t, or percentiles for a single round.

    `draws` are resamples of `value` after `_widen`. `level` is the probability with which the
    interval contains the true value.
    """
    if n < 2:
        low, high = np.percentile(draws, [50 * (1 - level), 50 * (1 + level)])
        return float(min(low, value)), float(max(high, value))
    half = float(_quantile(n, level)) * float(draws.std())
    return value - half, value + half


def _quantile(n: Any, level: float) -> Any:
    """Return Student's t: half the width of an interval of `n` rounds over its standard error."""
    return scipy.special.stdtrit(np.maximum(n - 1, 1), (1 + level) / 2)


def together(count: int, level: float = CONFIDENCE) -> float:
    """Return the level of each of `count` intervals that together hold with probability `level`.

    This is Bonferroni's method, which holds for any dependence between the estimates.
    """
    return 1 - (1 - level) / max(1, count)


def verdict(estimate: Estimate, *, margin: float = MARGIN) -> str:
    """Return the verdict on a ratio: "same", "faster", "slower" or "undecided".

    It is "same" if the whole interval is within `margin` of 1; otherwise "faster" or "slower" if
    all of it is above or below 1; "undecided" also for an estimate in doubt.
    """
    if estimate.doubt:
        return "undecided"
    if 1 - margin <= estimate.low and estimate.high <= 1 + margin:
        return "same"
    return "faster" if estimate.low > 1 else "slower" if estimate.high < 1 else "undecided"


def _error(ratio: Estimate) -> float:
    """Return the standard error of the logarithm of a ratio of at least two rounds."""
    return math.log(ratio.high / ratio.low) / 2 / float(_quantile(ratio.n, ratio.level))


def chance_above(estimate: Estimate) -> float:
    """Return the probability that the true value of a ratio of at least two rounds is above one.

    It is one minus the p-value of Student's one-sided test.
    """
    error = _error(estimate)
    apart = math.log(estimate.value)
    if not error:
        return 0.5 + 0.5 * float(np.sign(apart))
    return float(scipy.special.stdtr(estimate.n - 1, apart / error))


def rounds_to_decide(
    estimate: Estimate, *, against: float = 1.0, margin: float = MARGIN, most: int = 10_000
) -> int:
    """Return the least number of rounds, at most `most`, that would decide a ratio.

    It decides if its interval excludes `against`, or is within `margin` of 1. The ratio and the
    variation between rounds are assumed to stay, so that the interval shrinks with the square root
    of the rounds. Return `most` from fewer than two rounds.
    """
    if estimate.n < 2:
        return most
    n = np.unique(np.geomspace(estimate.n, most, 400).astype(int))
    half = _quantile(n, estimate.level) * _error(estimate) * np.sqrt(estimate.n / n)
    apart = half < abs(math.log(estimate.value / against))
    within = half <= math.log(1 + margin) - abs(math.log(estimate.value))
    decided = n[apart | within]
    return int(decided[0]) if len(decided) else most
