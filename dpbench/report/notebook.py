"""Notebook: a run, or a comparison of two, as HTML for the output of a notebook's cell.

The HTML needs neither a network nor scripts, and all text in it is escaped.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from markupsafe import Markup

from dpbench.analysis import statements
from dpbench.analysis.comparison import Comparisons
from dpbench.analysis.report import Report
from dpbench.report import NoDrawings, check_drawings, comparing, naming, table, templates
from dpbench.report.section import Section

if TYPE_CHECKING:
    from dpbench.report.sheet import Sheet

LIGHT, DARK = re.findall(r":root (\{.*?\})", templates.text_of("page.css"), re.DOTALL)[:2]
"""The CSS variables of the page in its light and its dark theme, to which drawings refer."""
THEMES = (
    ('[data-jp-theme-light="true"], [theme="light"], [data-theme="light"], .vscode-light', LIGHT),
    ('[data-jp-theme-light="false"], [theme="dark"], [data-theme="dark"], .vscode-dark', DARK),
)
"""The marks of a theme in JupyterLab, Colab, Sphinx and VS Code, whatever the system's theme is."""
STYLE = "\n".join(
    [
        f".dpbench {LIGHT}",
        f"@media (prefers-color-scheme: dark) {{ .dpbench {DARK} }}",
        *(f":is({marks}) .dpbench {variables}" for marks, variables in THEMES),
        templates.text_of("notebook.css"),
    ]
)


def render(report: Report) -> str:
    """Return the HTML of a run: a card per answer, the warnings, the swim lanes, and all cases.

    Without matplotlib, a note replaces the swim lanes.
    """
    sections: list[Section] = []
    missing = ""
    try:
        sections = _sections(report, "lanes")
    except NoDrawings as error:
        missing = f"No swim lanes: {error}."
    facts = ", ".join(f"{name} {value}" for name, value in naming.facts(report)[:3])
    return _html(
        answers=report.answers,
        lines=[facts, *([missing] if missing else [])],
        warnings=report.warnings,
        sections=sections,
        table=table.all_cases(report),
    )


def drawings(report: Report) -> Sheet:
    """Return a figure with the swim lanes and the speed-ups of a run, and with their HTML.

    For a run of `dpbench loaders`, it has its rates instead. Raises NoDrawings without matplotlib.
    """
    sections = _sections(report, "lanes", "speedup")
    from dpbench.report.sheet import Sheet

    return Sheet(sections, _html(sections=sections))


def _sections(report: Report, *ids: str) -> list[Section]:
    check_drawings()
    from dpbench.report import figures

    # a notebook may show several runs, whose drawings must not have the same ids
    return figures.sections(report, ids, f"run-{report.run.id[:12]}-")


def compared(before: Report, after: Report, comparisons: Comparisons) -> str:
    """Return the HTML of a comparison: a line on each run, and the table of their common cases."""
    return _html(
        heading=comparing.summary(comparisons.verdicts),
        lines=[f"{name}: {value}" for name, value in comparing.facts(before, after, comparisons)],
        table=comparing.case_table(comparisons),
        text_columns=comparing.TEXT_COLUMNS,
    )


def _html(**content: object) -> str:
    """Return the HTML of a cell's output with the parts that are given."""
    parts = {
        "heading": "",
        "answers": (),
        "lines": (),
        "warnings": (),
        "sections": (),
        "table": None,
        "text_columns": table.TEXT_COLUMNS,
    }
    return templates.template("notebook.html").render(
        **{**parts, **content},
        style=Markup(STYLE),
        summary=statements.summary,
        signs=table.FOOTNOTES,
    )
