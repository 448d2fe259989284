"""SVG: every drawing is a matplotlib figure, which `render` finishes as a small inline SVG.

A drawing follows the page's theme: placeholder colours become CSS variables, and text has the
page's font. Its styles are attributes of its elements, because a page's Content-Security-Policy
allows no style in an attribute `style`. Equal figures give equal bytes. A drawing refers to no
external resources.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple
from xml.etree import ElementTree

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dpbench.records import Case, Phase, words
from dpbench.records.estimate import Estimate
from dpbench.records.registry import Role
from dpbench.report import naming
from dpbench.report.marks import Drawing, Mark, in_lane

WIDTH = 420
"""The width of every panel in SVG units (1/72 inch); text of size `SMALL` is legible on a phone."""
MARGIN, RIGHT = 12.0, 18.0
"""The usual margins at the left and at the right of the axes, in SVG units."""
TEXT, SMALL = 12.5, 11.0
COLUMNS = 54
"""The number of letters on a line across a panel, in the widest common sans-serif font."""
FOREGROUND, GRID, MUTED, BACKGROUND, CARD = "#010203", "#010204", "#010205", "#010206", "#010207"
ROLES = {
    Role.BASELINE: "#020301",
    Role.ALL_CORES: "#020302",
    Role.WRAPPER: "#020303",
    Role.ENGINE: "#020304",
    Role.CONTROL: "#020305",
}
OTHERS = ("#020306", "#020307")
LOSS = "#020309"
VARIABLES = {
    FOREGROUND: "--fg",
    GRID: "--grid",
    MUTED: "--muted",
    BACKGROUND: "--bg",
    CARD: "--card",
    "#020301": "--single",
    "#020302": "--all-cores",
    "#020303": "--torch-dp",
    "#020304": "--dp",
    "#020305": "--ddp",
    "#020306": "--other-a",
    "#020307": "--other-b",
    LOSS: "--loss",
}


class Look(NamedTuple):
    """The fill of a phase, the colour of text on it, and a short name for narrow bars."""

    fill: str
    ink: str
    short: str


PHASES: Mapping[str, Look] = {
    Phase.DATA: Look("#766f6e", "#ffffff", "data"),
    Phase.SCATTER: Look("#a08c7f", "#000000", "scat"),
    Phase.REPLICATE: Look("#ff4d00", "#000000", "repl"),
    Phase.FORWARD: Look("#0092ff", "#000000", "fwd"),
    Phase.GATHER: Look("#c65cba", "#000000", "gath"),
    Phase.LOSS: Look("#8d8d96", "#000000", "loss"),
    Phase.BACKWARD: Look("#8231f0", "#ffffff", "bwd"),
    Phase.REDUCE: Look("#cf0000", "#ffffff", "red"),
    Phase.CLIP: Look("#589e48", "#000000", "clip"),
    Phase.OPTIMIZER: Look("#007083", "#ffffff", "opt"),
    Phase.READ: Look("#876147", "#ffffff", "read"),
}
"""The look of each phase in every drawing.

Every two colours differ by at least 10 in CIEDE2000, also for readers with protanopia, deuteranopia
or tritanopia. Each colour has a contrast of at least 3 to the background of every theme.
"""
ODD = ("PREDICTED", "COLOCATED", "EMULATED", "FAKE-GPU")
"""The labels that the legend of a speed-up panel shows with the name of a line."""
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "path.simplify": False,
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": TEXT,
    "axes.labelsize": SMALL,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "figure.dpi": 72,
    "text.color": FOREGROUND,
    "axes.labelcolor": FOREGROUND,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": FOREGROUND,
    "ytick.labelcolor": FOREGROUND,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "axes.unicode_minus": False,
}


def colour(case: Case) -> str:
    """Return the colour of a case's strategy, which is the same in every panel."""
    return ROLES.get(case.traits.role) or OTHERS[sum(map(ord, case.strategy)) % len(OTHERS)]


@contextmanager
def theme() -> Iterator[None]:
    """Return a context in which matplotlib has the report's style, not the user's settings."""
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        # the browser selects the font, so a glyph missing from matplotlib's does not matter
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def canvas(height: float, *, left: float, bottom: float, top: float = 4) -> tuple[Drawing, Axes]:
    """Return a figure that is `WIDTH` wide, and its axes; lengths are in SVG units (1/72 inch)."""
    figure = Drawing((WIDTH, height))
    box = (
        left / WIDTH,
        bottom / height,
        (WIDTH - left - RIGHT) / WIDTH,
        (height - bottom - top) / height,
    )
    axes = figure.add_axes(box, facecolor="none")
    return figure, axes


def lanes(
    names: Sequence[str],
    values: Sequence[str],
    heights: Sequence[float],
    *,
    keys: int = 0,
    left: float = MARGIN,
    cases: Sequence[Case] = (),
) -> tuple[Drawing, Axes, list[float]]:
    """Return a figure with a horizontal lane per case, its axes, and the top edge of each lane.

    Heights and edges are in SVG units; edges are measured from the top of the axes. The first 16
    units of a lane show the name of the case and its value as text. `keys` is the number of rows of
    the legend, and `left` the margin at the left of the axes. `cases` has the case of each lane, by
    which the page filters the lanes.
    """
    tops = [0, *accumulate(heights)]
    figure, axes = canvas(tops[-1] + below(keys) + 4, left=left, bottom=below(keys))
    figure.lanes = list(zip(cases, heights, strict=False))
    axes.set_ylim(tops[-1], 0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    for number, (name, value, top) in enumerate(zip(names, values, tops, strict=False)):
        # if the text is too long, drop the interval, which is drawn and in the table too, and keep
        # the name
        shown_value = value if len(name) + len(value) <= COLUMNS else value.partition(" (")[0]
        look = {"ha": "right", "fontweight": "bold", "fontsize": SMALL}
        with in_lane(axes, number):
            write_beside(axes, top + 12, naming.clip(name, COLUMNS - len(shown_value)), left)
            write_beside(axes, top + 12, shown_value, left, WIDTH - RIGHT, **look)
    return figure, axes, tops[:-1]


def write_beside(
    axes: Axes, y: float, text: str, left: float, x: float = MARGIN, **look: Any
) -> None:
    """Write a text at the height `y` of the axes, `x` units from the left edge of the figure.

    `left` is the margin at the left of the axes.
    """
    axes.text(
        (x - left) / (WIDTH - left - RIGHT), y, text, transform=axes.get_yaxis_transform(), **look
    )


def amounts(axis: Axis, ticks: int = 5) -> None:
    """Label an axis at up to `ticks` round values, abbreviated with k, M and G."""

    def said(value: float, _: int) -> str:
        for scale, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= scale:
                return f"{words.exact(value / scale)}{letter}"
        return words.exact(value)

    axis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(said))


FARTHEST = 4.0
"""The end of an axis with whiskers is at most this multiple of the largest value; see `extent`."""


def extent(estimates: Iterable[Estimate]) -> float:
    """Return the end of an axis for these estimates: the highest end of their intervals.

    The end is at most `FARTHEST` times the largest value, because a single wide interval would
    otherwise make all other marks small. `whisker` draws an arrow where an interval goes beyond it.
    """
    found = list(estimates)
    return min(max(one.high for one in found), FARTHEST * max(one.value for one in found))


def whisker(
    axes: Axes,
    place: float,
    value: float,
    interval: tuple[float, float],
    end: float,
    *,
    upright: bool = False,
    colour: str = FOREGROUND,
) -> None:
    """Draw the interval of a value as a whisker with caps, or an arrow at the `end` of the axis.

    `place` is the position on the other axis. With `upright`, values are on the vertical axis.
    """
    low, high = interval
    along = [min(low, value), max(value, min(high, end))]
    # Axes.errorbar takes three times as long, and its drawing has twice the size
    pieces = [(along, "-"), (along if high <= end else along[:1], "_" if upright else "|")]
    if high > end:
        pieces.append(([end], "^" if upright else ">"))
    for values, look in pieces:
        across = [place] * len(values)
        x, y = (across, values) if upright else (values, across)
        axes.plot(x, y, look, color=colour, linewidth=1.2, markersize=6)


def bar(
    axes: Axes, across: tuple[float, float], down: tuple[float, float], **look: Any
) -> Rectangle:
    """Draw and return a bar: `across` has its left edge and its width, `down` its top and height.

    Axes.barh takes five times as long, because it also adapts the limits of the axes.
    """
    rectangle = Rectangle((across[0], down[0]), across[1], down[1], **look)
    axes.add_artist(rectangle)
    return rectangle


def room(width: float, whole: float, left: float) -> float:
    """Return the number of letters of size `SMALL` that fit on a bar.

    `width` is the width of the bar and `whole` that of the axis, in the unit of the axis; `left` is
    the margin at the left of the axes.
    """
    # a letter of the widest common sans-serif font takes 7 units at this size
    return width / whole * (WIDTH - left - RIGHT) / 7


def phase_keys(names: Iterable[str]) -> list[Patch]:
    """Return the handles of a legend for these phases, in the order of `PHASES`."""
    present = set(names)
    return [
        Patch(edgecolor=FOREGROUND, linewidth=0.6, facecolor=PHASES[name].fill, label=str(name))
        for name in PHASES
        if name in present
    ]


def below(keys: int) -> float:
    """Return the margin for the axis label and `keys` rows of the legend, in SVG units."""
    return 42 + 14.5 * keys


def legend(figure: Figure, handles: Sequence[Any], columns: int) -> Legend:
    """Draw and return a legend with `columns` columns below the plot, filled row by row."""
    rows = -(-len(handles) // columns)
    by_column = [
        handles[r * columns + c]
        for c in range(columns)
        for r in range(rows)
        if r * columns + c < len(handles)
    ]
    return figure.legend(
        handles=by_column,
        loc="lower left",
        bbox_to_anchor=(0, 0),
        ncols=columns,
        borderaxespad=0.1,
        handlelength=1.8,
        handletextpad=0.5,
        columnspacing=1.2,
        labelspacing=0.3,
        borderpad=0.1,
    )


def render(figure: Drawing, *, key: str, title: str, description: str) -> Markup:
    """Return the figure as an SVG element; `key` makes its ids unique on the page.

    The attribute `data-lanes` of the element has the id of each lane's case and the lane's height.
    `_mark` explains the attributes of its parts.
    """
    buffer = io.BytesIO()
    for artist in figure.findobj():
        # all artists are inside the axes: clip paths would only add bytes
        artist.set_clip_on(False)
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    # matplotlib makes the ids of markers and images from their content and this salt
    with mpl.rc_context({"svg.hashsalt": key}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    (root,) = _finished(ElementTree.fromstring(buffer.getvalue()), figure)
    root.remove(root[0])  # matplotlib's style sheet
    root.attrib = {
        "viewBox": root.attrib["viewBox"],
        "width": root.attrib["viewBox"].split()[2],
        "role": "img",
        "aria-labelledby": f"{key}-title {key}-desc",
    }
    if figure.lanes:
        root.set(
            "data-lanes",
            " ".join(f"{naming.case_id(case)}:{height:g}" for case, height in figure.lanes),
        )
    for position, (tag, text) in enumerate((("title", title), ("desc", description))):
        child = ElementTree.Element(tag, {"id": f"{key}-{tag}"})
        child.text = naming.plain(text)
        root.insert(position, child)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _finished(element: ElementTree.Element, figure: Drawing) -> list[ElementTree.Element]:
    """Return an element without namespaces, white space, excess digits, and ids not referred to.

    A group that has no effect is replaced by its children.
    """
    element.tag = element.tag.rpartition("}")[2]
    element.text = element.text if element.tag == "text" else None
    element.tail = None
    element[:] = [part for child in element for part in _finished(child, figure)]
    attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
    if attributes.get("transform", "").startswith("rotate(-0 "):
        del attributes["transform"]
    look = _look(attributes.pop("style", ""))
    places = {name: _rounded(attributes[name]) for name in ("d", "x", "y") if name in attributes}
    element.attrib = attributes | places | look
    if element.tag != "path":  # the paths of markers are referred to
        mark = figure.marks.get(element.attrib.pop("id", ""), Mark())
        _mark(element, mark, in_lanes=bool(figure.lanes))
    bare = element.tag == "g" and not (element.attrib and len(element))
    return [*element] if bare else [element]


def _mark(element: ElementTree.Element, mark: Mark, *, in_lanes: bool) -> None:
    """Give an element the attributes that follow from the mark of its artist.

    An artist with a text gives `data-bar` and a title, which browsers show while the pointer is on
    the element; one with cases gives their ids as `data-cases`; one in a lane gives the lane's
    number as `data-lane`, if the figure is `in_lanes`.
    """
    if mark.lane is not None and in_lanes:
        element.set("data-lane", str(mark.lane))
    if mark.cases:
        element.set("data-cases", naming.case_ids(mark.cases))
    if mark.text:
        element.set("data-bar", "")
        title = ElementTree.Element("title")
        title.text = naming.plain(mark.text)
        element.insert(0, title)


def _rounded(places: str) -> str:
    """Return the words of a path or a coordinate, with two decimals at most."""
    return " ".join(
        word if word.isalpha() else f"{float(word):.2f}".rstrip("0").rstrip(".")
        for word in places.split()
    )


def _look(style: str) -> dict[str, str]:
    """Return the properties of a style, with the page's colours, and without the font's family."""
    parts = (one.partition(":") for one in style.split(";") if one)
    look = {name.strip(): value.strip() for name, _, value in parts}
    if "font" in look:  # the font in one property, by older versions of matplotlib
        *weight, size = look.pop("font").partition("px")[0].split()
        look |= {"font-size": f"{size}px", "font-weight": "".join(weight) or "normal"}
    look.pop("font-family", None)
    return {
        name: f"var({VARIABLES[value]})" if value in VARIABLES else value
        for name, value in look.items()
    }
