"""Machine: the picture of a machine, with its boxes and the rates of its links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path

from dpbench.records import words
from dpbench.records.boxes import Box, Link
from dpbench.records.registry import Role
from dpbench.report import naming, svg
from dpbench.report.marks import Drawing

WIDE, HIGH, GAP, BETWEEN = 148, 60, 14, 50
"""The width and the height of a box, and the gaps beside and below one, in SVG units."""
EDGE = 8
"""The margin of the picture, in SVG units."""
LETTERS = 24
"""The number of letters on a line of a box."""


def picture(placed: Sequence[Box], links: Sequence[Link]) -> Markup:
    """Return an SVG: sockets on top, then switches, then GPUs and cards, and NVSwitch below.

    The colour of a link shows its measured over its promised rate, which is written beside it: blue
    or, below `boxes.SLOW`, red. A link of which one rate is unknown is thin and grey.
    """
    boxes = {box.id: box for box in placed}
    rows = sorted({box.row for box in boxes.values()})
    tops = {row: EDGE + i * (HIGH + BETWEEN) for i, row in enumerate(rows)}
    ends = [[boxes[end] for end in link.ends] for link in links]
    arcs = [abs(one.column - other.column) for one, other in ends if one.row == other.row]
    below = BETWEEN + 8 * max(arcs) if arcs else 0
    width = EDGE + (1 + max((box.column for box in boxes.values()), default=0)) * (WIDE + GAP)
    height = max(tops.values(), default=0) + HIGH + EDGE + below
    with svg.theme():
        figure = Drawing((width, height))
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        for link in links:
            _draw(axes, link, boxes, tops)
        for box in boxes.values():
            _box(axes, _middle(box), tops[box.row], box.texts)
        return svg.render(
            figure,
            key="picture",
            title="The machine",
            description="; ".join(", ".join(box.texts) for box in placed),
        )


def _middle(box: Box) -> float:
    return EDGE + box.column * (WIDE + GAP) + WIDE / 2


def _draw(axes: Axes, link: Link, boxes: Mapping[str, Box], tops: Mapping[int, int]) -> None:
    """Draw a link and, above all links, its rate if it is known."""
    first, second = sorted((boxes[end] for end in link.ends), key=lambda box: box.row)
    x1, y1 = _middle(first), tops[first.row] + HIGH
    x2, y2 = _middle(second), tops[second.row]
    known = link.share is not None
    colour = svg.LOSS if link.slow else svg.ROLES[Role.ENGINE] if known else svg.MUTED
    x, y = (x1 + x2) / 2, (y1 + y2) / 2 + 4
    line = Path([(x1, y1), (x2, y2)])
    if first.row == second.row:
        deep = BETWEEN - 20 + 8 * abs(second.column - first.column)
        y = y1 + deep - 4
        line = Path([(x1, y1), (x, y1 + 2 * deep), (x2, y1)], [Path.MOVETO, *[Path.CURVE3] * 2])
    axes.add_patch(
        PathPatch(line, facecolor="none", edgecolor=colour, linewidth=3 if known else 1.5)
    )
    if link.share is not None:
        axes.text(
            x,
            y,
            words.percent(link.share) if link.share else "fails",
            ha="center",
            fontsize=svg.SMALL,
            fontweight="bold" if link.slow else "normal",
            color=colour if link.slow else svg.FOREGROUND,
            bbox={"facecolor": svg.BACKGROUND, "edgecolor": "none", "pad": 1},
        )


def _box(axes: Axes, x: float, y: float, lines: Sequence[str]) -> None:
    edge = FancyBboxPatch(
        (x - WIDE / 2, y),
        WIDE,
        HIGH,
        boxstyle="round,pad=0,rounding_size=6",
        facecolor=svg.CARD,
        edgecolor=svg.MUTED,
    )
    axes.add_patch(edge)
    shown = [naming.clip(text, LETTERS) for text in lines if text]
    first = y + HIGH / 2 - 16 * (len(shown) - 1) / 2 + 4
    for number, text in enumerate(shown):
        axes.text(x, first + 16 * number, text, ha="center", fontsize=svg.SMALL)
