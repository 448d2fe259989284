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

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from dpbench.analysis import answer as answering
from dpbench.analysis import caveats
from dpbench.analysis.answer import Answer
from dpbench.analysis.findings import text
from dpbench.analysis.report import Report
from dpbench.records import words
from dpbench.report import devices, figures, machine, markdown, naming, swim_lanes, table
from dpbench.report.svg import Panel, Section

FOLDER = Path(__file__).parent
SHOWN = ("loaders", "lanes", "speedup", "ladder")
"""The ids of the sections that the page shows at once; the others are folded as its details."""
ORDER = (
    *SHOWN,
    "phases",
    "imbalance",
    "memory-by-phase",
    "links",
    "link-counters",
    "steps",
    "utilisation",
    "predicted",
    "history",
    "hosts",
)
"""The ids of the sections with drawings or tables, in the order of the page; others come last."""
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "speedup": ("speedup", "scaling", "efficiency"),
    "phases": ("step", "phase"),
    "imbalance": ("imbalance", "busy", "memory"),
    "ladder": ("step", "speedup", "phase"),
    "steps": ("step",),
}
"""For each section, the prefixes of the numbers in `frames.frame` that the page's script saves."""
PHASES = (
    "Milliseconds of one step by phase. The ledger charges each moment of the step to one phase, so"
    " the phases add up to the step."
)
FACTS = "run.json"


@dataclass(frozen=True)
class Drawing:
    """A drawing of a section.

    `labels` has the labels that are not in the section's heading already, and `cases` the ids of
    the cases in the drawing, separated by spaces.
    """

    title: str
    drawing: Markup
    caption: str
    labels: tuple[str, ...]
    tables: Sequence[table.Table]
    cases: str


@dataclass(frozen=True)
class Numbers:
    """A table that can be folded, below the drawings; `cases` has the id of each line's case.

    `lead` is the text above the table, "" if the lead of its section says it.
    """

    content: table.Table
    cases: Sequence[str]
    open: bool
    lead: str = ""


@dataclass(frozen=True)
class PageSection:
    """A section of the page; `labels` has the labels that all of its drawings share.

    `columns` tells the page's script which numbers to save: the section's prefixes in `COLUMNS`,
    separated by spaces.
    """

    id: str
    title: str
    lead: str
    labels: tuple[str, ...]
    panels: Sequence[Drawing] = ()
    tables: Sequence[Numbers] = ()
    note: str = ""
    columns: str = ""


class Styles:
    """The style sheet of the drawings: each distinct style of their elements becomes a class.

    The page's Content-Security-Policy allows no style in an attribute.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def without(self, drawing: str) -> Markup:
        """Return a drawing whose elements have classes in place of styles.

        Text and attributes of a drawing contain no `<` and no `>`, so the pattern matches only in
        tags.
        """
        # svg.render has escaped all text
        return Markup(re.sub(r'(<\w[^<>]*?) style="([^"]*)"', self._named, drawing))

    def _named(self, match: re.Match[str]) -> str:
        name = self._names.setdefault(match[2], f"s{len(self._names)}")
        return f'{match[1]} class="{name}"'

    def __str__(self) -> str:
        """Return the style sheet."""
        return "".join(f".{name}{{{style}}}\n" for style, name in self._names.items())


def render(report: Report) -> str:
    """Return the HTML text of the page."""
    styles = Styles()
    sections = _parts(report, styles)
    shown = [part for part in sections if part.id in SHOWN]
    details = [part for part in sections if part.id not in SHOWN]
    columns, lines = table.all_cases(report, brief=True)
    drawn = text_of("machine.css") if report.examination else ""
    style = f"{text_of('page.css')}{drawn}{styles}"
    script = text_of("page.js")
    command = str(report.provenance.get("command", ""))
    rendered = template("page.html").render(
        report=report,
        policy=Markup(
            f"default-src 'none'; style-src {allowed(style)}; script-src {allowed(script)}; img-src"
            " data:"
        ),
        style=Markup(style),
        script=Markup(script),
        facts=naming.facts(report),
        command=command,
        badges=naming.badges(report.rows),
        axes=naming.axes([row.case for row in report.rows]),
        standing=_standing,
        contents=_contents(shown, details, report, command),
        alike=lambda one: naming.alike(one, report.rows),
        summary=caveats.summary,
        count=words.count,
        intervals=f"{words.INTERVALS} {words.TOGETHER}",
        headline=text.headline,
        finding_parts=text.parts,
        findings_note=text.NOTE,
        shown=shown,
        details=details,
        machine=machine,
        date=naming.date,
        columns=columns,
        text_columns=table.TEXT_COLUMNS,
        lines=lines,
        signs=table.FOOTNOTES,
        footnotes=table.footnotes,
        environment=naming.environment(report.provenance, report.trials),
        numbers=Markup(table.as_json(report.rows)),
        trace=Markup(table.safe(words.dumps(swim_lanes.trace(report.lanes)))),
        markdown=Markup(table.safe(words.dumps(markdown.brief(report)))),
    )
    # a name that was not UTF-8 contains lone surrogates, which cannot be encoded
    return rendered.encode("utf-8", "replace").decode()


def template(name: str, folder: Path = FOLDER) -> Template:
    """Return a template of a folder, which may use those here; it escapes all but markup."""
    environment = Environment(
        loader=FileSystemLoader([folder, FOLDER]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def text_of(name: str) -> str:
    """Return the text of a file in the folder of the templates."""
    return (FOLDER / name).read_text(encoding="utf-8")


def allowed(content: str) -> str:
    """Return the expression that allows this script or style sheet in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _parts(report: Report, styles: Styles) -> list[PageSection]:
    drawn = [_drawn(section, styles) for section in figures.sections(report)]
    tabled = [_tabled(section) for section in devices.parts(report)]
    by_id = {part.id: part for part in drawn}
    for part in tabled:
        before = by_id.get(part.id)
        by_id[part.id] = _joined(before, part) if before else part
    parts = [*by_id.values(), *_phases(report), *_hosts(report)]
    return sorted(parts, key=lambda part: ORDER.index(part.id) if part.id in ORDER else len(ORDER))


def _joined(drawn: PageSection, tabled: PageSection) -> PageSection:
    """Return a section with the drawings of one section, and the table of the other below them."""
    tables = [replace(numbers, lead=tabled.lead) for numbers in tabled.tables]
    return replace(drawn, tables=[*drawn.tables, *tables])


def _phases(report: Report) -> Iterator[PageSection]:
    content, cases = table.phases(report.rows)
    if cases:
        numbers = Numbers(content, list(map(naming.case_id, cases)), open=True)
        labels = naming.labels(report.rows)
        columns = " ".join(COLUMNS["phases"])
        yield PageSection(
            "phases", "Step time by phase", PHASES, labels, tables=[numbers], columns=columns
        )


def _hosts(report: Report) -> Iterator[PageSection]:
    if machines := table.machines(report):
        lead = "The machines of the launch. A slow machine delays every rank at each collective."
        numbers = Numbers(machines, (), open=True)
        yield PageSection("hosts", "Hosts", lead, naming.labels(report.rows), tables=[numbers])


def _drawn(section: Section, styles: Styles) -> PageSection:
    labels = naming.common(panel.labels for panel in section.panels)
    panels = [figure(panel, labels, styles) for panel in section.panels]
    columns = " ".join(COLUMNS.get(section.id, ())) if panels else ""
    return PageSection(
        section.id, section.title, section.lead, labels, panels, note=section.note, columns=columns
    )


def figure(panel: Panel, above: Sequence[str], styles: Styles) -> Drawing:
    """Return a panel without the labels `above`, which the heading of its section shows."""
    labels = tuple(label for label in panel.labels if label not in above)
    drawing = styles.without(panel.svg)
    return Drawing(
        panel.title, drawing, panel.caption, labels, panel.tables, naming.case_ids(panel.cases)
    )


def _tabled(section: devices.TableSection) -> PageSection:
    cases = list(map(naming.case_id, section.cases))
    tables = [Numbers(section.table, cases, section.open)]
    return PageSection(section.id, section.title, section.lead, section.labels, tables=tables)


class Place(NamedTuple):
    """A line of an answer's ranking; `uncertain` if its interval must not be shown."""

    name: str
    speedup: str
    interval: str
    uncertain: bool


def _standing(answer: Answer) -> list[Place]:
    """Return the lines of an answer's ranking, the fastest first; none for a single case."""
    places = []
    for row in answer.ranking if len(answer.ranking) > 1 else ():
        found = row.speedup
        uncertain = bool(found and found.doubt)
        interval = words.interval(found) if found and not uncertain else ""
        places.append(Place(answering.place(row), answering.about(row), interval, uncertain))
    return places


def _contents(
    shown: Sequence[PageSection], details: Sequence[PageSection], report: Report, command: str
) -> list[tuple[str, str]]:
    return [
        ("answers", "Answers"),
        *((part.id, part.title) for part in shown),
        ("cases", "All cases"),
        *([("findings", "Causes and remedies")] if report.diagnoses else []),
        ("details", "Details"),
        *((part.id, part.title) for part in details),
        *([("machine", "The machine")] if report.examination else []),
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
    name = report.run_id[:12]
    run_folder = folder / "runs" / name
    text = render(report)
    _write(run_folder / "index.html", text)
    _write(run_folder / FACTS, msgspec.json.encode(_entry(report)).decode())
    entries, unreadable = _entries(folder / "runs")
    _write(folder / "runs" / "index.html", _list(entries, unreadable))
    newest = next((one.run_id for one in entries if one.results), "")
    if newest == report.run_id:
        _write(folder / "latest" / "index.html", text)
    return Kept(run_folder / "index.html", newest)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _entry(report: Report) -> Entry:
    return Entry(
        run_id=report.run_id,
        started_s=report.started_s,
        results=sum(row.step is not None for row in report.rows),
        cases=len(report.rows),
        models=tuple(sorted({row.case.model for row in report.rows})),
        answers=tuple(f"{one.subject}: {one.headline}" for one in report.answers),
        command=str(report.provenance.get("command", "")),
    )


def _entries(folder: Path) -> tuple[list[Entry], list[str]]:
    """Return the entries of runs, the newest first, and the folders that cannot be read."""
    entries = []
    unreadable = []
    for path in folder.glob(f"*/{FACTS}"):
        try:
            entries.append(msgspec.json.decode(path.read_bytes(), type=Entry))
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
