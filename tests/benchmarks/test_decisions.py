"""The simulation of runs that stop once their answers are settled."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.scripts import coverage, decisions
from dpbench.analysis import stats


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> coverage.Noise:
    monkeypatch.setattr(stats, "RESAMPLES", 200)
    generator = np.random.default_rng(0)
    return coverage.Noise(generator.normal(0, 0.03, 200), tuple(generator.normal(0, 0.01, (20, 9))))


def test_simulated_runs_settle_and_are_right(noise: coverage.Noise) -> None:
    generator = np.random.default_rng(1)
    found = [decisions.simulate(noise, 0.0, True, generator) for _ in range(30)]
    assert sum(one.settled for one in found) > 15
    assert all(one.right for one in found if one.settled)
    assert {one.rounds for one in found if one.settled} <= {*stats.LOOKS}


def test_a_rule_that_decides_by_the_values_alone_is_caught(
    noise: coverage.Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats, "together", lambda count, level=0.95: 0.1)
    generator = np.random.default_rng(1)
    found = [decisions.simulate(noise, 0.0, False, generator) for _ in range(30)]
    assert not all(one.covered for one in found)
