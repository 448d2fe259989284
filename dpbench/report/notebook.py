"""Notebook: a run, or a comparison of two, as HTML for the output of a notebook's cell."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from markupsafe import Markup

from dpbench.analysis.answer import Answer
from dpbench.analysis.comparison import Comparisons
from dpbench.analysis.report import Report
from dpbench.report import comparing, naming, table

STYLE = """<style>
.dpbench { font: 14px/1.45 system-ui, sans-serif; overflow-x: auto; }
.dpbench .card { border: 1px solid #8884; border-left: 4px solid #0072b2; border-radius: 6px;
  padding: .5em .9em; margin: .5em 0; max-width: 60em; }
.dpbench .card b { display: block; font-size: 1.35em; }
.dpbench .card p { margin: .1em 0; }
.dpbench .badge { border: 1px solid; border-radius: 4px; padding: 0 .35em; font-size: .75em; }
.dpbench table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.dpbench th, .dpbench td { text-align: right; padding: .2em .5em; border-bottom: 1px solid #8884;
  vertical-align: top; white-space: nowrap; }
.dpbench .text { text-align: left; }
.dpbench small { display: block; opacity: .75; }
.dpbench code, .dpbench pre { white-space: pre-wrap; overflow-wrap: anywhere; text-align: left; }
</style>"""


def render(report: Report) -> str:
    """Return the HTML of a run: an answer card per model, the warnings, and the table of all cases.

    The HTML needs neither a network nor scripts, and all text in it is escaped.
    """
    facts = ", ".join(f"{name} {value}" for name, value in naming.facts(report)[:3])
    parts = [
        Markup(STYLE),
        *map(_card, report.answers),
        Markup("<p>{}</p>").format(facts),
        (
            _folded(f"Warnings: {len(report.warnings)}", map(_line, map(str, report.warnings)))
            if report.warnings
            else ""
        ),
        _table(report),
    ]
    return str(Markup('<div class="dpbench">{}</div>').format(Markup("\n").join(parts)))


def compared(before: Report, after: Report, comparisons: Comparisons) -> str:
    """Return the HTML of a comparison: a line on each run, and the table of their common cases."""
    head = [
        _line(f"{name}: {value}") for name, value in comparing.facts(before, after, comparisons)
    ]
    cells = [
        Markup("").join(
            _cell("td", *pair, text=comparing.TEXT_COLUMNS)
            for pair in zip(comparing.COLUMNS, line, strict=True)
        )
        for line in comparing.cells(comparisons)
    ]
    columns = Markup("").join(
        _cell("th", name, name, text=comparing.TEXT_COLUMNS) for name in comparing.COLUMNS
    )
    summary = Markup('<div class="card"><b>{}</b>{}</div>').format(
        comparing.summary(comparisons), Markup("").join(head)
    )
    return str(
        Markup('<div class="dpbench">{}{}{}</div>').format(
            Markup(STYLE), summary, _rows(columns, cells)
        )
    )


def _card(answer: Answer) -> Markup:
    paragraphs = Markup("").join(map(_line, answer.sentences))
    following = (
        Markup("<p>Next: <code>{}</code></p>").format(answer.command) if answer.command else ""
    )
    return Markup('<div class="card">{}<b>{}</b>{}{}{}</div>').format(
        answer.subject, answer.headline, paragraphs, following, _badges(answer.labels)
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
    columns, case_lines = table.all_cases(report)
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
    return _rows(head, lines)


def _rows(head: Markup, lines: Iterable[Markup]) -> Markup:
    body = Markup("").join(Markup("<tr>{}</tr>").format(line) for line in lines)
    return Markup("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>").format(head, body)


def _cell(
    tag: str, column: str, content: str, small: str = "", text: Collection[str] = table.TEXT_COLUMNS
) -> Markup:
    align = Markup(' class="text"') if column in text else ""
    under = Markup("<small>{}</small>").format(small) if small else ""
    return Markup("<{0}{1}>{2}{3}</{0}>").format(Markup(tag), align, content, under)
