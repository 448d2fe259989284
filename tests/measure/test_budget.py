"""The time of a run: what is left, what the rest needs, and what is said if it does not fit."""

from __future__ import annotations

import math
import time
from collections import Counter

from dpbench.measure.budget import OVERHEAD_S, Budget
from dpbench.records import Case, Effort
from tests.trials import trial_of

SINGLE = Case(strategy="single", model="mlp", devices=1, batch_size=64)


def budget(left_s: float, *, settles: bool = False) -> Budget:
    """Return a budget of which this many seconds are left."""
    deadline_s = time.perf_counter() + left_s
    return Budget(
        deadline_s=deadline_s, settle_by_s=deadline_s, settles=settles, effort=Effort(budget_s=1.5)
    )


def after_a_trial(left_s: float, trials: int, seconds: float = 1.8) -> Budget:
    """Return a budget after a trial of this length, with this many trials ahead."""
    found = budget(left_s)
    found.ahead = Counter({SINGLE: trials + 1})
    found.reserved = trials + 1
    found.took([trial_of(SINGLE, [0.0])], seconds)
    return found


def test_a_budget_that_cannot_hold_the_trials_says_so() -> None:
    assert after_a_trial(100.0, 52).shortage() == ""
    assert after_a_trial(math.inf, 10_000, 5.0).shortage() == ""
    assert after_a_trial(-0.1, 0).shortage() == "", "the last trial has spent the budget"
    said = after_a_trial(60.0, 52).shortage()
    assert "52 more trials would take" in said
    assert "of the budget is left" in said
    assert "--budget" in said


def test_the_rest_takes_as_long_as_the_trials_so_far() -> None:
    found = after_a_trial(1000.0, 10, 2.0)
    assert found.remaining_s() == 20.0
    found.took([trial_of(SINGLE, [0.0])], 8.0)
    assert found.remaining_s() == 45.0, "the rest grows where trials get slower"
    assert after_a_trial(3.0, 10, 2.0).remaining_s() <= 3.0, "the budget ends the run"


def test_the_time_left_is_shared_among_the_reserved_trials() -> None:
    found = budget(1000.0)
    found.reserved = 10
    assert found.trial([SINGLE]).budget_s == 1.5, "no more than the effort's"
    found.reserved = 500
    share_s = 0.9 * 1000 / 500 - OVERHEAD_S
    assert 0.99 * share_s < found.trial([SINGLE]).budget_s <= share_s
