"""History: the section with the step time of each case over commits, as small multiples."""

from __future__ import annotations

from itertools import pairwise

from dpbench.analysis.history import History
from dpbench.analysis.report import Report
from dpbench.records import words
from dpbench.report import marks, naming, small_multiples, svg
from dpbench.report.svg import Panel, Section

NAMED = 4
"""The largest number of commits that a panel names on its axis; with more, it names only the first and the last."""


def section(report: Report) -> Section | None:
    """Return the section on the history of the report's cases; None if no case has enough commits."""
    found = {one.case: one for one in report.histories}
    if not found:
        return None
    rows = [row for row in small_multiples.order(report.rows) if row.case in found]
    cases = list(dict.fromkeys(row.case for row in rows))
    drawn = [found[case] for case in cases[: small_multiples.PANELS]]
    with svg.theme():
        panels = [_panel(one, f"history{i}") for i, one in enumerate(drawn)]
    left_out = len(cases) - len(panels)
    more = f"{words.count(left_out, 'more case')} {words.verb(left_out, 'is', 'are')} not drawn." if left_out else ""
    blind = "Changes are not detected, because asv is not installed." if drawn[0].levels is None else ""
    return Section(
        "history", "History",
        "The step time over the commits in the store, in the order of their first runs, on this machine and version of "
        "torch. Whiskers are 95% intervals. A horizontal line is a level: between two levels, asv detects a change, "
        "and the intervals on both sides of it do not overlap. Runs at different times also differ in the state of the "
        "machine. Runs with uncommitted changes, and step times of too few rounds, are left out.",
        panels, " ".join(filter(None, (more, blind))),
    )  # fmt: skip


def _panel(history: History, key: str) -> Panel:
    points = history.points
    end = svg.extent(point.step for point in points) * 1e3
    figure, axes = svg.canvas(190, left=44, bottom=44, top=24)
    axes.set(xlim=(-0.6, len(points) - 0.4), ylim=(0, end * 1.06), xlabel="commit")
    axes.text(0, 1.05, "milliseconds of one step", transform=axes.transAxes, fontsize=svg.SMALL)
    colour = svg.colour(history.case)
    for level in history.levels or ():
        height = level.seconds * 1e3
        (line,) = axes.plot([level.first - 0.4, level.end - 0.6], [height, height], color=svg.MUTED, linewidth=2.4)
        first, last = points[level.first].commit, points[level.end - 1].commit
        marks.explain(line, f"level from {first} to {last}: {words.time(level.seconds)}", [history.case])
    for place, point in enumerate(points):
        step = point.step
        svg.whisker(axes, place, step.value * 1e3, (step.low * 1e3, step.high * 1e3), end, upright=True, colour=colour)
        (dot,) = axes.plot([place], [step.value * 1e3], "o", color=colour, markersize=5.5)
        runs = f"{words.verb(len(point.runs), 'run', 'runs')} {', '.join(run[:12] for run in point.runs)}"
        marks.explain(
            dot, f"{point.commit}: {words.ms(step)}, {words.count(step.n, 'round')} of {runs}", [history.case]
        )
    places = range(len(points)) if len(points) <= NAMED else (0, len(points) - 1)
    axes.set_xticks([*places], [points[place].commit for place in places])
    svg.amounts(axes.yaxis)
    axes.grid(axis="y")
    name = naming.clip(history.case.label, 90)
    said = "; ".join(f"{point.commit}: {words.ms(point.step)}" for point in points)
    drawing = svg.render(figure, key=key, title=f"History: {name}", description=said)
    return Panel(name, drawing, _caption(history), history.labels, cases=[history.case])


def _caption(history: History) -> str:
    """Return the caption of a panel: the number of commits, and each detected change with its size and its commit."""
    said = [f"{words.count(len(history.points), 'commit')}."]
    levels = history.levels or ()
    for before, after in pairwise(levels):
        change = after.seconds / before.seconds - 1
        way = "longer" if change > 0 else "shorter"
        commit = history.points[after.first].commit
        said.append(f"From commit {commit} on, the step is {words.percent(abs(change))} {way}.")
    if history.levels is not None and len(levels) == 1:
        said.append("No change is detected.")
    return naming.plain(" ".join(said))
