"""Arrivals: who is last at a reduction, for how long the others wait, and what it costs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dpbench.analysis import arrivals, findings, summary
from dpbench.measure import merging
from dpbench.observe import imported
from dpbench.records import Phase, Span, Step, Trial
from dpbench.records.facts import TrialHost, stated
from dpbench.records.observed import Observed
from dpbench.records.registry import Parallelism
from dpbench.records.resources import Resources
from dpbench.records.trial import joined
from tests import observed_loops as made
from tests.amounts import amounts
from tests.observe.test_imported import rank_of

RANKS = made.case(devices=2, parallelism=Parallelism.RANKS)


def rank(device: int, arrives: tuple[float, ...], *, steps: int = 4) -> Trial:
    """Return a rank's steps of 100 ms; each reduction takes 5 ms after rank 1, at 0.03 and 0.08."""
    spans = []
    for number in range(steps):
        begin = 0.1 * number
        for at, end in zip(arrives, (0.035, 0.085), strict=False):
            backward = Span(number, Phase.BACKWARD, device, "host", begin + end - 0.03, begin + end)
            reduce = Span(number, Phase.REDUCE, device, "host", begin + at, begin + end)
            spans += [backward, reduce]
    series = tuple(Step(0.1, number == 0, 0.1 * (number + 1)) for number in range(steps))
    return Trial(case=RANKS, steps=series, spans=tuple(spans))


FIRST, LAST = (0.02, 0.06), (0.03, 0.08)


def test_each_rank_waits_for_the_last_one_in_each_reduction() -> None:
    merged = merging.merge([rank(0, FIRST), rank(1, LAST)])
    found = arrivals.of_trial(merged.summary())
    assert [one.step for one in found] == [0, 0, 1, 1, 2, 2]
    for number, one in enumerate(found):
        assert one.waits_s == pytest.approx((0.02 if number % 2 else 0.01, 0.0))
        assert one.last == 1
    assert arrivals.waiting(merged) == pytest.approx([0.03] * 3), "rank 0 waits at both"
    short = replace(merged, steps=tuple(replace(one, seconds=0.01) for one in merged.steps))
    assert arrivals.waiting(short) == [0.01] * 3, "no wait is longer than its step"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("late_ms", [20, 100])
def test_what_a_late_rank_costs_at_most_is_what_its_lateness_costs(
    late_ms: float, ranks: int
) -> None:
    """Without its lateness, each step would be as much shorter: backward takes 10 ms elsewhere."""
    late_s = late_ms / 1e3
    step_s = 0.03 + late_s
    parts = []
    for device in range(ranks):
        own_s = 0.01 + late_s * (device == 1)
        spans = []
        for number in range(12):
            begin_s = step_s * number
            reduces = begin_s + own_s, begin_s + 0.013 + late_s
            spans += [
                Span(number, Phase.BACKWARD, device, "host", begin_s, reduces[1]),
                Span(number, Phase.REDUCE, device, "host", *reduces),
            ]
        steps = tuple(Step(step_s, number == 0, step_s * (number + 1)) for number in range(12))
        case = replace(RANKS, devices=ranks)
        loop = stated(loop=Observed(command="python train.py", reads={}))
        parts.append(Trial(case=case, steps=steps, spans=tuple(spans), provenance=loop))
    merged = merging.merge(parts)
    found = _sizes(merged)
    assert next(iter(found)) == "late rank", "the reduction is not the first"
    assert found["late rank"] == pytest.approx(late_s)
    assert found["reduction"] == pytest.approx(0.003), "waiting is no part of it"


def test_ranks_that_are_late_in_turn_within_a_step_cost_the_sum_of_their_waits() -> None:
    """Rank 0 is late by 10 ms at the first reduction, and rank 1 by 20 ms at the second."""
    merged = merging.merge([rank(0, (0.03, 0.06)), rank(1, (0.02, 0.08))])
    assert arrivals.waiting(merged) == pytest.approx([0.03] * 3)


def _sizes(trial: Trial) -> dict[str, float]:
    """Return the seconds that each finding costs at most, the first finding first."""
    (diagnosis,) = findings.diagnose(summary.rows([trial]), [trial], Resources())
    return {
        one.rule.key: one.evidence.size_s.value for one in diagnosis.findings if one.evidence.size_s
    }


def test_the_reductions_of_one_step_are_each_cut_at_their_own_last_rank() -> None:
    _, spans = joined([rank(0, FIRST), rank(1, LAST)])
    first = [span for span in spans if span.device == 0 and span.step == 1]
    cut = [(span.phase, round(span.start_s - 0.1, 6), round(span.end_s - 0.1, 6)) for span in first]
    assert cut == [
        (Phase.BACKWARD, 0.005, 0.02),
        (Phase.REDUCE, 0.03, 0.035),
        (Phase.BACKWARD, 0.055, 0.06),
        (Phase.REDUCE, 0.08, 0.085),
    ]


def test_reductions_that_some_ranks_hide_are_not_matched() -> None:
    parts = [rank(0, FIRST), rank(1, LAST[:1])]
    assert arrivals.of_trial(merging.merge(parts)) == ()
    _, spans = joined(parts)
    uncut = [span.start_s for span in spans if span.device == 0 and span.phase is Phase.REDUCE]
    assert uncut[:2] == pytest.approx(FIRST)


def test_ranks_of_several_machines_have_several_clocks() -> None:
    hosts = [TrialHost(name=name, machine=name, ranks=(n,)) for n, name in enumerate("ab")]
    merged = merging.merge([rank(0, FIRST), rank(1, LAST)], hosts)
    assert arrivals.of_trial(merged) == ()


def test_a_late_rank_is_found_and_named() -> None:
    merged = merging.merge([rank(0, FIRST, steps=12), rank(1, LAST, steps=12)])
    (diagnosis,) = findings.diagnose(summary.rows([merged]), [merged], Resources())
    (found,) = [one for one in diagnosis.findings if one.rule.key == "late rank"]
    assert amounts(found.evidence.says) == ["1"]
    assert amounts(found.evidence.numbers) == ["1", "22", "22", "30.0 ms", "0", "30.0 ms", "1"]
    assert found.evidence.size_s is not None
    assert found.evidence.size_s.value == pytest.approx(0.03)
    together = merging.merge([rank(0, LAST, steps=12), rank(1, LAST, steps=12)])
    (diagnosis,) = findings.diagnose(summary.rows([together]), [together], Resources())
    assert not {one.rule.key for one in diagnosis.findings} & {"late rank", "late in turn"}


def waiting_ranks(waits_s: Sequence[tuple[float, ...]]) -> Trial:
    """Return a trial whose ranks wait this long in each step of 100 ms, after a warm-up step."""
    ranks = len(waits_s[0])
    parts = []
    for device in range(ranks):
        spans = []
        for number, waits in enumerate([waits_s[0], *waits_s]):
            end_s = 0.1 * number + 0.09
            arrives_s = end_s - 0.001 - waits[device]
            spans += [
                Span(number, Phase.BACKWARD, device, "host", end_s - 0.08, end_s),
                Span(number, Phase.REDUCE, device, "host", arrives_s, end_s),
            ]
        steps = tuple(
            Step(0.1, number == 0, 0.1 * (number + 1)) for number in range(len(waits_s) + 1)
        )
        case = replace(RANKS, devices=ranks)
        parts.append(Trial(case=case, steps=steps, spans=tuple(spans)))
    return merging.merge(parts)


@pytest.mark.parametrize(
    ("waits_s", "key", "named"),
    [
        ([(0.03, 0.0)], "late rank", ["1"]),
        ([(0.03, 0.0)] * 9 + [(0.0, 0.03)], "late rank", ["1"]),
        ([(0.03, 0.0), (0.0, 0.03)], "late in turn", []),
        ([(0.03, 0.0)] * 6 + [(0.0, 0.03)] * 4, "late in turn", []),
        ([(0.03, 0.0, 0.0)], "late rank", ["1", "2"]),
        ([(0.03, 0.02, 0.0), (0.02, 0.03, 0.0)], "late rank", ["2"]),
        ([(0.03, 0.0, 0.0, 0.0, 0.0)], "late rank", ["4"]),  # how many they are
        ([(0.03, 0.0, 0.02), (0.0, 0.02, 0.03), (0.02, 0.03, 0.0)], "late in turn", []),
    ],
)
def test_the_whole_wait_is_for_late_ranks_or_in_turn(
    waits_s: list[tuple[float, ...]], key: str, named: list[str]
) -> None:
    trial = waiting_ranks(waits_s * (60 // len(waits_s)))
    (diagnosis,) = findings.diagnose(summary.rows([trial]), [trial], Resources())
    (found,) = [one for one in diagnosis.findings if one.rule.key.startswith("late ")]
    assert found.rule.key == key
    assert amounts(found.evidence.says) == named
    assert found.evidence.size_s is not None
    assert found.evidence.size_s.value == pytest.approx(0.03)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_with_equal_work_are_not_called_late(ranks: int) -> None:
    """Their lateness is random; the wait is found in each trial."""
    generator = random.Random(1)
    for _ in range(10):
        late_s = [[generator.expovariate(100) for _ in range(ranks)] for _ in range(40)]
        trial = waiting_ranks([tuple(max(step) - one for one in step) for step in late_s])
        assert {"late rank", "late in turn"} & {*_sizes(trial)} == {"late in turn"}


def test_clocks_that_disagree_make_no_wait_longer_than_its_step() -> None:
    collectives = [(0.3, 0.0), (0.0, 0.5)] * 20
    trial = waiting_ranks(collectives)
    short = replace(trial, steps=tuple(replace(one, seconds=0.1) for one in trial.steps))
    order = arrivals.Order.of(arrivals.of_trial(short))
    assert order.apart(short)[:2] == [-0.1, 0.1]
    assert arrivals.waiting(short)[:2] == [0.1, 0.1]


def test_the_ranks_of_aligned_traces_wait_in_each_bucket(tmp_path) -> None:
    paths = rank_of(tmp_path, 0), rank_of(tmp_path, 1, late_ms=15, skew_ms=2345.678)
    (loop,) = imported.load(paths)
    found = arrivals.of_trial(loop.trial)
    assert len(found) == len(loop.trial.timed) == 3
    for one in found:
        assert one.waits_s == pytest.approx((0.015, 0.0), abs=1e-5)
    (alone,) = imported.load(paths[:1])
    assert arrivals.of_trial(alone.trial) == ()


def test_exposed_parts_of_different_reductions_on_gpus_keep_their_times() -> None:
    """Rank 0 hides its second reduction, and rank 1 its first one."""
    spans = [
        Span(0, Phase.REDUCE, device, "cuda_event", start_s, start_s + 0.01)
        for device, start_s in ((0, 0.02), (1, 0.06))
    ]
    series = (Step(0.1, False, 0.1),)
    _, found = joined([Trial(case=RANKS, steps=series, spans=(one,)) for one in spans])
    assert [*found] == spans
