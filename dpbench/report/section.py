"""Sections: what a report shows on one question, as drawings, a table, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpbench.records import Case
from dpbench.report import naming
from dpbench.report.table import Table


@dataclass(frozen=True)
class Panel:
    """One drawing with its title, its caption and the labels of its cases.

    `tables` have the numbers in more detail. `cases` are the cases by which the page filters the
    drawing; without any, the page always shows it.
    """

    title: str
    svg: str
    caption: str
    labels: tuple[str, ...]
    tables: Sequence[Table] = ()
    cases: Sequence[Case] = ()


@dataclass(frozen=True)
class Section:
    """A section of a report: a text before its panels and its table (`lead`), and a `note` below.

    `table_labels` are the labels of the table's cases. The note gives the number of cases that are
    not drawn, and the reason.
    """

    id: str
    title: str
    lead: str
    panels: Sequence[Panel] = ()
    note: str = ""
    table: Table | None = None
    table_labels: tuple[str, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the labels that the table and all panels share, which the heading shows."""
        tabled = [self.table_labels] if self.table else []
        return naming.common([*tabled, *(panel.labels for panel in self.panels)])
