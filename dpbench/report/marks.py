"""Marks: the texts and the cases of a drawing's artists, by which the page explains and filters it.

Matplotlib writes the `gid` of an artist as the id of its SVG group. The functions here choose the
`gid`; `svg.render` turns the mark into attributes of the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpbench.records import Case


@dataclass
class Mark:
    """What an artist shows: a text that explains it, its cases, and the number of its lane."""

    text: str = ""
    cases: Sequence[Case] = ()
    lane: int | None = None


class Drawing(Figure):
    """A figure that knows what its artists show.

    `marks` maps the `gid` of an artist to its mark. `lanes` has the case and the height of each
    lane, from the top of the axes; it is empty without lanes. Heights and `size` are in SVG units
    (1/72 inch).
    """

    def __init__(self, size: tuple[float, float]) -> None:
        super().__init__(figsize=(size[0] / 72, size[1] / 72), facecolor="none")
        self.marks: dict[str, Mark] = {}
        self.lanes: Sequence[tuple[Case, float]] = ()


def _mark(artist: Artist) -> Mark:
    """Return the mark of an artist, which gets one if it has none."""
    figure = artist.figure
    assert isinstance(figure, Drawing)
    gid = artist.get_gid() or f"mark-{len(figure.marks)}"
    artist.set_gid(gid)
    return figure.marks.setdefault(gid, Mark())


def explain(artist: Artist, text: str, cases: Sequence[Case] = ()) -> None:
    """Give an artist a text, which the page shows while the pointer or the focus is on it.

    `cases` are the cases that the artist shows; if empty, it shows the case of its lane.
    """
    _mark(artist).text = text
    own(artist, cases)


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
    _mark(artist).cases = cases


@contextmanager
def in_lane(axes: Axes, number: int) -> Iterator[None]:
    """Return a context that puts each artist that is added to `axes` inside it into a lane.

    The page hides the artists of a lane if it hides the lane's case.
    """
    before = set(axes.get_children())
    yield
    for artist in axes.get_children():
        if artist not in before:
            _mark(artist).lane = number
