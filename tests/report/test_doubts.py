"""Estimates in doubt are exported, but no report, headline, axis or verdict shows them."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dpbench.analysis import findings, imbalance, ladder, stats, summary
from dpbench.analysis.answer import answers
from dpbench.analysis.decision import Choice
from dpbench.analysis.findings import text
from dpbench.analysis.report import Report
from dpbench.cli import tables
from dpbench.records import Case, Phase, Sample, Source, Span, Step, Trial, Verified
from dpbench.records import words as explained
from dpbench.records.estimate import Doubt
from dpbench.records.resources import Resources
from dpbench.report import devices, figures, markdown, page
from tests import exported
from tests.amounts import amounts
from tests.trials import BUSY, report_on

SINGLE = Case(model="mlp", strategy="single", batch_size=64)
DP = replace(SINGLE, strategy="dp", schedule="reference", devices=2)
DDP = replace(DP, strategy="ddp", schedule="")
OUTLIER = 50.0


def rounds(
    case: Case, step_s: float, factors: tuple[float, ...] = (1.0, 1.01, 0.99)
) -> list[Trial]:
    """Return a trial per factor: its steps take `step_s` times the factor, half in forward."""
    return [_round(case, step_s * factor, number) for number, factor in enumerate(factors)]


def _round(case: Case, step_s: float, number: int) -> Trial:
    steps = tuple(Step(step_s, k == 0, 100 * (k + 1.0)) for k in range(11))
    spans = tuple(
        Span(k, Phase.FORWARD, 0, "host", s.start_s, s.start_s + step_s / 2)
        for k, s in enumerate(steps)
    )
    busy = tuple(
        Sample(s.end_s, d, "busy_s", step_s * (1 + (d == 0)))
        for s in steps
        for d in range(case.devices)
    )
    return Trial(
        case=case, round=number, verified=Verified.BITWISE, steps=steps, spans=spans, samples=busy
    )


def content(*groups: list[Trial]) -> Report:
    return report_on([trial for group in groups for trial in group])


SOUND = content(rounds(SINGLE, 0.03), rounds(DP, 0.02), rounds(DDP, 0.016))
STEPS_S = {SINGLE: 0.03, DP: 0.02, DDP: 0.016}
DOUBTFUL = {
    "one outlying round": content(
        rounds(SINGLE, 0.03),
        rounds(DP, 0.02, (1.0, OUTLIER, 1.01)),
        rounds(DDP, 0.016, (1.0, OUTLIER, 1.01)),
    ),
    "two rounds": content(*(rounds(case, s, (1.0, 1.01)) for case, s in STEPS_S.items())),
    "one round": content(*(rounds(case, s, (1.0,)) for case, s in STEPS_S.items())),
}
NOISY = content(
    *([replace(one, provenance=BUSY) for one in rounds(case, s)] for case, s in STEPS_S.items())
)


def terminal(shown: Report) -> str:
    said = [answer.text for answer in shown.answers]
    return "\n".join(
        [*said, tables.table(shown.rows, shown.ladders), *shown.notes, *map(str, shown.statements)]
    )


def test_three_sound_rounds_are_shown_in_full() -> None:
    for rendered in (
        terminal(SOUND),
        page.render(SOUND),
        markdown.render(SOUND),
    ):
        assert "not enough rounds" not in rendered
        assert "1.50" in rendered  # the speed-up of dp
    panels = {section.id: len(section.panels) for section in figures.sections(SOUND)}
    assert panels["lanes"] == panels["speedup"] == 1


@pytest.mark.parametrize("name", DOUBTFUL)
def test_what_is_in_doubt_is_in_no_headline_and_on_no_axis(name: str) -> None:
    shown = DOUBTFUL[name]
    (dp,) = [row for row in shown.rows if row.case == DP]
    assert dp.step.doubt
    assert dp.speedup.doubt
    (answer,) = shown.answers
    assert "×" not in answer.headline
    assert answer.headline.startswith("cannot tell: ")
    assert answer.command.startswith("dpbench run ")
    sections = {section.id: section for section in figures.sections(shown)}
    assert sections["speedup"].panels == []
    assert amounts(sections["speedup"].note) == ["2"], "cases that are not drawn"
    assert "not enough rounds" in sections["speedup"].note


def test_of_noisy_rounds_no_report_says_that_more_of_them_would_be_enough() -> None:
    (dp,) = [row for row in NOISY.rows if row.case == DP]
    assert dp.speedup.doubt is Doubt.NOISY
    sections = {section.id: section for section in figures.sections(NOISY)}
    explained = " ".join(text.render(NOISY.diagnoses, NOISY.rows).split())
    for said in (
        sections["speedup"].note,
        explained.lower(),
        terminal(NOISY),
        markdown.render(NOISY),
        page.render(NOISY),
    ):
        assert "not enough quiet rounds" in said
        assert "not enough rounds" not in said


@pytest.mark.parametrize("name", DOUBTFUL)
def test_every_report_says_so_in_the_place_of_the_number_and_what_would_help(name: str) -> None:
    shown = DOUBTFUL[name]
    (line,) = [
        line for line in tables.table(shown.rows).splitlines() if re.match(r"mlp +dp ", line)
    ]
    assert line.count("~") >= 2
    assert not re.search(r"\d–\d", line)
    for rendered in (terminal(shown), page.render(shown), markdown.render(shown)):
        assert "not enough rounds" in rendered
        assert "--rounds N, or --rounds auto" in rendered
    explained = " ".join(text.render(shown.diagnoses, shown.rows).split())
    assert "Not enough rounds" in explained
    assert "--rounds N, or --rounds auto" in explained
    assert "of the step" not in explained.partition("Sizes are")[0]


def test_a_step_of_which_one_round_is_far_off_is_marked() -> None:
    """One of three rounds is off by orders of magnitude."""
    shown = content(rounds(SINGLE, 0.0142), rounds(DP, 0.02146, (1.0, 4e3, 1e-3)))
    (line,) = [
        line for line in tables.table(shown.rows).splitlines() if re.match(r"mlp +dp ", line)
    ]
    assert [cell[0] for cell in re.split(r"  +", line)[4:7]] == ["~", "~", "~"]


def test_a_sound_step_without_a_sound_speed_up_is_still_shown() -> None:
    shown = content(rounds(SINGLE, 0.03, (1.0, OUTLIER, 1.01)), rounds(DP, 0.02))
    (dp,) = [row for row in shown.rows if row.case == DP]
    assert dp.step.doubt is None
    assert dp.speedup.doubt
    (answer,) = shown.answers
    assert "perfect scaling" not in answer.text


def test_exports_keep_the_numbers_and_say_that_reports_withhold_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    dpbench = exported.command(tmp_path, monkeypatch, capfd)
    exported.stored(
        tmp_path / "dpbench.db", *rounds(SINGLE, 0.03), *rounds(DP, 0.02, (1.0, OUTLIER, 1.01))
    )
    single, dp = csv.DictReader(dpbench("export", "csv")[1].splitlines())
    assert (single["step_withheld"], single["speedup_withheld"]) == ("", "")
    assert dp["step_withheld"] == dp["speedup_withheld"] == "interval too wide"
    assert float(dp["step_value"]) == pytest.approx(0.0202)
    assert float(dp["step_high"]) > 4 * float(dp["step_low"])
    assert dp["imbalance_busy_time_first_withheld"] == ""


def test_compare_says_why_a_ratio_is_not_shown_and_calls_it_undecided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    dpbench = exported.command(tmp_path, monkeypatch, capfd)
    exported.stored(tmp_path / "a.db", *rounds(SINGLE, 0.03, (1.0, 1.0)))
    exported.stored(tmp_path / "b.db", *rounds(SINGLE, 0.09, (1.0, 1.0)))
    code, out, _ = dpbench("compare", "a.db", "b.db")
    assert code == 3
    [line] = exported.compared(out)
    (one,) = json.loads(dpbench("compare", "a.db", "b.db", "--json")[1])["cases"]
    assert one["ratio"]["withheld"] == Doubt.ROUNDS
    assert amounts(one["reason"]) == ["2", "3"]
    assert one["reason"] in " ".join(out.split())
    assert line.startswith("undecided ")
    assert not re.search(r"\d\.\d+x", out)


def test_verdicts_of_what_is_in_doubt_are_undecided() -> None:
    from dpbench.records.estimate import Estimate

    for estimate in (
        Estimate(1.0, 1.0, 1.0, 2),
        Estimate(5.0, 4.9, 5.1, 2),
        Estimate(5.0, 4.9, 5.1, 9, noisy=True),
    ):
        assert estimate.doubt
        assert stats.verdict(estimate) == "undecided"


def test_an_interval_that_is_too_wide_to_be_shown_decides() -> None:
    from dpbench.records.estimate import Estimate

    wide = Estimate(0.3, 0.1, 0.86, 9)
    assert wide.doubt
    assert stats.verdict(wide) == "slower"
    assert explained.times(wide) == "between 0.100× and 0.860×"


def test_an_imbalance_in_doubt_decides_nothing() -> None:
    trials = [*rounds(DP, 0.02, (1.0, 1.01)), *rounds(DDP, 0.02)]
    busy = next(
        one for one in imbalance.indexes(trials) if one.case == DP and one.quantity == "busy time"
    )
    assert busy.verdict == "undecided: not enough rounds"
    assert "not enough rounds" in markdown.render(content(trials))


def test_a_prediction_is_shown_although_it_has_no_rounds() -> None:
    def predicted(case: Case, step_s: float) -> Trial:
        stated = {"interval_80_s": [step_s / 3, step_s * 3]}
        return Trial(
            case=case,
            source=Source.PREDICTED,
            steps=(Step(step_s, False, step_s),),
            provenance=stated,
        )

    rows = summary.rows([predicted(SINGLE, 0.03), predicted(DP, 0.02)])
    assert [row.step.n for row in rows if row.step] == [0, 0]
    assert [row.step.doubt for row in rows if row.step] == [None, None]
    assert "not enough rounds" not in tables.table(rows)
    (answer,) = answers(rows, Resources())
    assert "1.50×" in answer.headline


def test_a_ladder_draws_no_rung_in_doubt_and_crowns_none() -> None:
    def rung(
        name: str, step_s: float, factors: tuple[float, ...] = (1.0, 1.01, 0.99)
    ) -> list[Trial]:
        return rounds(replace(DP, schedule=name), step_s, factors)

    # the cached rung has the least median, from rounds that differ too much
    shown = content(
        rounds(SINGLE, 0.03),
        rung("reference", 0.02),
        rung("pool", 0.015),
        rung("cached", 0.001, (1.0, OUTLIER, 1.01)),
    )
    (found,) = shown.ladders
    assert found.fastest.name == "pool"
    (climb,) = next(one.tables for one in devices.parts(shown) if one.id == "ladder")
    (cached,) = [line for line in climb.lines if line[0].text == "cached"]
    assert [cell.text[0] for cell in cached[2:5]] == ["~"] * 3
    assert "~: uncertain" in markdown.render(shown)


def test_findings_in_doubt_are_named_and_not_sized() -> None:
    bigger = replace(DP, batch_size=128)
    shown = content(
        rounds(SINGLE, 0.03), rounds(DP, 0.02), rounds(bigger, 0.03, (1.0, OUTLIER, 1.01))
    )
    diagnosis = next(one for one in shown.diagnoses if one.row.case == DP)
    assert isinstance(diagnosis, findings.Diagnosis)
    assert "bigger batch" not in [finding.rule.key for finding in diagnosis.findings]
    (said,) = (one for one in diagnosis.unjudged if amounts(one) == ["128"])
    assert "not enough rounds" in said
    assert ladder.ladders(shown.rows) == []


def test_weak_scaling_is_named_beside_a_speed_up_that_is_shown() -> None:
    shown = content(rounds(SINGLE, 0.02), rounds(replace(DP, batch_size=128), 0.03))
    (line,) = [
        line for line in tables.table(shown.rows).splitlines() if re.match(r"mlp +dp ", line)
    ]
    assert "1.33× weak" in line
    (answer,) = shown.answers
    assert (answer.choice, answer.row.case.devices) == (Choice.USE, 2)
    assert answer.row.speedup.value == pytest.approx(4 / 3, rel=0.01)
    assert amounts(answer.headline)[:2] == ["2", "1.33×"]
    assert answer.headline.endswith(", weak scaling")


def test_the_page_and_the_documents_describe_one_kind_of_interval() -> None:
    documents = " ".join((Path(__file__).parents[2] / "docs" / "measuring.md").read_text().split())
    assert explained.INTERVALS in page.render(SOUND).replace("&#39;", "'")
    for clause in explained.INTERVALS.removesuffix(".").split("; "):
        assert clause.replace("95%", "95 %").partition(", which")[0] in documents
    assert "percentile" not in documents
