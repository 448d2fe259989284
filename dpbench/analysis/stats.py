"""Statistics: medians and ratios, with intervals by a bootstrap of rounds, and verdicts.

Rounds run in fresh processes and differ more than the steps within one. Resampling therefore draws
whole rounds: they differ by the variation of their steps, too, which drawing steps as well would
count twice (Davison and Hinkley, "Bootstrap Methods and their Application", 1997, section 3.8). A
few rounds understate their variance, so the bootstrap's spread is widened by sqrt(n / (n - 1)), and
the interval is Student's t with n - 1 degrees of freedom (Hesterberg, "What Teachers Should Know
About the Bootstrap", 2015, section 5.3). The steps of a single round are resampled instead, and its
interval covers only the variation between them. An estimate from fewer than three rounds, or with
an interval that spans more than a factor of 4, is in doubt (`Estimate.doubt`); that of fewer rounds
decides nothing.

The interval decides the verdict. Estimates that are judged together have wider intervals
(Bonferroni, see `joint_level`), so that all contain the true values with 95 %.

Other processes lengthen steps. A comparison leaves out the NOISY rounds of both sides if at least
three rounds remain. In all others, the CPU time that others used bounds what they took: with a part
f of a core, they made the sum of the steps longer by a factor of at most 1 / (1 - f), and the
median step by at most (1 + f) / (1 - f), because all of this time can fall on half of the steps.
The interval of a comparison reaches from its low end with the first side as much shorter to its
high end with the second side as much shorter. From `ROUGH` on, a comparison is in doubt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from dpbench.records.estimate import Estimate
from dpbench.records.work import middle_ratio

Rounds = Mapping[int, Sequence[float]]
"""The durations of one case's timed steps in seconds, by round."""


class Timed(dict[int, Sequence[float]]):
    """The durations of one case's timed steps in seconds, by round, and what others used meanwhile.

    In a round in `noisy`, others used too much of the cores. `taken` has, by round, the part of a
    core that they can have taken from the case; it is 0 in rounds without an entry.
    """

    def __init__(
        self,
        rounds: Mapping[int, Sequence[float]] | Iterable[tuple[int, Sequence[float]]] = (),
        noisy: Iterable[int] = (),
        taken: Mapping[int, float] | None = None,
    ) -> None:
        super().__init__(rounds)
        self.noisy = frozenset(noisy)
        self.taken = dict(taken or {})

    def of(self, rounds: Iterable[int]) -> Timed:
        """Return these rounds alone."""
        kept = {number: self[number] for number in rounds}
        taken = {number: part for number, part in self.taken.items() if number in kept}
        return Timed(kept, self.noisy & kept.keys(), taken)

    @property
    def quiet(self) -> Timed:
        """Return the rounds that a comparison uses: those not NOISY or, if these are few, all."""
        return self.of(_quiet([*self], self.noisy))

    def scaled(self, factors: Mapping[int, float] | float) -> Timed:
        """Return the series with all durations multiplied by a factor, which may be by round."""
        by_round = factors if isinstance(factors, Mapping) else dict.fromkeys(self, factors)
        longer = {
            number: [one * by_round.get(number, 1.0) for one in steps]
            for number, steps in self.items()
        }
        return Timed(longer, self.noisy, self.taken)


Array = NDArray[np.float64]
Places = NDArray[np.int32]
Vectors = Mapping[int, Array]
"""Arrays of shape (steps, devices) by round; a quantity read once per round has one step."""

RESAMPLES = 2000
CELLS = 4_000_000
"""The most pairs of rounds in all resamples; with many rounds, there are fewer resamples."""
CONFIDENCE = 0.95
LOOKS = (4, 6, 9, 14, 21, 31)
"""The rounds after which a run that stops once its answers are decided looks at its results.

The intervals hold at all looks together (Bonferroni), so that stopping early makes no verdict less
certain. The growing distances keep the number of looks small.
"""
ROUGH = 0.9
"""The part of a core from which on nothing bounds what others took."""
POWER = 0.8
"""The probability with which as many rounds as `rounds_to_decide` returns decide."""
MARGIN = 0.01
"""The relative difference up to which two cases count as the same."""


def median(rounds: Rounds, *, seed: int = 0) -> Estimate:
    """Return the median over rounds of each round's median, of values with any sign."""
    return quantile(rounds, 0.5, seed=seed)


def percentile(rounds: Rounds, number: int) -> Estimate | None:
    """Return the median over rounds of the duration below which `number` % of a round's steps lie.

    None if a round has so few steps that none is expected above it: fewer than 20 for the 95th
    percentile, and than 100 for the 99th.
    """
    enough = 100 / (100 - number)
    if min(map(len, rounds.values())) < enough:
        return None
    return quantile(rounds, number / 100)


def quantile(rounds: Rounds, share: float, *, seed: int = 0) -> Estimate:
    """Return the median over rounds of each round's quantile; the values may have any sign."""
    ((each, drawn),) = _quantiles([rounds], seed, share=share)
    # not the exponential of the median logarithm, which differs if the number of rounds is even
    value = float(np.median(each))
    middles = drawn.medians()
    n = len(rounds)
    if min(value, middles.min()) <= 0:
        return Estimate(value, *_interval(value, _widen(middles, n), n), n)
    return _exponential(value, _widen(np.log(middles), n), n)


def average(rounds: Rounds) -> Estimate:
    """Return the mean over rounds of each round's mean, of values with any sign.

    The interval is Student's; that of a single round covers only the variation between its steps.
    """
    means = np.array([np.mean(steps) for steps in rounds.values()])
    varying = means if len(means) > 1 else np.asarray(next(iter(rounds.values())), dtype=float)
    return _student(float(means.mean()), varying, len(means))


def portion(parts: Rounds, wholes: Rounds) -> Estimate:
    """Return the mean of `parts` over the mean of `wholes`, each as in `average`.

    The interval is Student's for a ratio of means, from the residuals of the rounds (Cochran,
    "Sampling Techniques", 1977, section 6.4) or, of a single round, from those of its steps.
    """
    pairs = [(parts[number], wholes[number]) for number in wholes]
    means = np.array([(np.mean(some), np.mean(every)) for some, every in pairs])
    value = float(means[:, 0].mean() / means[:, 1].mean())
    varying = means if len(means) > 1 else np.array(pairs[0], dtype=float).T
    residuals = (varying[:, 0] - value * varying[:, 1]) / varying[:, 1].mean()
    return _student(value, residuals, len(means))


def _student(value: float, varying: Array, n: int) -> Estimate:
    """Return the interval of a mean of `varying` values, which come from `n` rounds."""
    count = len(varying)
    error = float(varying.std(ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    half = float(_quantile(count, CONFIDENCE)) * error
    return Estimate(value, value - half, value + half, n)


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
    estimate is the median of the ratios. The interval includes what other processes can have taken;
    NOISY rounds are left out if enough others remain.
    """

    def of(common: bool, sides: Sequence[Rounds]) -> Estimate:
        (top, tops), (bottom, bottoms) = (
            (np.log(each), drawn.of(np.log(drawn.values)))
            for each, drawn in _quantiles(sides, seed, together=common)
        )
        n = min(len(top), len(bottom))
        if common:
            value = _centre(top - bottom)
            draws = _widen(tops.of(tops.values - bottoms.values).centres(), n)
        else:
            value = np.median(top[:, None] - bottom[None, :])
            # resample each side's centre: computing all pairs of rounds in every resample would
            # cost too much
            above, below = tops.centres(), bottoms.centres()
            count = min(len(above), len(below))
            draws = _widen(above[:count], len(top)) - _widen(below[:count], len(bottom))
        return _exponential(math.exp(value), draws, n, level=level)

    return _compared(numerator, denominator, of, _shortest_median, paired=paired)


def _compared(
    first: Rounds,
    second: Rounds,
    of: Callable[[bool, Sequence[Rounds]], Estimate],
    shortest: Callable[[float], float],
    *,
    paired: bool = True,
) -> Estimate:
    """Return a comparison `of` two series, whose interval includes what others can have taken.

    `of` takes whether rounds are paired, which are then those that both series have, and the rounds
    of both sides. NOISY rounds of either series are left out if enough others remain. `shortest`
    returns the least factor by which steps may have been shorter, from a part of a core.
    """
    one, other = (side if isinstance(side, Timed) else Timed(side) for side in (first, second))
    numbers = sorted(one.keys() & other.keys()) if paired else []
    if numbers:
        kept = _quiet(numbers, one.noisy | other.noisy)
        sides = [one.of(kept), other.of(kept)]
    else:
        sides = [one.quiet, other.quiet]
    found = of(bool(numbers), sides)
    taken = [part for side in sides for part in side.taken.values()]
    if not any(taken):
        return found
    if max(taken) >= ROUGH:
        return replace(found, noisy=True)
    quick = [side.scaled({n: shortest(part) for n, part in side.taken.items()}) for side in sides]
    low = of(bool(numbers), [quick[0], sides[1]]).low
    high = of(bool(numbers), [sides[0], quick[1]]).high
    return replace(found, low=min(low, found.low), high=max(high, found.high))


def _shortest_median(part: float) -> float:
    return (1 - part) / (1 + part)


def _shortest_mean(part: float) -> float:
    return 1 - part


def _quiet(rounds: Sequence[int], noisy: Collection[int]) -> Sequence[int]:
    """Return the rounds not in `noisy` or, if they are too few, all rounds."""
    kept = [number for number in rounds if number not in noisy]
    return kept if len(kept) >= Estimate.ROUNDS else rounds


def mean_ratio(numerator: Rounds, denominator: Rounds) -> Estimate:
    """Return the ratio of the mean step of `numerator` to that of `denominator`, each as in `mean`.

    The rounds are those of `ratio`. The interval is Student's over the rounds' means, as fractions
    of their mean, or over the differences of these fractions in common rounds.
    """

    def of(common: bool, sides: Sequence[Rounds]) -> Estimate:
        top, bottom = map(_means, sides)
        value = float(top.mean() / bottom.mean())
        shares = [top / top.mean(), bottom / bottom.mean()]
        n, error = _spread([shares[0] - shares[1]] if common else shares)
        factor = math.exp(min(700.0, float(_quantile(n, CONFIDENCE)) * error))
        return Estimate(value, value / factor, value * factor, n)

    return _compared(numerator, denominator, of, _shortest_mean)


def mean_difference(first: Rounds, second: Rounds, *, level: float = CONFIDENCE) -> Estimate:
    """Return the mean of `first` minus that of `second`, each as in `average`.

    The rounds are those of `ratio`. The interval is Student's over the differences of the rounds'
    means or, without common rounds, over the means.
    """

    def of(common: bool, sides: Sequence[Rounds]) -> Estimate:
        one, other = map(_means, sides)
        value = float(one.mean() - other.mean())
        n, error = _spread([one - other] if common else [one, other])
        half = float(_quantile(n, level)) * error
        return Estimate(value, value - half, value + half, n, signed=True, level=level)

    return _compared(first, second, of, _shortest_mean)


def _means(rounds: Rounds) -> Array:
    return np.array([np.mean(rounds[number]) for number in sorted(rounds)])


def _spread(sides: Sequence[Array]) -> tuple[int, float]:
    """Return the least number of rounds, and the standard error of a sum of the sides' means."""
    n = min(map(len, sides))
    return n, math.sqrt(sum(side.var(ddof=1) / len(side) for side in sides)) if n > 1 else 0.0


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


def difference(first: Rounds, second: Rounds, *, level: float = CONFIDENCE) -> Estimate:
    """Return the median of `first` minus the median of `second` in seconds.

    The rounds are those of `ratio`.
    """

    def of(common: bool, sides: Sequence[Rounds]) -> Estimate:
        (one, ones), (other, others) = _quantiles(sides, together=common)
        value = float(np.median(one) - np.median(other))
        n = min(len(one), len(other))
        first_medians, second_medians = ones.medians(), others.medians()
        count = min(len(first_medians), len(second_medians))
        draws = first_medians[:count] - second_medians[:count]
        low, high = _interval(value, _widen(draws, n), n, level=level)
        return Estimate(value, low, high, n, signed=True, level=level)

    return _compared(first, second, of, _shortest_median)


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

    A device's median is the median over rounds of each round's median. A round, or the step of a
    single round, is resampled with all its devices, so that common disturbances cancel.
    """
    pools = [vectors[key] for key in sorted(vectors)]
    generator = np.random.default_rng(0)
    if len(pools) > 1:
        pool = np.array([np.median(steps, axis=0) for steps in pools])
        times = _times(len(pool), generator)
    else:
        pool = pools[0]
        times = _counts(len(pool), RESAMPLES, generator)
    values = device_medians(vectors)
    resampled = np.stack([Resamples(device, times).medians() for device in pool.T], axis=1)

    def estimate(function: Callable[[Array], Array], level: float = CONFIDENCE) -> Estimate:
        value = float(function(values))
        wide = _widen(np.log(function(resampled)), len(vectors))
        return _exponential(value, wide, len(vectors), level=level)

    # the largest of equal devices is above their mean by chance: all devices' intervals hold
    # together, and that of the largest is between the largest low and the largest high end
    devices = range(pools[0].shape[1])
    level = joint_level(len(devices))

    def of_device(device: int) -> Estimate:
        return estimate(lambda one: one[..., device] / one.mean(axis=-1), level)

    each = [*map(of_device, devices)]
    value = max(one.value for one in each)
    low = max(1.0, *(one.low for one in each))
    return Balance(
        first=estimate(lambda one: one[..., 0] / one[..., 1:].mean(axis=-1)),
        most=Estimate(value, min(low, value), max(one.high for one in each), len(vectors)),
    )


def beside(series: Sequence[Sequence[float]]) -> Array:
    """Return several devices' series as shape (steps, devices), as long as the shortest."""
    steps = min(map(len, series))
    return np.array([one[:steps] for one in series], dtype=float).T


def device_medians(vectors: Vectors) -> Array:
    """Return, for each device, the median over rounds of the median over each round's steps."""
    return np.asarray(np.median([np.median(steps, axis=0) for steps in vectors.values()], axis=0))


class Resamples(NamedTuple):
    """Resamples of values; `times` is how often each has drawn each value: (values, resamples).

    If `times` is None, `values` has one number for each resample, which is its median.
    """

    values: Array
    times: Places | None = None

    def of(self, values: Array) -> Resamples:
        """Return the same resamples of other values."""
        return Resamples(values, self.times)

    def medians(self) -> Array:
        """Return the median of the values that each resample has drawn; NaN if one of them is."""
        if self.times is None:
            return self.values
        order = self.values.argsort()
        ranked = self.values[order]
        reached = self.times[order].cumsum(axis=0, dtype=np.int32)
        count = int(reached[-1, 0])  # each resample has drawn as many
        low, high = ((reached <= rank).sum(axis=0) for rank in ((count - 1) // 2, count // 2))
        middles = np.asarray((ranked[low] + ranked[high]) / 2)
        middles[(self.times[np.isnan(self.values)] > 0).any(axis=0)] = np.nan
        return middles

    def centres(self) -> Array:
        """Return the Hodges-Lehmann centre of each resample: the median of all pairs' means.

        A pair of values that were drawn a and b times occurs a * b times. All resamples have the
        same pairs, which are sorted once.
        """
        if self.times is None:
            return self.values
        one, other = np.triu_indices(len(self.values))
        pairs = self.times[one] * self.times[other]
        itself = one == other
        pairs[itself] = self.times * (self.times + 1) // 2
        return Resamples((self.values[one] + self.values[other]) / 2, pairs).medians()


def _centre(values: Array) -> float:
    once = np.ones((len(values), 1), dtype=np.int32)
    return float(Resamples(values, once).centres()[0])


def _quantiles(
    sides: Sequence[Rounds], seed: int = 0, *, share: float = 0.5, together: bool = False
) -> list[tuple[Array, Resamples]]:
    """Return for each series its rounds' quantiles, and resamples of them.

    A quantile is the value below which `share` of a round's steps lie, by default the median. If
    `together`, each resample draws the same rounds of all series.
    """
    generator = np.random.default_rng(seed)
    times = _times(len(sides[0]), generator)
    found = []
    for number, side in enumerate(sides):
        each = np.array([_quantile_of(side[key], share) for key in sorted(side)])
        if number and not together:
            times = _times(len(side), generator)
        if len(side) > 1:
            drawn = Resamples(each, times)
        else:
            drawn = Resamples(_resampled(next(iter(side.values())), share, generator))
        found.append((each, drawn))
    return found


def _quantile_of(steps: Sequence[float], share: float) -> float:
    """Return a quantile of the distribution of the steps, hardly biased however few they are.

    It is definition 8 of Hyndman and Fan ("Sample Quantiles in Statistical Packages", 1996); for
    the median, all definitions agree.
    """
    return float(np.quantile(steps, share, method="median_unbiased"))


def _resampled(steps: Sequence[float], share: float, generator: np.random.Generator) -> Array:
    """Return the quantile of resamples of the steps of one round, shape (resamples,)."""
    ordered = np.sort(np.asarray(steps, dtype=float))
    low, high, part = _around(len(ordered), share, RESAMPLES, generator)
    return (1 - part) * ordered[low] + part * ordered[high]


def _times(rounds: int, generator: np.random.Generator) -> Places:
    """Return how often each resample has drawn each round: shape (rounds, resamples)."""
    most = CELLS // (rounds * (rounds + 1) // 2)
    return _counts(rounds, max(200, min(RESAMPLES, most)), generator)


def _counts(n: int, count: int, generator: np.random.Generator) -> Places:
    """Return how often each of `count` resamples has drawn each of `n` values: shape (n, count)."""
    picks = generator.integers(n, size=(count, n)) + n * np.arange(count)[:, None]
    times = np.bincount(picks.ravel(), minlength=count * n).reshape(count, n)
    return np.ascontiguousarray(times.T, dtype=np.int32)


def _around(
    n: int, share: float, count: int, generator: np.random.Generator
) -> tuple[Places, Places, float]:
    """Return the two steps around a quantile of `count` resamples of `n` steps, as ascending ranks.

    The third value is the part of the way from the first to the second at which the quantile lies.
    The steps need not be drawn. The k-th smallest of n uniform numbers has the distribution Beta(k,
    n - k + 1), and each of the larger ones is uniform above it. The step at the rank of such a
    number is distributed as the k-th smallest step of a resample (David and Nagaraja, "Order
    Statistics", 2003, sections 2.1 and 2.5).
    """
    place = min(max(0.0, (n + 1 / 3) * share - 2 / 3), n - 1)  # see `_quantile_of`
    before, part = divmod(round(place, 9), 1)
    rank = int(before) + 1
    first = generator.beta(rank, n - rank + 1, size=count)
    low = np.minimum((n * first).astype(np.int32), n - 1)
    if not part:
        return low, low, 0.0
    second = 1 - (1 - first) * generator.random(count) ** (1 / (n - rank))
    return low, np.minimum((n * second).astype(np.int32), n - 1), part


def _widen(draws: Array, n: int) -> Array:
    """Widen the draws, because resampling n rounds understates their variance."""
    return draws * math.sqrt(n / (n - 1)) if n > 1 else draws


def _exponential(value: float, draws: Array, n: int, *, level: float = CONFIDENCE) -> Estimate:
    """Return the estimate of a value above 0, from resamples of its logarithm (see `_interval`).

    The interval of two rounds at a high level may be too wide for a floating-point number.
    """
    middle = math.log(value)
    low, high = _interval(middle, draws, n, level=level)
    down, up = (math.exp(min(700.0, apart)) for apart in (middle - low, high - middle))
    return Estimate(value, value / down, value * up, n, level=level)


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


def joint_level(count: int, level: float = CONFIDENCE) -> float:
    """Return the level of each of `count` intervals that together hold with probability `level`.

    This is Bonferroni's method, which holds for any dependence between the estimates.
    """
    return 1 - (1 - level) / max(1, count)


def verdict(estimate: Estimate, *, margin: float = MARGIN) -> str:
    """Return the verdict on a ratio: "same", "faster", "slower" or "undecided".

    It is "same" if the whole interval is within `margin` of 1; otherwise "faster" or "slower" if
    all of it is above or below 1; "undecided" also for an estimate that decides nothing.
    """
    if not estimate.decides:
        return "undecided"
    if 1 - margin <= estimate.low and estimate.high <= 1 + margin:
        return "same"
    return "faster" if estimate.low > 1 else "slower" if estimate.high < 1 else "undecided"


def rounds_to_decide(
    estimate: Estimate, *, against: float = 1.0, margin: float = MARGIN, most: int = 10_000
) -> int:
    """Return the least number of rounds, at most `most`, that would decide a ratio in 80 % of runs.

    It decides if its interval excludes `against`, or is within `margin` of 1. The true ratio is
    assumed to be the estimate, and the variation between rounds to stay, so that the interval
    shrinks with the square root of the rounds. Return `most` from fewer than two rounds.
    """
    if estimate.n < 2:
        return most
    n = np.unique(np.geomspace(estimate.n, most, 400).astype(int))
    freedom = estimate.n - 1
    now = math.log(estimate.high / estimate.low) / 2 / float(_quantile(estimate.n, estimate.level))
    # a few rounds show less than the true variation more often than more
    error = now * math.sqrt(freedom / scipy.special.chdtri(freedom, 0.5)) * np.sqrt(estimate.n / n)
    half = _quantile(n, estimate.level) * error
    one_side = scipy.special.stdtrit(freedom, POWER) * error
    two_sides = scipy.special.stdtrit(freedom, (1 + POWER) / 2) * error
    apart = half + one_side < abs(math.log(estimate.value / against))
    within = half + two_sides <= math.log(1 + margin) - abs(math.log(estimate.value))
    decided = n[apart | within]
    return int(decided[0]) if len(decided) else most
