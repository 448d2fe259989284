"""Archive: a folder with one page for each run, a list of these pages, and a copy of the newest page with a result.

reports/runs/RUN/index.html   the page of a run; run.json in the same folder has the facts for the list
reports/runs/index.html       the list of the runs
reports/latest/index.html     the page of the newest run in which at least one case has a result
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
from markupsafe import Markup

from dpbench.analysis.report import Report
from dpbench.report import page

FACTS = "run.json"


class Kept(NamedTuple):
    """The file of a run's page in the archive, and the id of the newest run with a result; "" if there is none."""

    page: Path
    latest_run: str


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list of runs, stored with the run's page.

    `started_s` is in seconds since the epoch. `results` is how many of the run's `cases` cases have a result.
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
    own = folder / "runs" / name
    text = page.render(report)
    _write(own / "index.html", text)
    _write(own / FACTS, msgspec.json.encode(_entry(report)).decode())
    entries, unreadable = _entries(folder / "runs")
    _write(folder / "runs" / "index.html", _list(entries, unreadable))
    newest = next((one.run_id for one in entries if one.results), "")
    if newest == report.run_id:
        _write(folder / "latest" / "index.html", text)
    return Kept(own / "index.html", newest)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _entry(report: Report) -> Entry:
    return Entry(
        run_id=report.run_id, started_s=report.started_s, results=sum(row.step is not None for row in report.rows),
        cases=len(report.rows), models=tuple(sorted({row.case.model for row in report.rows})),
        answers=tuple(f"{one.subject}: {one.headline}" for one in report.answers),
        command=str(report.provenance.get("command", "")),
    )  # fmt: skip


def _entries(folder: Path) -> tuple[list[Entry], list[str]]:
    """Return the entries of the runs in a folder, the newest first, and the folders whose facts cannot be read."""
    found, unreadable = [], []
    for path in folder.glob(f"*/{FACTS}"):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=Entry))
        except msgspec.MsgspecError:
            unreadable.append(path.parent.name)
    return sorted(found, key=lambda one: (-one.started_s, one.run_id)), sorted(unreadable)


def _list(entries: list[Entry], unreadable: list[str]) -> str:
    """Return the HTML text of the list of runs."""
    style = page.text_of("page.css")
    policy = Markup(f"default-src 'none'; style-src {page.allowed(style)}")
    rendered = page.template("runs.html").render(
        entries=entries, unreadable=unreadable, style=Markup(style), policy=policy
    )
    return rendered.encode("utf-8", "replace").decode()
