"""Statistics against oracles: scipy where it has the like, simulation where it has not."""

from __future__ import annotations

import itertools
import math
import warnings

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

# scipy.stats is imported at its first use: each process of the suite collects this file
import scipy

from dpbench.analysis import stats
from dpbench.measure.stopping import Stopping, half_width, warmup
from dpbench.records.estimate import Estimate
from tests.amounts import amounts

positive = st.floats(1e-6, 1e3)
series = st.lists(positive, min_size=1, max_size=12)
rounds = st.dictionaries(st.integers(0, 5), series, min_size=1, max_size=4)


def simulated(
    generator: np.random.Generator, count: int, steps: int, between: float, within: float
) -> stats.Rounds:
    """Return rounds of lognormal steps around 1, the rounds' own levels apart by `between`."""
    levels = np.exp(between * generator.standard_normal(count))
    return {
        r: list(level * np.exp(within * generator.standard_normal(steps)))
        for r, level in enumerate(levels)
    }


@hypothesis.given(rounds)
def test_value_is_the_median_of_the_rounds_medians(given: stats.Rounds) -> None:
    found = stats.median(given)
    assert found.value == pytest.approx(np.median([np.median(steps) for steps in given.values()]))
    assert found.low <= found.value <= found.high
    assert found.n == len(given)


def test_two_rounds_far_apart_at_a_high_level_have_a_wide_interval() -> None:
    """A run that looks several times at many speed-ups asks for such a level after two rounds."""
    found = stats.ratio({0: [1.0] * 9, 1: [9.0] * 9}, {0: [1.0] * 9, 1: [1.0] * 9}, level=0.9999)
    assert found.low < 1e-6
    assert found.high > 1e6
    assert math.isfinite(found.high)
    assert found.doubt


def test_interval_of_many_rounds_agrees_with_scipy() -> None:
    """With one step a round the two levels are one: scipy's bootstrap of the median must agree."""
    for seed in range(5):
        sample = np.random.default_rng(seed).lognormal(0, 0.3, 41)
        ours = stats.median(dict(enumerate([v] for v in sample)))
        theirs = scipy.stats.bootstrap(
            (sample,),
            np.median,
            n_resamples=9999,
            method="percentile",
            rng=np.random.default_rng(seed),
        ).confidence_interval
        assert ours.value == np.median(sample)
        # theirs are percentiles, ours Student's t around the median: as wide, and apart by the skew
        assert ours.high - ours.low == pytest.approx(theirs.high - theirs.low, rel=0.25)
        assert max(ours.low, theirs.low) < ours.value < min(ours.high, theirs.high)


def test_interval_of_one_round_agrees_with_scipy() -> None:
    sample = np.random.default_rng(3).lognormal(0, 0.3, 61)
    ours = stats.median({0: list(sample)})
    theirs = scipy.stats.bootstrap(
        (sample,), np.median, n_resamples=9999, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    width = theirs.high - theirs.low
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.1 * width)


@pytest.mark.slow
@pytest.mark.parametrize("between", [0.0, 0.3])
def test_interval_covers_the_truth_about_as_often_as_it_says(between: float) -> None:
    generator = np.random.default_rng(11)
    trials = 200
    hits = 0
    for number in range(trials):
        found = stats.median(simulated(generator, 10, 15, between, 0.05), seed=number)
        hits += found.low <= 1 <= found.high
    # of 200, 95 % is 190; three standard deviations below it are 181
    assert hits >= 181


@pytest.mark.slow
@pytest.mark.parametrize(("count", "paired"), [(3, True), (3, False), (5, False), (10, True)])
def test_intervals_of_equals_miss_1_no_more_often_than_they_say(count: int, paired: bool) -> None:
    """Also where one round in seven is slowed down by something else."""
    generator = np.random.default_rng(7)

    def rounds() -> stats.Rounds:
        disturbed = (generator.random(count) < 0.15) * generator.exponential(0.25, count)
        plain = simulated(generator, count, 9, 0.05, 0.02)
        return {r: [step * np.exp(disturbed[r]) for step in steps] for r, steps in plain.items()}

    trials = 300
    for level, missing in ((0.95, 15), (0.99, 3)):
        found = [
            stats.ratio(rounds(), rounds(), paired=paired, level=level, seed=n)
            for n in range(trials)
        ]
        missed = sum(not e.low <= 1 <= e.high for e in found)
        assert missed <= missing + 3 * np.sqrt(missing), f"{missed} of {trials} intervals miss 1"
        assert sum(stats.verdict(e) in ("faster", "slower") for e in found) <= missed


@pytest.mark.slow
def test_the_intervals_of_equals_that_are_read_together_all_contain_1() -> None:
    generator = np.random.default_rng(9)
    families, count, wrong = 40, 20, 0
    for _ in range(families):
        sides = [[simulated(generator, 5, 5, 0.05, 0.01) for _ in range(2)] for _ in range(count)]
        found = [stats.ratio(*pair, level=stats.joint_level(count)) for pair in sides]
        wrong += any(not e.low <= 1 <= e.high for e in found)
    assert wrong <= 5, f"{wrong} of {families} families"


def test_the_level_of_an_interval_is_students_and_is_divided_among_those_read_together() -> None:
    one, other = simulated(np.random.default_rng(1), 8, 5, 0.05, 0.01), {r: [1.0] for r in range(8)}
    usual, wide = (stats.ratio(one, other, level=level) for level in (0.95, stats.joint_level(5)))
    half = [np.log(e.high / e.low) / 2 for e in (usual, wide)]
    assert half[1] / half[0] == pytest.approx(
        scipy.stats.t.ppf(0.995, 7) / scipy.stats.t.ppf(0.975, 7)
    )
    assert (usual.value, usual.level, wide.level) == (wide.value, 0.95, pytest.approx(0.99))
    assert [stats.joint_level(1), stats.joint_level(10, 0.99)] == [0.95, pytest.approx(0.999)]
    for of in (stats.difference, stats.mean_difference):
        seconds = [of(one, other, level=level) for level in (0.95, stats.joint_level(5))]
        widths = [e.high - e.low for e in seconds]
        assert widths[1] / widths[0] == pytest.approx(half[1] / half[0])
        assert seconds[1].level == wide.level


def test_a_verdict_is_what_the_shown_interval_says() -> None:
    """The headline once said "may or may not be a gain" beside an interval that excludes 1."""
    generator = np.random.default_rng(3)
    for number in range(40):
        shift = 1 + 0.02 * (number % 8)
        one, other = (simulated(generator, 6, 5, 0.02, 0.01) for _ in range(2))
        faster = {r: [s / shift for s in steps] for r, steps in other.items()}
        found = stats.ratio(one, faster, level=stats.joint_level(1 + number % 7))
        expected = "faster" if found.low > 1 else "slower" if found.high < 1 else "undecided"
        assert stats.verdict(found, margin=0.0) == expected


def test_rounds_to_decide_are_about_as_many_as_it_takes() -> None:
    few = [
        stats.ratio(
            simulated(np.random.default_rng(s), 8, 9, 0.05, 0.01), {r: [0.97] for r in range(8)}
        )
        for s in range(30)
    ]
    said = float(np.median([stats.rounds_to_decide(e) for e in few]))
    # a 3 % difference at 5 % a round: ((1.96 + 0.84) x 0.05 / 0.03)^2 is 22
    assert 18 <= said <= 40
    sure = Estimate(2.0, 1.9, 2.1, 5)
    assert stats.rounds_to_decide(sure) == 5
    assert stats.rounds_to_decide(Estimate(1.01, 0.9, 1.13, 5), most=99) == 99
    assert stats.rounds_to_decide(Estimate(1.5, 1.4, 1.6, 1), most=99) == 99


def test_the_rounds_to_decide_decide_in_four_of_five_runs() -> None:
    """The interval has two sides, and the estimate of a run varies: fewer rounds are too few."""
    for value, level in ((1.1, 0.95), (0.95, 0.95), (1.1, 0.99), (1.03, 0.998)):
        half = 0.2
        now = Estimate(value, value * np.exp(-half), value * np.exp(half), 5, level=level)
        error = half / scipy.stats.t.ppf((1 + level) / 2, 4) * np.sqrt(5)

        def power(
            n: int, against: float, level: float = level, error: float = error, value: float = value
        ) -> float:
            apart = abs(np.log(value / against)) / (error / np.sqrt(n))
            return float(
                scipy.stats.nct.sf(scipy.stats.t.ppf((1 + level) / 2, n - 1), n - 1, apart)
            )

        for against in (1.0, 1.2):
            rounds = stats.rounds_to_decide(now, against=against, margin=0.0)
            assert power(rounds, against) >= 0.79
            assert power(int(rounds * 0.6), against) < 0.8, "fewer rounds would not be enough"


def test_interval_is_no_wider_than_it_must_be() -> None:
    """The interval must shrink with the rounds like the spread of a median."""
    generator = np.random.default_rng(5)
    few, many = (
        np.median(
            [
                e.high - e.low
                for e in (stats.median(simulated(generator, n, 9, 0.1, 0.02)) for _ in range(30))
            ]
        )
        for n in (8, 32)
    )
    assert 1.5 <= few / many <= 2.7
    assert few == pytest.approx(2 * 1.96 * 1.25 * 0.1 / np.sqrt(8), rel=0.4)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_interval_is_students_at_95_percent(count: int) -> None:
    """Few rounds have few resamples, which are all listed here; the bootstrap draws from them."""
    logs = np.random.default_rng(count).normal(0, 0.1, count)
    found = stats.ratio(
        {r: [math.exp(value)] for r, value in enumerate(logs)}, {r: [1.0] for r in range(count)}
    )
    centres = [
        np.median([(a + b) / 2 for a, b in itertools.combinations_with_replacement(drawn, 2)])
        for drawn in itertools.product(logs, repeat=count)
    ]
    half = scipy.stats.t.ppf(0.975, count - 1) * np.std(centres) * math.sqrt(count / (count - 1))
    assert math.log(found.high / found.value) == pytest.approx(half, rel=0.1)
    assert math.log(found.value / found.low) == pytest.approx(half, rel=0.1)


def test_interval_of_one_round_is_95_percent_of_its_resamples() -> None:
    """The median's rank of 1001 steps is about normal: mean 501, deviation sqrt(1001) / 2."""
    found = stats.median({0: list(range(1, 1002))})
    half = scipy.stats.norm.ppf(0.975) * math.sqrt(1001) / 2  # 31.0; at 90 % it would be 26.0
    assert (501 - found.low, found.high - 501) == pytest.approx((half, half), abs=2.5)


def test_steps_alone_do_not_narrow_what_rounds_spread() -> None:
    """A hundred times as many steps in two rounds do not hide how the rounds differ."""
    found = stats.median({0: [1.0] * 1000, 1: [2.0] * 1000})
    assert (found.value, found.n) == (pytest.approx(1.5), 2)
    assert found.low < 1.0
    assert found.high > 2.0


@hypothesis.given(rounds, rounds)
@hypothesis.settings(max_examples=50)
def test_ratio_of_a_series_with_itself_contains_1(one: stats.Rounds, other: stats.Rounds) -> None:
    same = stats.ratio(one, one)
    assert same.low <= 1 <= same.high
    assert same.value == 1
    found = stats.ratio(one, other)
    assert 0 < found.low <= found.value <= found.high
    assert found.n <= min(len(one), len(other))


@hypothesis.given(rounds, rounds)
@hypothesis.settings(max_examples=50)
def test_a_difference_is_that_of_the_medians_and_turns_its_sign(
    one: stats.Rounds, other: stats.Rounds
) -> None:
    assert stats.difference(one, one).value == 0
    found = stats.difference(one, other)
    assert found.low <= found.value <= found.high
    if set(one) == set(other):
        assert found.value == pytest.approx(
            stats.median(one).value - stats.median(other).value, abs=1e-12
        )
        assert stats.difference(other, one).value == pytest.approx(-found.value)


def test_what_all_rounds_share_is_no_part_of_a_difference() -> None:
    slow = {0: [1.0] * 9, 1: [5.0] * 9, 2: [3.0] * 9}
    fast = {number: [value - 0.5 for value in series] for number, series in slow.items()}
    found = stats.difference(slow, fast)
    assert (found.low, found.value, found.high) == pytest.approx((0.5, 0.5, 0.5))


@hypothesis.given(rounds, st.sampled_from([1e-6, 0.5, 2.0, 1024.0]))
@hypothesis.settings(max_examples=50)
def test_scale_does_not_matter(given: stats.Rounds, scale: float) -> None:
    plain, scaled = (
        stats.median(given),
        stats.median({k: [v * scale for v in s] for k, s in given.items()}),
    )
    assert (scaled.value, scaled.low, scaled.high) == pytest.approx(
        (plain.value * scale, plain.low * scale, plain.high * scale), rel=1e-9
    )
    other = {key: [*reversed(steps), 1.0] for key, steps in given.items()}
    left = stats.ratio(given, other)
    right = stats.ratio(
        *({k: [v * scale for v in s] for k, s in side.items()} for side in (given, other))
    )
    assert (left.value, left.low, left.high) == pytest.approx(
        (right.value, right.low, right.high), rel=1e-9
    )


def test_rounds_in_common_cancel_their_drift() -> None:
    generator = np.random.default_rng(2)
    drift = {r: float(np.exp(generator.normal(0, 0.5))) for r in range(8)}
    slow = {r: list(2 * d * (1 + 0.001 * generator.standard_normal(9))) for r, d in drift.items()}
    fast = {r: list(d * (1 + 0.001 * generator.standard_normal(9))) for r, d in drift.items()}
    paired = stats.ratio(slow, fast)
    alone = stats.ratio(slow, {r + 100: steps for r, steps in fast.items()})
    assert paired.low <= 2 <= paired.high
    assert paired.high - paired.low < 0.05
    assert alone.high - alone.low > 5 * (paired.high - paired.low)


def test_only_common_rounds_are_compared() -> None:
    found = stats.ratio({0: [2.0], 1: [2.0], 7: [99.0]}, {0: [1.0], 1: [1.0], 8: [50.0]})
    assert (found.value, found.low, found.high, found.n) == pytest.approx((2.0, 2.0, 2.0, 2))


def test_the_same_seed_gives_the_same_interval_in_any_order_of_rounds() -> None:
    given = {r: [1.0 + r * s for s in range(5)] for r in range(4)}
    backwards = dict(reversed(given.items()))
    assert stats.median(given) == stats.median(backwards)
    assert stats.ratio(given, {r: s[::-1] for r, s in given.items()}) == stats.ratio(
        backwards, {r: s[::-1] for r, s in given.items()}
    )


@pytest.mark.parametrize(
    ("low", "high", "rounds", "expected"),
    [
        (1.05, 1.2, 9, "faster"),
        (0.8, 0.9, 9, "slower"),
        (0.995, 1.005, 3, "same"),
        (0.9, 1.1, 9, "undecided"),
        (0.991, 1.0099, 5, "same"),
        (0.98, 1.001, 9, "undecided"),
        (1.001, 1.005, 9, "same"),
        (1.0, 1.5, 9, "undecided"),
        (1.05, 1.2, 3, "faster"),
        (0.5, 1.9, 3, "undecided"),
        (1.05, 1.2, 1, "undecided"),
        (1.0, 1.0, 1, "undecided"),
    ],
)
def test_verdict_is_what_the_interval_and_its_rounds_decide(
    low: float, high: float, rounds: int, expected: str
) -> None:
    assert stats.verdict(Estimate((low * high) ** 0.5, low, high, rounds)) == expected


# ---------------------------------------------------------------- when to stop


def fed(stopping: Stopping, steps: list[float]) -> int:
    """Feed steps one by one; return after how many it had enough, 0 if never."""
    for number, seconds in enumerate(steps, 1):
        stopping.add(seconds)
        if stopping.finished():
            return number
    return 0


def test_a_precise_series_stops_as_soon_as_it_may() -> None:
    stopping = Stopping(budget_s=1e9, min_steps=10)
    assert fed(stopping, [1.0] * 50) == 10
    assert stopping.reason.startswith("precise: ")
    assert amounts(stopping.reason) == ["0.5%"]


def test_a_noisy_series_stops_at_its_budget_but_not_before_its_least_steps() -> None:
    noisy = [1.0, 3.0] * 50
    stopping = Stopping(budget_s=40, min_steps=10)
    assert fed(stopping, noisy) == 20
    assert stopping.reason.startswith("budget: 40 s")
    assert fed(Stopping(budget_s=1, min_steps=10), noisy) == 10


def test_a_noisy_series_stops_at_its_most_steps() -> None:
    stopping = Stopping(budget_s=1e9, min_steps=10, max_steps=33)
    assert fed(stopping, [1.0, 3.0] * 50) == 33
    assert stopping.reason.startswith("steps: 33 timed steps")
    assert fed(Stopping(budget_s=1e9, min_steps=50, max_steps=5), [1.0] * 50) == 5


def test_the_warm_up_is_found_where_it_ends() -> None:
    generator = np.random.default_rng(4)
    for cut in (5, 20, 40):
        series = [*(2.0 + 0.1 * generator.random(cut)), *(1.0 + 0.1 * generator.random(100))]
        assert cut <= warmup(series) <= cut + 10
    falling = [1 + np.exp(-i / 8) + 0.02 * generator.random() for i in range(120)]
    assert 10 <= warmup(falling) <= 50


def test_a_steady_series_has_no_warm_up() -> None:
    """Slow steps that come back, early or late, are not warm-up."""
    generator = np.random.default_rng(4)
    found = []
    for _ in range(200):
        series = np.exp(
            0.05 * generator.standard_normal(100) + (generator.random(100) < 0.05) * 0.5
        )
        found.append(warmup(list(series)))
    assert np.mean([cut == 0 for cut in found]) >= 0.95
    assert warmup([1.0] * 50, least=5) == 5
    assert warmup([], least=5) == 0


def test_a_series_stops_when_its_noise_is_known() -> None:
    generator = np.random.default_rng(6)
    stopping = Stopping(budget_s=1e9, min_steps=10, max_steps=10_000, precision=1e-6)
    count = fed(stopping, list(np.exp(0.2 * generator.standard_normal(5000))))
    assert 64 < count < 2000
    assert stopping.reason.startswith("noise is known")


def test_the_first_reason_stays() -> None:
    stopping = Stopping(budget_s=1e9, max_steps=20)
    fed(stopping, [1.0] * 10)
    reason = stopping.reason
    for _ in range(30):
        stopping.add(9.0)
    assert stopping.finished()
    assert stopping.reason == reason


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_handful_of_steps_is_never_called_precise(steps: int) -> None:
    """With this few values, no order statistics enclose the median with a probability near 95 %."""
    stopping = Stopping(budget_s=1e9, min_steps=1)
    assert fed(stopping, [1.0] * steps) == 0


@pytest.mark.parametrize("n", [10, 15, 30, 100])
def test_half_width_covers_the_median_about_as_often_as_it_says(n: int) -> None:
    """The interval by order statistics assumes no distribution: its coverage is binomial."""
    ordered = list(np.linspace(1.0, 2.0, n))
    spread = half_width(ordered) * ordered[n // 2] * 2
    kept = round(spread / (1 / (n - 1))) + 1
    low = (n - kept) // 2
    coverage = 1 - 2 * scipy.stats.binom.cdf(low, n, 0.5)
    assert 0.925 <= coverage <= 0.99


@hypothesis.given(st.lists(positive, min_size=2, max_size=40), st.sampled_from([0.5, 4.0, 1e-3]))
def test_half_width_is_a_fraction_whatever_the_unit(given: list[float], scale: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert half_width([v * scale for v in given]) == pytest.approx(
            half_width(given), rel=1e-9, abs=1e-12
        )
    assert half_width(given) >= 0


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 10, 31, 100])
def test_medians_of_resamples_are_distributed_as_those_of_drawn_steps(n: int) -> None:
    draw = np.random.default_rng(n)
    pool = np.exp(0.2 * draw.standard_normal(n))
    drawn = np.median(pool[draw.integers(n, size=(20_000, n))], axis=1)
    low, high, part = stats._around(n, 0.5, 20_000, draw)
    assert part in (0, 0.5)
    ordered = np.sort(pool)
    found = (ordered[low] + ordered[high]) / 2
    assert {*np.round(found, 12)} <= {*np.round((pool[:, None] + pool[None, :]) / 2, 12).ravel()}
    for share in (0.025, 0.25, 0.5, 0.75, 0.975):
        at = np.quantile(drawn, share)
        for side in (np.less, np.less_equal):  # the medians are discrete
            assert side(found, at).mean() == pytest.approx(side(drawn, at).mean(), abs=0.02)


@hypothesis.given(st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_medians_and_centres_are_those_of_the_values_that_were_drawn(n: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    values = generator.integers(5, size=n) / 3
    times = stats._counts(n, 20, generator)
    drawn = [np.repeat(values, one) for one in times.T]
    assert {len(one) for one in drawn} == {n}
    resamples = stats.Resamples(values, times)
    assert [*resamples.medians()] == [np.median(one) for one in drawn]
    pairs = np.triu_indices(n)
    centres = [np.median((one[pairs[0]] + one[pairs[1]]) / 2) for one in drawn]
    assert [*resamples.centres()] == centres


def test_as_many_rounds_are_drawn_as_there_are_each_as_often_as_any_other() -> None:
    times = stats._times(6, np.random.default_rng(0))
    assert times.shape == (6, stats.RESAMPLES)
    assert (times.sum(axis=0) == 6).all()
    assert times.mean(axis=1) == pytest.approx(1.0, abs=0.1)
    # that of a Poisson number is 1, and that of draws among n values 1 - 1 / n
    assert times.var() == pytest.approx(1 - 1 / 6, abs=0.05)


@pytest.mark.parametrize("count", [1, 6])
def test_devices_that_vary_together_are_resampled_together(count: int) -> None:
    steps = np.random.default_rng(0).random(30)
    rounds = {
        number: np.stack([part, 2 * part], axis=1)
        for number, part in enumerate(np.split(steps, count))
    }
    found = stats.balance(rounds).first
    assert (found.low, found.high) == pytest.approx((0.5, 0.5))


@pytest.mark.parametrize("count", [4, 31])
def test_a_round_without_a_ratio_leaves_the_comparison_undefined(count: int) -> None:
    """A median of ranks alone would count it as one more round."""
    one = {number: [1.0, 1.1, 0.9] for number in range(count)}
    with np.errstate(all="ignore"):
        found = stats.ratio({**one, 2: [0.0] * 3}, {**one, 2: [0.0] * 3})
    assert math.isnan(found.value)
    assert math.isnan(found.low)
    assert math.isnan(found.high)
