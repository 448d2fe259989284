"""Past: the steps of other runs in a store that a report compares with a run, without loading spans and samples."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from dpbench.records import Status, Trial
from dpbench.store import file, rows
from dpbench.store.rows import UnreadableRow
from dpbench.store.runs import StoredRun

PREDICTED = "predicted:"
"""The beginning of the host of a run on a machine that was only described."""


@dataclass(frozen=True)
class PastRun:
    """A run with those of its trials whose case another run has too; the trials have no spans, samples and memory."""

    run: StoredRun
    trials: tuple[Trial, ...]


def past(path: Path, run_id: str, unreadable: Callable[[UnreadableRow], None] | None = None) -> tuple[PastRun, ...]:
    """Return the runs of a store on the hardware of a run, and the predicted runs, which have cases of this run.

    The runs are in the order of their start, and the run itself is one of them. Only trials of status `ok` count.
    `unreadable` is called with each row that cannot be read, except rows of the run itself, which the caller has read
    already. Raises StoreError if the file is not a store and, without `unreadable`, UnreadableRow.
    """
    with closing(file.open_to_read(path)) as db:
        runs = db.execute(
            "SELECT rowid, id FROM run WHERE host=(SELECT host FROM run WHERE id=?) OR host LIKE ? "
            "ORDER BY started, rowid",
            (run_id, f"{PREDICTED}%"),
        ).fetchall()
        found = []
        for row, name in runs:
            listed = (lambda fault: None) if name == run_id and unreadable else unreadable
            ids = db.execute(
                "SELECT id FROM trial WHERE run_id=? AND status=? AND fingerprint IN "
                "(SELECT fingerprint FROM trial WHERE run_id=?) ORDER BY id",
                (name, Status.OK, run_id),
            ).fetchall()
            trials = [trial for _, trial in rows.readable(db, rows.steps_of, ids, listed)]
            run = [run for _, run in rows.readable(db, rows.run, [(row,)] if trials else [], listed)]
            found += [PastRun(one, tuple(trials)) for one in run]
    return tuple(found)
