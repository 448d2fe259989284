"""The report's figures: bars, lines, panels and strips, on rows made by hand."""

from __future__ import annotations

import dataclasses
import re

import pytest

from dpbench.records import Case, Source, Status, Trial
from dpbench.report import figures, page, small_multiples, table, timeline
from tests.test_report import colocated_cpu_and_weak, gpu_page, gpu_run, made, many, of_rows, ran, run_of


def test_parts_of_a_bar_sum_to_the_step() -> None:
    row = made(Case(model="mlp", strategy="dp", batch_size=8, devices=2), 0.1)
    assert sum(row.phases.values()) == pytest.approx(row.step.value)
    (panel,) = figures.sections(of_rows([row]))[2].panels
    drawn = r'<path d="M ?([\d.]+) [\d.]+\s+L ?([\d.]+) [\d.]+[^"]*" style="fill:(#[0-9a-f]{6}|none);'
    edges = re.findall(drawn, panel.svg)
    assert len(edges) >= len(row.phases)
    fills = {fill for fill, _ in figures.PHASES.values()}
    width = sum(float(right) - float(left) for left, right, fill in edges[: len(row.phases)] if fill in fills)
    assert width == pytest.approx((420 - 30) / 1.02, abs=0.5)
    said = re.search(r"<desc[^>]*>(.*?)</desc>", panel.svg)[1]
    assert sum(map(float, re.findall(r"([\d.]+) ms", said))) == pytest.approx(100, rel=0.01)
    assert "unattributed" in said


def test_speedup_says_weak_or_strong_and_draws_all_cores_as_a_level() -> None:
    section = figures.sections(of_rows(colocated_cpu_and_weak()))[0]
    strong, weak = section.panels
    assert "Strong scaling: global batch 64" in strong.caption
    assert "Weak scaling: batch 64 per device" in weak.caption
    assert "weak scaling" in weak.title
    for panel in section.panels:
        assert "single, all cores: 1.67×" in panel.svg
        assert "var(--all-cores)" in panel.svg
        assert "ideal: 2× on 2" in panel.svg
    assert "strong" in table.lines(colocated_cpu_and_weak(), [])[2].cells[7].small


def test_a_ladder_of_schedules_keeps_each_line_in_one_panel() -> None:
    rows = [
        made(Case(model="mlp", strategy="dp", schedule=f"rung{i:02}", batch_size=64, devices=n), 0.01 / n, 0.01)
        for i in range(13) for n in (1, 2, 4)
    ]  # fmt: skip
    panels = figures.sections(of_rows(rows))[0].panels
    assert [panel.title for panel in panels] == ["mlp (small), batch 64 (1 of 2)", "mlp (small), batch 64 (2 of 2)"]
    assert sum(panel.svg.count("on 4</text>") for panel in panels) == 13 + 2  # each line's key, and each panel's ideal


@pytest.mark.slow
def test_sixty_cases_stay_readable_and_what_is_left_out_is_said() -> None:
    sections = figures.sections(of_rows(many(60)))
    throughput = sections[1]
    assert [panel.svg.count("/s (") // 2 for panel in throughput.panels] == [10] * 6
    assert not throughput.note
    crowd = [
        dataclasses.replace(row, case=dataclasses.replace(row.case, model=f"m{i:02}")) for i, row in enumerate(many(60))
    ]
    sections = figures.sections(of_rows(crowd))
    assert len(sections[1].panels) == small_multiples.PANELS
    assert sections[1].note == "48 more cases are not drawn; the table shows all cases."


def test_measured_and_predicted_of_one_case_stay_apart() -> None:
    case = Case(model="mlp", strategy="dp", batch_size=64, devices=2, device_kind="cuda")
    seen = made(case, 0.01, 0.01)
    foreseen = dataclasses.replace(made(case, 0.02, 0.01), source=Source.PREDICTED, labels=("PREDICTED",), rounds=1)
    run = run_of(
        seen, foreseen, trials=[*ran(seen), *ran(foreseen), Trial(case=case, status=Status.OOM, reason="full")]
    )
    sections = figures.sections(run)
    assert [len(section.panels) for section in sections] == [1, 1, 1, 2, 1, 1]
    assert sections[0].panels[0].labels == sections[1].panels[0].labels == ("MEASURED", "PREDICTED")
    assert ">PREDICTED dp: 0.500×" in sections[0].panels[0].svg
    assert ">dp: 1.00×" in sections[0].panels[0].svg
    assert sections[4].panels[0].labels == sections[5].panels[0].labels == ("MEASURED",)
    assert [len(line.notes) for line in table.lines(run.rows, run.trials)] == [1, 0]


def test_a_long_name_costs_the_interval_and_never_the_label() -> None:
    rows = [row for row in colocated_cpu_and_weak() if row.case.devices == 2]
    (panel,) = figures.sections(of_rows(rows))[1].panels
    found = re.findall(r">([^<>]*)</text>", panel.svg)
    assert "COLOCATED dp[reference] ×2, batch 64" in found
    assert "3,200/s" in found


def test_warm_up_and_rounds_are_told_apart_in_the_steps() -> None:
    row = made(Case(model="mlp", strategy="dp", batch_size=8), 0.1)
    (panel,) = figures.sections(of_rows([row], ran(row)))[-1].panels
    keys = re.findall(r">([^<>]+)</text>", panel.svg)
    assert {"step", "median", "warm-up", "warm-up, beyond"} <= set(keys)
    assert panel.svg.count("V") >= 3 * 30


def test_gaps_in_the_samples_are_gaps_in_the_strip() -> None:
    series = {("GPU", 0): [(float(t), 1.0) for t in (*range(10), *range(20, 30))]}
    pixels, width = timeline._image(series, [("GPU", 0), ("GPU", 1)])
    assert width == pytest.approx(30)
    assert (pixels[1, :, 3] == 0).all()  # a device that was never read
    drawn = pixels[0, :, 3] > 0
    assert drawn[:66].all()
    assert drawn[140:].all()
    assert not drawn[70:110].any()


def test_drawing_leaves_the_callers_matplotlib_alone() -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    with mpl.rc_context({"lines.linewidth": 9.0, "text.usetex": True, "svg.fonttype": "path"}):
        assert page.render(gpu_run()) == gpu_page()
    assert dict(mpl.rcParams) == before
