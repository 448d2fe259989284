"""Statistics: medians and ratios with hierarchical bootstrap intervals, and what they decide.

Rounds are fresh processes, and differ from each other more than the steps within one do; so resampling takes rounds
first, then the steps inside each. A few rounds resampled vary less than a few rounds measured: the bootstrap's spread
is widened by sqrt(n / (n - 1)), and the interval taken from Student's t with n - 1 degrees of freedom (Hesterberg,
"What Teachers Should Know About the Bootstrap", 2015, section 5.3). One round shows nothing about other rounds: its
interval covers the steps alone. An estimate of fewer than three rounds, or with an interval that spans more than a
factor of 4, is computed but not shown (`Estimate.doubt`), and its verdict is undecided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from dpbench.records.estimate import Estimate

Rounds = Mapping[int, Sequence[float]]
"""The measured step seconds of one case, by round."""
Array = NDArray[np.float64]
Vectors = Mapping[int, Sequence[Sequence[float]]]
"""By round and step, a number for each device; a round that has one figure has one step."""

RESAMPLES = 2000
CELLS = 4_000_000
"""Numbers that one set of resamples may hold; many rounds need fewer resamples."""
CONFIDENCE = 0.95
ALPHA = 0.01
"""How often "faster" or "slower" may be said of two equals."""
MARGIN = 0.01
"""What counts as the same."""


def median(rounds: Rounds, *, seed: int = 0) -> Estimate:
    """Return the median over rounds of each round's median, with its interval. Any sign will do."""
    each, draws = _medians(rounds, np.random.default_rng(seed), scale=np.asarray)
    # the middle of the numbers, not of their logarithms, which differ where the count of rounds is even
    value, middles = float(np.median(each)), np.median(draws, axis=1)
    if min(value, middles.min()) <= 0:
        return Estimate(value, *_interval(value, middles, len(rounds)), len(rounds))
    found = _exponential(math.log(value), np.log(middles), len(rounds))
    return replace(found, value=value, low=min(found.low, value), high=max(found.high, value))


def ratio(numerator: Rounds, denominator: Rounds, *, paired: bool = True, seed: int = 0) -> Estimate:
    """Return how many times as long a step of `numerator` takes, with its interval.

    Rounds of one run that both have are `paired`: the estimate is the Hodges-Lehmann centre of the rounds' own
    ratios, so that what both sides of a round share cancels, and a round gone wrong does not carry it. Rounds of
    different runs are not: then it is the centre of the ratios of any two.
    """
    generator = np.random.default_rng(seed)
    common = sorted(set(numerator) & set(denominator)) if paired else []
    if common:
        sides = [{key: side[key] for key in common} for side in (numerator, denominator)]
        chosen = _choose(len(common), generator)
        (top, tops), (bottom, bottoms) = (_medians(side, generator, chosen) for side in sides)
        return _exponential(float(_centre(top - bottom)), _centre(tops - bottoms), len(common))
    (top, tops), (bottom, bottoms) = (_medians(side, generator) for side in (numerator, denominator))
    count = min(len(tops), len(bottoms))
    # each side's centre, because all pairs of all resamples would be too many
    draws = _widen(_centre(tops[:count]), len(top)) - _widen(_centre(bottoms[:count]), len(bottom))
    value = float(np.median(top[:, None] - bottom[None, :]))
    return _exponential(value, draws, min(len(top), len(bottom)), widened=True)


def quotient(numerator: Estimate, denominator: Estimate) -> Estimate:
    """Return the ratio of two estimates of which only the intervals are known, as if they were independent."""
    up = math.hypot(math.log(numerator.high / numerator.value), math.log(denominator.value / denominator.low))
    down = math.hypot(math.log(numerator.value / numerator.low), math.log(denominator.high / denominator.value))
    value = numerator.value / denominator.value
    return Estimate(value, value * math.exp(-down), value * math.exp(up), min(numerator.n, denominator.n))


def difference(first: Rounds, second: Rounds, *, seed: int = 0) -> Estimate:
    """Return median(first) - median(second) with its interval, by the rounds that both have."""
    generator = np.random.default_rng(seed)
    common = sorted(set(first) & set(second))
    if common:
        first, second = ({key: side[key] for key in common} for side in (first, second))
    chosen = _choose(len(common), generator) if common else None
    (one, ones), (other, others) = (_medians(side, generator, chosen, np.asarray) for side in (first, second))
    value, n = float(np.median(one) - np.median(other)), min(len(one), len(other))
    count = min(len(ones), len(others))
    draws = np.median(ones[:count], axis=1) - np.median(others[:count], axis=1)
    low, high = _interval(value, draws, n)
    return Estimate(value, low, high, n, signed=True)


def first_over_rest(vectors: Vectors, *, seed: int = 0) -> Estimate:
    """Return device 0's median over the mean of the other devices' medians, with its interval."""
    return _of_medians(vectors, lambda each: each[..., 0] / each[..., 1:].mean(axis=-1), seed)


def most_over_mean(vectors: Vectors, *, seed: int = 0) -> Estimate:
    """Return the largest of the devices' medians over the mean of all, with its interval; at least 1."""
    return _of_medians(vectors, lambda each: each.max(axis=-1) / each.mean(axis=-1), seed)


def _of_medians(vectors: Vectors, function: Callable[[Array], Array], seed: int) -> Estimate:
    """Return a function of the devices' medians over rounds of each round's median, with its interval.

    A step is resampled with all its devices, so that what they share cancels.
    """
    each, draws = _medians(vectors, np.random.default_rng(seed), scale=np.asarray)
    value = float(function(np.median(each, axis=0)))
    found = _exponential(math.log(value), np.log(function(np.median(draws, axis=1))), len(vectors))
    return replace(found, value=value)


def _choose(rounds: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Return resamples of `rounds` rounds: an array (resamples, rounds)."""
    pairs = rounds * (rounds + 1) // 2
    return generator.integers(rounds, size=(max(200, min(RESAMPLES, CELLS // pairs)), rounds))


def _medians(
    rounds: Rounds | Vectors,
    generator: np.random.Generator,
    chosen: NDArray[np.int64] | None = None,
    scale: Callable[[Array], Array] = np.log,
) -> tuple[Array, Array]:
    """Return each round's median step on a scale, and (resamples, rounds) of them of resampled steps.

    Of vectors there is one more axis, the devices.
    """
    keys = sorted(rounds)
    chosen = _choose(len(keys), generator) if chosen is None else chosen
    pools = [np.asarray(rounds[key], dtype=float) for key in keys]
    draws = np.empty((*chosen.shape, *pools[0].shape[1:]))
    for number, pool in enumerate(pools):
        here = chosen == number
        picks = generator.integers(len(pool), size=(int(here.sum()), len(pool)))
        draws[here] = np.median(pool[picks], axis=1)
    return scale(np.array([np.median(pool, axis=0) for pool in pools])), scale(draws)


def _centre(values: Array) -> Array:
    """Return the Hodges-Lehmann estimate along the last axis: the median of the means of all pairs."""
    first, second = np.triu_indices(values.shape[-1])
    return np.asarray(np.median((values[..., first] + values[..., second]) / 2, axis=-1))


def _widen(draws: Array, n: int) -> Array:
    """Spread resamples as far as measurements of so few rounds would be."""
    return draws * math.sqrt(n / (n - 1)) if n > 1 else draws


def _exponential(value: float, draws: Array, n: int, *, widened: bool = False) -> Estimate:
    """Return the estimate whose logarithm was resampled."""
    low, high = _interval(value, draws, n, widened=widened)
    return Estimate(math.exp(value), math.exp(low), math.exp(high), n)


def _interval(value: float, draws: Array, n: int, *, widened: bool = False) -> tuple[float, float]:
    """Return the 95 % interval around a value: Student's t over rounds, percentiles within a single one."""
    tail = (1 - CONFIDENCE) / 2
    if n < 2:
        low, high = np.percentile(draws, [100 * tail, 100 * (1 - tail)])
        return float(min(low, value)), float(max(high, value))
    spread = float((draws if widened else _widen(draws, n)).std())
    half = float(stdtrit(n - 1, 1 - tail)) * spread
    return value - half, value + half


def p_value(estimate: Estimate) -> float:
    """Return how likely so great a ratio is between equals; 1 for a prediction and for an estimate in doubt."""
    if estimate.n < 2 or estimate.doubt:
        return 1.0
    spread = math.log(estimate.high / estimate.low) / 2 / stdtrit(estimate.n - 1, (1 + CONFIDENCE) / 2)
    away = abs(math.log(estimate.value))
    if spread < 1e-12:
        return 1.0 if away < 1e-12 else 0.0
    return float(2 * stdtr(estimate.n - 1, -away / spread))


def verdict(estimate: Estimate, *, margin: float = MARGIN, alpha: float = ALPHA) -> str:
    """Say what a ratio decides: faster (above 1), slower, same (95 % interval within the margin) or undecided."""
    if 1 - margin <= estimate.low and estimate.high <= 1 + margin and estimate.n > 1 and not estimate.doubt:
        return "same"
    if p_value(estimate) <= alpha:
        return "faster" if estimate.value > 1 else "slower"
    return "undecided"


def verdicts(estimates: Sequence[Estimate], *, margin: float = MARGIN, alpha: float = ALPHA) -> list[str]:
    """Return the verdicts of ratios that are read together: "faster" or "slower" of any equal one in `alpha` of cases.

    Holm's correction: the k-th smallest of m p-values must be below alpha / (m - k), and all smaller ones too.
    """
    order = sorted(range(len(estimates)), key=lambda i: p_value(estimates[i]))
    found = [""] * len(estimates)
    lost = False
    for place, i in enumerate(order):
        strict = alpha / (len(order) - place)
        found[i] = verdict(estimates[i], margin=margin, alpha=0.0 if lost else strict)
        lost = lost or p_value(estimates[i]) > strict
    return found


def rounds_to_decide(estimate: Estimate, *, margin: float = MARGIN, alpha: float = ALPHA, most: int = 10_000) -> int:
    """Return how many rounds would decide a ratio like this one, if it stays where it is; `most` if not even those.

    The interval shrinks with the square root of the rounds, until it leaves 1 or fits into the margin.
    """
    if estimate.n < 2:
        return most
    spread = math.log(estimate.high / estimate.low) / 2 / stdtrit(estimate.n - 1, (1 + CONFIDENCE) / 2)
    away, one = abs(math.log(estimate.value)), spread * math.sqrt(estimate.n)
    n = np.unique(np.geomspace(estimate.n, most, 400).astype(int))
    apart = stdtrit(n - 1, 1 - alpha / 2) * one / np.sqrt(n) <= away
    within = stdtrit(n - 1, (1 + CONFIDENCE) / 2) * one / np.sqrt(n) <= math.log(1 + margin) - away
    decided = n[apart | within]
    return int(decided[0]) if len(decided) else most
