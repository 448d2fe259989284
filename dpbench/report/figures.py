"""Figures: the panels on throughput and phases, and the list of all sections with drawings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from dpbench.analysis.ladder import notable
from dpbench.analysis.report import Report
from dpbench.analysis.summary import Row
from dpbench.records import UNATTRIBUTED, Phase, words
from dpbench.report import heatmap, naming, small_multiples, speedup, svg, timeline, waterfall
from dpbench.report.svg import Panel, Section

PHASES: Mapping[str, tuple[str, str]] = {
    Phase.SCATTER: ("#f0e442", "#000000"),
    Phase.REPLICATE: ("#e69f00", "#000000"),
    Phase.FORWARD: ("#56b4e9", "#000000"),
    Phase.GATHER: ("#cc79a7", "#000000"),
    Phase.LOSS: ("#bbbbbb", "#000000"),
    Phase.BACKWARD: ("#0072b2", "#ffffff"),
    Phase.REDUCE: ("#d55e00", "#000000"),
    Phase.OPTIMIZER: ("#009e73", "#000000"),
    UNATTRIBUTED: ("none", svg.FOREGROUND),
}
"""The fill of each phase and the colour of text on this fill; unattributed time is not filled."""

ENDS = "Only the reference and the best rung of each ladder are drawn; the table below has the other schedules."


def sections(report: Report) -> list[Section]:
    """Return every section with drawings, in the order of the page.

    For each ladder, the sections on the ladder and on phases show all rungs; the other sections show only the lowest
    rung, the best one, and the schedule that TrainStep chose.
    """
    ladders, drawable = report.ladders, notable(report.rows, report.ladders)
    climbed = {row.case for row in (*drawable, *(rung.row for found in ladders for rung in found.rungs))}
    with svg.theme():
        drawn = [
            speedup.section(drawable), throughput(drawable),
            phases([row for row in report.rows if row.case in climbed]),
            timeline.imbalance(drawable), heatmap.utilisation(drawable, report.trials),
            timeline.steps(drawable, report.trials),
        ]  # fmt: skip
        if not ladders:
            return drawn
        said = [one if one.id == "phases" else replace(one, note=f"{one.note} {ENDS}".strip()) for one in drawn]
        return [said[0], waterfall.section(ladders), *said[1:]]


def throughput(rows: Sequence[Row]) -> Section:
    """Draw samples per second, one bar per case."""
    panels, left_out = small_multiples.split([row for row in rows if naming.drawable(row.throughput)], per=12)
    left_out = " ".join(filter(None, (left_out, naming.withheld(row.throughput for row in rows))))
    return Section(
        "throughput", "Throughput", "Samples per second; longer is better. Whiskers are 95% intervals.",
        [_throughput(facet, f"throughput{i}") for i, facet in enumerate(panels)],
        left_out or ("" if panels else "No case was measured."),
    )  # fmt: skip


def _throughput(facet: small_multiples.Facet, key: str) -> Panel:
    found = [row.throughput for row in facet.rows if row.throughput]
    values = [f"{words.number(e.value)}/s ({words.interval(e)})" for e in found]
    figure, axes, tops = svg.lanes(facet.names, values, [38] * len(values))
    for row, e, y in zip(facet.rows, found, (top + 24 for top in tops), strict=True):
        colour = svg.colour(row.case)
        face = "none" if "PREDICTED" in row.labels else colour
        axes.barh(y, e.value, height=11, facecolor=face, edgecolor=colour, linewidth=1.2)
        whisker = ([e.value - e.low], [e.high - e.value])
        axes.errorbar([e.value], [y], xerr=whisker, color=svg.FOREGROUND, capsize=3.5, linewidth=1.2)
    axes.set(xlim=(0, max(e.high for e in found) * 1.03), xlabel="samples per second")
    svg.amounts(axes.xaxis)
    said = "; ".join(f"{name}: {value}" for name, value in zip(facet.names, values, strict=True))
    drawing = svg.render(figure, key=key, title=f"Throughput: {facet.title}", description=said)
    return Panel(facet.title, drawing, naming.rounds(facet.rows), facet.labels)


def phases(rows: Sequence[Row]) -> Section:
    """Draw the time of each phase of a step; the parts of a bar add up to the step."""
    drawn = [row for row in rows if row.phases and row.step and naming.drawable(row.step)]
    panels, left_out = small_multiples.split(drawn, per=16)  # a whole ladder on one axis
    left_out = " ".join(filter(None, (left_out, naming.withheld(row.step for row in rows if row.phases))))
    return Section(
        "phases", "Step time by phase",
        "Milliseconds of one step by phase. The ledger walks back from the end of the step, so that the phases add up "
        "to the step. Hollow parts are time outside all phases.",
        [_phases(facet, f"phases{i}") for i, facet in enumerate(panels)],
        left_out or ("" if panels else "No case has phases."),
    )  # fmt: skip


def _phases(facet: small_multiples.Facet, key: str) -> Panel:
    present = [name for name in PHASES if any(name in row.phases for row in facet.rows)]
    values = [f"{words.number(row.step.value * 1e3)} ms" if row.step else "" for row in facet.rows]
    figure, axes, tops = svg.lanes(facet.names, values, [40] * len(values), keys=-(-len(present) // 3))
    widest = max(sum(row.phases.values()) for row in facet.rows) * 1e3
    for row, top in zip(facet.rows, tops, strict=True):
        _stack(axes, row, present, top + 26, widest)
    axes.set(xlim=(0, widest * 1.02), xlabel="milliseconds of one step")
    svg.amounts(axes.xaxis)
    svg.legend(figure, [_key(name) for name in present], 3)
    said = "; ".join(
        f"{name}: " + ", ".join(f"{phase} {words.number(seconds * 1e3)} ms" for phase, seconds in row.phases.items())
        for name, row in zip(facet.names, facet.rows, strict=True)
    )
    drawing = svg.render(figure, key=key, title=f"Step time by phase: {facet.title}", description=said)
    return Panel(facet.title, drawing, "Each bar is the median step; its parts add up to it.", facet.labels)


def _stack(axes: Axes, row: Row, present: Sequence[str], y: float, widest: float) -> None:
    """Draw the phases of one case next to each other, with their names if they fit."""
    left = 0.0
    for name in present:
        width = row.phases.get(name, 0.0) * 1e3
        fill, ink = PHASES[name]
        hollow = name == UNATTRIBUTED
        axes.barh(
            y, width, left=left, height=16, facecolor=fill, edgecolor=svg.FOREGROUND, linewidth=0.6,
            linestyle=(0, (2, 1.5)) if hollow else "-",
        )  # fmt: skip
        # a letter of the widest common sans-serif font takes 7 units at this size
        if width / widest * svg.WIDTH * 0.93 > 7 * len(name):
            axes.text(left + width / 2, y + 4, name, ha="center", color=ink, fontsize=svg.SMALL)
        left += width


def _key(name: str) -> Patch:
    hollow = name == UNATTRIBUTED
    return Patch(
        facecolor=PHASES[name][0], edgecolor=svg.FOREGROUND, linewidth=0.6, linestyle=(0, (2, 1.5)) if hollow else "-",
        label=str(name),
    )  # fmt: skip
