"""Sections: what a report shows on one question, as drawings, a table, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from markupsafe import Markup

from dpbench.records import Case
from dpbench.report import naming
from dpbench.report.table import Table

if TYPE_CHECKING:
    from dpbench.report.marks import Drawing


@dataclass(frozen=True)
class Panel:
    """One drawing with its title, its caption and the labels of its cases.

    `cases` are the cases by which the page filters the drawing; without any, the page always shows
    it. `figure` is what `svg` was made from, for the drawings that `Run.plot` shows.
    """

    title: str
    svg: Markup
    caption: str
    labels: tuple[str, ...]
    cases: Sequence[Case] = ()
    figure: Drawing | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Detail:
    """A section that a sibling adds to the details of a page, as HTML below its title.

    `style` is the style sheet of this HTML.
    """

    id: str
    title: str
    html: Markup
    style: str


@dataclass(frozen=True)
class Section:
    """A section of a report: a text before its panels and its tables (`lead`), and a `note` below.

    `table_labels` are the labels of the tables' cases. The note gives the number of cases that are
    not drawn, and the reason. The page shows an `open` section at once, and folds the others as its
    details. `numbers` are the prefixes of the numbers in `frames.frame` that the page can save.
    """

    id: str
    title: str
    lead: str
    panels: Sequence[Panel] = ()
    note: str = ""
    tables: Sequence[Table] = ()
    table_labels: tuple[str, ...] = ()
    open: bool = False
    numbers: tuple[str, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the labels that the tables and all panels share, which the heading shows."""
        tabled = [self.table_labels] if self.tables else []
        return naming.common([*tabled, *(panel.labels for panel in self.panels)])
