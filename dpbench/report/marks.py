"""Marks: the texts and the cases of a drawing's artists, by which the page explains and filters it.

Matplotlib writes the `gid` of an artist as the id of its SVG group. The functions here choose the
`gid`, and turn it into attributes of the group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from xml.etree import ElementTree

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.spines import Spine
from matplotlib.text import Text

from dpbench.records import Case
from dpbench.report import naming


class Drawing(Figure):
    """A figure that knows what its artists show.

    `hooks` maps the `gid` of an artist to the text that explains it, `owners` to the cases that it
    shows. `bands` has the case, the top edge and the bottom edge of each lane, measured from the
    top of the axes; it is empty without lanes. `size` is in SVG units (1/72 inch).
    """

    def __init__(self, size: tuple[float, float]) -> None:
        super().__init__(figsize=(size[0] / 72, size[1] / 72), facecolor="none")
        self.hooks: dict[str, str] = {}
        self.owners: dict[str, Sequence[Case]] = {}
        self.bands: Sequence[tuple[Case, float, float]] = ()


def explain(artist: Artist, text: str, cases: Sequence[Case] = ()) -> None:
    """Give an artist a text, which the page shows while the pointer or the focus is on it.

    `cases` are the cases that the artist shows; if empty, it shows the case of its lane.
    """
    figure = artist.figure
    assert isinstance(figure, Drawing)
    gid = f"mark-{len(figure.hooks)}"
    artist.set_gid(gid)
    figure.hooks[gid] = text
    figure.owners[gid] = cases


@contextmanager
def owned(axes: Axes, cases: Sequence[Case]) -> Iterator[None]:
    """Return a context that gives `cases` to each artist that is added to `axes` inside it.

    An artist to which `explain` has given a text keeps its own cases.
    """
    before = set(axes.get_children())
    yield
    for artist in axes.get_children():
        if artist not in before and not artist.get_gid():
            own(artist, cases)


def own(artist: Artist, cases: Sequence[Case]) -> None:
    """Give an artist the cases that it shows; the page hides it if it hides all of them."""
    figure = artist.figure
    assert isinstance(figure, Drawing)
    gid = f"of-{len(figure.owners)}"
    artist.set_gid(gid)
    figure.owners[gid] = cases


def give_bands(figure: Drawing) -> None:
    """Put the number of the band (lane) that contains an artist into the artist's `gid`."""
    for axes in figure.axes[:1] if figure.bands else ():
        for artist in axes.get_children():
            band = _band(figure.bands, axes, artist)
            if band is not None:
                artist.set_gid(f"band-{band}:{artist.get_gid() or ''}")


def _band(bands: Sequence[tuple[Case, float, float]], axes: Axes, artist: Artist) -> int | None:
    """Return the number of the band of an artist; None if no band contains it, as for an axis."""
    if isinstance(artist, Axis | Spine) or artist is axes.patch or not artist.get_visible():
        return None
    low, high = _edges(axes, artist)
    middle = (low + high) / 2
    containing = (number for number, (_, top, bottom) in enumerate(bands) if top <= middle < bottom)
    number = next(containing, None)
    # an artist that is higher than a band, such as a line across several bands, belongs to none
    return (
        number if number is not None and high - low <= bands[number][2] - bands[number][1] else None
    )


def _edges(axes: Axes, artist: Artist) -> tuple[float, float]:
    """Return an artist's top and bottom edge in units of the axes; -1 if it draws nothing."""
    if isinstance(artist, Text):
        ends = [artist.get_position()[1]] if artist.get_text() else []
    elif isinstance(artist, LineCollection):  # whose extent in the window matplotlib does not know
        ends = [y for segment in artist.get_segments() for _, y in segment]
    elif isinstance(artist, Rectangle) and artist.get_data_transform() is axes.transData:
        ends = [artist.get_y(), artist.get_y() + artist.get_height()]
    else:
        box = artist.get_window_extent()
        ends = list(axes.transData.inverted().transform([[0, box.y0], [0, box.y1]])[:, 1])
    return (min(ends), max(ends)) if ends and np.isfinite(ends).all() else (-1.0, -1.0)


def hook(target: ElementTree.Element, gid: str, figure: Drawing) -> None:
    """Give an SVG element the attributes that follow from the `gid` of its artist.

    An artist with a text gives `data-bar` and a title, which browsers show while the pointer is on
    the group; one with cases gives their ids as `data-cases`; one in a band gives the band's number
    as `data-lane`.
    """
    if band := re.match(r"band-(\d+):", gid):
        target.set("data-lane", band[1])
        gid = gid.removeprefix(band[0])
    if cases := figure.owners.get(gid):
        target.set("data-cases", naming.case_ids(cases))
    if gid in figure.hooks:
        target.set("data-bar", "")
        ElementTree.SubElement(target, "title").text = naming.plain(figure.hooks[gid])
