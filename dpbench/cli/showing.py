"""Showing: print the table and the verdict of a run, and write its report page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpbench.analysis.report import Report
    from dpbench.records import Trial
    from dpbench.store import StoredRun


def read(store: Path, run_id: str | None) -> tuple[StoredRun, list[Trial]]:
    """Return a run of a store, and its trials without their spans."""
    from dpbench.store import Store

    with Store.read(store) as opened:
        chosen = choose(opened.runs(), run_id)
        return chosen, opened.summaries(chosen.id)


def choose(runs: Any, run_id: str | None) -> StoredRun:
    """Return the newest run, or the one whose id begins with `run_id`. Raises UsageError if none or several match."""
    found = [run for run in runs if run.id.startswith(run_id or "")]
    if not found:
        known = ", ".join(run.id[:8] for run in runs) or "none"
        raise click.UsageError(f"no run {run_id or ''} in the store, which has: {known}")
    if run_id and len(found) > 1:
        raise click.UsageError(f"{run_id} matches {len(found)} runs: {', '.join(run.id[:12] for run in found)}")
    chosen: StoredRun = found[0]
    return chosen


def report_of(chosen: StoredRun, trials: Sequence[Trial]) -> Report:
    """Return the analysis of a run's trials, from which the page, Markdown and the terminal's output are made."""
    from dpbench.analysis.report import Report
    from dpbench.measure import checks

    return Report.of(
        trials, run_id=chosen.id, started_s=chosen.started, status=chosen.status, provenance=chosen.provenance,
        self_check=checks.words(chosen.provenance),
    )  # fmt: skip


def write_report(path: Path, report: Report) -> None:
    """Write the HTML page of a report; create missing parent folders."""
    from dpbench.report import page

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page.render(report))


def print_table(report: Report) -> None:
    """Print a table with one line per case to stdout."""
    from dpbench.cli.progress import table

    click.echo(table(report.rows, report.ladders))


def print_verdict(report: Report) -> None:
    """Print the verdict and the self-check to stdout, and the warnings and the reasons why rounds ended to stderr."""
    for warning in report.warnings:
        click.echo(f"warning: {warning}", err=True)
    for case, ended in report.provenance.get("rounds", {}).items():
        click.echo(f"{case}: {ended}", err=True)
    click.echo(f"\n{report.verdict}")
    for line in report.self_check:
        click.echo(f"self-check: {line}")
