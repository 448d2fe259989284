"""Markdown: a run's report for a pull request, without drawings and without matplotlib."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from dpbench.analysis.answer import Answer
from dpbench.analysis.findings import Diagnosis, text
from dpbench.analysis.report import Report
from dpbench.records import words
from dpbench.report import devices, naming, table
from dpbench.report.section import Section

REASON = 160
"""The number of columns of a problem's reason; the HTML page shows it in full."""


def render(report: Report) -> str:
    """Return the report in GitHub's Markdown."""
    sections = devices.parts(report)
    figures = [
        *(f"**{said(one.subject)}**: {said(' '.join(one.sentences))}" for one in report.answers),
        *_list(report.notes, 4000),
        *(part for one in report.diagnoses for part in _diagnosis(one)),
        *(_part(part) for part in sections if part.id != "ladder"),
        *_list(report.remarks),
        "\n".join(f"- {name}: {said(value)}" for name, value in _facts(report)),
    ]
    return _joined(
        [
            f"## dpbench: run {said(report.run.id[:12])}",
            *_badges(report),
            *map(_answer, report.answers),
            *_list(report.warnings),
            *(_part(part, folded=False) for part in sections if part.id == "ladder"),
            *_cases(report),
            _details("Causes, remarks, figures, machine and code", _joined(figures)),
        ]
    )


def brief(report: Report) -> str:
    """Return the answers and the table of all cases, for an issue or a pull request."""
    return _joined([*map(_answer, report.answers), *_cases(report)])


def _joined(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def _badges(report: Report) -> Iterator[str]:
    """Yield the labels of cases, unless an answer states them."""
    if not report.answers:
        badges = naming.badges(report.rows)
        yield " ".join(f"**{label}**{f' ({where})' if where else ''}" for label, where in badges)


def _cases(report: Report) -> list[str]:
    columns, lines, notes = table.all_cases(report)
    cells = ([_cell(cell) for cell in line.cells] for line in lines)
    return [
        _table(columns, cells),
        "\n".join(_notes(lines)),
        "\n".join(said(note, 4000) for note in notes),
    ]


def said(text: str, columns: int = 1000) -> str:
    """Return the text as one line of at most `columns`, with markup, mentions and links escaped."""
    escaped = re.sub(r"([\\`*_\[\]#|~])", r"\\\1", naming.clip(text, columns))
    escaped = escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return escaped.replace("@", "@\u200b").replace("://", ":\u200b//")


def _answer(answer: Answer) -> str:
    first, *others = map(said, answer.verdict)
    lines = [f"**{first}**{_labels(answer.labels)}", *others]
    if answer.command:
        lines.append(f"Next: {_code(answer.command)}")
    return "\\\n".join(lines)


def _code(text: str) -> str:
    """Return the text as code, enclosed by one backtick more than its longest run of them."""
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    space = " " * text.startswith("`") or " " * text.endswith("`")
    return f"{fence}{space}{naming.plain(text)}{space}{fence}"


def _list(notes: Iterable[object], columns: int = 400) -> Iterator[str]:
    if lines := [f"- {said(str(one), columns)}" for one in notes]:
        yield "\n".join(lines)


def _labels(labels: Iterable[str]) -> str:
    return "".join(f" `{label}`" for label in labels)


def _cell(cell: table.Cell) -> str:
    small = f"<br><sub>{said(cell.small)}</sub>" if cell.small else ""
    return f"{said(cell.text)}{small}"


def _diagnosis(diagnosis: Diagnosis) -> Iterator[str]:
    yield f"**{said(diagnosis.row.label)}**{_labels(diagnosis.labels)}"
    lines = []
    for finding in diagnosis.findings:
        detail = "; ".join(f"{name}: {value}" for name, value in text.parts(finding))
        lines.append(f"1. **{said(text.headline(finding))}**<br><sub>{said(detail)}</sub>")
    yield _details(
        f"{words.count(len(lines), 'finding')} on {said(diagnosis.row.case.model)}, the most"
        " costly first",
        "\n".join(lines),
    )


def _table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[str] = table.TEXT_COLUMNS
) -> str:
    align = ["---" if name in text or not name else "---:" for name in columns]
    return "\n".join(f"| {' | '.join(row)} |" for row in ([*columns], align, *rows))


def _notes(lines: Iterable[table.TableLine]) -> Iterator[str]:
    for line in lines:
        model, strategy, devices, batch = (cell for cell in line.cells[:4])
        for what, reason in line.notes:
            case = (
                f"{model.text} {strategy.text}{strategy.small} ×{devices.text} batch {batch.text}"
            )
            last = reason.strip().rpartition("\n")[2]  # the error message of a traceback
            yield f"- {said(case)}: {said(what)}: {said(last, REASON)}"


def _part(section: Section, *, folded: bool = True) -> str:
    lead = f"{said(section.lead)}{_labels(section.labels)}"
    titled = len(section.tables) > 1 or not folded
    body = "\n\n".join([lead, *(part for one in section.tables for part in _whole(one, titled))])
    return _details(section.title, body) if folded else f"### {section.title}\n\n{body}"


def _whole(content: table.Table, titled: bool) -> Iterator[str]:
    """Yield a table with its note and its signs explained, after its title if `titled`."""
    if titled:
        yield f"**{said(content.title)}**"
    cells = ([_cell(cell) for cell in line] for line in content.lines)
    yield _table(content.columns, cells, content.columns[: content.text])
    if notes := [*filter(None, [said(content.note)]), *table.footnotes(content.lines)]:
        yield "\n".join(notes)


def _details(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>" if body else ""


def _facts(report: Report) -> list[tuple[str, str]]:
    return [*naming.facts(report), ("command", report.run.facts.command)]


def compared(
    title: str,
    facts: Sequence[tuple[str, str]],
    columns: Sequence[str],
    cells: Iterable[Sequence[table.Cell]],
    text: Sequence[str],
    note: str,
) -> str:
    """Return a comparison of two runs as Markdown: its facts as a list, its table, and a note.

    `text` has the columns that contain text, not numbers.
    """
    listed = "\n".join(f"- {name}: {said(value)}" for name, value in facts)
    body = _table(columns, ([_cell(cell) for cell in line] for line in cells), text)
    return f"## {said(title)}\n\n{listed}\n\n{body}\n\n{said(note)}\n"
