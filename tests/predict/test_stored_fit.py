"""Measured profiles: lines that are fitted to known times and to the phases of stored trials."""

from __future__ import annotations

import pytest

from dpbench import models
from dpbench.predict import counts
from dpbench.predict.stored import fit_cost, of_trials
from dpbench.records import Case, Phase, Trial
from tests.trials import trial_of


def test_a_line_is_found_again() -> None:
    cost = fit_cost([8, 16, 64], [1.08, 1.16, 1.64])
    assert cost.fixed_s == pytest.approx(1.0)
    assert cost.sample_s == pytest.approx(0.01)


def test_seconds_are_never_negative() -> None:
    falling = fit_cost([8, 16], [2.0, 1.0])
    assert falling.sample_s == 0
    assert 1 < falling.fixed_s < 2
    steep = fit_cost([8, 16], [1.0, 4.0])
    assert steep.fixed_s == 0
    assert fit_cost([8], [0.0]).at(100) == 0


def test_distances_count_relative_to_the_time() -> None:
    """A small batch that is 10 % off must not be outweighed by a large one that is not."""
    cost = fit_cost([1, 1000], [1e-3, 1.0])
    assert cost.at(1) == pytest.approx(1e-3, rel=1e-6)


def stored(rows: int, forward_s: float, backward_s: float) -> Trial:
    """Return a trial of three steps, the first of them warm-up and ten times slower."""
    step_s = forward_s + backward_s
    middle = forward_s / step_s
    case = Case(model="mlp", strategy="single", batch_size=rows)
    parts = [(Phase.FORWARD, 0, 0.0, middle), (Phase.BACKWARD, 0, middle, 1.0)]
    return trial_of(case, [10 * step_s, step_s, step_s], warmup=1, parts=parts)


def test_stored_trials_make_a_profile() -> None:
    counted = counts.in_step(models.load("mlp", "small", 0))
    found = of_trials(counted, [stored(8, 0.3, 0.5), stored(16, 0.4, 0.9)])
    assert found.forward is not None
    assert found.backward is not None
    assert found.forward.at(16) == pytest.approx(0.4)
    assert found.backward.at(8) == pytest.approx(0.5)
