"""Past: the steps of other runs in a store that a report compares with a run, without loading spans and samples."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from dpbench.records import Case, Source, Status, Step, Trial, Verified
from dpbench.store import file
from dpbench.store.runs import StoredRun

PREDICTED = "predicted:"
"""The beginning of the host of a run on a machine that was only described."""


@dataclass(frozen=True)
class PastRun:
    """A run with those of its trials whose case another run has too; the trials have no spans, samples and memory."""

    run: StoredRun
    trials: tuple[Trial, ...]


def past(path: Path, run_id: str) -> tuple[PastRun, ...]:
    """Return the runs of a store on the hardware of a run, and the predicted runs, which have cases of this run.

    The runs are in the order of their start, and the run itself is one of them. Only trials of status `ok` count.
    Raises StoreError if the file is not a store.
    """
    with closing(file.open_to_read(path)) as db:
        runs = db.execute(
            "SELECT id, status, started, rounds, provenance FROM run WHERE host=(SELECT host FROM run WHERE id=?) "
            "OR host LIKE ? ORDER BY started, rowid",
            (run_id, f"{PREDICTED}%"),
        ).fetchall()
        found = []
        for name, status, started, rounds, facts in runs:
            trials = []
            rows = db.execute(
                "SELECT id, case_json, verified, source, started, provenance, round FROM trial WHERE run_id=? AND "
                "status=? AND fingerprint IN (SELECT fingerprint FROM trial WHERE run_id=?) ORDER BY id",
                (name, Status.OK, run_id),
            ).fetchall()
            for number, case, verified, source, began, known, turn in rows:
                steps = db.execute(
                    "SELECT seconds, warmup, end_s FROM step WHERE trial_id=? ORDER BY step", (number,)
                ).fetchall()
                trials.append(
                    Trial(
                        case=Case.from_dict(json.loads(case)), source=Source(source), verified=Verified(verified),
                        steps=tuple(Step(seconds, bool(warmup), end) for seconds, warmup, end in steps),
                        started_s=began, round=turn, provenance=json.loads(known),
                    )
                )  # fmt: skip
            if trials:
                found.append(PastRun(StoredRun(name, status, started, rounds, json.loads(facts)), tuple(trials)))
    return tuple(found)
