"""SVG: matplotlib figures as small inline drawings that follow the page's theme.

Colours are sentinels that become CSS variables, text stays text in the page's own font, and equal figures give
equal bytes. Nothing in a drawing refers to anything outside of it.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpbench.report import words

WIDTH = 420
"""Units of every panel: narrow enough that its text is still read on a telephone."""
TEXT, SMALL = 11.5, 10.5
FOREGROUND, GRID, MUTED, BACKGROUND = "#010203", "#010204", "#010205", "#010206"
ROLES = {"single": "#020301", "single_all_cores": "#020302", "torch_dp": "#020303", "dp": "#020304", "ddp": "#020305"}
OTHERS = ("#020306", "#020307")
VARIABLES = {
    FOREGROUND: "--fg", GRID: "--grid", MUTED: "--muted", BACKGROUND: "--bg", "#020301": "--single",
    "#020302": "--all-cores", "#020303": "--torch-dp", "#020304": "--dp", "#020305": "--ddp",
    "#020306": "--other-a", "#020307": "--other-b",
}  # fmt: skip
_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "dpbench", "path.simplify": False, "text.parse_math": False,
    "font.family": "DejaVu Sans", "font.size": TEXT, "axes.labelsize": SMALL, "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL, "legend.fontsize": SMALL, "axes.spines.top": False, "axes.spines.right": False,
    "axes.linewidth": 0.8, "figure.dpi": 72, "text.color": FOREGROUND, "axes.labelcolor": FOREGROUND,
    "axes.edgecolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": FOREGROUND,
    "ytick.labelcolor": FOREGROUND, "grid.color": GRID, "grid.linewidth": 0.8, "axes.axisbelow": True,
    "legend.frameon": False, "axes.unicode_minus": False,
}  # fmt: skip
_XLINK = "{http://www.w3.org/1999/xlink}href"


@dataclass(frozen=True)
class Panel:
    """One drawing with all that must stand beside it."""

    title: str
    svg: str
    caption: str
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """The panels that answer one question; `note` says what is missing, and why."""

    id: str
    title: str
    lead: str
    panels: Sequence[Panel]
    note: str = ""


@contextmanager
def theme() -> Iterator[None]:
    """Draw in the report's style, whatever the user's own matplotlib settings are."""
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        # the browser picks the font: that ours lacks a glyph does not matter
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def canvas(height: float, *, left: float = 6, right: float = 14, top: float = 4, bottom: float = 40) -> tuple[Figure, Axes]:
    """Return a figure of the common width with one plot inside these margins."""
    figure = Figure(figsize=(WIDTH / 72, height / 72), facecolor="none")
    box = (left / WIDTH, bottom / height, (WIDTH - left - right) / WIDTH, (height - bottom - top) / height)
    axes = figure.add_axes(box, facecolor="none")
    return figure, axes


def lanes(names: Sequence[str], values: Sequence[str], *, lane: float = 36, bottom: float = 40) -> tuple[Figure, Axes]:
    """Return a plot with one lane a case: its name and value in words, and room below them to draw.

    The vertical axis counts units from the top; lane i begins at i * lane, and its text ends 14 below that.
    """
    height = len(names) * lane + bottom + 4
    figure, axes = canvas(height, bottom=bottom)
    axes.set_ylim(len(names) * lane, 0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    across = axes.get_yaxis_transform()
    for index, (name, value) in enumerate(zip(names, values, strict=True)):
        y = index * lane + 12
        axes.text(0, y, words.clip(name, 60 - len(value)), transform=across)
        axes.text(1, y, value, transform=across, ha="right", fontweight="bold", fontsize=SMALL)
    return figure, axes


def legend(figure: Figure, handles: Sequence[Any], columns: int) -> None:
    """Put the keys below the plot, read along the rows."""
    rows = -(-len(handles) // columns)
    by_column = [handles[r * columns + c] for c in range(columns) for r in range(rows) if r * columns + c < len(handles)]
    figure.legend(
        handles=by_column, loc="lower left", bbox_to_anchor=(0, 0), ncols=columns, borderaxespad=0.1,
        handlelength=1.8, handletextpad=0.5, columnspacing=1.2, labelspacing=0.35, borderpad=0.1,
    )  # fmt: skip


def render(figure: Figure, *, key: str, title: str, description: str) -> str:
    """Return the figure as an inline SVG element; `key` makes its ids unique in the page."""
    buffer = io.StringIO()
    for artist in figure.findobj():
        artist.set_clip_on(False)  # clip paths would only add ids and bytes: nothing is drawn outside
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    source = ElementTree.fromstring(buffer.getvalue())
    referred = {href[1:] for element in source.iter() if (href := element.get(_XLINK, "")).startswith("#")}
    root = _cleaned(source, referred, key)
    root.attrib = {
        "viewBox": source.attrib["viewBox"], "role": "img", "aria-labelledby": f"{key}-title {key}-desc",
    }  # fmt: skip
    for position, (tag, text) in enumerate((("title", title), ("desc", description))):
        child = ElementTree.Element(tag, {"id": f"{key}-{tag}"})
        child.text = words.plain(text)
        root.insert(position, child)
    return ElementTree.tostring(root, encoding="unicode")


def _cleaned(source: ElementTree.Element, referred: set[str], key: str) -> ElementTree.Element:
    """Copy an element without namespaces, metadata, style sheets, unused ids and needless digits."""
    target = ElementTree.Element(source.tag.rpartition("}")[2])
    target.text, target.tail = (text if text and text.strip() else None for text in (source.text, source.tail))
    for name, value in source.attrib.items():
        if name == "id":
            if value in referred:
                target.set("id", f"{key}-{value}")
        elif name == _XLINK:
            target.set("href", value.replace("#", f"#{key}-", 1) if value.startswith("#") else value)
        elif name == "style":
            target.set("style", _styled(value))
        elif not (name == "transform" and value.startswith("rotate(-0 ")):
            target.set(name, re.sub(r"-?\d+\.\d{3,}", lambda match: f"{float(match[0]):.2f}", value))
    for child in source:
        if child.tag.rpartition("}")[2] not in ("metadata", "style"):
            target.append(_cleaned(child, referred, key))
    return target


def _styled(style: str) -> str:
    """Replace the sentinels by variables, and matplotlib's font by the page's."""
    style = re.sub(r"#0[12]0[0-9a-f]{3}", lambda m: f"var({VARIABLES[m[0]]})" if m[0] in VARIABLES else m[0], style)
    font = re.search(r"font: (?:(\d+|bold) )?([\d.]+px) [^;]*", style)
    if font:
        weight = f"; font-weight: {font[1]}" if font[1] else ""
        style = style.replace(font[0], f"font-size: {font[2]}{weight}")
    return style.replace(": ", ":").replace("; ", ";")
