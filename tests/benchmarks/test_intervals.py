"""The simulation of intervals, claims and choices, on a sample of its runs."""

from __future__ import annotations

import pytest

from benchmarks.scripts import intervals
from dpbench.analysis import stats

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "RESAMPLES", 200)


def simulated(name: str, runs: int = 8) -> intervals.Outcomes:
    return intervals.simulate(intervals.SETTINGS[name], runs)


@pytest.mark.parametrize("name", ["noise 2 %", "near ties, noise 2 %", "bursts"])
def test_intervals_hold_and_claims_are_true(name: str) -> None:
    found = simulated(name)
    assert found.share("pointwise") >= 0.85
    assert found.share("means") >= 0.85
    assert found.right["together"] >= 7
    assert found.right["order"] >= found.said["order"] - 1
    assert found.share("not slower") == 1.0
    assert found.share("not missed") == 1.0


@pytest.mark.parametrize("name", ["beside 0.1", "beside 0.3"])
def test_intervals_beside_another_program_hold_by_the_bound(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = simulated(name, 4)
    assert found.share("pointwise") == 1.0
    assert found.right["together"] == 4
    monkeypatch.setattr(stats, "_shortest_median", lambda part: 1.0)
    assert simulated(name, 4).share("pointwise") < 0.8, "without the bound they do not"


def test_a_choice_by_the_median_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals.decision, "_loses_by_all_steps", lambda row, baseline: False)
    assert simulated("bursts").share("not slower") < 1.0
