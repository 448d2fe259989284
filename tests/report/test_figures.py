"""The report's figures: bars, lines, panels and strips, on rows made by hand."""

from __future__ import annotations

import dataclasses
import re
from itertools import combinations

import pytest

from dpbench.records import Case, Phase, Source, Status, Step, Trial
from dpbench.records.estimate import Estimate
from dpbench.report import figures, page, small_multiples, speedup, svg, swim_lanes, table, timeline
from tests.amounts import amounts
from tests.report_rows import (
    colocated_cpu_and_weak,
    gpu_page,
    gpu_run,
    made,
    many,
    of_rows,
    part,
    ran,
    run_of,
    spread,
)


def test_speedup_says_weak_or_strong_and_names_all_cores() -> None:
    section = part(of_rows(colocated_cpu_and_weak()), "speedup")
    strong, weak = section.panels
    assert "Strong scaling: global batch 64" in strong.svg
    assert "batch 64" in strong.title
    assert amounts(weak.caption)[0] == "64", "the batch on each device"
    assert "weak scaling" in weak.title
    for panel in section.panels:
        assert "single_all_cores: 1.67×" in panel.svg
        assert "var(--all-cores)" in panel.svg
        assert "ideal: the number of devices" in panel.svg
    speedups = [
        column.cell(row).text
        for column in table.COLUMNS
        for row in colocated_cpu_and_weak()
        if column.heading == "speed-up"
    ]
    assert [text for text in speedups if "weak" in text] == ["0.833× weak"]


def test_from_three_numbers_of_devices_on_speedups_are_lines_and_all_cores_a_level() -> None:
    case = Case(model="mlp", strategy="dp", batch_size=64)
    rows = [made(dataclasses.replace(case, devices=n), 0.01 / n, 0.01) for n in (1, 2, 4)]
    rows.append(made(dataclasses.replace(case, strategy="single_all_cores"), 0.006, 0.01))
    (few,) = part(of_rows([rows[0], rows[1], rows[3]]), "speedup").panels
    assert {"dp ×1", "dp ×2", "single_all_cores"} <= set(re.findall(r">([^<>]+)</text>", few.svg))
    assert len(few.svg.partition('data-lanes="')[2].partition('"')[0].split()) == 3
    (panel,) = part(of_rows(rows), "speedup").panels
    assert "data-lane" not in panel.svg
    assert {"ideal: 4× on 4", "single_all_cores: 1.67× (1.62–1.72)"} <= set(
        re.findall(r">([^<>]+)</text>", panel.svg)
    )


def test_a_ladder_of_schedules_keeps_each_line_in_one_panel() -> None:
    rows = [
        made(
            Case(model="mlp", strategy="dp", schedule=f"rung{i:02}", batch_size=64, devices=n),
            0.01 / n,
            0.01,
        )
        for i in range(13)
        for n in (1, 2, 4)
    ]
    panels = part(of_rows(rows), "speedup").panels
    assert [amounts(panel.title) for panel in panels] == [["64", "1", "2"], ["64", "2", "2"]]
    # each line's key, and each panel's ideal
    assert sum(panel.svg.count("on 4</text>") for panel in panels) == 13 + 2


def test_sixty_cases_stay_readable_and_what_is_left_out_is_said() -> None:
    facets, note = small_multiples.split(many(60), per=12)
    assert [len(facet.rows) for facet in facets] == [10] * 6
    assert not note
    crowd = [
        dataclasses.replace(row, case=dataclasses.replace(row.case, model=f"m{i:02}"))
        for i, row in enumerate(many(60))
    ]
    facets, note = small_multiples.split(crowd, per=12)
    assert len(facets) == small_multiples.PANELS
    assert amounts(note) == ["54"], "cases that are not drawn"


def test_measured_and_predicted_of_one_case_stay_apart() -> None:
    case = Case(model="mlp", strategy="dp", batch_size=64, devices=2, device_kind="cuda")
    seen = made(case, 0.01, 0.01)
    foreseen = dataclasses.replace(
        made(case, 0.02, 0.01), source=Source.PREDICTED, labels=("PREDICTED",), rounds=1
    )
    lost = Trial(case=case, status=Status.OOM, reason="full")
    run = run_of(seen, foreseen, trials=[*ran(seen, spans=True), *ran(foreseen, spans=True), lost])
    sections = {section.id: section.panels for section in figures.sections(run)}
    assert {name: len(panels) for name, panels in sections.items()} == {
        "lanes": 1,
        "speedup": 1,
        "steps": 1,
        "utilisation": 1,
    }
    for name in ("lanes", "speedup"):
        assert sections[name][0].labels == ("MEASURED", "PREDICTED")
    assert ">[PREDICTED] dp ×2</text>" in sections["speedup"][0].svg
    assert ">dp ×2</text>" in sections["speedup"][0].svg
    assert sections["steps"][0].labels == sections["utilisation"][0].labels == ("MEASURED",)
    assert [len(line.notes) for line in table.all_cases(run).lines] == [1, 0]


def test_a_long_name_costs_the_interval_and_never_the_label() -> None:
    name = "COLOCATED dp[allreduce] ×2, batch 64"
    with svg.theme():
        figure, _, _ = svg.lanes([name], ["3,200/s (3,100–3,300)"], [38])
        drawn = svg.render(figure, key="k", title="t", description="d")
    found = re.findall(r">([^<>]*)</text>", drawn)
    assert name in found
    assert "3,200/s" in found


def test_a_box_of_a_round_has_its_quartiles_its_median_and_dots_at_its_outliers() -> None:
    row = made(Case(model="mlp", strategy="dp", batch_size=8), 0.1)
    seconds = [0.08, 0.09, 0.1, 0.11, 0.12, 0.2]
    steps = tuple(Step(one, False, float(i)) for i, one in enumerate(seconds))
    (panel,) = part(of_rows([row], [Trial(case=row.case, steps=steps)]), "steps").panels
    box = re.search(
        r'data-bar=""><title>([^<]*)</title><path d="M ([\d.]+) [\d.]+ L ([\d.]+)', panel.svg
    )
    assert amounts(box[1]) == ["1", "1", "105 ms", "6"], "devices, round, median, timed steps"
    (dot,) = re.findall(r'<use[^>]*x="([\d.]+)"[^>]*fill="var\(--dp\)', panel.svg)
    scale = (float(box[3]) - float(box[2])) / (117.5 - 92.5)
    assert (float(dot) - float(box[2])) / scale == pytest.approx(200 - 92.5, rel=0.01)
    keys = re.findall(r">([^<>]+)</text>", panel.svg)
    assert {"half of a round's steps", "outlier", "median, 95%", "beyond the axis"} <= set(keys)


def test_gaps_in_the_samples_are_gaps_in_the_strip() -> None:
    series = {("GPU", 0): [(float(t), 1.0) for t in (*range(10), *range(20, 30))]}
    pixels, width = timeline._image(series, [("GPU", 0), ("GPU", 1)])
    assert width == pytest.approx(30)
    assert (pixels[1, :, 3] == 0).all()  # a device that was never read
    drawn = pixels[0, :, 3] > 0
    assert drawn[:66].all()
    assert drawn[140:].all()
    assert not drawn[70:110].any()


SHARMA = (
    ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
    ((50, 2.8361, -74.02), (50, 0, -82.7485), 3.4412),
    ((50, -1.3802, -84.2814), (50, 0, -82.7485), 1.0),
    ((50, 0, 0), (50, -1, 2), 2.3669),
    ((50, 2.49, -0.001), (50, -2.49, 0.0009), 7.1792),
    ((50, -0.001, 2.49), (50, 0.0009, -2.49), 4.8045),
    ((50, 2.5, 0), (73, 25, -18), 27.1492),
    ((50, 2.5, 0), (56, -27, -3), 31.9030),
    ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    ((2.0776, 0.0795, -1.135), (0.9033, -0.0636, -0.5514), 0.9082),
)
"""Pairs of colours in CIELAB with their published difference: Sharma, Wu and Dalal, "The CIEDE2000
color-difference formula", Color Research and Application 30 (2005), table 1.
"""
MACHADO_RED = (0.152286, 0.114503, -0.003882)
"""Pure red, in linear sRGB, as a reader with protanopia sees it: the first column of the matrix of
Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color vision
deficiency" (2009).
"""


def test_the_colours_of_phases_differ_in_normal_vision_and_under_three_deficiencies() -> None:
    colour = pytest.importorskip("coloraide", reason="coloraide is not installed").Color
    for one, other, difference in SHARMA:
        found = colour("lab-d65", one).delta_e(colour("lab-d65", other), method="2000")
        assert found == pytest.approx(difference, abs=5e-5)
    red = colour("srgb-linear", (1, 0, 0)).filter("protan", method="machado").coords()
    assert red == pytest.approx(MACHADO_RED, abs=1e-5)
    fills = {name: colour(look.fill) for name, look in svg.PHASES.items()}
    assert len(fills) == len(Phase) == 11
    views = {"normal vision": fills}
    for lost in ("protan", "deutan", "tritan"):
        for method in ("machado", "brettel"):
            views[f"{lost}, {method}"] = {
                n: c.filter(lost, method=method) for n, c in fills.items()
            }
    # any two phases can be neighbours in a lane or in a legend
    close = [
        (view, one, other, seen[one].delta_e(seen[other], method="2000"))
        for view, seen in views.items()
        for one, other in combinations(seen, 2)
    ]
    assert [pair for pair in close if pair[3] < 10] == []


def test_the_lanes_take_the_colours_of_phases_from_one_table() -> None:
    row = made(Case(model="mlp", strategy="dp", batch_size=64, devices=2, device_kind="cuda"), 0.01)
    row = dataclasses.replace(
        row, phases=dict.fromkeys(("data", "clip", "read"), 0.0002) | row.phases
    )
    run = run_of(row, trials=ran(row, spans=True))
    with svg.theme():
        (panel,) = swim_lanes.section(run, [row]).panels
    for phase in Phase:
        assert f'fill="{svg.PHASES[phase].fill}"' in panel.svg, phase


def test_a_wide_interval_does_not_rule_the_axis_and_ends_in_an_arrow() -> None:
    """The axis of a chart with whiskers ends at four times the largest value."""
    steady = made(Case(model="mlp", strategy="ddp", batch_size=64, devices=2), 0.01, 0.01)
    wild = Estimate(6400.0, 1600.0, 6400.0 * 40, 0)  # a prediction is never in doubt
    row = dataclasses.replace(
        made(Case(model="mlp", strategy="dp", batch_size=64, devices=2), 0.01, 0.01),
        throughput=wild,
        speedup=Estimate(2.0, 0.5, 80.0, 0),
    )
    assert svg.extent([wild, spread(6400.0)]) == 4 * 6400
    assert svg.extent([spread(6400.0)]) == pytest.approx(6400 * 1.03)
    with svg.theme():
        lines = speedup.section([steady, row]).panels[0].svg
    assert {"0", "2", "4", "6", "8"} <= set(re.findall(r">(\d+)</text>", lines))
    assert not re.findall(r">(\d\d+)</text>", lines)
    assert max(float(x) for x in re.findall(r"[ML] (-?[\d.]+)", lines)) <= 420


def test_a_round_ends_with_an_arrow_where_steps_are_beyond_the_axis() -> None:
    row = made(Case(model="mlp", strategy="dp", batch_size=8), 0.1)
    steady = ran(row)
    end = steady[0].steps[-1].end_s
    late = dataclasses.replace(steady[0], steps=(*steady[0].steps, Step(9.0, False, end + 9)))
    (calm,) = part(of_rows([row], steady), "steps").panels
    (panel,) = part(of_rows([row], [late, *steady[1:]]), "steps").panels
    assert calm.caption == "All timed steps."
    assert amounts(panel.caption) == ["1", "1", "91", "9,000 ms"], "devices, beyond the axis"
    ticks = [float(tick) for tick in re.findall(r">(\d+)</text>", panel.svg)]
    assert 200 < max(ticks) <= 420


@pytest.mark.slow
def test_drawing_leaves_the_callers_matplotlib_alone() -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    with mpl.rc_context({"lines.linewidth": 9.0, "text.usetex": True, "svg.fonttype": "path"}):
        assert page.render(gpu_run()) == gpu_page()
    assert dict(mpl.rcParams) == before
