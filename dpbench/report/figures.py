"""Figures: the sections on ladders and commits, and the list of sections."""

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
from dpbench.records import words
from dpbench.records.registry import Role
from dpbench.report import (
    late_ranks,
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
    """Return every section with drawings.

    The section on the ladder shows all rungs of each ladder, the others only the lowest rung, the
    best rung, and the schedule that TrainStep selected.
    """
    ladders = report.ladders
    drawable = notable(report.rows, report.ladders)
    with svg.theme():
        if report.loading:
            return [loaders.section(report.loading, report.trials)]
        all_sections = [
            swim_lanes.section(drawable, report.lanes),
            speedup.section(drawable),
            timeline.imbalance(drawable),
            timeline.steps(drawable, report.trials),
            timeline.utilisation(drawable, report.trials),
            *filter(None, [late_ranks.section(drawable, report.arrivals), over_commits(report)]),
        ]
        if report.observed:  # an observed loop has no baseline, and perhaps no batch size
            return [section for section in all_sections if section.panels]
        if not ladders:
            return all_sections
        noted = [replace(one, note=f"{one.note} {ENDS}".strip()) for one in all_sections]
        return [*noted, ladder_section(ladders)]
