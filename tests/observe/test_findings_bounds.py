"""What a finding costs "at most" is at least what each step would save without its cause.

The causes are planted: the truth is the difference to the same loop without them. What the rules on
several devices say is compared with the simulated machine in `tests/simulated/test_report.py`, and
late ranks in `test_arrivals.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from dpbench.analysis import findings, summary
from dpbench.records import Phase, Trial
from dpbench.records.registry import Parallelism
from dpbench.records.resources import Resources
from tests import observed_loops as made
from tests.observed_loops import Group

RANKS = {"devices": 2, "parallelism": Parallelism.RANKS}
ON_A_GPU = {"device_kind": "cuda"}
WITHOUT_LOADER = {"loader_workers": -1}
READING = {"reads": {"train.py:7": 40}}
PAGEABLE = {"pinned": False}
TWICE = {"updates": 2, "synchronized": 1.0}


def with_part(phase: Phase, seconds: float) -> Sequence[Group]:
    device = -1 if phase is Phase.DATA else 0
    return made.with_part(phase, seconds, device)


def step_s(trials: Sequence[Trial]) -> float:
    return statistics.mean(s for trial in trials for s in trial.timed)


@pytest.mark.parametrize("planted_s", [0.003, 0.05])
@pytest.mark.parametrize(
    ("rule", "phase", "kept", "of", "about"),
    [
        ("loading", Phase.DATA, 0.0, {}, {}),
        ("between", Phase.DATA, 0.0, {}, WITHOUT_LOADER),
        ("reads", Phase.READ, 0.0, {}, READING),
        ("pageable", Phase.SCATTER, 0.0, ON_A_GPU, PAGEABLE),
        ("reduction", Phase.REDUCE, 0.0, RANKS, {}),
        # once per update is needed
        ("accumulation", Phase.REDUCE, 0.5, RANKS, TWICE),
    ],
)
def test_a_planted_phase_costs_at_most_what_it_costs(
    rule: str,
    phase: Phase,
    kept: float,
    planted_s: float,
    of: dict[str, Any],
    about: dict[str, Any],
) -> None:
    """`kept` is the share of the phase that no remedy saves."""
    case = made.case(**of)
    slow = made.loop(with_part(phase, planted_s), case, **about)
    fast = made.loop(with_part(phase, kept * planted_s), case, **about)
    truth_s = step_s(slow) - step_s(fast)
    assert truth_s == pytest.approx((1 - kept) * planted_s, rel=0.02)
    found = sizes(slow)
    # where few bytes move in a long time, the rule and its remedy are others
    assert found.get(rule, found.get(f"{rule} of few bytes", 0.0)) >= 0.99 * truth_s


def test_a_gpu_that_is_idle_costs_at_most_its_idle_time() -> None:
    """The GPU works for 4 ms of each step."""
    case = made.case(**ON_A_GPU)
    loop = made.loop(of=case, busy={0: 0.004})
    waits_s = sum(s for group in made.PLAIN for p, _, s in group if p in WAITS)
    assert sizes(loop)["launches"] >= 0.99 * (step_s(loop) - 0.004 - waits_s)


WAITS = (Phase.DATA, Phase.SCATTER, Phase.READ)


def test_skipped_updates_cost_at_most_the_steps_that_they_waste() -> None:
    loop = made.loop(skipped_updates=26)
    steps = sum(len(trial.steps) for trial in loop)
    assert sizes(loop)["skipped updates"] >= 0.99 * step_s(loop) * 26 / steps


def sizes(trials: Sequence[Trial]) -> dict[str, float]:
    """Return the seconds per step that each finding costs at most."""
    (diagnosis,) = findings.diagnose(summary.rows(trials), trials, Resources(cores=8))
    return {
        one.rule.key: one.evidence.size_s.value for one in diagnosis.findings if one.evidence.size_s
    }
