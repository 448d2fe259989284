"""Machine: the picture of a machine, with its boxes and the rates of its links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from markupsafe import Markup

from dpbench.records import words
from dpbench.records.boxes import Box, Link

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
    svg = ElementTree.Element(
        "svg",
        {
            "viewBox": f"0 0 {width:g} {height:g}",
            "width": f"{width:g}",
            "role": "img",
            "aria-label": "; ".join(", ".join(box.texts) for box in placed),
        },
    )
    rates = [_draw(svg, link, boxes, tops) for link in links]
    svg.extend(rate for rate in rates if rate is not None)  # above all lines
    for box in boxes.values():
        _box(svg, _middle(box), tops[box.row], box.texts)
    return Markup(ElementTree.tostring(svg, encoding="unicode"))


def _middle(box: Box) -> float:
    return EDGE + box.column * (WIDE + GAP) + WIDE / 2


def _draw(
    svg: ElementTree.Element, link: Link, boxes: Mapping[str, Box], tops: Mapping[int, int]
) -> ElementTree.Element | None:
    """Draw a link, and return the text of its rate, None without one."""
    first, second = sorted((boxes[end] for end in link.ends), key=lambda box: box.row)
    x1, y1 = _middle(first), tops[first.row] + HIGH
    x2, y2 = _middle(second), tops[second.row]
    look = "unknown" if link.share is None else "slow" if link.slow else "known"
    middle = (x1 + x2) / 2
    if first.row == second.row:
        deep = BETWEEN - 20 + 8 * abs(second.column - first.column)
        path = f"M{x1:g} {y1:g}Q{middle:g} {y1 + 2 * deep:g} {x2:g} {y1:g}"
        place = middle, y1 + deep - 4
    else:
        path = f"M{x1:g} {y1:g}L{x2:g} {y2:g}"
        place = middle, (y1 + y2) / 2 + 4
    ElementTree.SubElement(svg, "path", {"d": path, "class": f"link {look}"})
    if link.share is None:
        return None
    return _text(place, words.percent(link.share) if link.share else "fails", f"rate {look}")


def _box(svg: ElementTree.Element, x: float, y: float, lines: Sequence[str]) -> None:
    place = {"x": f"{x - WIDE / 2:g}", "y": f"{y:g}", "width": str(WIDE), "height": str(HIGH)}
    ElementTree.SubElement(svg, "rect", {**place, "rx": "6", "class": "box"})
    shown = [text if len(text) <= LETTERS else f"{text[: LETTERS - 1]}…" for text in lines if text]
    first = y + HIGH / 2 - 16 * (len(shown) - 1) / 2 + 4
    for number, text in enumerate(shown):
        svg.append(_text((x, first + 16 * number), text))


def _text(place: tuple[float, float], text: str, look: str = "name") -> ElementTree.Element:
    x, y = place
    element = ElementTree.Element("text", {"x": f"{x:g}", "y": f"{y:g}", "class": look})
    element.text = text
    return element
