"""What commands show of a run: the table, the verdict, the page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from dpbench.store import Run


def read(store: Path, run_id: str | None) -> tuple[Run, Any]:
    """Return a run of a store and its trials."""
    from dpbench.store import Store

    with Store.read(store) as opened:
        chosen = choose(opened.runs(), run_id)
        return chosen, opened.trials(chosen.id)


def choose(runs: Any, run_id: str | None) -> Run:
    """Return the newest run, or the one whose id begins so."""
    found = [run for run in runs if run.id.startswith(run_id or "")]
    if not found:
        known = ", ".join(run.id[:8] for run in runs) or "none"
        raise click.UsageError(f"no run {run_id or ''} in the store; it has: {known}")
    if run_id and len(found) > 1:
        raise click.UsageError(f"{run_id} fits {len(found)} runs: {', '.join(run.id[:12] for run in found)}")
    chosen: Run = found[0]
    return chosen


def content_of(chosen: Run, trials: Any) -> dict[str, Any]:
    """Return what every form of the report shows."""
    from dpbench.analysis import diagnosis, findings, ladder, summary

    table = summary.rows(trials)
    cores = chosen.provenance.get("host", {}).get("cores", 0)
    ladders = ladder.ladders(table)
    return {
        "rows": table, "trials": trials, "provenance": chosen.provenance, "run_id": chosen.id,
        "started": chosen.started, "ladders": ladders, "verdict": diagnosis.verdict(table, ladders) + _noisy(chosen),
        "tiles": diagnosis.tiles(table, ladders), "diagnoses": findings.diagnose(table, trials, cores),
        "warnings": [*_unfinished(chosen), *_untold(chosen), *diagnosis.warnings(table, trials, chosen.provenance)],
    }  # fmt: skip


def _unfinished(chosen: Run) -> list[str]:
    """Warn of a run that has not measured all it was asked to."""
    if chosen.status == "finished":
        return []
    return [f"incomplete: this run is {chosen.status}; the same `dpbench run` command goes on where it is"]


def _noisy(chosen: Run) -> str:
    """Label a run during or before which other processes took too much of the cores."""
    from dpbench.hardware.foreign_load import NOISY

    reasons = chosen.provenance.get("noisy")
    return f" {NOISY}: {'; '.join(reasons.values())}." if reasons else ""


def _untold(chosen: Run) -> list[str]:
    """Warn of a run of which it is unknown whether the machine was quiet."""
    reason = chosen.provenance.get("foreign_load", {}).get("unknown")
    return [f"it is unknown whether other processes used the cores: {reason}"] if reason else []


def write_report(path: Path, content: dict[str, Any]) -> None:
    """Write the page, and the folders above it."""
    from dpbench.report import page

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page.render(**content))


def print_table(content: dict[str, Any]) -> None:
    """Print one line a case to stdout."""
    from dpbench.cli.progress import table

    click.echo(table(content["rows"], content["ladders"]))


def print_verdict(content: dict[str, Any]) -> None:
    """Print the verdict to stdout, and what the self-check found; the warnings to stderr."""
    from dpbench.measure import selfcheck

    for warning in content["warnings"]:
        click.echo(f"warning: {warning}", err=True)
    for case, ended in content["provenance"].get("rounds", {}).items():
        click.echo(f"{case}: {ended}", err=True)
    click.echo(f"\n{content['verdict']}")
    for line in selfcheck.words(content["provenance"]):
        click.echo(f"self-check: {line}")
