"""The ladder on trials made by hand: the gain of each rung is known, and must be the result."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import pytest

from dpbench.analysis import ladder, statements, summary
from dpbench.analysis.report import Report
from dpbench.cli import tables
from dpbench.records import Case, Phase, Source, Span, Status, Step, Trial, Verified, plan
from dpbench.records.facts import RunFacts
from dpbench.records.schedule import EFFECTS, Schedule
from dpbench.report import devices, figures, markdown, page
from dpbench.report.section import Section
from tests.amounts import amounts
from tests.report_rows import badges
from tests.trials import report_on

GAINS = {
    "reference": 1.0,
    "pool": 1.0,
    "cached": 0.6,
    "local": 0.33,
    "allreduce": 0.45,
    "sharded": 0.4,
}
"""Each rung's step over the reference's: cached gives most by seconds and local by ratio, allreduce
costs, and pool gives nothing.
"""
CASES = plan.ladder(models=["mlp"], devices=[2], batch_sizes=[64])


def factor(case: Case) -> float:
    """Return a case's step in units of the reference's."""
    rivals = {
        "single": 0.5 * case.batch_size / 64,
        "single_all_cores": 0.4,
        "ddp": 0.75,
        "torch_dp": 1.0,
    }
    return rivals[case.strategy] if case.strategy != "dp" else GAINS[case.schedule]


def trial(case: Case, number: int, seconds: float, noise: float) -> Trial:
    """Return a trial whose step is half forward.

    What is beyond 0.3 of the reference's is replicate.
    """
    draw = random.Random(f"{case.fingerprint} {number}")
    steps, spans, at = [], [], 100.0 * number
    for k in range(20):
        one = seconds * draw.lognormvariate(0, noise)
        at += one
        steps.append(Step(one, k < 2, at))
        spans.append(Span(k, Phase.FORWARD, 0, "host", at - one, at - one + min(one, 0.003)))
        spans.append(Span(k, Phase.REPLICATE, 0, "host", at - one + min(one, 0.003), at))
    return Trial(
        case=case, verified=Verified.BITWISE, steps=tuple(steps), spans=tuple(spans), round=number
    )


def trials(
    cases: Sequence[Case] = CASES, *, noise: float = 0.001, drift: Mapping[int, float] | None = None
) -> list[Trial]:
    """Return three rounds of every case, the reference's step being 10 ms."""
    slow = drift or {0: 1.0, 1: 1.0, 2: 1.0}
    return [trial(case, r, 0.01 * factor(case) * slow[r], noise) for case in cases for r in slow]


def climbed(found: Sequence[Trial]) -> ladder.Ladder:
    (one,) = ladder.ladders(summary.rows(found))
    return one


@cache
def plain() -> ladder.Ladder:
    return climbed(trials())


def changes(found: ladder.Ladder) -> dict[str, ladder.RungGain]:
    return {rung.name: rung.change for rung in found.rungs if rung.change}


# ---------------------------------------------------------------- the climb


def test_each_rung_is_compared_with_the_one_before_it_and_the_gains_sum_to_the_whole() -> None:
    found = plain()
    names = [rung.name for rung in found.rungs]
    assert names == [*Schedule]
    assert [change.over for change in changes(found).values()] == names[:-1]
    for name, change in changes(found).items():
        assert change.ratio.value == pytest.approx(GAINS[change.over] / GAINS[name], rel=0.01)
        assert change.gain_s.value == pytest.approx(
            0.01 * (GAINS[change.over] - GAINS[name]), abs=5e-5
        )
        assert change.ratio.low <= change.ratio.value <= change.ratio.high
        assert change.gain_s.low <= change.gain_s.value <= change.gain_s.high
    fallen = sum(change.gain_s.value for change in changes(found).values())
    assert fallen == pytest.approx(found.rungs[0].step.value - found.rungs[-1].step.value)


def test_the_verdict_is_what_the_interval_says() -> None:
    verdicts = {name: change.verdict for name, change in changes(plain()).items()}
    assert verdicts == {
        "pool": "same",
        "cached": "faster",
        "local": "faster",
        "allreduce": "slower",
        "sharded": "faster",
    }
    assert changes(plain())["allreduce"].ratio.high < 1
    assert changes(plain())["allreduce"].gain_s.high < 0
    assert changes(climbed(trials(noise=0.3)))["sharded"].verdict == "undecided"


def test_a_drift_between_rounds_decides_nothing_because_rounds_are_paired() -> None:
    steady, drifting = plain(), climbed(trials(drift={0: 1.0, 1: 1.6, 2: 0.7}))
    for name, change in changes(drifting).items():
        assert change.verdict == changes(steady)[name].verdict, name
        assert change.ratio.high - change.ratio.low < 0.05


def test_the_best_is_the_fastest_without_tolerance() -> None:
    assert plain().fastest.name == "local"


def test_equal_steps_on_all_rungs_are_the_same() -> None:
    level = [trial(case, r, 0.01, 0.0) for case in CASES for r in range(3)]
    assert {change.verdict for change in changes(climbed(level)).values()} == {"same"}


def test_a_rung_without_a_result_is_stepped_over_and_named() -> None:
    good = [t for t in trials() if t.case.schedule != "cached"]
    bad = next(case for case in CASES if case.schedule == "cached")
    found = climbed([*good, Trial(case=bad, status=Status.OOM, reason="full")])
    assert "cached" not in changes(found)
    assert changes(found)["local"].over == "pool"
    assert [row.case.schedule for row in found.lost] == ["cached"]


def test_the_phase_that_shrank_is_named() -> None:
    change = changes(plain())["cached"]
    assert change.phase == "replicate"
    assert change.phase_s == pytest.approx(-0.004, rel=0.05)


def test_rungs_are_compared_with_single_and_ddp_and_the_limit_is_one_devices_share() -> None:
    found = plain()
    pool = found.rungs[1]
    assert pool.row.speedup.value == pytest.approx(0.5 / 1.0, rel=0.01)
    assert pool.row.scaling == "strong"
    assert pool.over_ddp.value == pytest.approx(0.75 / 1.0, rel=0.01)
    assert found.limit.case.batch_size == 32
    assert found.limit.step.value == pytest.approx(0.0025, rel=0.01)


def test_two_schedules_are_no_ladder_and_one_device_has_none() -> None:
    dp = [case for case in CASES if case.schedule in ("reference", "cached")]
    assert ladder.ladders(summary.rows(trials(dp))) == []
    alone = [Case(model="mlp", strategy="dp", batch_size=64, schedule=name) for name in GAINS]
    assert ladder.ladders(summary.rows(trials(alone))) == []


def test_measured_and_predicted_rungs_are_two_ladders() -> None:
    foreseen = [Trial.from_dict(t.to_dict() | {"source": "predicted"}) for t in trials()]
    found = ladder.ladders(summary.rows([*trials(), *foreseen]))
    assert [{rung.row.source for rung in one.rungs} for one in found] in (
        [{Source.MEASURED}, {Source.PREDICTED}],
        [{Source.PREDICTED}, {Source.MEASURED}],
    )


# ---------------------------------------------------------------- emulated devices


@cache
def emulated() -> tuple[summary.Row, ...]:
    cases = plan.ladder(models=["mlp"], devices=[2], batch_sizes=[64], device_kind="emulated")
    return tuple(summary.rows(trials(cases)))


def test_emulated_devices_have_a_ladder_and_no_speed_up() -> None:
    rows = emulated()
    assert all(row.speedup is None and row.efficiency is None for row in rows)
    (found,) = ladder.ladders(rows)
    assert [rung.name for rung in found.rungs] == [*Schedule]
    assert all(rung.over_ddp is None for rung in found.rungs)
    assert found.limit is None
    assert [one.key for one in statements.made(rows, [], RunFacts())] == ["emulated"]
    shown = section(replace(content(), rows=rows, trials=[], ladders=[found]))
    assert shown.labels == ("MEASURED", "EMULATED")
    assert "no speed-up" in shown.tables[0].note


# ---------------------------------------------------------------- what stays in other sections


def test_other_sections_keep_the_ends_of_a_ladder_and_never_the_limit() -> None:
    rows = summary.rows(
        [*trials(), *trials([Case(model="lstm", strategy="single", batch_size=64)])]
    )
    kept = ladder.notable(rows, ladder.ladders(rows))
    assert [row.case.schedule for row in kept if row.case.strategy == "dp"] == [
        "reference",
        "local",
    ]
    assert {row.case.strategy for row in kept} == {"single", "single_all_cores", "dp", "ddp"}
    assert all(row.case.options != plan.LIMIT for row in kept)
    assert len(ladder.notable(rows, [])) == len(rows) - 1


def test_a_limit_is_nobodys_baseline() -> None:
    without = [t for t in trials() if not (t.case.strategy == "single" and t.case.batch_size == 64)]
    assert all(row.speedup is None for row in summary.rows(without))


def test_schedules_stand_in_the_order_of_the_ladder() -> None:
    rows = [row.case.schedule for row in summary.rows(trials()) if row.case.strategy == "dp"]
    assert rows == [*Schedule]


# ---------------------------------------------------------------- what is said and drawn


@cache
def content() -> Report:
    found = trials()
    return replace(
        report_on(found),
        statements=[],
        diagnoses=[],
    )


def test_the_plain_table_names_the_best_rung() -> None:
    lines = tables.table(content().rows, content().ladders).splitlines()
    assert [line.split()[1:4] for line in lines if "best rung" in line] == [
        ["dp[local]", "(best", "rung)"]
    ]
    assert [line.split()[1] for line in lines if "limit" in line] == ["single"]
    assert max(map(len, lines)) < 190


def section(shown: Report) -> Section:
    """Return the section on the ladders of a report."""
    (found,) = [one for one in devices.parts(shown) if one.id == "ladder"]
    return found


def test_the_ladder_is_a_table_of_rungs_with_verdicts_and_what_they_are_compared_with() -> None:
    shown = section(content())
    assert shown.labels == ("MEASURED", "CPU-ONLY")
    (climb,) = shown.tables
    assert [line[0].text.split()[0] for line in climb.lines] == [*Schedule]
    assert [case.schedule for case in climb.cases] == [*Schedule]
    verdicts = {line[0].text.split()[0]: line[1].text for line in climb.lines}
    for name, change in changes(plain()).items():
        assert verdicts[name] == change.verdict
    assert {*verdicts.values()} == {"", "faster", "slower", "same"}
    rounds, ddp, _, _, share, limit = amounts(climb.note)[1:7]
    assert (rounds, ddp, share, limit) == ("3", "7.50 ms", "32", "2.50 ms")


@pytest.mark.slow
def test_the_page_and_the_comment_have_the_ladder_and_other_runs_have_none() -> None:
    text = page.render(content())
    places = [
        text.index(f'<section id="{name}"') for name in ("lanes", "ladder", "phases", "steps")
    ]
    assert places == sorted(places)
    assert len(text.encode()) < 400 * 1024
    heading = re.search(r'<section id="ladder".*?<table', text, re.DOTALL)[0]
    assert badges(heading) == ["MEASURED", "CPU-ONLY"]
    comment = markdown.render(content())
    ladder_of = comment.partition("### The ladder")[2].partition("###")[0]
    assert "`MEASURED` `CPU-ONLY`" in ladder_of
    assert "**mlp ×2, small, batch 64**" in ladder_of
    rungs = [line for line in ladder_of.splitlines() if "<br><sub>" in line]
    for rung, line in zip(Schedule, rungs[: len(Schedule)], strict=True):
        assert line.startswith(f"| {rung}")
        assert EFFECTS.get(rung, "") in line
    other = replace(content(), ladders=[])
    assert '<section id="ladder"' not in page.render(other)
    assert "The ladder" not in markdown.render(other)


def test_other_sections_stay_readable_beside_a_ladder() -> None:
    sections = {s.id: s for s in figures.sections(content())}
    assert [len(sections[name].panels) for name in ("speedup", "steps")] == [1, 1]
    assert "ladder" in sections["speedup"].note, "it has the other schedules"
    phases = re.search(r'<section id="phases".*?</section>', page.render(content()), re.DOTALL)[0]
    shown = [name for name in Schedule if name is not Schedule.REFERENCE]
    assert all(f"dp[{name}]" in phases for name in shown)
