"""Judge: the rule on simulated pairs, whose true ratio is known."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dpbench.gating.judge import LOOKS, Answer, Finding, Pair, Taken, look, whole
from dpbench.gating.sides import Block

LIMIT = 0.05
GIGABYTE = 10**9


def pairs(
    seed: int,
    *,
    wall: float = 1.0,
    cpu: float = 1.0,
    memory: float = 1.0,
    wall_spread: float = 0.03,
    cpu_spread: float = 0.03,
) -> list[Pair]:
    """Return as many pairs as the rule takes at most, with these ratios of head to base.

    The logarithms of the pairs' ratios spread by the last two arguments, and the blocks of a side
    by a part of them.
    """
    draw = np.random.default_rng(seed)

    def side(wall_s: float, cpu_s: float, memory_bytes: float) -> Taken:
        blocks = [
            Block(
                wall_s * np.exp(wall_spread / 3 * draw.standard_normal()),
                cpu_s * np.exp(cpu_spread / 3 * draw.standard_normal()),
                int(memory_bytes),
            )
            for _ in range(4)
        ]
        return Taken(blocks)

    def one() -> Pair:
        walls, cpus = (
            np.exp(spread * draw.standard_normal()) for spread in (wall_spread, cpu_spread)
        )
        return Pair(
            side(0.01, 0.01, GIGABYTE),
            side(0.01 * wall * walls, 0.01 * cpu * cpus, memory * GIGABYTE),
        )

    return [one() for _ in range(LOOKS[-1])]


def decided(taken: list[Pair]) -> Finding:
    """Return the finding of the first look that has an answer, or of the last one."""
    for number in LOOKS:
        last = number == LOOKS[-1]
        found = look("step", taken[:number], limit=LIMIT, works=1, last=last)
        if found.answer is not Answer.UNKNOWN:
            break
    return found


def answers(tries: int, **ratios: float) -> Counter[Answer]:
    return Counter(decided(pairs(seed, **ratios)).answer for seed in range(tries))


def test_an_unchanged_step_is_not_slower() -> None:
    found = answers(30)
    assert found[Answer.SLOWER] <= 1  # reports/gate-alarms has the rate
    assert found[Answer.NOT_SLOWER] >= 29


def test_a_slower_step_is_found_and_never_missed() -> None:
    assert answers(20, wall=1.1, cpu=1.1) == {Answer.SLOWER: 20}


def test_a_change_below_the_limit_is_accepted() -> None:
    assert answers(10, wall=1.03, cpu=1.03, wall_spread=0.01) == {Answer.NOT_SLOWER: 10}


def test_a_faster_step_is_not_slower() -> None:
    assert answers(10, wall=0.8, cpu=0.8) == {Answer.NOT_SLOWER: 10}


def test_waiting_that_costs_no_cpu_time_is_never_accepted() -> None:
    # the wall times spread so much that CPU time alone would decide
    found = answers(20, wall=1.2, cpu=1.0, wall_spread=0.25, cpu_spread=0.01)
    assert found[Answer.NOT_SLOWER] == 0


def test_a_faster_step_that_uses_more_cores_is_not_slower() -> None:
    found = answers(20, wall=0.8, cpu=2.0, wall_spread=0.1)
    assert found[Answer.SLOWER] == 0


def test_a_step_that_only_uses_more_cores_is_not_slower() -> None:
    ratios = {"wall": 1.0, "cpu": 1.3, "wall_spread": 0.3, "cpu_spread": 0.02}
    taken = [pairs(seed, **ratios) for seed in range(40)]
    found = [look("step", one, limit=LIMIT, works=1, last=True) for one in taken]
    assert not any(one.by_cpu for one in found)


def test_cpu_time_decides_nothing_below_the_limit() -> None:
    taken = pairs(0, wall=1.03, cpu=1.08, wall_spread=0.15, cpu_spread=0.01)
    for number in LOOKS:
        found = look("step", taken[:number], limit=LIMIT, works=1, last=True)
        assert found.answer is not Answer.SLOWER or found.wall.value >= 1 + LIMIT


def test_cpu_time_says_slower_where_the_wall_time_says_nothing() -> None:
    found = decided(pairs(0, wall=1.1, cpu=1.1, wall_spread=0.4, cpu_spread=0.02))
    assert found.answer is Answer.SLOWER
    assert found.by_cpu


def test_noise_gives_no_answer() -> None:
    found = answers(10, wall=1.02, cpu=1.02, wall_spread=0.3, cpu_spread=0.3)
    assert found == {Answer.UNKNOWN: 10}


@pytest.mark.parametrize(("memory", "more"), [(1.0, False), (1.03, False), (1.12, True)])
def test_memory_has_the_same_limit(memory: float, more: bool) -> None:
    found = decided(pairs(0, memory=memory))
    assert found.more_memory is more
    assert found.worse is more


def test_between_the_planned_looks_there_is_no_answer() -> None:
    taken = pairs(0, wall=2.0, cpu=2.0, memory=2.0)
    for number in range(1, LOOKS[-1] + 1):
        found = look("step", taken[:number], limit=LIMIT, works=1)
        if number not in LOOKS:
            assert found.answer is Answer.UNKNOWN
            assert not found.worse
    assert found.worse


@pytest.mark.parametrize(("batches", "ready"), [(167, 0), (40, 6), (0, 0)])
def test_batches_that_were_fetched_before_give_no_answer(batches: int, ready: int) -> None:
    found = _fed(batches, ready)
    assert found.answer is Answer.UNKNOWN
    assert "8" in found.reason


@pytest.mark.parametrize(("batches", "ready"), [(168, 0), (42, 6), (0, 8)])
def test_enough_batches_show_a_slower_loader(batches: int, ready: int) -> None:
    found = _fed(batches, ready)
    assert found.answer is Answer.NOT_SLOWER
    assert not found.reason


def test_a_slower_step_is_one_whatever_was_fetched_before() -> None:
    assert _fed(0, 0, wall=1.5, cpu=1.5).answer is Answer.SLOWER


def _fed(batches: int, ready: int, **ratios: float) -> Finding:
    """Return the finding on heads with 8 batches ahead, after blocks with these batches."""
    before = Block(0.01, 0.01, batches=batches, ahead=8, ready=ready)
    fed = [Pair(one.base, replace(one.head, draining=[before])) for one in pairs(0, **ratios)]
    return decided(fed)


def test_more_works_need_more_evidence() -> None:
    alone, among = (look("step", pairs(0)[:9], limit=LIMIT, works=works) for works in (1, 8))
    assert among.wall.low < alone.wall.low < alone.wall.high < among.wall.high


def test_the_whole_answer_is_that_of_the_worst_step() -> None:
    slower, same, unknown = (
        decided(pairs(0, **ratios))
        for ratios in (
            {"wall": 1.5, "cpu": 1.5},
            {"wall": 1.0},
            {"wall_spread": 0.5, "cpu_spread": 0.5},
        )
    )
    assert whole([same, slower, unknown]) is Answer.SLOWER
    assert whole([same, unknown]) is Answer.UNKNOWN
    assert whole([same]) is Answer.NOT_SLOWER
