"""Marks: which case and which text an artist of a drawing has in the SVG."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from dpbench.records import Case, Source, words
from dpbench.report import marks, naming, speedup, svg
from dpbench.report.section import Panel
from tests.amounts import amounts
from tests.report_rows import HOSTILE, colocated_cpu_and_weak, made, many

ROWS = [
    made(Case(model="mlp", strategy="dp", schedule=f"r{i}", batch_size=8), 0.1 / (i + 1))
    for i in range(5)
]


def parsed(panel: Panel) -> ElementTree.Element:
    return ElementTree.fromstring(panel.svg)


def bars() -> ElementTree.Element:
    """Draw a bar with a whisker for each of `ROWS`, as the sections do."""
    names = [f"dp[r{number}] ×1" for number in range(len(ROWS))]
    with svg.theme():
        figure, axes, tops = svg.lanes(
            names, ["12/s"] * len(ROWS), [38] * len(ROWS), cases=[row.case for row in ROWS]
        )
        for number, (row, name, top) in enumerate(zip(ROWS, names, tops, strict=True)):
            rate = row.throughput
            with marks.in_lane(axes, number):
                bar = svg.bar(axes, (0, rate.value), (top + 18.5, 11), facecolor="#00ff00")
                marks.explain(bar, f"{name}: {words.number(rate.value)} samples per second")
                svg.whisker(axes, top + 24, rate.value, (rate.low, rate.high), 1e9)
        axes.set(xlabel="samples per second", xlim=(0, 2 * ROWS[-1].throughput.value))
        return ElementTree.fromstring(svg.render(figure, key="k", title="t", description="d"))


def test_each_lane_has_its_name_its_value_its_bar_and_its_whisker() -> None:
    root = bars()
    lanes = root.get("data-lanes").split()
    assert lanes == [f"{naming.case_id(row.case)}:38" for row in ROWS]
    for number, row in enumerate(ROWS):
        groups = [group for group in root.iter("g") if group.get("data-lane") == str(number)]
        texts = [text.text for group in groups for text in group.iter("text")]
        assert texts == [f"dp[r{number}] ×1", "12/s"]
        (bar,) = (group for group in groups if group.get("data-bar") is not None)
        rate = words.number(row.throughput.value)
        assert bar.find("title").text == f"dp[r{number}] ×1: {rate} samples per second"
        top, bottom = 4 + 38 * number, 4 + 38 * (number + 1)
        drawn = [path.get("d") for group in groups for path in group.findall("path")]
        places = [float(y) for d in drawn for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", d)]
        assert places
        assert all(top <= y <= bottom for y in places)
        assert len(groups) == 5, (
            "a name, a value, a bar, and a whisker, which has a line and two caps"
        )


def test_axes_and_legends_belong_to_no_lane() -> None:
    root = bars()
    free = {text.text for text in root.iter("text")}
    free -= {
        text.text
        for group in root.iter("g")
        if group.get("data-lane")
        for text in group.iter("text")
    }
    assert "samples per second" in free
    assert "0" in free


def test_what_is_drawn_in_no_lane_belongs_to_none() -> None:
    with svg.theme():
        figure, axes, tops = svg.lanes(
            ["a", "b"], ["", ""], [30, 30], cases=[ROWS[0].case, ROWS[1].case]
        )
        axes.vlines(
            [1, 1], [tops[0] + 5, tops[1] + 5], [tops[0] + 25, tops[1] + 25], color="#ff0000"
        )
        with marks.in_lane(axes, 1):
            axes.plot([0, 1], [tops[1] + 10, tops[1] + 20], color="#00ff00")
        root = ElementTree.fromstring(svg.render(figure, key="k", title="t", description="d"))
    red = [path for path in root.iter("path") if path.get("stroke") == "#ff0000"]
    assert len(red) == 2
    owned = [
        path for group in root.iter("g") if group.get("data-lane") for path in group.iter("path")
    ]
    assert not [path for path in red if path in owned]
    green = [
        group.get("data-lane")
        for group in root.iter("g")
        for path in group.findall("path")
        if path.get("stroke") == "#00ff00"
    ]
    assert green == ["1"]


def test_a_line_of_speed_ups_and_its_legend_have_the_cases_of_its_points() -> None:
    with svg.theme():
        panels = speedup.section(many(9)).panels
    assert panels
    for panel in panels:
        root = parsed(panel)
        own = {naming.case_id(case) for case in panel.cases}
        named = [
            set(group.get("data-cases").split())
            for group in root.iter("g")
            if group.get("data-cases")
        ]
        assert set.union(*named) <= own
        legend = [
            text.text
            for group in root.iter("g")
            if group.get("data-cases")
            for text in group.iter("text")
        ]
        assert legend == [text.text for text in root.iter("text") if "dp[" in (text.text or "")]
    with svg.theme():
        strong, _ = speedup.section(colocated_cpu_and_weak()).panels
    said = [title.text for group in parsed(strong).iter("g") for title in group.findall("title")]
    numbers = {name: amounts(rest) for name, _, rest in (one.partition(": ") for one in said)}
    assert numbers["dp ×2"] == ["1.43×", "1.39", "1.47", "3", "90"], "rounds, and steps"
    assert numbers["single_all_cores"] == ["1.67×", "1.62", "1.72", "3", "90"]


def test_a_text_on_a_mark_stays_text() -> None:
    with svg.theme():
        figure, axes, _ = svg.lanes(["a"], [""], [30])
        (bar,) = axes.barh(20, 1)
        marks.explain(bar, HOSTILE + '"\x00\ud800')
        text = svg.render(figure, key="k", title="t", description="d")
    assert "<script" not in text
    assert [title.text for title in ElementTree.fromstring(text).iter("title")] == [
        "t",
        HOSTILE + '"',
    ]


def test_a_figure_without_cases_has_no_lanes() -> None:
    with svg.theme():
        figure, _, _ = svg.lanes(["a"], ["1"], [30])
        text = svg.render(figure, key="k", title="t", description="d")
    assert "data-" not in text


def test_a_mark_of_a_prediction_does_not_speak_of_rounds() -> None:
    assert naming.basis(ROWS[0]) == "3 rounds with 90 steps"
    assert (
        naming.basis(made(ROWS[0].case, 0.1, source=Source.PREDICTED)) == "predicted, 80% interval"
    )
