"""Stored: find a run in a store or in an exported file, and read it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from dpbench.records import words
from dpbench.records.errors import UsageError

if TYPE_CHECKING:
    from dpbench.records import Trial
    from dpbench.store import Store, StoredRun, UnreadableRow


def read(store: Path, run_id: str | None) -> tuple[StoredRun, list[Trial], list[UnreadableRow]]:
    """Return a run in a store file, its trials without spans, and the rows that could not be read.

    `choose` explains `run_id`.
    """
    from dpbench.store import Store

    unreadable: list[UnreadableRow] = []
    with Store.read(store, listing(unreadable)) as opened:
        chosen = choose(opened, run_id)
        return chosen, opened.summaries(chosen.id), unreadable


def listing(found: list[UnreadableRow]) -> Callable[[UnreadableRow], None]:
    """Return a function that prints that a row cannot be read, and appends the row to `found`."""

    def list_row(row: UnreadableRow) -> None:
        list_unreadable(row)
        found.append(row)

    return list_row


def list_unreadable(row: UnreadableRow) -> None:
    """Print to stderr that a row of a store cannot be read and is left out."""
    print(f"unreadable: {row}", file=sys.stderr)


NAMED = 20
"""The largest number of runs that an error names."""


def choose(opened: Store, name: str | None) -> StoredRun:
    """Return the run that `name` names by @NAME or by the beginning of its id.

    @last and None mean the newest run. Raises ValueError if no run matches, or several.
    """
    from dpbench.store import LATEST

    runs = opened.matching(name)
    if not runs:
        if name is None or name == f"@{LATEST}":
            sought = "run"
        elif name.startswith("@"):
            sought = f"run with the name {name[1:]!r}"
        else:
            sought = f"run whose id begins with {name!r}"
        named = [*map(_called, islice(opened.newest(), NAMED + 1))]
        shown = ", ".join(named[:NAMED]) or "none"
        more = ", and older ones, which `dpbench list runs` lists" if len(named) > NAMED else ""
        raise UsageError(f"the store has no {sought}; its runs are: {shown}{more}")
    if len(runs) > 1:
        matches = ", ".join(f"{run.id[:12]} ({words.minute(run.started)})" for run in runs[:NAMED])
        more = f", and {len(runs) - NAMED} older ones" if len(runs) > NAMED else ""
        raise UsageError(
            f"{name} matches {len(runs)} runs: {matches}{more}; give more characters of the id of"
            " one run"
        )
    return runs[0]


def _called(run: StoredRun) -> str:
    return f"{run.id[:8]} @{run.naming.name}" if run.naming.name else run.id[:8]


def side(store: Path, name: str) -> tuple[StoredRun, list[Trial]]:
    """Return the run that `name` names, and its trials without their spans.

    The help of `dpbench compare` explains the names. Raises ValueError if no run matches, or
    several.
    """
    path, colon, run = name.rpartition(":")
    whole = Path(name).is_file()
    if whole or (colon and Path(path).is_file()):
        return _in_file(Path(name if whole else path), "" if whole else run)
    from dpbench.store import Store

    with Store.read(store, list_unreadable) as opened:
        chosen = _of_commit(opened, name) or choose(opened, name)
        return chosen, opened.summaries(chosen.id)


def _in_file(path: Path, run: str) -> tuple[StoredRun, list[Trial]]:
    """Return a run and its trials; "" means a store's newest run, or an export's only one."""
    if path.suffix in (".jsonl", ".gz"):
        from dpbench.store import export

        return export.read_run(path, run)
    return read(path, run or None)[:2]


def _of_commit(opened: Store, prefix: str) -> StoredRun | None:
    """Return the newest run of a store whose commit begins with `prefix`, if any.

    Raises ValueError if `prefix` matches several commits, or a commit and the id of a run.
    """
    if prefix.startswith("@"):
        return None
    commits: dict[str, StoredRun] = {}
    for run in opened.of_commit(prefix):
        for commit in (run.facts.dpbench.commit or "", run.facts.project.commit or ""):
            if commit.startswith(prefix):
                commits.setdefault(commit, run)
    ids = [run.id for run in opened.matching(prefix)] if commits else []
    if len(commits) + len(ids) > 1:
        matches = ", ".join(
            [*(f"commit {commit[:12]}" for commit in commits), *(f"run {run[:12]}" for run in ids)]
        )
        raise UsageError(
            f"{prefix} is the beginning of several commits or ids: {matches}; give more characters"
        )
    return next(iter(commits.values()), None)
