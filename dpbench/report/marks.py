"""Marks: the texts and the cases of a drawing's artists, by which the page explains and filters it.

Matplotlib writes the `gid` of an artist as the id of its SVG group. The functions here choose the
`gid`, and turn it into attributes of the group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from xml.etree import ElementTree

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpbench.records import Case
from dpbench.report import naming


class Drawing(Figure):
    """A figure that knows what its artists show.

    `hooks` maps the `gid` of an artist to the text that explains it, `owners` to the cases that it
    shows. `lanes` has the case and the height of each lane, from the top of the axes; it is empty
    without lanes. Heights and `size` are in SVG units (1/72 inch).
    """

    def __init__(self, size: tuple[float, float]) -> None:
        super().__init__(figsize=(size[0] / 72, size[1] / 72), facecolor="none")
        self.hooks: dict[str, str] = {}
        self.owners: dict[str, Sequence[Case]] = {}
        self.lanes: Sequence[tuple[Case, float]] = ()


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


@contextmanager
def in_lane(axes: Axes, number: int) -> Iterator[None]:
    """Return a context that puts each artist that is added to `axes` inside it into a lane.

    The page hides the artists of a lane if it hides the lane's case. A figure without lanes is
    drawn as it is.
    """
    figure = axes.figure
    assert isinstance(figure, Drawing)
    before = set(axes.get_children())
    yield
    for artist in axes.get_children():
        if figure.lanes and artist not in before:
            artist.set_gid(f"lane-{number}:{artist.get_gid() or ''}")


def hook(target: ElementTree.Element, gid: str, figure: Drawing) -> None:
    """Give an SVG element the attributes that follow from the `gid` of its artist.

    An artist with a text gives `data-bar` and a title, which browsers show while the pointer is on
    the group; one with cases gives their ids as `data-cases`; one in a lane gives the lane's number
    as `data-lane`.
    """
    if lane := re.match(r"lane-(\d+):", gid):
        target.set("data-lane", lane[1])
        gid = gid.removeprefix(lane[0])
    if cases := figure.owners.get(gid):
        target.set("data-cases", naming.case_ids(cases))
    if gid in figure.hooks:
        target.set("data-bar", "")
        ElementTree.SubElement(target, "title").text = naming.plain(figure.hooks[gid])
