"""Machine: the picture of a machine that `dpbench doctor` examined, for all pages."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from markupsafe import Markup

from dpbench.records.examination import Box, Examination, Link
from dpbench.records.words import count, percent

WIDE, HIGH, GAP, BETWEEN = 148, 60, 14, 50
"""The width and the height of a box, and the gaps beside and below one, in SVG units."""
EDGE = 8
"""The margin of the picture, in SVG units."""
LETTERS = 24
"""The number of letters on a line of a box."""


def summary(examination: Examination) -> str:
    """Return the number of faults in words."""
    faults = examination.faults
    return f"{count(faults, 'fault')} found" if faults else "Nothing wrong found"


def picture(examination: Examination) -> Markup:
    """Return an SVG: sockets on top, then switches, then GPUs and cards, and NVSwitch below.

    The colour of a link shows its measured over its promised rate, which is written beside it: blue
    or, below `examination.SLOW`, red. A link of which one rate is unknown is thin and grey.
    """
    boxes = {box.id: box for box in examination.boxes}
    rows = sorted({box.row for box in boxes.values()})
    tops = {row: EDGE + i * (HIGH + BETWEEN) for i, row in enumerate(rows)}
    arcs = [link for link in examination.links if _level(boxes, link)]
    most = max((_span(boxes, link) for link in arcs), default=0)
    width = EDGE + (1 + max((box.column for box in boxes.values()), default=0)) * (WIDE + GAP)
    height = max(tops.values(), default=0) + HIGH + EDGE + (BETWEEN if arcs else 0) + 8 * most
    svg = ElementTree.Element(
        "svg",
        {
            "viewBox": f"0 0 {width:g} {height:g}",
            "width": f"{width:g}",
            "role": "img",
            "aria-label": "; ".join(", ".join(box.texts) for box in examination.boxes),
        },
    )
    for link in examination.links:
        first, second = sorted((boxes[end] for end in link.ends), key=lambda box: box.row)
        _draw(svg, link, _below(first, tops), _end(first, second, tops))
    for box in boxes.values():
        _box(svg, _middle(box), tops[box.row], box.texts)
    return Markup(ElementTree.tostring(svg, encoding="unicode"))


def _level(boxes: dict[str, Box], link: Link) -> bool:
    """Return whether a link joins two boxes of one row, and so is an arc below them."""
    first, second = (boxes[end] for end in link.ends)
    return first.row == second.row


def _span(boxes: dict[str, Box], link: Link) -> float:
    first, second = (boxes[end].column for end in link.ends)
    return abs(first - second)


def _middle(box: Box) -> float:
    return EDGE + box.column * (WIDE + GAP) + WIDE / 2


def _below(box: Box, tops: dict[int, int]) -> tuple[float, float]:
    return _middle(box), tops[box.row] + HIGH


def _end(first: Box, second: Box, tops: dict[int, int]) -> tuple[float, float]:
    if first.row == second.row:
        return _below(second, tops)
    return _middle(second), tops[second.row]


def _draw(
    svg: ElementTree.Element, link: Link, start: tuple[float, float], end: tuple[float, float]
) -> None:
    (x1, y1), (x2, y2) = start, end
    look = "unknown" if link.share is None else "slow" if link.slow else "known"
    middle = (x1 + x2) / 2
    if y1 == y2:  # the arc's lowest point is half as deep as its control point
        deep = BETWEEN + 8 * abs(x2 - x1) / (WIDE + GAP)
        path = f"M{x1:g} {y1:g}Q{middle:g} {y1 + 2 * deep - 30:g} {x2:g} {y2:g}"
        place = middle, y1 + deep - 15 - 4
    else:
        path = f"M{x1:g} {y1:g}L{x2:g} {y2:g}"
        place = middle + 4, (y1 + y2) / 2 + 4
    ElementTree.SubElement(svg, "path", {"d": path, "class": f"link {look}"})
    if link.share is not None:
        text = percent(link.share) if link.share else "fails"
        _text(svg, place, text, f"rate {look}")


def _box(svg: ElementTree.Element, x: float, y: float, lines: Sequence[str]) -> None:
    place = {"x": f"{x - WIDE / 2:g}", "y": f"{y:g}", "width": str(WIDE), "height": str(HIGH)}
    ElementTree.SubElement(svg, "rect", {**place, "rx": "6", "class": "box"})
    shown = [text if len(text) <= LETTERS else f"{text[: LETTERS - 1]}…" for text in lines if text]
    first = y + HIGH / 2 - 16 * (len(shown) - 1) / 2 + 4
    for number, text in enumerate(shown):
        _text(svg, (x, first + 16 * number), text, "")


def _text(svg: ElementTree.Element, place: tuple[float, float], text: str, look: str) -> None:
    x, y = place
    given = {"x": f"{x:g}", "y": f"{y:g}", **({"class": look} if look else {})}
    ElementTree.SubElement(svg, "text", given).text = text
