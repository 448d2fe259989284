"""Uneven steps: samples per second and epochs come from all steps."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dpbench import load
from dpbench.analysis import stats, summary, uneven
from dpbench.analysis.decision import Choice
from dpbench.analysis.report import Report
from dpbench.records import Case, Trial, words
from dpbench.records.ledger import Ledger
from tests import observed_loops
from tests.amounts import amounts
from tests.analysis import test_noisy
from tests.exported import stored
from tests.trials import report_on, trial_of

SINGLE, DDP = test_noisy.SINGLE, test_noisy.DDP
BASE_S, LONGER_S = 0.0158, 0.060
"""A step, and what every fourth one takes in addition: the mean is 1.95 times the median."""


def trial(
    case: Case,
    number: int,
    longer_s: Callable[[int], float],
    base_s: float = BASE_S,
    steps: int = 65,
) -> Trial:
    draw = random.Random(f"{case.label} {number}")
    seconds = [base_s * draw.lognormvariate(0, 0.01) + longer_s(k) for k in range(steps)]
    return trial_of(case, seconds, warmup=5, round=number)


def every(period: int, longer_s: float = LONGER_S) -> Callable[[int], float]:
    return lambda index: longer_s * (index % period == 0)


def even(index: int) -> float:
    return 0.0


def rounds(case: Case, longer_s: Callable[[int], float], base_s: float = BASE_S) -> list[Trial]:
    return [trial(case, number, longer_s, base_s) for number in range(5)]


def report(trials: Sequence[Trial]) -> Report:
    return report_on([one.summary() for one in trials], test_noisy.FACTS)


def uneven_cases(found: Report) -> dict[Case, str]:
    return {
        case: detail for one in found.remarks if one.key == "uneven" for case, detail in one.cases
    }


def test_samples_per_second_are_rows_over_the_time_of_all_timed_steps() -> None:
    trials = rounds(SINGLE, every(4))
    (row,) = summary.rows(trials)
    seconds = [one for each in trials for one in each.timed]
    assert row.throughput.value == pytest.approx(64 * len(seconds) / sum(seconds), rel=1e-6)
    assert row.throughput.low < 64 / (BASE_S + LONGER_S / 4) < row.throughput.high
    assert row.step.value == pytest.approx(BASE_S, rel=0.02), "the step time stays the median"
    assert (row.mean.low, row.mean.high) == pytest.approx(
        (64 / row.throughput.high, 64 / row.throughput.low)
    )


def test_the_time_of_long_steps_is_in_its_phase() -> None:
    """Every fourth step takes 100 ms more in the optimizer: 69 % of all time."""
    draw = random.Random(3)
    trials = []
    for number in range(5):
        seconds, phases = [], []
        for index in range(60):
            update_s = 0.1 * (index % 4 == 0) + 0.001
            forward_s = 0.01 * draw.lognormvariate(0, 0.01)
            seconds.append(forward_s + update_s)
            phases.append({"forward": forward_s, "optimizer": update_s})
        one = trial_of(SINGLE, seconds, warmup=0, round=number)
        trials.append(one.with_ledger(Ledger.recorded(one.steps, phases)))
    (row,) = summary.rows(trials)
    assert row.step.value == pytest.approx(0.011, rel=0.01)
    assert sum(row.phases.values()) == pytest.approx(row.mean.value)
    assert row.phases["optimizer"] / row.mean.value == pytest.approx(0.026 / 0.036, rel=0.01)
    assert uneven.differs(row)
    assert next(iter(uneven.excess(trials))) == "optimizer"


@pytest.mark.slow
def test_the_interval_of_a_mean_contains_the_truth_about_as_often_as_it_says() -> None:
    draw = random.Random(5)
    found = []
    for _ in range(200):
        levels = [draw.lognormvariate(0, 0.05) for _ in range(5)]
        found.append(
            stats.mean(
                {
                    n: [level * draw.lognormvariate(0, 0.02) for _ in range(20)]
                    for n, level in enumerate(levels)
                }
            )
        )
    truth = 1 * 2.718281828 ** ((0.05**2 + 0.02**2) / 2)
    assert sum(one.low <= truth <= one.high for one in found) >= 181
    assert sum(one.high / one.low for one in found) / 200 < 1.2, "not by useless intervals"


def test_a_mean_that_differs_from_the_median_is_said_with_both() -> None:
    found = report([*rounds(SINGLE, every(4)), *rounds(DDP, even)])
    said = uneven_cases(found)
    assert set(said) == {SINGLE}
    mean, _, _, median, *_ = amounts(said[SINGLE])
    assert (mean[:3], median[:3]) == ("30.", "15.")


def test_even_steps_and_differences_within_the_intervals_are_not_said() -> None:
    assert uneven_cases(report([*rounds(SINGLE, even), *rounds(DDP, every(4, 0.0005))])) == {}
    few = [trial(SINGLE, 0, every(4))]
    assert uneven_cases(report(few)) == {}, "one round has no interval"


def test_a_case_that_loses_by_all_steps_is_not_chosen() -> None:
    """By the medians ddp gives 1.4 times; by all steps it is slower than one device."""
    found = report([*rounds(SINGLE, even), *rounds(DDP, every(4, 0.05), BASE_S / 1.4)])
    (answer,) = found.answers
    assert answer.choice is Choice.UNKNOWN
    by_mean = BASE_S / (BASE_S / 1.4 + 0.05 / 4)
    ddp = next(row for row in found.rows if row.case == DDP)
    gain = uneven.gain_of_means(ddp, answer.baseline)
    assert gain
    assert gain.value == pytest.approx(by_mean, rel=0.02)
    assert words.times(gain) in answer.headline
    assert "--rounds" in answer.command, "more rounds may show how often steps are long"


def pauses(every_steps: int, pause_s: float, slow_rounds: Iterable[int]) -> list[Trial]:
    """Return rounds of ddp at half the step of one device; some have steps with a pause."""
    return [
        trial(
            DDP, number, every(every_steps, pause_s) if number in slow_rounds else even, BASE_S / 2
        )
        for number in range(6)
    ]


@pytest.mark.parametrize(
    "trials",
    [
        pytest.param(
            [trial(DDP, n, even, BASE_S * (5 if n == 2 else 0.5)) for n in range(6)],
            id="one slow round of six",
        ),
        pytest.param(pauses(10, 0.25, range(6)), id="every tenth step of each round"),
        pytest.param(pauses(6, 0.45, (1, 3, 5)), id="every sixth step of half of the rounds"),
    ],
)
def test_no_choice_is_made_against_the_time_of_all_steps(trials: list[Trial]) -> None:
    (answer,) = report([*rounds(SINGLE, even), *trials]).answers
    assert answer.choice is Choice.UNKNOWN


def test_a_gain_by_all_steps_that_is_in_doubt_is_said_with_the_choice() -> None:
    """Pauses in one round leave the mean unknown."""
    found = report([*rounds(SINGLE, even), *pauses(30, 0.6, (3,))])
    (answer,) = found.answers
    assert answer.choice is Choice.USE
    gain = uneven.gain_of_means(answer.row, answer.baseline)
    assert gain
    assert words.about_times(gain) in answer.certainty


def test_the_gain_by_all_steps_is_the_ratio_of_the_mean_steps() -> None:
    draw = random.Random(2)
    one, other = (
        {n: [draw.lognormvariate(level, 0.5) for _ in range(9)] for n in range(5)}
        for level in (0, 0.3)
    )
    found = stats.mean_ratio(one, other)
    assert found.value == pytest.approx(stats.mean(one).value / stats.mean(other).value)


# -- the time of an epoch


def test_an_epoch_of_uneven_steps_takes_the_time_of_all_steps() -> None:
    (answer,) = report([*rounds(SINGLE, every(4)), *rounds(DDP, every(4), BASE_S)]).answers
    now, _ = answer.epoch_s(64_000)
    assert now.value == pytest.approx(1000 * (BASE_S + LONGER_S / 4), rel=0.02)
    assert now.low < now.value < now.high


def test_an_answer_that_cannot_tell_states_the_epoch_on_one_device(
    tmp_path: Path, dpbench: Any
) -> None:
    stored(tmp_path / "dpbench.db", *(one for case in (SINGLE, DDP) for one in rounds(case, even)))
    code, out, _ = dpbench("explain", "--samples", 1_000_000)
    assert code == 0
    found = json.loads(dpbench("explain", "--samples", 1_000_000, "--json")[1])["answers"][0]
    assert found["choice"] in (Choice.UNKNOWN, Choice.STAY)
    assert amounts(found["epoch"])[0] == "1,000,000"
    assert found["epoch"] in " ".join(out.split())
    assert found["epoch_s"]["value"] == pytest.approx(1_000_000 / 64 * BASE_S, rel=0.02)
    assert found["epoch_choice_s"] is None
    assert json.loads(dpbench("explain", "--json")[1])["answers"][0]["epoch"] == ""


def test_a_noisy_run_states_the_epoch_on_one_device() -> None:
    (answer,) = test_noisy.report(test_noisy.run(test_noisy.ALL)).answers
    assert answer.choice is Choice.UNKNOWN
    assert answer.epoch_s(64_000)[0].value == pytest.approx(14.5, rel=0.02)
    samples, *_, steps = amounts(answer.epoch(64_000))
    assert (samples, steps) == ("64,000", "18")


@pytest.mark.sibling("observe")
def test_a_watched_script_states_its_epoch(tmp_path: Path, dpbench: Any) -> None:
    stored(tmp_path / "dpbench.db", *observed_loops.loop(), provenance=observed_loops.FACTS)
    (row,) = load(tmp_path / "dpbench.db").analysis.rows
    code, out, _ = dpbench("explain", "--samples", 1_000_000)
    assert code == 0
    found = json.loads(dpbench("explain", "--samples", 1_000_000, "--json")[1])["answers"][0]
    assert amounts(found["epoch"])[0] == "1,000,000"
    assert found["epoch"] in " ".join(out.split())
    assert found["epoch_s"]["value"] == pytest.approx(1_000_000 / row.throughput.value)


@pytest.mark.parametrize(
    ("trials", "why"),
    [
        pytest.param(
            observed_loops.loop(of=observed_loops.case(batch_size=0)),
            "because the batch size is unknown",
            marks=pytest.mark.sibling("observe"),
        ),
        (rounds(DDP, even), "because the strategy single was not measured"),
        (rounds(SINGLE, even)[:2] + rounds(DDP, even), "because 2 rounds, but at least 3"),
    ],
)
def test_an_unknown_epoch_says_why(
    trials: Sequence[Trial], why: str, tmp_path: Path, dpbench: Any
) -> None:
    stored(tmp_path / "dpbench.db", *trials, provenance=observed_loops.FACTS)
    code, out, _ = dpbench("explain", "--samples", 1_000_000)
    assert code == 0
    assert why in " ".join(out.split())
