"""Page: the report of a run as one HTML file, and the archive with the pages of all runs.

A page can be read without a network and without scripts. Its script filters the cases, shows the
value of a mark, and saves a section's numbers as a file. The page's Content-Security-Policy has the
hashes of this script and of the page's style sheet, so the browser uses no other. The archive has
these files:

reports/runs/RUN/index.html   the page of a run; run.json beside it has the facts for the list
reports/runs/index.html       the list of the runs
reports/latest/index.html     the page of the newest run in which at least one case has a result
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
from markupsafe import Markup

from dpbench.analysis import answer as answering
from dpbench.analysis import statements
from dpbench.analysis.answer import Answer
from dpbench.analysis.findings import text
from dpbench.analysis.report import Report
from dpbench.analysis.summary import Row
from dpbench.records import hidden, siblings, words
from dpbench.records.files import write
from dpbench.report import devices, figures, markdown, naming, swim_lanes, table
from dpbench.report.section import Detail, Section
from dpbench.report.templates import allowed, template, text_of
from dpbench.store import inside

OPEN = 24
"""The largest number of lines of a table that is expanded when the page opens."""
FACTS = "run.json"


@dataclass(frozen=True)
class Place:
    """A line of a card's table; `uncertain` if its interval must not be shown."""

    name: str
    ratio: str
    interval: str
    uncertain: bool = False


@dataclass(frozen=True, kw_only=True)
class Card:
    """An answer of the page, with the ids of the cases for which it holds, separated by spaces.

    `tone` is a class of the style sheet, and `columns` are the heads of the table of `places`.
    """

    subject: str
    headline: str
    tone: str
    columns: tuple[str, str, str]
    places: Sequence[Place]
    standing: str = ""
    sentences: Sequence[str]
    labels: Sequence[str]
    command: str = ""
    cases: str


@dataclass(frozen=True, kw_only=True)
class Content:
    """What the page of a run and the page of a comparison do not compute alike from a report.

    `table` is that of all cases, `text_columns` are its columns of text, and `lead` is the text
    above it. `axes` are those of the filter, each with its column, its title and its values.
    `numbers` is the JSON of all cases, and `markdown` the text for an issue.
    """

    title: str
    heading: str
    facts: Sequence[tuple[str, str]]
    cards: Sequence[Card]
    table: table.CaseTable
    text_columns: Sequence[str]
    lead: str
    axes: Sequence[tuple[str, str, Sequence[str]]]
    numbers: str
    markdown: str


def render(report: Report) -> str:
    """Return the HTML text of the page of a run."""
    return rendered(
        report,
        Content(
            title=f"run {report.run.id[:12]}",
            heading="data parallelism in PyTorch",
            facts=naming.facts(report),
            cards=[_card(one, report.rows) for one in report.answers],
            table=table.all_cases(report),
            text_columns=table.TEXT_COLUMNS,
            lead=table.lead(report.rows),
            axes=naming.axes([row.case for row in report.rows]),
            numbers=table.as_json(report.rows),
            markdown=markdown.brief(report),
        ),
    )


def rendered(report: Report, content: Content) -> str:
    """Return the HTML text of the page that shows a report with this content."""
    drawn, tabled = figures.sections(report), devices.parts(report)
    shown = [part for part in (*drawn, *tabled) if part.open]
    details = [part for part in (*tabled, *drawn) if not part.open]
    added = _added(report)
    style = f"{text_of('page.css')}{''.join(part.style for part in added)}"
    script = text_of("page.js")
    command = report.run.facts.command
    html = template("page.html").render(
        report=report,
        content=content,
        policy=Markup(
            f"default-src 'none'; style-src {allowed(style)}; script-src {allowed(script)}; img-src"
            " data:"
        ),
        style=Markup(style),
        script=Markup(script),
        command=command,
        badges=naming.badges(report.rows),
        contents=_contents(shown, [*details, *added], report, command),
        summary=statements.summary,
        count=words.count,
        intervals=f"{words.INTERVALS} {words.TOGETHER}",
        headline=text.headline,
        finding_parts=text.parts,
        findings_note=text.NOTE,
        no_finding=text.no_finding,
        shown=shown,
        details=details,
        added=added,
        open=OPEN,
        case_id=naming.case_id,
        case_ids=naming.case_ids,
        date=words.minute,
        signs=table.FOOTNOTES,
        footnotes=table.footnotes,
        environment=naming.environment(report.run.provenance, report.trials),
        numbers=Markup(content.numbers),
        trace=Markup(table.safe(words.dumps(swim_lanes.trace(report)))),
        markdown=Markup(table.safe(words.dumps(content.markdown))),
    )
    # a name that was not UTF-8 contains lone surrogates, which cannot be encoded
    return html.encode("utf-8", "replace").decode()


def _card(answer: Answer, rows: Sequence[Row]) -> Card:
    return Card(
        subject=answer.subject,
        headline=answer.headline,
        tone=answer.choice.name.lower() if answer.settled else "",
        columns=("fastest first", "speed-up", answer.source.level),
        places=[*_standing(answer)],
        standing=answer.standing,
        sentences=answer.sentences,
        labels=answer.labels,
        command=answer.command,
        cases=naming.alike(answer, rows),
    )


def _added(report: Report) -> list[Detail]:
    """Return the sections that siblings add on the run's machine."""
    sections = siblings.added("section") if report.run.machine_result else []
    return [found for section in sections if (found := section(report.run.machine_result))]


def _standing(answer: Answer) -> Iterator[Place]:
    """Yield the lines of an answer's ranking, the fastest first; none for a single case."""
    for row in answer.ranking if len(answer.ranking) > 1 else ():
        found = row.speedup
        uncertain = bool(found and found.doubt)
        interval = words.interval(found) if found and not uncertain else ""
        yield Place(answering.place(row), answering.about(row), interval, uncertain)


def _contents(
    shown: Sequence[Section], details: Sequence[Section | Detail], report: Report, command: str
) -> list[tuple[str, str]]:
    return [
        ("answers", "Answers"),
        *((part.id, part.title) for part in shown),
        ("cases", "All cases"),
        *([("findings", "Causes and remedies")] if report.diagnoses else []),
        ("details", "Details"),
        *((part.id, part.title) for part in details),
        ("method", "How it was measured"),
        ("environment", "Environment"),
        *([("reproduce", "Command")] if command else []),
    ]


class Kept(NamedTuple):
    """The file of a run's page, and the id of the newest run that has a result, or ""."""

    page: Path
    latest_run: str


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list of runs, stored with the run's page.

    `started_s` is in seconds since the epoch. `results` is how many of the `cases` have a result.
    """

    run_id: str
    started_s: float
    results: int
    cases: int
    models: tuple[str, ...]
    answers: tuple[str, ...]
    command: str

    @property
    def date(self) -> str:
        """Return the start of the run as text, in UTC."""
        return datetime.fromtimestamp(self.started_s, UTC).strftime("%Y-%m-%d %H:%M")


def keep(report: Report, folder: Path) -> Kept:
    """Write the page of a run into the archive in `folder`, and write the list of runs again.

    The page also becomes the latest page if the run is the newest one that has a result.
    """
    run_folder = inside(folder / "runs", report.run.id[:12])
    text = render(report)
    page = write(run_folder / "index.html", text)
    write(run_folder / FACTS, msgspec.json.encode(_entry(report)).decode())
    entries, unreadable = _entries(folder / "runs")
    write(folder / "runs" / "index.html", _list(entries, unreadable))
    newest = next((one.run_id for one in entries if one.results), "")
    if newest == report.run.id:
        write(folder / "latest" / "index.html", text)
    return Kept(page, newest)


def _entry(report: Report) -> Entry:
    return Entry(
        run_id=report.run.id,
        started_s=report.run.started,
        results=sum(row.step is not None for row in report.rows),
        cases=len(report.rows),
        models=tuple(sorted({row.case.model for row in report.rows})),
        answers=tuple(f"{one.subject}: {one.headline}" for one in report.answers),
        command=report.run.facts.command,
    )


def _entries(folder: Path) -> tuple[list[Entry], list[str]]:
    """Return the entries of runs, the newest first, and the folders that cannot be read."""
    entries = []
    unreadable = []
    for path in folder.glob(f"*/{FACTS}"):
        try:
            found = hidden.everywhere(msgspec.json.decode(path.read_bytes()))
            entries.append(msgspec.convert(found, Entry))
        except msgspec.MsgspecError:
            unreadable.append(path.parent.name)
    return sorted(entries, key=lambda entry: (-entry.started_s, entry.run_id)), sorted(unreadable)


def _list(entries: list[Entry], unreadable: list[str]) -> str:
    style = text_of("page.css")
    policy = Markup(f"default-src 'none'; style-src {allowed(style)}")
    rendered = template("runs.html").render(
        entries=entries, unreadable=unreadable, style=Markup(style), policy=policy
    )
    return rendered.encode("utf-8", "replace").decode()
