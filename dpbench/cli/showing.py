"""Showing: print the answers and the table of a run, and write its report page."""

from __future__ import annotations

import gc
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dpbench.api import stored
from dpbench.api.reports import write_report
from dpbench.records import files, words
from dpbench.records.spelling import dashed
from dpbench.report import NoDrawings, check_drawings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpbench.analysis.answer import Answer
    from dpbench.analysis.report import Report
    from dpbench.measure.selection import RunForecast
    from dpbench.records import Trial
    from dpbench.store import StoredRun, UnreadableRow


def read(store: Path, run_id: str | None) -> tuple[StoredRun, list[Trial], list[UnreadableRow]]:
    """Return what `stored.read` returns, without garbage collection until the command ends.

    The millions of objects of a large run stay in use until then, so it would find nothing.
    """
    context = click.get_current_context()
    gc.disable()
    context.call_on_close(gc.enable)
    # called before gc.enable: else one collection would visit all objects
    context.call_on_close(gc.freeze)
    return stored.read(store, run_id)


def check_page(path: Path | None) -> None:
    """Raise OSError or NoDrawings if the page `path`, which the user named, cannot be written.

    A run would otherwise learn it after measuring.
    """
    if path is None:
        return
    check_drawings()
    files.check_writable(path)


def try_report(path: Path | None, report: Report, store: Path) -> bool:
    """Write the page of a run, and print its path and the store's; return False for a failure.

    Call it after printing the results: a page that cannot be written must not hide them. Without
    matplotlib, a note says that there is no page.
    """
    written = None
    fault = note = ""
    try:
        written = write_report(path, report)
    except OSError as error:
        fault = f"error: {error}; `dpbench report --report FILE` writes the page elsewhere"
    except NoDrawings as missing:
        note = f"note: {missing}"
    click.echo(
        f"report: {written or 'not written'}   store: {store}   run: {report.run.id[:8]}", err=True
    )
    if fault or note:
        click.echo(fault or note, err=True)
    return not fault


NAMED = 2
"""The number of cases that a printed warning names; the page names all."""
ANSWERS = 6
"""The largest number of answers that a run prints; `dpbench explain` prints all."""


def print_answers(answers: Sequence[Answer], rest: str = "") -> None:
    """Print answers to stdout: for each model, whether to use several devices, and why.

    If `rest`, a command that prints all, is given, only the first `ANSWERS` are printed, and
    `rest`.
    """
    shown = answers[:ANSWERS] if rest else answers
    for one in shown:
        click.echo(f"\n{one}")
    if len(shown) < len(answers):
        click.echo(f"\n{words.count(len(answers) - len(shown), 'more answer')}: {rest}")


def print_results(report: Report, rest: str) -> None:
    """Print a run's tables, notes, warnings and answers; `rest` is the command that prints all.

    A second table has the latencies of cases that run the forward alone.
    """
    from dpbench.cli.tables import latencies, table

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    click.echo(table(report.rows, report.ladders, width=width))
    if latency := latencies(report.rows):
        click.echo(f"\n{latency}")
    for note in report.notes:
        click.echo(f"\n{note}")
    if report.remarks:
        click.echo(f"\n{words.count(len(report.remarks), 'remark')} on these figures: {rest}")
    sys.stdout.flush()
    print_warnings(report)
    print_answers(report.answers, rest)


def print_warnings(report: Report) -> None:
    """Print a report's warnings to stderr, one line each."""
    for warning in report.warnings:
        click.echo(f"warning: {warning.line(NAMED)}", err=True)


def print_plan(planned: RunForecast, *, as_json: bool) -> None:
    """Print the plan of a run: its cases, rounds, expected time, and the basis of the time."""
    from dpbench.cli import shapes

    if as_json:
        shapes.show(shapes.RunPlan.of(planned))
        return
    expected = [
        (
            one.case.label,
            "no earlier trial" if one.trial_s is None else f"{words.time(one.trial_s)} per trial",
        )
        for one in planned.cases
    ]
    for line in words.in_columns(expected):
        click.echo(line)
    if planned.resumes:
        done = len(planned.cases) * planned.rounds - planned.trials
        click.echo(
            f"resumes the run {planned.resumes[:8]}, which has {words.count(done, 'trial')} of this"
            " plan"
        )
    click.echo(expectation(planned))


def expectation(planned: RunForecast) -> str:
    """Return a planned run's number of trials, expected time, its basis, and time budget."""
    rounds = words.count(planned.rounds, "round")
    lines = [
        (
            f"{words.count(len(planned.cases), 'case')} in"
            f" {'at least ' if planned.auto else ''}{rounds}:"
            f" {words.count(planned.trials, 'trial')} to measure"
        ),
        f"expected time: about {words.long_time(planned.seconds)} ({planned.basis})",
    ]
    if left := planned.left_out:
        lines.append(
            f"of them, {words.count(len(left), 'case')} would not fit into the time budget of"
            f" {words.long_time(planned.budget_s or 0.0)}, and are left out unless trials take less"
            f" time: {', '.join(case.label for case in left)}; the same command goes on with them,"
            f" and {dashed('budget')} {planned.budget_of_all_s} measures all at once"
        )
    if planned.auto:
        lines.append(
            "then more rounds of the cases on which an answer still depends, until"
            f" {words.long_time(planned.settle_s)} have passed"
        )
    elif planned.budget_s:
        limit = (
            "later rounds that do not fit into it are left out"
            if planned.on_gpus
            else "it limits the steps of each trial"
        )
        lines.append(
            f"time budget: {words.long_time(planned.budget_s)}; {limit}, and trials that have not"
            " started by its end are left out, with which the same command goes on"
        )
    return "\n".join(lines)
