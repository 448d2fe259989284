"""The gate: its rule on simulated pairs, and the whole path on a step that does twice the work."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from dpbench.records.environment import Environment, forbidding
from dpbench.records.facts import RunFacts
from tests import environments

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "scripts"))

import gate  # noqa: E402
import gate_tries  # noqa: E402


def simulated(slowdown: float, seed: int, wall: float = 0.21, cpu: float = 0.035) -> gate.Answer:
    """Return the rule's answer if the log ratios of pairs spread by `wall` and `cpu`."""
    draw = np.random.default_rng(seed)
    level = gate.ALPHA / (len(gate.CASES) * len(gate.LOOKS) * len(gate.TIMES))
    found = {
        name: np.exp(np.log1p(slowdown) + spread * draw.standard_normal(gate.LOOKS[-1]))
        for name, spread in (("wall_s", wall), ("cpu_s", cpu))
    }
    for pairs in gate.LOOKS:
        one = gate.judge(
            "case", {name: ratios[:pairs] for name, ratios in found.items()}, 0.05, level
        )
        if one.answer is not gate.Answer.UNKNOWN:
            return one.answer
    return gate.Answer.UNKNOWN


def share(answer: gate.Answer, slowdown: float, **spread: float) -> float:
    return sum(simulated(slowdown, seed, **spread) is answer for seed in range(300)) / 300


def test_an_unchanged_case_is_rarely_slower() -> None:
    assert share(gate.Answer.SLOWER, 0.0) <= 0.05 / len(gate.CASES)
    assert share(gate.Answer.NOT_SLOWER, 0.0) >= 0.9


@pytest.mark.slow
def test_five_percent_are_found_and_never_missed() -> None:
    assert share(gate.Answer.SLOWER, 0.05) >= 0.9
    assert share(gate.Answer.NOT_SLOWER, 0.05) <= 0.05 / len(gate.CASES)


@pytest.mark.slow
def test_noise_gives_no_answer() -> None:
    assert share(gate.Answer.UNKNOWN, 0.02, cpu=0.21) >= 0.9


def test_the_whole_answer_is_that_of_the_worst_case() -> None:
    one = gate.judge("a", {name: [2.0, 2.1, 2.05] for name in gate.TIMES}, 0.05, 0.01)
    other = gate.judge("b", {name: [1.0, 1.001, 0.999] for name in gate.TIMES}, 0.05, 0.01)
    assert (one.answer, other.answer) == (gate.Answer.SLOWER, gate.Answer.NOT_SLOWER)
    assert gate.whole([other, one]) is gate.Answer.SLOWER
    assert gate.whole([other]) is gate.Answer.NOT_SLOWER


@pytest.mark.parametrize("name", environments.FORBIDS)
def test_sides_in_unlike_environments_are_not_compared(name: str) -> None:
    base = Environment.of(RunFacts.of(environments.FACTS))
    gate.refuse_unlike(base, base)
    with pytest.raises(SystemExit, match=f"{environments.TOLD[name]}: "):
        gate.refuse_unlike(base, Environment.of(RunFacts.of(environments.facts(name))))


def test_a_side_tells_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with gate.server(ROOT) as usual, monkeypatch.context() as patch:
        patch.setenv("NCCL_P2P_DISABLE", "1")
        with gate.server(ROOT) as other:
            (found,) = forbidding(usual.environment, other.environment)
    assert found.after == "NCCL_P2P_DISABLE=1"
    assert usual.environment.torch


def test_planted_work_is_found_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "LOOKS", (3,))
    monkeypatch.setattr(gate, "ALPHA", 0.5)
    with gate.tree_of("HEAD") as base, gate.tree_of("HEAD") as head:
        gate_tries.plant(head, 2.0)
        (found,) = gate.decide(base, head, cases=["mlp local"], seconds=300, margin=0.05)
    assert found.answer is gate.Answer.SLOWER
    assert found.ratio > 1.5
