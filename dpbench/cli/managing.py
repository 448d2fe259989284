"""Managing: the commands show, rm and merge, and the lines of `dpbench list runs`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dpbench.api.stored import choose, list_unreadable
from dpbench.cli import shapes
from dpbench.cli.options import EXIT_FAILED, EXITS, Documented, json_option, store_option
from dpbench.cli.shapes import RunFacts, ShownRun, StartedCase
from dpbench.records import words
from dpbench.records.trial import by_case

if TYPE_CHECKING:
    from dpbench.store import Store, StoredRun


def runs(store: Path, last: int | None = None) -> list[RunFacts]:
    """Return the facts of the `last` runs of a store, None for all, the newest first."""
    from dpbench.store import Store

    with Store.read(store, list_unreadable) as opened:
        return [
            RunFacts.of(run, [*opened.outcomes(run.id)]) for run in islice(opened.newest(), last)
        ]


def lines(listed: Sequence[RunFacts]) -> list[str]:
    """Return one line per run, as `dpbench list runs` prints it."""
    cells = [
        (
            run.id[:12],
            _minute(run),
            _commit(run),
            words.count(run.cases, "case"),
            run.status,
            f"@{run.name}" if run.name else "-",
            ",".join(run.models) or "-",
            run.host or "-",
            run.command or "-",
        )
        for run in listed
    ]
    return words.in_columns(cells)


def _minute(run: RunFacts) -> str:
    return f"{run.started[:16].replace('T', ' ')} UTC"


def _commit(run: RunFacts) -> str:
    return f"{run.commit[:9] or 'no commit'}{'+' if run.dirty else ''}"


def shown_run(opened: Store, run: StoredRun) -> ShownRun:
    """Return the facts of a stored run and of its cases, with the labels of their results."""
    from dpbench.analysis import summary

    outcomes = opened.outcomes(run.id)
    trials = by_case(opened.summaries(run.id))
    labels = {
        case: summary.all_labels(summary.shown(group) or group) for case, group in trials.items()
    }
    cases = [
        StartedCase(label=case.label, case=case, trials=counts, labels=labels.get(case, ()))
        for case, counts in outcomes.items()
    ]
    return ShownRun(run=RunFacts.of(run, [*outcomes]), cases=cases)


def _text(shown: ShownRun) -> str:
    run = shown.run
    planned = (
        words.count(run.rounds, "round") if run.rounds else "auto: until its answers are settled"
    )
    facts = {
        "run": run.id,
        "name": run.name and f"@{run.name}",
        "tags": " ".join(map("=".join, run.tags.items())),
        "command": run.command,
        "state": run.status,
        "started": _minute(run),
        "rounds": planned,
        "host": ", ".join(filter(None, [run.host, run.cpu])),
        "GPUs": ", ".join(run.gpus),
        "commit": _commit(run),
        "torch": run.torch,
    }
    cases = [
        (
            one.label,
            ", ".join(f"{number} {status}" for status, number in one.trials.items()),
            " ".join(one.labels),
        )
        for one in shown.cases
    ]
    return "\n".join(
        [
            *(f"{title:<8} {fact}" for title, fact in facts.items() if fact),
            f"{words.count(len(cases), 'case')}, with the number of trials by status:",
            *(f"  {line}" for line in words.in_columns(cases)),
        ]
    )


@click.command(cls=Documented, short_help="Show the facts of a run, and the status of its cases.")
@click.argument("run_id", metavar="RUN", default="@last")
@json_option
@store_option
def show(run_id: str, as_json: bool, store: Path) -> None:
    """Show the facts of a run, and the number of trials of each case by status.

    RUN is @last (the default), @NAME, or the beginning of an id.
    """
    from dpbench.store import Store

    with Store.read(store, list_unreadable) as opened:
        shown = shown_run(opened, choose(opened, run_id))
    if as_json:
        shapes.show(shown)
    else:
        click.echo(_text(shown))


@click.command(
    cls=Documented,
    short_help="Remove runs from a store.",
    exits=EXITS
    | {
        EXIT_FAILED: "a run is being measured, or the store cannot be used",
        130: "not confirmed",
    },
)
@click.argument("run_ids", metavar="RUN...", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Remove the runs without asking.")
@store_option
def rm(run_ids: Sequence[str], yes: bool, store: Path) -> None:
    """Remove runs with all their trials and profiles from a store, after confirmation.

    Each RUN is @last, @NAME, or the beginning of an id. A run that is being measured cannot be
    removed.
    """
    from dpbench.store import Store

    with Store.read(store, list_unreadable) as opened:
        named = [choose(opened, asked) for asked in run_ids]
        chosen = {run.id: RunFacts.of(run, [*opened.outcomes(run.id)]) for run in named}
    for line in lines([*chosen.values()]):
        click.echo(line, err=True)
    if not yes and not _confirmed(f"Remove {words.count(len(chosen), 'run')} from {store}?"):
        click.echo("nothing was removed; --yes removes runs without asking", err=True)
        sys.exit(130)
    with Store.create(store) as opened:
        opened.remove([*chosen])
    click.echo(f"removed {words.count(len(chosen), 'run')} from {store}")


def _confirmed(question: str) -> bool:
    """Return whether the user agrees; no answer is none."""
    try:
        return click.confirm(question, err=True)
    except click.Abort:
        click.echo(err=True)
        return False


@click.command(
    cls=Documented,
    short_help="Copy the runs of another store into this one.",
    exits=EXITS
    | {
        EXIT_FAILED: (
            "the stores contradict each other, a run is being measured, or a file cannot be used"
        )
    },
)
@click.argument("other", metavar="OTHER.db", type=click.Path(path_type=Path))
@store_option
def merge(other: Path, store: Path) -> None:
    """Copy the runs and trials of OTHER.db into the store of --store, except those it has.

    The command can be repeated, because it never copies a trial twice. If the two stores contradict
    each other, no store is changed, and the error names the runs and cases.
    """
    from dpbench.store import Store

    if other.exists() and store.exists() and other.samefile(store):
        raise click.UsageError(
            f"{other} is the store itself: give another file, or another store with --store"
        )
    with Store.read(other):  # before the store of --store is created
        pass
    with Store.create(store) as opened:
        done = opened.merge(other)
    click.echo(
        f"{store}: {words.count(done.runs, 'run')} and {words.count(done.trials, 'trial')} added"
        f" from {other}; {words.count(done.known, 'run')} {words.verb(done.known, 'was', 'were')}"
        " there already"
    )
