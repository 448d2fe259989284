"""Figures: the section on commits, and the list of the sections with drawings."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import pairwise

from dpbench.analysis.history import History, histories
from dpbench.analysis.ladder import notable
from dpbench.analysis.report import Report
from dpbench.records import Source, words
from dpbench.report import (
    late_ranks,
    loaders,
    marks,
    naming,
    small_multiples,
    speedup,
    svg,
    swim_lanes,
    timeline,
)
from dpbench.report.section import Panel, Section
from dpbench.store import PAST

NAMED = 4
"""Above this number of commits, a panel names only the first and the last on its axis."""
ENDS = (
    "Of each ladder, only the rung `reference`, the best rung and the schedule that TrainStep"
    " selected are drawn; the table of the ladder has the other schedules."
)


def over_commits(report: Report) -> Section | None:
    """Return the section on the history of the cases; None if no case has enough commits."""
    measured = dict.fromkeys(row.case for row in report.rows if row.source is Source.MEASURED)
    found = histories(measured, report.past, report.provenance)
    by_case = {history.case: history for history in found}
    if not by_case:
        return None
    rows = [row for row in small_multiples.order(report.rows) if row.case in by_case]
    cases = list(dict.fromkeys(row.case for row in rows))
    drawn = [by_case[case] for case in cases[: small_multiples.PANELS]]
    with svg.theme():
        panels = [_commits_panel(history, f"history{i}") for i, history in enumerate(drawn)]
    left_out = len(cases) - len(panels)
    more = (
        f"{words.count(left_out, 'more case')} {words.verb(left_out, 'is', 'are')} not drawn."
        if left_out
        else ""
    )
    blind = (
        "Changes are not detected, because asv is not installed." if drawn[0].levels is None else ""
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


DRAWN = ("lanes", "speedup", "steps", "utilisation", "ranks", "history")
"""The ids of the sections with drawings of a run that trains."""


def sections(report: Report, ids: Collection[str] = DRAWN, key: str = "") -> list[Section]:
    """Return the sections with drawings that have one of these ids; those of a DataLoader always.

    They show only the lowest rung of each ladder, the best rung, and the schedule that TrainStep
    selected. The ids in the drawings begin with `key`.
    """
    rows = notable(report.rows, report.ladders)
    drawn: dict[str, Callable[[], Section | None]] = {
        "lanes": lambda: swim_lanes.section(report, rows, f"{key}lanes"),
        "speedup": lambda: speedup.section(rows, f"{key}speedup"),
        "steps": lambda: timeline.steps(report, rows),
        "utilisation": lambda: timeline.utilisation(report, rows),
        "ranks": lambda: late_ranks.section(rows, report.arrivals, f"{key}ranks"),
        "history": lambda: over_commits(report),
    }
    with svg.theme():
        if report.loading:
            return [loaders.section(report.loading, report.trials, f"{key}loaders")]
        found = [section for name in ids if (section := drawn[name]())]
    # an observed loop has no baseline, and two runs are compared in some of the sections
    if report.observed or report.compared:
        return [section for section in found if section.panels]
    if not report.ladders:
        return found
    return [replace(one, note=f"{one.note} {ENDS}".strip()) for one in found]
