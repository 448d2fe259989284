"""Statistics: medians and ratios with confidence intervals by a hierarchical bootstrap, and
verdicts on ratios.

Each round runs in a fresh process, and rounds differ from each other more than the steps within one
round do. Resampling therefore draws rounds first, then steps within each drawn round. Resampling a
few rounds understates their variance, so the bootstrap's spread is widened by sqrt(n / (n - 1)),
and the interval is taken from Student's t with n - 1 degrees of freedom (Hesterberg, "What Teachers
Should Know About the Bootstrap", 2015, section 5.3). A single round gives no information about the
variation between rounds: the interval of its estimate covers only the variation between steps. An
estimate from fewer than three rounds, or with an interval that spans more than a factor of 4, is
computed but not shown (`Estimate.doubt`), and its verdict is "undecided".

One interval decides each verdict, and it is the interval that is shown. Of several estimates that
are judged together, each has a wider interval (Bonferroni, see `together`), so that all of them
contain the true values with 95 %.

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
from dpbench.records.work import middle_draws

Rounds = Mapping[int, Sequence[float]]
"""The durations of one case's timed steps in seconds, by round."""


class Timed(dict[int, Sequence[float]]):
    """The durations of one case's timed steps in seconds, by round (see `Rounds`), and the rounds
    that are NOISY.

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
"""For each round, an array of shape (steps, devices).

A quantity read once per round has one step.
"""

RESAMPLES = 2000
WITHIN = 400
"""In `balance`, each round's steps are resampled at most this many times.

Each use of the round picks one of them.
"""
NETWORK = 10
"""The largest number of columns that `_row_medians` sorts by comparing whole columns: 4 rounds have
10 pairs.
"""
CELLS = 4_000_000
"""The largest number of pairs of rounds in all resamples together.

With many rounds, fewer resamples are drawn.
"""
CONFIDENCE = 0.95
MARGIN = 0.01
"""The relative difference up to which two cases count as the same."""


@dataclass(frozen=True)
class Percentile:
    """A percentile, in seconds, of the durations of all steps of all rounds.

    `steps` is the number of these steps.

    `low` and `high` are the ends of its 95 % interval; both are None if there are too few steps for
    an interval, and the percentile is then not shown.
    """

    value: float
    low: float | None
    high: float | None
    steps: int

    @property
    def doubt(self) -> str:
        """Return the reason why the percentile must not be shown; "" if it may be shown."""
        return "too few steps" if self.low is None else ""


def percentile(rounds: Rounds, share: float) -> Percentile:
    """Return the duration below which the given share of all steps lies, as numpy.percentile
    computes it.

    The interval is that of the order statistics, which assumes independent steps but no particular
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
    """Return the median over rounds of each round's median, with its interval.

    Values may have any sign.
    """
    ((each, draws),) = _medians([rounds], seed)
    # not the exponential of the median logarithm, which differs if the number of rounds is even
    value = float(np.median(each))
    middles = _row_medians(draws)
    if min(value, middles.min()) <= 0:
        return Estimate(value, *_interval(value, middles, len(rounds)), len(rounds))
    found = _exponential(math.log(value), np.log(middles), len(rounds))
    return replace(found, value=value, low=min(found.low, value), high=max(found.high, value))


def mean(rounds: Rounds) -> Estimate:
    """Return the mean over rounds of the mean duration of each round's steps, with its interval.

    All durations must be above 0. The interval is Student's over the logarithms of the rounds'
    means; that of a single round covers only the variation between its steps.
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
    """Return the ratio of the step time of `numerator` to that of `denominator`, with its interval.

    If `paired`, the median of each round of `numerator` is divided by the median of the same round
    of `denominator`; both series must come from one run. The estimate is the Hodges-Lehmann centre
    of these ratios on a logarithmic scale. Disturbances that affect both series in a round cancel,
    and an outlying round has little influence. If not `paired`, or if the series have no round in
    common, every round of one series is compared with every round of the other, and the estimate is
    the median of the ratios. NOISY rounds are left out if enough others remain (see `Timed`).
    """
    common, sides, disturbed = _compared(numerator, denominator, paired=paired)
    if common:
        (top, tops), (bottom, bottoms) = (
            map(np.log, one) for one in _medians(sides, seed, together=True)
        )
        estimate = _exponential(
            float(_centre(top - bottom)), _centre(tops - bottoms), len(top), level=level
        )
        return replace(estimate, noisy=disturbed)
    (top, tops), (bottom, bottoms) = (map(np.log, one) for one in _medians(sides, seed))
    count = min(len(tops), len(bottoms))
    # resample each side's centre: computing all pairs of rounds in every resample would cost too
    # much
    draws = _widen(_centre(tops[:count]), len(top)) - _widen(_centre(bottoms[:count]), len(bottom))
    value = float(np.median(top[:, None] - bottom[None, :]))
    estimate = _exponential(value, draws, min(len(top), len(bottom)), widened=True, level=level)
    return replace(estimate, noisy=disturbed)


def _compared(first: Rounds, second: Rounds, *, paired: bool) -> tuple[bool, list[Rounds], bool]:
    """Return whether rounds are compared in pairs, the rounds of both series to compare, and
    whether some are NOISY.

    In pairs, these are the common rounds. NOISY rounds of either series are left out if enough
    others remain.
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
    """Return the NOISY rounds of a series; a series that is not `Timed` has none."""
    return rounds.noisy if isinstance(rounds, Timed) else frozenset()


def _quiet(rounds: Sequence[int], noisy: Collection[int]) -> tuple[Sequence[int], bool]:
    """Return the rounds that are not in `noisy`, and False.

    If they are too few, return all rounds, and True.
    """
    kept = [number for number in rounds if number not in noisy]
    enough = len(kept) >= Estimate.ROUNDS or len(kept) == len(rounds)
    return (kept, False) if enough else (rounds, True)


def mean_ratio(numerator: Rounds, denominator: Rounds) -> Estimate:
    """Return the ratio of the mean step of `numerator` to that of `denominator`, with its interval.

    The rounds that are compared are those of `ratio`. The interval is Student's over the logarithms
    of the rounds' means, or of their ratios in common rounds.
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

    `above` and `below` are random draws of the errors of the numerator and the denominator, as
    logarithms. Draws with the same index are paired, so that common errors cancel in the interval.
    Without draws, the interval combines the intervals of the numerator and the denominator,
    assuming independent errors.
    """
    value = numerator.value / denominator.value
    if above and len(above) == len(below):
        low, high = middle_draws([a - b for a, b in zip(above, below, strict=True)])
        return Estimate(value, value * math.exp(min(0.0, low)), value * math.exp(max(0.0, high)), 0)
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


def difference(
    first: Rounds, second: Rounds, *, level: float = CONFIDENCE, seed: int = 0
) -> Estimate:
    """Return the median of `first` minus the median of `second` in seconds, with its interval.

    Only rounds that both series have are used; if there are none, all rounds are used. NOISY rounds
    are left out if enough others remain (see `Timed`).
    """
    common, sides, disturbed = _compared(first, second, paired=True)
    (one, ones), (other, others) = _medians(sides, seed, together=common)
    value = float(np.median(one) - np.median(other))
    n = min(len(one), len(other))
    count = min(len(ones), len(others))
    draws = _row_medians(ones[:count]) - _row_medians(others[:count])
    low, high = _interval(value, draws, n, level=level)
    return Estimate(value, low, high, n, signed=True, level=level, noisy=disturbed)


@dataclass(frozen=True)
class Balance:
    """The imbalance of devices as two ratios of their medians.

    `first` is device 0's median over the mean of the others' medians, `most` the largest median
    over the mean of all.
    """

    first: Estimate
    most: Estimate


def balance(vectors: Vectors, *, seed: int = 0) -> Balance:
    """Return the imbalance of the devices, with intervals.

    A device's median is the median over rounds of each round's median. Each step is resampled with
    all its devices, so that disturbances common to all devices cancel.
    """
    pools = [vectors[key] for key in sorted(vectors)]
    rounds, resamples = _drawn_steps(tuple(map(len, pools)), seed, RESAMPLES)
    draws = np.empty((*rounds.shape, pools[0].shape[1]))
    for number, (pool, (counts, picks)) in enumerate(zip(pools, resamples, strict=True)):
        draws[rounds == number] = _of_devices(pool, counts)[picks]
    values = device_medians(vectors)
    resampled = _row_medians(draws.swapaxes(1, 2))

    def estimate(function: Callable[[Array], Array]) -> Estimate:
        value = float(function(values))
        return replace(
            _exponential(math.log(value), np.log(function(resampled)), len(vectors)), value=value
        )

    return Balance(
        first=estimate(lambda one: one[..., 0] / one[..., 1:].mean(axis=-1)),
        most=estimate(lambda one: one.max(axis=-1) / one.mean(axis=-1)),
    )


def beside(series: Sequence[Sequence[float]]) -> Array:
    """Return the series of several devices as one array of shape (steps, devices), as long as the
    shortest series.
    """
    steps = min(map(len, series))
    return np.array([one[:steps] for one in series], dtype=float).T


def device_medians(vectors: Vectors) -> Array:
    """Return, for each device, the median over rounds of the median over each round's steps."""
    return np.asarray(np.median([np.median(steps, axis=0) for steps in vectors.values()], axis=0))


def _medians(
    sides: Sequence[Rounds], seed: int, *, together: bool = False
) -> list[tuple[Array, Array]]:
    """Return for each series the medians of its rounds, and of its resampled rounds (shape
    (resamples, rounds)).

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
    """Draw resamples of several series.

    `sides` has, for each series, the number of steps of each round.

    Return for each series the two middle steps of each resampled round, as two arrays of shape
    (resamples, rounds). A step is an index into the concatenated rounds, each of them sorted. The
    draws depend only on the arguments and are cached: all phases of a case have equal numbers of
    steps.
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
            low[here], high[here] = before + first, before + second
        middles.append((low, high))
    return tuple(middles)


@lru_cache(maxsize=4)
def _drawn_steps(
    sizes: tuple[int, ...], seed: int, resamples: int
) -> tuple[NDArray[np.int64], tuple[tuple[Places, NDArray[np.int64]], ...]]:
    """Draw resamples of the steps of several devices.

    `sizes` has the number of steps of each round.

    Return the rounds of each resample, shape (resamples, rounds). For each round, also return
    resamples of its steps (see `_counts`), and the index of one of these resamples for each time
    that the round was drawn.
    """
    generator = np.random.default_rng(seed)
    rounds = _choose(len(sizes), resamples, generator)
    draws = []
    for number, n in enumerate(sizes):
        count = int((rounds == number).sum())
        few = (
            min(count, WITHIN) if len(sizes) > 1 else count
        )  # the variation between rounds is larger
        counts = _counts(n, few, generator)
        draws.append(
            (counts, generator.integers(few, size=count) if few < count else np.arange(count))
        )
    return rounds, tuple(draws)


def _choose(rounds: int, resamples: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Return indices below `rounds`, drawn with replacement, as an array of shape (resamples,
    rounds).
    """
    most = CELLS // (rounds * (rounds + 1) // 2)
    return generator.integers(rounds, size=(max(200, min(resamples, most)), rounds))


def _middles(n: int, count: int, generator: np.random.Generator) -> tuple[Places, Places]:
    """Return the two middle steps of `count` resamples of `n` steps, as ranks among the steps in
    ascending order.

    The steps themselves need not be drawn. The k-th smallest of n uniform numbers has the
    distribution Beta(k, n - k + 1), and each of the larger ones is uniform above it. The step at
    the rank of such a number is distributed as the k-th smallest step of a resample (David and
    Nagaraja, "Order Statistics", 2003, sections 2.1 and 2.5).
    """
    middle = (n + 1) // 2
    first = generator.beta(middle, n - middle + 1, size=count)
    low = np.minimum((n * first).astype(np.int32), n - 1)
    if n % 2:
        return low, low
    second = 1 - (1 - first) * generator.random(count) ** (1 / (n - middle))
    return low, np.minimum((n * second).astype(np.int32), n - 1)


def _counts(n: int, count: int, generator: np.random.Generator) -> Places:
    """Return, for `count` resamples of `n` steps, the number of times each step was drawn: shape
    (count, n).
    """
    picks = generator.integers(n, size=(count, n)) + n * np.arange(count)[:, None]
    return np.bincount(picks.ravel(), minlength=count * n).reshape(count, n).astype(np.int32)


def _of_devices(pool: Array, counts: Places) -> Array:
    """Return each device's median in each resample of one round, shape (resamples, devices).

    `pool` has shape (steps, devices). A row of `counts` has the number of times that a resample has
    drawn each step.
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
    """Return the Hodges-Lehmann centre along the last axis: the median of the means of all pairs of
    values.
    """
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
    """Return `draws` times sqrt(n / (n - 1)) if n > 1, because resampling n rounds understates
    their variance.
    """
    return draws * math.sqrt(n / (n - 1)) if n > 1 else draws


def _exponential(
    value: float, draws: Array, n: int, *, widened: bool = False, level: float = CONFIDENCE
) -> Estimate:
    """Return the estimate of exp(value) from `n` rounds; the arguments are those of `_interval`."""
    low, high = _interval(value, draws, n, widened=widened, level=level)
    return Estimate(math.exp(value), math.exp(low), math.exp(high), n, level=level)


def _interval(
    value: float, draws: Array, n: int, *, widened: bool = False, level: float = CONFIDENCE
) -> tuple[float, float]:
    """Return the ends of the interval: by Student's t for several rounds, by percentiles for a
    single round.

    `draws` are resamples of `value`. `widened` is True if they have already been widened by
    `_widen`. `level` is the probability with which the interval contains the true value.
    """
    if n < 2:
        low, high = np.percentile(draws, [50 * (1 - level), 50 * (1 + level)])
        return float(min(low, value)), float(max(high, value))
    half = float(_quantile(n, level)) * float((draws if widened else _widen(draws, n)).std())
    return value - half, value + half


def _quantile(n: Any, level: float) -> Any:
    """Return half the width of an interval of `n` rounds over its standard error, by Student's
    t.
    """
    return scipy.special.stdtrit(np.maximum(n - 1, 1), (1 + level) / 2)


def together(count: int, level: float = CONFIDENCE) -> float:
    """Return the level of each of `count` intervals that contain all of their true values with
    probability `level`.

    This is Bonferroni's method, which holds for any dependence between the estimates.
    """
    return 1 - (1 - level) / max(1, count)


def verdict(estimate: Estimate, *, margin: float = MARGIN) -> str:
    """Return the verdict on a ratio: "same", "faster", "slower" or "undecided".

    The verdict is "same" if the whole interval is between 1 - `margin` and 1 + `margin`. Otherwise,
    it is "faster" or "slower" if the whole interval is above or below 1. It is "undecided" for an
    estimate in doubt.
    """
    if estimate.doubt:
        return "undecided"
    if 1 - margin <= estimate.low and estimate.high <= 1 + margin:
        return "same"
    return "faster" if estimate.low > 1 else "slower" if estimate.high < 1 else "undecided"


def rounds_to_decide(
    estimate: Estimate, *, against: float = 1.0, margin: float = MARGIN, most: int = 10_000
) -> int:
    """Return the least number of rounds, at most `most`, after which the interval of a ratio would
    decide.

    The ratio and the variation between rounds are assumed to stay the same, so that the interval
    shrinks with the square root of the number of rounds. It decides if it excludes `against`, or if
    it is within `margin` around 1. Return `most` if more rounds would be needed, or if the estimate
    has fewer than two rounds.
    """
    if estimate.n < 2:
        return most
    error = (
        math.log(estimate.high / estimate.low) / 2 / float(_quantile(estimate.n, estimate.level))
    )
    n = np.unique(np.geomspace(estimate.n, most, 400).astype(int))
    half = _quantile(n, estimate.level) * error * np.sqrt(estimate.n / n)
    apart = half < abs(math.log(estimate.value / against))
    within = half <= math.log(1 + margin) - abs(math.log(estimate.value))
    decided = n[apart | within]
    return int(decided[0]) if len(decided) else most
