"""Figures: the sections on throughput, phases, ladders and commits, and the list of sections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from dpbench.analysis.history import History
from dpbench.analysis.ladder import Ladder, Rung, RungGain, notable
from dpbench.analysis.report import Report
from dpbench.analysis.summary import Row
from dpbench.records import words
from dpbench.records.registry import Role
from dpbench.report import (
    loaders,
    marks,
    naming,
    small_multiples,
    speedup,
    svg,
    swim_lanes,
    table,
    timeline,
)
from dpbench.report.svg import Panel, Section
from dpbench.store import PAST

NAMED = 4
"""Above this number of commits, a panel names only the first and the last on its axis."""
COLOURS = {"faster": svg.GAIN, "slower": svg.LOSS}
"""The colour of a bar by the verdict on its change; bars with other verdicts are grey."""
BEYOND = 1.5
"""The lines of `ddp` and of the limit are drawn up to this multiple of the slowest rung's time.

A line farther to the right would make all bars short. If `ddp` has no line, the caption states its
step time.
"""
ENDS = (
    "Of each ladder, only the rung `reference`, the best rung and the schedule that TrainStep"
    " selected are drawn; the table below has the other schedules."
)


def over_commits(report: Report) -> Section | None:
    """Return the section on the history of the cases; None if no case has enough commits."""
    by_case = {history.case: history for history in report.histories}
    if not by_case:
        return None
    rows = [row for row in small_multiples.order(report.rows) if row.case in by_case]
    cases = list(dict.fromkeys(row.case for row in rows))
    histories = [by_case[case] for case in cases[: small_multiples.PANELS]]
    with svg.theme():
        panels = [_commits_panel(history, f"history{i}") for i, history in enumerate(histories)]
    left_out = len(cases) - len(panels)
    more = (
        f"{words.count(left_out, 'more case')} {words.verb(left_out, 'is', 'are')} not drawn."
        if left_out
        else ""
    )
    blind = (
        "Changes are not detected, because asv is not installed."
        if histories[0].levels is None
        else ""
    )
    return Section(
        "history",
        "History",
        "The step time of each commit in the store, in the order of the commits' first runs, on"
        " this machine and with this version of torch. Whiskers are 95% intervals. A horizontal"
        " line is a level. A new level begins at a change that asv detects if the intervals on"
        " both sides of the change do not overlap. Runs at different times also differ in the"
        " state of the machine. Runs with uncommitted changes, and step times of too few rounds,"
        f" are left out. Of each case, the last {PAST} runs in the store are read.",
        panels,
        " ".join(filter(None, (more, blind))),
    )


def _commits_panel(history: History, key: str) -> Panel:
    points = history.points
    end = svg.extent(point.step for point in points) * 1e3
    figure, axes = svg.canvas(190, left=44, bottom=44, top=24)
    axes.set(xlim=(-0.6, len(points) - 0.4), ylim=(0, end * 1.06), xlabel="commit")
    axes.text(0, 1.05, "milliseconds of one step", transform=axes.transAxes, fontsize=svg.SMALL)
    colour = svg.colour(history.case)
    for level in history.levels or ():
        height = level.seconds * 1e3
        (line,) = axes.plot(
            [level.first - 0.4, level.end - 0.6], [height, height], color=svg.MUTED, linewidth=2.4
        )
        first, last = points[level.first].commit, points[level.end - 1].commit
        marks.explain(
            line, f"level from {first} to {last}: {words.time(level.seconds)}", [history.case]
        )
    for place, point in enumerate(points):
        step = point.step
        svg.whisker(
            axes,
            place,
            step.value * 1e3,
            (step.low * 1e3, step.high * 1e3),
            end,
            upright=True,
            colour=colour,
        )
        (dot,) = axes.plot([place], [step.value * 1e3], "o", color=colour, markersize=5.5)
        runs = (
            f"{words.verb(len(point.runs), 'run', 'runs')}"
            f" {', '.join(run[:12] for run in point.runs)}"
        )
        marks.explain(
            dot,
            f"{point.commit}: {words.ms(step)}, {words.count(step.n, 'round')} of {runs}",
            [history.case],
        )
    places = range(len(points)) if len(points) <= NAMED else (0, len(points) - 1)
    axes.set_xticks([*places], [points[place].commit for place in places])
    svg.amounts(axes.yaxis)
    axes.grid(axis="y")
    name = naming.clip(history.case.label, 90)
    description = "; ".join(f"{point.commit}: {words.ms(point.step)}" for point in points)
    drawing = svg.render(figure, key=key, title=f"History: {name}", description=description)
    return Panel(name, drawing, _commits_caption(history), history.labels, cases=[history.case])


def _commits_caption(history: History) -> str:
    sentences = [f"{words.count(len(history.points), 'commit')}."]
    levels = history.levels or ()
    for before, after in pairwise(levels):
        change = after.seconds / before.seconds - 1
        way = "longer" if change > 0 else "shorter"
        commit = history.points[after.first].commit
        sentences.append(
            f"From commit {commit} on, the step is {words.percent(abs(change))} {way}."
        )
    if history.levels is not None and len(levels) == 1:
        sentences.append("No change is detected.")
    return naming.plain(" ".join(sentences))


def ladder_section(ladders: Sequence[Ladder]) -> Section:
    """Return the section on ladders, with a panel and tables for each ladder."""
    panels = [
        _panel(ladder, f"ladder{i}") for i, ladder in enumerate(ladders[: small_multiples.PANELS])
    ]
    left_out = len(ladders) - len(panels)
    ladders_ = f"{words.count(left_out, 'more ladder')} {words.verb(left_out, 'is', 'are')}"
    note = f"{ladders_} not drawn; the table has all schedules." if left_out else ""
    return Section("ladder", table.TITLE, table.LEAD, panels, note)


def _panel(ladder: Ladder, key: str) -> Panel:
    names = [_name(rung) for rung in ladder.rungs]
    values = [words.times(r.change.ratio) if r.change else words.ms(r.step) for r in ladder.rungs]
    handles = list(_handles(ladder))
    figure, axes, tops = svg.lanes(
        names,
        values,
        [36] * len(names),
        keys=-(-len(handles) // 2),
        cases=[rung.row.case for rung in ladder.rungs],
    )
    steps = {rung.name: rung.step.value * 1e3 for rung in ladder.rungs if not rung.step.doubt}
    drawn_rungs = [
        (rung, top) for rung, top in zip(ladder.rungs, tops, strict=True) if _drawable(rung, steps)
    ]
    rivals = _rivals(ladder)
    longest = max([0.0, *steps.values(), *(milliseconds for _, milliseconds, _ in rivals)])
    ends = [_bar(axes, rung, steps, top + 25, svg.FARTHEST * longest) for rung, top in drawn_rungs]
    for _, milliseconds, look in rivals:
        # leave gaps for the text above the bars
        axes.vlines(
            [milliseconds] * len(tops),
            [top + 16 for top in tops],
            [top + 35 for top in tops],
            **look,
        )
    most = max([longest, *ends])
    axes.set(xlim=(0, most * 1.04 or 1), xlabel="milliseconds of one step")
    svg.amounts(axes.xaxis)
    svg.legend(figure, handles, 2)
    description = "; ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
    drawing = svg.render(
        figure, key=key, title=f"The ladder: {table.title(ladder)}", description=description
    )
    return Panel(
        table.title(ladder),
        drawing,
        _caption(ladder),
        naming.labels(ladder.rows),
        [table.climb(ladder)],
        [row.case for row in ladder.rows],
    )


def _drawable(rung: Rung, steps: dict[str, float]) -> bool:
    """Return whether none of the estimates that a rung's bar shows is in doubt.

    `steps` has the step times by rung in milliseconds, except for those in doubt.
    """
    over = rung.change is None or (rung.change.over in steps and not rung.change.ratio.doubt)
    return rung.name in steps and over


def _name(rung: Rung) -> str:
    """Return a rung's name with its change and verdict, which the colours alone would not tell."""
    if not rung.change or rung.change.ratio.doubt or rung.change.gain_s.doubt:
        return rung.name
    return (
        f"{rung.name}: {words.signed(-rung.change.gain_s.value * 1e3)} ms,"
        f" {table.VERDICTS[rung.change.verdict]}"
    )


def _bar(axes: Axes, rung: Rung, steps: dict[str, float], y: float, farthest: float) -> float:
    """Draw a rung's bar at height `y`, and return its whisker's end, at most `farthest`, in ms.

    The bar of the lowest rung is its step time, and that of another rung the difference from the
    rung below it. `steps` has the step times of rungs in milliseconds.
    """
    if rung.change is None:
        (bar,) = axes.barh(
            y, steps[rung.name], height=13, facecolor=svg.MUTED, edgecolor=svg.MUTED, alpha=0.55
        )
        low = rung.step.low * 1e3
        high = rung.step.high * 1e3
        end = steps[rung.name]
    else:
        start = steps[rung.change.over]
        gain = rung.change.gain_s
        colour = _colour(rung.change)
        alpha = 0.9 if rung.change.verdict in COLOURS else 0.55
        end = start - gain.value * 1e3
        low = max(0.0, start - gain.high * 1e3)  # a step time is not negative
        high = start - gain.low * 1e3
        (bar,) = axes.barh(
            y, end - start, left=start, height=13, facecolor=colour, edgecolor=colour, alpha=alpha
        )
        axes.plot([start, start], [y - 9, y + 9], color=svg.FOREGROUND, linewidth=0.9)
        axes.plot([0, min(end, start)], [y, y], color=svg.GRID, linewidth=1.0, zorder=0.5)
    over = f", {words.times(rung.change.ratio)} over {rung.change.over}" if rung.change else ""
    marks.explain(
        bar, f"{_name(rung)}: a step takes {words.ms(rung.step)}{over}, {naming.basis(rung.row)}"
    )
    svg.whisker(axes, y, min(max(end, low), high), (low, high), farthest)
    return min(high, farthest)


def _colour(change: RungGain) -> str:
    return COLOURS.get(change.verdict, svg.MUTED)


def _rivals(ladder: Ladder) -> list[tuple[str, float, dict[str, Any]]]:
    """Return the lines of `ddp` and of the limit up to `BEYOND`, as (name, milliseconds, style).

    The limit is the step time of `single` with one device's share of the batch.
    """
    slowest = max((rung.step.value for rung in ladder.rungs if not rung.step.doubt), default=0.0)
    looks = (
        ("ddp", ladder.ddp, {"color": svg.ROLES[Role.CONTROL], "linestyle": (0, (5, 2))}),
        ("limit", ladder.limit, {"color": svg.ROLES[Role.BASELINE], "linestyle": (0, (1.5, 1.5))}),
    )
    return [
        (name, row.step.value * 1e3, {**look, "linewidth": 1.6})
        for name, row, look in looks
        if row and row.step and not row.step.doubt and row.step.value <= BEYOND * slowest
    ]


def _handles(ladder: Ladder) -> Iterator[Patch | Line2D]:
    seen = {rung.change.verdict for rung in ladder.rungs if rung.change}
    for verdict, colour in COLOURS.items():
        if verdict in seen:
            yield Patch(facecolor=colour, alpha=0.9, label=verdict)
    if seen - COLOURS.keys():
        yield Patch(facecolor=svg.MUTED, alpha=0.55, label="undecided, or the same")
    for name, milliseconds, look in _rivals(ladder):
        yield Line2D([], [], label=f"{name}: {words.number(milliseconds)} ms", **look)


def _caption(ladder: Ladder) -> str:
    sentences = [naming.rounds([rung.row for rung in ladder.rungs])]
    if ladder.limit:
        share = f"single at batch {ladder.limit.case.batch_size}"
        sentences.append(
            f"The limit is the step time of one device's share of the batch, measured as {share}."
        )
    rival_names = {name for name, _, _ in _rivals(ladder)}
    if ladder.ddp and ladder.ddp.step and "ddp" not in rival_names:
        sentences.append(
            f"A step of ddp takes {words.ms(ladder.ddp.step)}, which is beyond the end of the axis."
        )
    if ladder.case.device_kind == "emulated":
        sentences.append("The steps show host cost only, and no speed-up.")
    return " ".join(sentences)


def sections(report: Report) -> list[Section]:
    """Return every section with drawings, in the order of the page.

    The sections on the ladder and on phases show all rungs of each ladder, the others only the
    lowest rung, the best rung, and the schedule that TrainStep selected.
    """
    ladders = report.ladders
    drawable = notable(report.rows, report.ladders)
    climbed = {
        row.case for row in (*drawable, *(rung.row for ladder in ladders for rung in ladder.rungs))
    }
    with svg.theme():
        if report.loading:
            return [loaders.section(report.loading, report.trials)]
        all_sections = [
            swim_lanes.section(drawable, report.lanes),
            speedup.section(drawable),
            throughput(drawable),
            phases([row for row in report.rows if row.case in climbed]),
            timeline.imbalance(drawable),
            timeline.steps(drawable, report.trials),
            timeline.utilisation(drawable, report.trials),
            *filter(None, [over_commits(report)]),
        ]
        if report.observed:  # an observed loop has no baseline, and perhaps no batch size
            return [section for section in all_sections if section.panels]
        if not ladders:
            return all_sections
        with_notes = [
            section
            if section.id == "phases"
            else replace(section, note=f"{section.note} {ENDS}".strip())
            for section in all_sections
        ]
        return [*with_notes[:5], ladder_section(ladders), *with_notes[5:]]


def throughput(rows: Sequence[Row]) -> Section:
    """Return the section on throughput, with a bar for the samples per second of each case."""
    panels, left_out = small_multiples.split(
        [row for row in rows if naming.drawable(row.throughput)], per=12
    )
    left_out = " ".join(filter(None, (left_out, naming.withheld(row.throughput for row in rows))))
    return Section(
        "throughput",
        "Throughput",
        "Samples per second; longer is better. Whiskers are 95% intervals.",
        [_throughput(facet, f"throughput{i}") for i, facet in enumerate(panels)],
        left_out or ("" if panels else "No case was measured."),
    )


def _throughput(facet: small_multiples.Facet, key: str) -> Panel:
    estimates = [row.throughput for row in facet.rows if row.throughput]
    values = [f"{words.number(e.value)}/s ({words.interval(e)})" for e in estimates]
    figure, axes, tops = svg.lanes(facet.names, values, [38] * len(values), cases=facet.cases)
    end = svg.extent(estimates)
    for row, name, e, y in zip(
        facet.rows, facet.names, estimates, (top + 24 for top in tops), strict=True
    ):
        colour = svg.colour(row.case)
        face = "none" if "PREDICTED" in row.labels else colour
        bar = svg.bar(
            axes, (0, e.value), (y - 5.5, 11), facecolor=face, edgecolor=colour, linewidth=1.2
        )
        marks.explain(
            bar,
            f"{name}: {words.number(e.value)} samples per second ({words.interval(e)}),"
            f" {naming.basis(row)}",
        )
        svg.whisker(axes, y, e.value, (e.low, e.high), end)
    axes.set(xlim=(0, end * 1.03), xlabel="samples per second")
    svg.amounts(axes.xaxis)
    description = "; ".join(
        f"{name}: {value}" for name, value in zip(facet.names, values, strict=True)
    )
    drawing = svg.render(
        figure, key=key, title=f"Throughput: {facet.title}", description=description
    )
    return Panel(facet.title, drawing, naming.rounds(facet.rows), facet.labels, cases=facet.cases)


def phases(rows: Sequence[Row]) -> Section:
    """Return the section on phases, with a bar for the step of each case, made of its phases."""
    drawn = [row for row in rows if row.phases and row.step and naming.drawable(row.step)]
    panels, left_out = small_multiples.split(drawn, per=16)  # enough for a whole ladder
    left_out = " ".join(
        filter(None, (left_out, naming.withheld(row.step for row in rows if row.phases)))
    )
    return Section(
        "phases",
        "Step time by phase",
        "Milliseconds of one step by phase. The ledger charges each moment of the step to one"
        " phase, so the phases add up to the step. Hollow parts are time that no phase covers.",
        [_phases(facet, f"phases{i}") for i, facet in enumerate(panels)],
        left_out or ("" if panels else "No case has phases."),
    )


def _phases(facet: small_multiples.Facet, key: str) -> Panel:
    present = [name for name in svg.PHASES if any(name in row.phases for row in facet.rows)]
    values = [f"{words.number(row.step.value * 1e3)} ms" if row.step else "" for row in facet.rows]
    figure, axes, tops = svg.lanes(
        facet.names, values, [40] * len(values), keys=-(-len(present) // 3), cases=facet.cases
    )
    widest = max(sum(row.phases.values()) for row in facet.rows) * 1e3
    for row, name, top in zip(facet.rows, facet.names, tops, strict=True):
        _stack(axes, row, name, present, top + 26, widest)
    axes.set(xlim=(0, widest * 1.02), xlabel="milliseconds of one step")
    svg.amounts(axes.xaxis)
    svg.legend(figure, svg.phase_keys(present), 3)
    description = "; ".join(
        f"{name}: "
        + ", ".join(
            f"{phase} {words.number(seconds * 1e3)} ms" for phase, seconds in row.phases.items()
        )
        for name, row in zip(facet.names, facet.rows, strict=True)
    )
    drawing = svg.render(
        figure, key=key, title=f"Step time by phase: {facet.title}", description=description
    )
    caption = "Each bar is the median step time, and its parts add up to it."
    return Panel(facet.title, drawing, caption, facet.labels, cases=facet.cases)


def _stack(
    axes: Axes, row: Row, case: str, present: Sequence[str], y: float, widest: float
) -> None:
    """Draw the phases `present` of a case as parts of a bar at height `y`, with the names that fit.

    `widest` is the longest bar of the panel in milliseconds.
    """
    left = 0.0
    for name in present:
        width = row.phases.get(name, 0.0) * 1e3
        if not width:
            continue
        look = svg.PHASES[name]
        share = words.percent(width / 1e3 / sum(row.phases.values()))
        bar = svg.bar(axes, (left, width), (y - 8, 16), facecolor=look.fill, **svg.edge(name))
        marks.explain(
            bar,
            f"{case}: {name} {words.time(width / 1e3)}, {share} of the step, {naming.basis(row)}",
        )
        letters = svg.room(width, widest * 1.02)
        if text := next((text for text in (name, look.short) if len(text) <= letters), ""):
            axes.text(
                left + width / 2, y + 4, text, ha="center", color=look.ink, fontsize=svg.SMALL
            )
        left += width


def compared(title: str, before: Row, after: Row, key: str) -> Panel:
    """Return the panel with the step of a case by phase in two runs, one below the other.

    Both rows must have phases. `key` makes the ids in the drawing unique on the page.
    """
    with svg.theme():
        return _phases(small_multiples.Facet(title, (before, after), ("before", "after")), key)
