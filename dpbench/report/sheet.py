"""Sheet: drawings of a report in one matplotlib figure, in the colours of the light theme."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from dpbench.report import naming, svg, templates
from dpbench.report.marks import Drawing
from dpbench.report.section import Section

HEAD = 44.0
"""The height of a drawing's title, in SVG units (1/72 inch)."""
NOTE = 18.0
"""The height of a line on a section without drawings, in SVG units."""
GAP = 24.0
"""The space between two columns, in SVG units."""
PARTS = ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor")
"""The properties of artists that are colours."""


def _light() -> Mapping[str, str]:
    """Return the colours of the light theme by the placeholder that drawings have for them."""
    theme = dict(re.findall(r"(--[\w-]+): (#\w+);", templates.text_of("page.css").split("}")[0]))
    return {placeholder: theme[name] for placeholder, name in svg.VARIABLES.items()}


class Sheet(Figure):
    """A figure with a column for each section, which has the drawings of its panels.

    Above each drawing are its title and its labels; below all are the notes of the sections without
    drawings, which say why they have none. The drawings keep their size if that of the
    figure is changed. A notebook shows `html`, which follows its theme.
    """

    _drawings: list[Drawing]

    def __init__(self, sections: Sequence[Section], html: str) -> None:
        drawn = [[one.figure for one in section.panels if one.figure] for section in sections]
        columns = [column for column in drawn if column]
        self._html = html
        self._colours = _light()
        heights = [sum(HEAD + _height(drawing) for drawing in column) for column in columns]
        notes = [
            f"{section.title}: {section.note}"
            for section, column in zip(sections, drawn, strict=True)
            if not column
        ]
        height = max([*heights, HEAD]) + NOTE * len(notes)
        width = max(len(columns), 1) * (svg.WIDTH + GAP) - GAP
        super().__init__(figsize=(width / 72, height / 72), facecolor="white")
        self._drawings = [drawing for column in columns for drawing in column]
        for section in sections:
            _title(section)
        for number, column in enumerate(columns):
            bottom = height
            for drawing in column:
                bottom -= HEAD + _height(drawing)
                _move(drawing, number * (svg.WIDTH + GAP), bottom)
        for line, note in enumerate(notes):
            self.text(0, (line + 0.3) * NOTE / height, note, fontsize=8)

    def clear(self, keep_observers: bool = False) -> None:
        """Remove the drawings, too."""
        self._drawings = []
        super().clear(keep_observers=keep_observers)

    @property  # type: ignore[misc]
    def axes(self) -> list[Axes]:  # type: ignore[override]
        """Return the axes of all drawings."""
        return [axes for drawing in self._drawings for axes in drawing.axes]

    def draw(self, renderer: RendererBase) -> None:
        """Draw the drawings on the background."""
        with svg.theme():
            super().draw(renderer)
            for drawing in self._drawings:
                drawing.set_dpi(self.get_dpi())
                for artist in drawing.findobj():
                    self._colour(artist)
                drawing.draw(renderer)

    def _colour(self, artist: Artist) -> None:
        """Replace the placeholders among the colours of an artist."""
        for part in PARTS:
            known: Any = getattr(artist, f"get_{part}", None)
            found = known() if known else None
            if found is not None and (colour := self._colours.get(to_hex(found))):
                artist.set(**{part: colour})

    def get_tightbbox(self, *args: Any, **kwargs: Any) -> Bbox:
        """Return the whole figure in inches, because no drawing has a margin to cut off."""
        return self.bbox_inches

    def _repr_html_(self) -> str:
        return self._html


def _height(drawing: Drawing) -> float:
    """Return the height of a drawing that has not been moved, in SVG units."""
    return float(drawing.get_size_inches()[1]) * 72


def _title(section: Section) -> None:
    """Write above each drawing of a section its title and its labels."""
    for panel in section.panels:
        if panel.figure:
            title = naming.clip(panel.title, svg.COLUMNS)
            below = f"{section.title} [{' '.join(panel.labels)}]"
            unit = 1 / _height(panel.figure)
            with svg.theme():
                panel.figure.text(0, 1 + 28 * unit, title, fontweight="bold")
                panel.figure.text(0, 1 + 12 * unit, below, fontsize=svg.SMALL)


def _move(drawing: Drawing, left: float, bottom: float) -> None:
    """Move a drawing to a place in a larger figure, in SVG units."""
    width, height = drawing.get_size_inches()
    place = Bbox.from_bounds(left / 72, bottom / 72, width, height)
    drawing.bbox_inches.set_points(place.get_points())
