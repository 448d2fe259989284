"""Storing: the commands that look after a store's file: `dpbench store check` and `dpbench store recover`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dpbench.cli.config import Documented
from dpbench.cli.options import EXIT_FAILED, EXIT_USAGE, EXIT_WORSE
from dpbench.records import words


@click.group("store", short_help="Check the file of a store, or recover its trials.")
def store_() -> None:
    """Check the file of a store for damage, or recover the trials of a damaged store."""


@store_.command(
    cls=Documented,
    short_help="List the damage of a store.",
    exits={0: "no damage was found", EXIT_WORSE: "the store is damaged", EXIT_FAILED: "the file is not a store",
           EXIT_USAGE: "wrong usage"},
)  # fmt: skip
@click.argument("file", type=click.Path(path_type=Path))
def check(file: Path) -> None:
    """Check the structure of the store FILE, and read every run and every trial; print each fault on a line."""
    from dpbench.store import recovery

    if faults := recovery.check(file):
        click.echo("\n".join(faults))
        click.echo(f"{file}: {words.count(len(faults), 'fault')}", err=True)
        sys.exit(EXIT_WORSE)
    click.echo(f"{file}: no damage found")


@store_.command(
    cls=Documented,
    short_help="Copy what can be read of a damaged store.",
    exits={0: "everything was copied", EXIT_WORSE: "some rows are lost", EXIT_FAILED: "nothing can be read, or a file "
           "cannot be written", EXIT_USAGE: "wrong usage"},
)  # fmt: skip
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), required=True, help="The new store, which must not exist.")
def recover(file: Path, output: Path) -> None:
    """Copy every run and every ended trial of the store FILE that can be read into a new store; FILE is not changed."""
    from dpbench.store import recovery

    done = recovery.recover(file, output)
    for fault in done.lost:
        click.echo(f"lost: row {fault.row} of the table {fault.table}: {fault.why}", err=True)
    click.echo(
        f"{output}: {words.count(done.runs, 'run')} and {words.count(done.trials, 'trial')} recovered from {file}, "
        f"{words.count(len(done.lost), 'row')} lost"
    )
    sys.exit(EXIT_WORSE if done.lost else 0)
