"""Showing: print the answers and the table of a run, and write its report page."""

from __future__ import annotations

import gc
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dpbench.cli.options import LATEST, REPORTS
from dpbench.records import words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dpbench.analysis.answer import Answer
    from dpbench.analysis.report import Report
    from dpbench.measure.selection import RunForecast
    from dpbench.records import Trial
    from dpbench.records.observed import Alternatives
    from dpbench.store import PastRun, Store, StoredRun, UnreadableRow


def read(store: Path, run_id: str | None) -> tuple[StoredRun, list[Trial], list[UnreadableRow]]:
    """Return a run in a store file, the run's trials without their spans, and the rows that could not be read.

    `choose` explains `run_id`.
    """
    from dpbench.store import Store

    if context := click.get_current_context(silent=True):
        # the millions of objects of a large run stay in use until the command ends, so a collector would find nothing
        gc.disable()
        context.call_on_close(gc.enable)
        context.call_on_close(gc.freeze)  # called before gc.enable: else one collection would visit all objects
    unreadable: list[UnreadableRow] = []
    with Store.read(store, listing(unreadable)) as opened:
        chosen = choose(opened, run_id)
        return chosen, opened.summaries(chosen.id), unreadable


def listing(found: list[UnreadableRow]) -> Callable[[UnreadableRow], None]:
    """Return a function that prints that a row cannot be read, and appends the row to `found`."""

    def one(row: UnreadableRow) -> None:
        list_unreadable(row)
        found.append(row)

    return one


def list_unreadable(row: UnreadableRow) -> None:
    """Print to stderr that a row of a store cannot be read and is left out."""
    click.echo(f"unreadable: {row}", err=True)


NAMED = 20
"""The largest number of runs that an error names."""


def choose(opened: Store, asked: str | None) -> StoredRun:
    """Return the run that `asked` names by @NAME or by the beginning of its id; @last and None mean the newest run.

    Raises UsageError if `asked` matches no run of the store, or several.
    """
    from dpbench.store import LATEST

    found = opened.matching(asked)
    if not found:
        if asked is None or asked == f"@{LATEST}":
            sought = "run"
        elif asked.startswith("@"):
            sought = f"run with the name {asked[1:]!r}"
        else:
            sought = f"run whose id begins with {asked!r}"
        known = [*map(_called, islice(opened.newest(), NAMED + 1))]
        shown = ", ".join(known[:NAMED]) or "none"
        more = ", and older ones, which `dpbench list runs` lists" if len(known) > NAMED else ""
        raise click.UsageError(f"the store has no {sought}; its runs are: {shown}{more}")
    if len(found) > 1:
        matches = ", ".join(f"{run.id[:12]} ({_date(run)})" for run in found[:NAMED])
        more = f", and {len(found) - NAMED} older ones" if len(found) > NAMED else ""
        raise click.UsageError(
            f"{asked} matches {len(found)} runs: {matches}{more}; give more characters of the id of one run"
        )
    return found[0]


def _called(run: StoredRun) -> str:
    """Return the beginning of a run's id, with the run's name if it has one."""
    return f"{run.id[:8]} @{run.naming.name}" if run.naming.name else run.id[:8]


def _date(run: StoredRun) -> str:
    return datetime.fromtimestamp(run.started, UTC).strftime("%Y-%m-%d %H:%M UTC")


def report_of(
    chosen: StoredRun, trials: Sequence[Trial], store: Path | None = None, unreadable: Sequence[UnreadableRow] = ()
) -> Report:
    """Return the report of a run: the analysis of its trials for the HTML page, for Markdown and for the terminal.

    If `store`, the file of the run, is given, the report also has the earlier runs and the predictions of the same
    cases. The report lists the rows of the file that could not be read: those in `unreadable`, and those of earlier
    runs.
    """
    from dpbench.analysis.report import Report

    rows = [*unreadable]
    return Report.of(
        trials, run_id=chosen.id, started_s=chosen.started, status=chosen.status, provenance=chosen.provenance,
        past=_past(store, chosen.id, trials, listing(rows)) if store else (),
        alternatives=_alternatives(chosen, trials), unreadable=rows,
    )  # fmt: skip


def _past(
    store: Path, run_id: str, trials: Sequence[Trial], unreadable: Callable[[UnreadableRow], None]
) -> tuple[PastRun, ...]:
    from dpbench.store import Store

    with Store.read(store, unreadable) as opened:
        return opened.past(run_id, trials)


def _alternatives(chosen: StoredRun, trials: Sequence[Trial]) -> Alternatives:
    """Return, for each observed loop with several GPUs in one process, its prediction with one process per GPU.

    The mapping is empty if the run has no such loop.
    """
    if not any(trial.case.traits.observed and trial.case.devices > 1 for trial in trials):
        return {}
    from dpbench.predict import stored

    return stored.alternatives(trials, chosen.provenance)


def write_report(path: Path | None, report: Report) -> Path:
    """Write a report as an HTML page, and return the page's file.

    The page is written to the file `path`, whose parent folders are created. If `path` is None, the page is kept in the
    archive `REPORTS`. In this case, the function returns `LATEST` if `LATEST` shows this run, and otherwise the run's
    page in the archive.
    """
    from dpbench.report import page

    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page.render(report), encoding="utf-8")
        return path
    kept = page.keep(report, REPORTS)
    if kept.latest_run == report.run_id:
        return LATEST
    if not any(row.step for row in report.rows):
        click.echo(f"no case has a result, so {LATEST} remains {_owner(kept.latest_run)}", err=True)
    return kept.page


def try_report(path: Path | None, report: Report, store: Path) -> bool:
    """Write the page of a run, print the paths of the page and the store, and return whether the page was written.

    Call this function after the results are printed: a page that cannot be written must not hide the results.
    """
    written, fault = None, ""
    try:
        written = write_report(path, report)
    except OSError as error:
        fault = f"error: cannot write the page: {error}; `dpbench report --html FILE` writes it elsewhere"
    click.echo(f"report: {written or 'not written'}   store: {store}   run: {report.run_id[:8]}", err=True)
    if fault:
        click.echo(fault, err=True)
    return not fault


def _owner(run_id: str) -> str:
    """Return "the page of run ..." for the run that the latest page shows; "unchanged" if `run_id` is empty."""
    return f"the page of run {run_id[:8]}" if run_id else "unchanged"


ANSWERS = 6
"""The largest number of answers that a run prints; `dpbench explain` prints all."""


def print_answers(answers: Sequence[Answer], rest: str = "") -> None:
    """Print answers to stdout: for each model, whether to use several devices, and why.

    If `rest` is a command that prints all answers, only the first `ANSWERS` are printed, followed by this command.
    """
    shown = answers[:ANSWERS] if rest else answers
    for one in shown:
        click.echo(f"{one.text} [{' '.join(one.labels)}]\n")
    if len(shown) < len(answers):
        click.echo(f"{words.count(len(answers) - len(shown), 'more answer')}: {rest}\n")


def print_table(report: Report) -> None:
    """Print the table of a report's results to stdout, then the table of latencies if cases run the forward alone."""
    from dpbench.cli.progress import latencies, table

    click.echo(table(report.rows, report.ladders))
    if latency := latencies(report.rows):
        click.echo(f"\n{latency}")


def print_warnings(report: Report) -> None:
    """Print to stderr a report's warnings and, for each case under --rounds auto, why its rounds ended."""
    for warning in report.warnings:
        click.echo(f"warning: {warning}", err=True)
    for case, ended in report.provenance.get("rounds", {}).items():
        click.echo(f"{case}: {ended}", err=True)


def print_notes(report: Report) -> None:
    """Print a report's notes to stdout."""
    for note in report.notes:
        click.echo(f"\n{note}")


def print_plan(planned: RunForecast, *, as_json: bool) -> None:
    """Print the plan of a run to stdout: its cases, rounds and expected time, and the basis of the expectation."""
    from dpbench.cli import shapes

    if as_json:
        shapes.show(shapes.RunPlan.of(planned))
        return
    width = max(len(one.case.label) for one in planned.cases)
    for one in planned.cases:
        known = f"{words.time(one.trial_s)} per trial" if one.trial_s is not None else "no earlier trial"
        click.echo(f"{one.case.label:<{width}}  {known}")
    if planned.resumes:
        done = len(planned.cases) * planned.rounds - planned.trials
        click.echo(f"resumes the run {planned.resumes[:8]}, which has {words.count(done, 'trial')} of this plan")
    click.echo(expectation(planned))


def expectation(planned: RunForecast) -> str:
    """Return lines with the number of trials of a planned run, their expected time, its basis, and the time budget."""
    rounds = words.count(planned.rounds, "round")
    about = "unknown" if planned.seconds is None else f"about {words.long_time(planned.seconds)}"
    lines = [
        f"{words.count(len(planned.cases), 'case')} in {'at least ' if planned.auto else ''}{rounds}: "
        f"{words.count(planned.trials, 'trial')} to measure",
        f"expected time: {about} ({planned.basis})",
    ]
    if planned.budget_s:
        lines.append(
            f"time budget: {words.long_time(planned.budget_s)}; it limits the steps of each trial, and trials "
            "that have not started by its end are skipped"
        )
    return "\n".join(lines)
