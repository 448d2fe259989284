"""Late ranks: a picture of ranks and steps, with each rank's wait for the last one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from dpbench.analysis.arrivals import Collective
from dpbench.analysis.summary import Row
from dpbench.records import words
from dpbench.records.trial import Key
from dpbench.report import marks, small_multiples, svg
from dpbench.report.section import Panel, Section

Arrivals = Mapping[Key, Sequence[Collective]]
"""The collectives of one round of each case and source."""
RANKS = 16
"""The largest number of ranks that are drawn."""
HEAD, ROW, LEFT = 19.0, 24.0, 62.0
"""The heights of a case's name and of a rank, and the margin for the names, in SVG units."""


def section(rows: Sequence[Row], arrivals: Arrivals, key: str) -> Section | None:
    """Return the section, with a panel for each case of ranks; None without one."""
    drawn = [row for row in rows if row.key in arrivals]
    if not drawn:
        return None
    shown = drawn[: small_multiples.PANELS]
    left_out = len(drawn) - len(shown)
    return Section(
        "ranks",
        "Which rank arrives last",
        "Each stroke is one collective of a timed step: on the lane of a rank, how long it waited"
        " there for the last rank, and on the lowest lane the transfer after that. The rank without"
        " a stroke was the last one. All strokes of a panel have one scale.",
        [_panel(row, arrivals[row.key], f"{key}{i}") for i, row in enumerate(shown)],
        f"{words.count(left_out, 'more case')} {words.verb(left_out, 'is', 'are')} not drawn."
        if left_out
        else "",
    )


def _panel(row: Row, collectives: Sequence[Collective], key: str) -> Panel:
    ranks = len(collectives[0].waits_s)
    lanes = {f"rank {rank}": [one.waits_s[rank] for one in collectives] for rank in range(ranks)}
    lanes = dict(list(lanes.items())[:RANKS])
    lanes["transfer"] = [one.transfer_s for one in collectives]
    longest_s = max(max(values) for values in lanes.values())
    height = HEAD + ROW * len(lanes)
    figure, axes, (top,) = svg.lanes(
        [row.case.label],
        [f"up to {words.time(longest_s)}"],
        [height],
        keys=1,
        left=LEFT,
        cases=[row.case],
    )
    places = _places(collectives)
    with marks.in_lane(axes, 0):
        for number, (name, values) in enumerate(lanes.items()):
            floor = top + HEAD + ROW * (number + 1) - 3
            svg.write_beside(axes, floor, name, LEFT, fontsize=svg.SMALL)
            _strokes(axes, name, places, values, floor, longest_s)
    axes.set(xlim=(-0.02, collectives[-1].step + 1.02), xlabel="timed step")
    svg.amounts(axes.xaxis)
    looks = [(name, _colour(name)) for name in ("wait for the last rank", "transfer")]
    svg.legend(figure, [Line2D([], [], color=colour, label=name) for name, colour in looks], 2)
    said = _said(collectives)
    drawing = svg.render(figure, key=key, title=f"Ranks: {row.case.label}", description=said)
    return Panel(row.case.label, drawing, said, row.labels, cases=[row.case])


def _colour(name: str) -> str:
    return svg.FOREGROUND if name == "transfer" else svg.LOSS


def _places(collectives: Sequence[Collective]) -> list[float]:
    """Return where each collective is drawn: its step, and its place among those of the step."""
    numbers: dict[int, int] = {}
    for one in collectives:
        numbers[one.step] = numbers.get(one.step, 0) + 1
    seen: dict[int, int] = {}
    places = []
    for one in collectives:
        place = seen.get(one.step, 0)
        places.append(one.step + (place + 0.5) / numbers[one.step])
        seen[one.step] = place + 1
    return places


def _strokes(
    axes: Axes,
    name: str,
    places: Sequence[float],
    values: Sequence[float],
    floor: float,
    longest_s: float,
) -> None:
    tops = [floor - (ROW - 5) * value / longest_s if longest_s else floor for value in values]
    strokes = axes.vlines(places, tops, [floor] * len(tops), color=_colour(name), linewidth=1.1)
    middle_s = statistics.median(values)
    marks.explain(
        strokes, f"{name}: {words.time(middle_s)} (median), up to {words.time(max(values))}"
    )


def _said(collectives: Sequence[Collective]) -> str:
    """Return who was last most often, and the waits and transfers per step."""
    counts = [0] * len(collectives[0].waits_s)
    for one in collectives:
        counts[one.last] += 1
    latest = max(range(len(counts)), key=lambda rank: counts[rank])
    steps = len({one.step for one in collectives})
    waits_s = sum(sum(one.waits_s) / len(counts) for one in collectives) / steps
    transfer_s = sum(one.transfer_s for one in collectives) / steps
    not_drawn = f" Only the first {RANKS} ranks are drawn." if len(counts) > RANKS else ""
    return (
        f"Rank {latest} arrived last at {counts[latest]} of"
        f" {words.count(len(collectives), 'collective')} in {words.count(steps, 'step')}. Per step,"
        f" a rank waits {words.time(waits_s)} on average, and the transfer takes"
        f" {words.time(transfer_s)}.{not_drawn}"
    )
