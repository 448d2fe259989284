"""Showing: print the table and the verdict of a run, and write its report page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpbench.analysis.answer import Answer
    from dpbench.analysis.report import Report
    from dpbench.records import Trial
    from dpbench.store import StoredRun


def read(store: Path, run_id: str | None) -> tuple[StoredRun, list[Trial]]:
    """Return a run in a store file, and the run's trials without their spans; `choose` explains `run_id`."""
    from dpbench.store import Store

    with Store.read(store) as opened:
        chosen = choose(opened.runs(), run_id)
        return chosen, opened.summaries(chosen.id)


def choose(runs: Any, run_id: str | None) -> StoredRun:
    """Return the run whose id begins with `run_id`, or the newest run for None.

    Raises UsageError if there is no such run, or if several ids begin with `run_id`.
    """
    found = [run for run in runs if run.id.startswith(run_id or "")]
    if not found:
        known = ", ".join(run.id[:8] for run in runs) or "none"
        raise click.UsageError(f"the store has no run whose id begins with {run_id or ''!r}; its runs are: {known}")
    if run_id and len(found) > 1:
        matches = ", ".join(run.id[:12] for run in found)
        raise click.UsageError(f"{run_id} matches {len(found)} runs: {matches}; give more characters of the id")
    chosen: StoredRun = found[0]
    return chosen


def report_of(chosen: StoredRun, trials: Sequence[Trial]) -> Report:
    """Return the report of a run: the analysis of its trials for the HTML page, for Markdown and for the terminal."""
    from dpbench.analysis.report import Report
    from dpbench.measure import checks

    return Report.of(
        trials, run_id=chosen.id, started_s=chosen.started, status=chosen.status, provenance=chosen.provenance,
        self_check=checks.words(chosen.provenance),
    )  # fmt: skip


def write_report(path: Path, report: Report) -> None:
    """Write a report as an HTML page to the file `path`, and create its parent folders if they are missing."""
    from dpbench.report import page

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page.render(report))


ANSWERS = 6
"""The largest number of answers that a run prints; `dpbench explain` prints all."""


def print_answers(answers: Sequence[Answer]) -> None:
    """Print answers to stdout: for each model, whether to use several devices, and why."""
    for one in answers[:ANSWERS]:
        click.echo(f"{one.text} [{' '.join(one.labels)}]\n")
    if len(answers) > ANSWERS:
        click.echo(f"{len(answers) - ANSWERS} more: dpbench explain\n")


def print_table(report: Report) -> None:
    """Print a report's table of results, with one line per case, to stdout."""
    from dpbench.cli.progress import table

    click.echo(table(report.rows, report.ladders))


def print_verdict(report: Report) -> None:
    """Print a report's verdict and self-check to stdout, its warnings and why each case's rounds ended to stderr."""
    for warning in report.warnings:
        click.echo(f"warning: {warning}", err=True)
    for case, ended in report.provenance.get("rounds", {}).items():
        click.echo(f"{case}: {ended}", err=True)
    click.echo(f"\n{report.verdict}")
    for line in report.self_check:
        click.echo(f"self-check: {line}")
