"""Notebook: a run, or a comparison of two, as HTML for the output of a notebook's cell.

The HTML needs neither a network nor scripts, and all text in it is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from dpbench.analysis import caveats
from dpbench.analysis.answer import Answer
from dpbench.analysis.comparison import Comparisons
from dpbench.analysis.ladder import notable
from dpbench.analysis.report import Report
from dpbench.report import NoDrawings, check_drawings, comparing, naming, table

if TYPE_CHECKING:
    from dpbench.report.section import Panel, Section

LIGHT, DARK = re.findall(
    r":root (\{.*?\})", Path(__file__).with_name("page.css").read_text(encoding="utf-8"), re.DOTALL
)[:2]
"""The CSS variables of the page in its light and its dark theme, to which drawings refer."""
THEMES = (
    ('[data-jp-theme-light="true"], [theme="light"], [data-theme="light"], .vscode-light', LIGHT),
    ('[data-jp-theme-light="false"], [theme="dark"], [data-theme="dark"], .vscode-dark', DARK),
)
"""The marks of a theme in JupyterLab, Colab, Sphinx and VS Code, whatever the system's theme is."""
STYLE = "\n".join(
    [
        "<style>",
        f".dpbench {LIGHT}",
        f"@media (prefers-color-scheme: dark) {{ .dpbench {DARK} }}",
        *(f":is({marks}) .dpbench {variables}" for marks, variables in THEMES),
        """\
.dpbench { font: 14px/1.45 system-ui, sans-serif; overflow-x: auto; padding: .5em;
  background: var(--bg); color: var(--fg); }
.dpbench .card { background: var(--card); border: 1px solid var(--grid);
  border-left: 4px solid var(--dp); border-radius: 6px; padding: .5em .9em; margin: .5em 0;
  max-width: 60em; }
.dpbench .card b { display: block; font-size: 1.35em; }
.dpbench p { margin: .1em 0; max-width: 60em; }
.dpbench h4 { margin: .8em 0 .2em; }
.dpbench .badge { border: 1px solid; border-radius: 4px; padding: 0 .35em; font-size: .75em; }
.dpbench .panels { display: flex; flex-wrap: wrap; gap: .5em 2em; }
.dpbench figure { margin: .3em 0; flex: 1 1 420px; max-width: 560px; min-width: 0; }
.dpbench svg { display: block; width: 100%; height: auto; stroke-linejoin: round; }
.dpbench figcaption, .dpbench .note { color: var(--muted); font-size: .85em; }
.dpbench table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5em 0;
  color: inherit; font-size: inherit; table-layout: auto; }
.dpbench th, .dpbench td { text-align: right; padding: .2em .5em; vertical-align: top;
  border-bottom: 1px solid var(--grid); white-space: nowrap; }
.dpbench .text { text-align: left; }
.dpbench small { display: block; color: var(--muted); }
.dpbench code, .dpbench pre { white-space: pre-wrap; overflow-wrap: anywhere; text-align: left; }
.dpbench code, .dpbench pre { background: none; color: inherit; }
</style>""",
    ]
)
ENDS = "Of each ladder, the drawings show the first rung, `reference`, and the best rungs only."


def render(report: Report) -> str:
    """Return the HTML of a run: a card per answer, the warnings, the swim lanes, and all cases.

    Without matplotlib, a note replaces the swim lanes.
    """
    facts = ", ".join(f"{name} {value}" for name, value in naming.facts(report)[:3])
    parts = [*map(_card, report.answers), _line(facts)]
    if report.warnings:
        title = f"Warnings: {caveats.summary(report.warnings)}"
        parts.append(_folded(title, map(_line, map(str, report.warnings))))
    try:
        parts += map(_section, _sections(report, lanes_only=True))
    except NoDrawings as missing:
        parts.append(_line(f"No swim lanes: {missing}."))
    return _whole([*parts, _table(report)])


def drawings(report: Report) -> str:
    """Return the HTML of the swim lanes and the speed-ups of a run.

    For a run of `dpbench loaders`, the HTML has its rates instead. Raises NoDrawings without
    matplotlib.
    """
    return _whole(map(_section, _sections(report)))


def _sections(report: Report, *, lanes_only: bool = False) -> list[Section]:
    check_drawings()
    from dpbench.report import loaders, speedup, svg, swim_lanes

    # a notebook may show several runs, whose drawings must not have the same ids
    run = f"run-{report.run_id[:12]}"
    rows = notable(report.rows, report.ladders)
    with svg.theme():
        if report.loading:
            return [loaders.section(report.loading, report.trials)]
        sections = [swim_lanes.section(report, rows, f"{run}-lanes")]
        if not (lanes_only or report.observed):  # an observed loop has no baseline
            sections.append(speedup.section(rows, f"{run}-speedup"))
    if report.ladders:
        return [replace(section, note=f"{section.note} {ENDS}".strip()) for section in sections]
    return sections


def compared(before: Report, after: Report, comparisons: Comparisons) -> str:
    """Return the HTML of a comparison: a line on each run, and the table of their common cases."""
    head = [
        _line(f"{name}: {value}") for name, value in comparing.facts(before, after, comparisons)
    ]
    cells = [
        Markup("").join(
            _cell("td", name, cell.text, text=comparing.TEXT_COLUMNS)
            for name, cell in zip(comparing.COLUMNS, line, strict=True)
        )
        for line in comparing.cells(comparisons)
    ]
    columns = Markup("").join(
        _cell("th", name, name, text=comparing.TEXT_COLUMNS) for name in comparing.COLUMNS
    )
    summary = Markup('<div class="card"><b>{}</b>{}</div>').format(
        comparing.summary(comparisons.verdicts), Markup("").join(head)
    )
    return _whole([summary, _rows(columns, cells)])


def _whole(parts: Iterable[Markup]) -> str:
    content = Markup("\n").join([Markup(STYLE), *parts])
    return str(Markup('<div class="dpbench">{}</div>').format(content))


def _card(answer: Answer) -> Markup:
    ranked = [f"{answer.ranked[0].upper()}{answer.ranked[1:]}."] if answer.ranked else []
    paragraphs = Markup("").join(map(_line, [*ranked, *answer.sentences]))
    following = (
        Markup("<p>Next: <code>{}</code></p>").format(answer.command) if answer.command else ""
    )
    return Markup('<div class="card">{}<b>{}</b>{}{}{}</div>').format(
        answer.subject, answer.headline, paragraphs, following, _badges(answer.labels)
    )


def _section(section: Section) -> Markup:
    note = _line(section.note) if section.note else ""
    return Markup('<h4>{}</h4><p class="note">{}</p><div class="panels">{}</div>{}').format(
        section.title, section.lead, Markup("").join(map(_figure, section.panels)), note
    )


def _figure(panel: Panel) -> Markup:
    return Markup("<figure>{}{}<figcaption>{} {}</figcaption></figure>").format(
        panel.title,
        Markup(panel.svg),  # svg.render has escaped all text
        _badges(panel.labels),
        panel.caption,
    )


def _line(text: str) -> Markup:
    return Markup("<p>{}</p>").format(text)


def _folded(title: str, lines: Iterable[Markup]) -> Markup:
    return Markup("<details><summary>{}</summary>{}</details>").format(
        title, Markup("").join(lines)
    )


def _badges(labels: Iterable[str]) -> Markup:
    return Markup(" ").join(
        Markup('<span class="badge">{}</span>').format(label) for label in labels
    )


def _table(report: Report) -> Markup:
    columns, case_lines, notes = table.all_cases(report)
    head = Markup("").join(_cell("th", name, name) for name in columns)
    lines = []
    for line in case_lines:
        cells = zip(columns, line.cells, strict=True)
        lines.append(
            Markup("").join(_cell("td", name, cell.text, cell.small) for name, cell in cells)
        )
        lines += [
            Markup(
                '<td class="text"'
                ' colspan="{}"><details><summary>{}</summary><pre>{}</pre></details></td>'
            ).format(len(columns), headline, reason)
            for headline, reason in line.notes
        ]
    return Markup("").join([_rows(head, lines), *map(_line, notes)])


def _rows(head: Markup, lines: Iterable[Markup]) -> Markup:
    body = Markup("").join(Markup("<tr>{}</tr>").format(line) for line in lines)
    return Markup("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>").format(head, body)


def _cell(
    tag: str, column: str, content: str, small: str = "", text: Collection[str] = table.TEXT_COLUMNS
) -> Markup:
    align = Markup(' class="text"') if column in text else ""
    under = Markup("<small>{}</small>").format(small) if small else ""
    return Markup("<{0}{1}>{2}{3}</{0}>").format(Markup(tag), align, content, under)
