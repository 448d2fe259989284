"""Copying: copy runs and trials from one store's database into another.

Every stored bit is copied; columns that a file of an older schema lacks get their defaults. Two
trials are the same if they have the same run, case, round and start time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from dpbench.records import Case, Status
from dpbench.records.environment import Environment, forbidding
from dpbench.records.spelling import dashed
from dpbench.store import file, rows
from dpbench.store.file import StoreError
from dpbench.store.runs import FINISHED

PARTS = ("step", "span", "memory", "series")
"""The tables with the parts of trials; their column `trial_id` refers to the trial."""
IDENTITY = ("host", "code", "started")
"""The columns of a run that never change: copies that differ in one contradict each other."""
NO_RESULT = (
    "id",
    "run_id",
    "trial_id",
    "checksum",
    "parts_checksum",
    "summary_checksum",
    "summary",
)
"""Columns that are no results of a trial: the numbers of a file, and what is computed from results.

Schemas 3 and 4 have checksums, which no later version updates.
"""
SHOWN = 5
"""The most conflicts that an error lists."""


@dataclass(frozen=True)
class Merged:
    """The result of a merge: the numbers of added runs, and of added trials in any run.

    `known` is the number of runs of the other store that this store had before.
    """

    runs: int
    trials: int
    known: int


def _shared(source: file.Connection, target: file.Connection, table: str) -> list[str]:
    """Return the columns of a table that both files have; others are checksums of old files."""
    target_columns = rows.columns_of(target, table)
    return [name for name in rows.columns_of(source, table) if name in target_columns]


def _insertion(table: str, names: Sequence[str]) -> str:
    marks = ",".join("?" * len(names))
    return f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})"


def copy_run(source: file.Connection, run_id: str, target: file.Connection) -> None:
    """Copy the row of a run, which `target` must not have."""
    names = _shared(source, target, "run")
    (values,) = source.execute(f"SELECT {', '.join(names)} FROM run WHERE id=?", (run_id,))
    target.execute(_insertion("run", names), values)


def copy_trial(source: file.Connection, trial_id: int, target: file.Connection, run_id: str) -> int:
    """Copy one trial into the run `run_id` of `target`, and return its id there."""
    names = [name for name in _shared(source, target, "trial") if name not in ("id", "run_id")]
    (values,) = source.execute(f"SELECT {', '.join(names)} FROM trial WHERE id=?", (trial_id,))
    new = target.execute(_insertion("trial", ["run_id", *names]), (run_id, *values)).lastrowid
    assert new is not None
    for table in PARTS:
        columns = [name for name in rows.columns_of(source, table) if name != "trial_id"]
        parts = source.execute(
            f"SELECT {', '.join(columns)} FROM {table} WHERE trial_id=?", (trial_id,)
        )
        insertion = _insertion(table, ["trial_id", *columns])
        target.executemany(insertion, ((new, *row) for row in parts))
    return new


def merge(source: file.Connection, target: file.Connection) -> Merged:
    """Copy from `source` the runs and trials that `target` lacks, in the caller's transaction.

    A run that is in both gets the missing trials and, if its copy in `source` is the newer one, the
    status, the end, the plan and the provenance from there. Raises UnreadableRow for a damaged run
    or trial, and StoreError, which names the runs and cases, if copies of a run contradict each
    other: in `IDENTITY`, the environment or a trial's results, or because each has a trial of the
    same case and round that the other lacks.
    """
    runs = trials = known = 0
    conflicts: list[str] = []
    _copy_machine_results(source, target)
    for (run_id,) in source.execute("SELECT id FROM run ORDER BY started, rowid").fetchall():
        if not target.execute("SELECT 1 FROM run WHERE id=?", (run_id,)).fetchone():
            copy_run(source, run_id, target)
            missing = _ids(source, run_id)
            runs += 1
        else:
            contradictions = [*_contradictions(source, target, run_id)]
            conflicts += contradictions
            missing = [] if contradictions else _missing(source, target, run_id)
            known += 1
            if not contradictions and _is_newer(source, target, run_id):
                _adopt(source, target, run_id)
        trials += len(missing)
        for trial_id in missing:
            query = "SELECT source FROM trial WHERE id=?"
            (origin,) = source.execute(query, (trial_id,)).fetchone()
            if origin is not None:
                rows.trial(source, trial_id)  # raises for an ended trial that cannot be read
            copy_trial(source, trial_id, target, run_id)
    if conflicts:
        more = f"; and {len(conflicts) - SHOWN} more" if len(conflicts) > SHOWN else ""
        raise StoreError(
            "the stores contradict each other, and nothing was merged:"
            f" {'; '.join(conflicts[:SHOWN])}{more}. Remove each of these runs from one of the"
            f" stores with `dpbench rm RUN {dashed('store', 'FILE')}`"
        )
    return Merged(runs, trials, known)


def _copy_machine_results(source: file.Connection, target: file.Connection) -> None:
    """Copy the results on machines that are newer in `source`, or missing in `target`."""
    if not rows.columns_of(source, "examination"):
        return
    for row in source.execute("SELECT host, started, result FROM examination"):
        target.execute(
            "INSERT INTO examination VALUES (?,?,?) ON CONFLICT(host) DO UPDATE SET"
            " started=excluded.started, result=excluded.result WHERE excluded.started>started",
            row,
        )


def _ids(db: file.Connection, run_id: str) -> list[int]:
    return [
        number
        for (number,) in db.execute("SELECT id FROM trial WHERE run_id=? ORDER BY id", (run_id,))
    ]


def _slots(db: file.Connection, run_id: str) -> dict[tuple[str, int], dict[float, int]]:
    """Return the ids of a run's ended trials by (fingerprint, round) and start time."""
    slots: dict[tuple[str, int], dict[float, int]] = {}
    query = (
        "SELECT fingerprint, round, started, id FROM trial WHERE run_id=? AND status NOT IN"
        " ('running', ?)"
    )
    for fingerprint, number, started, trial_id in db.execute(query, (run_id, Status.KILLED)):
        slots.setdefault((fingerprint, number), {})[started] = trial_id
    return slots


def _missing(source: file.Connection, target: file.Connection, run_id: str) -> list[int]:
    """Return the ids, in `source`, of a run's ended trials that `target` lacks, by start."""
    here = _slots(target, run_id)
    return sorted(
        trial_id
        for slot, trials in _slots(source, run_id).items()
        for started, trial_id in trials.items()
        if started not in here.get(slot, {})
    )


def _contradictions(source: file.Connection, target: file.Connection, run_id: str) -> Iterator[str]:
    query = f"SELECT {', '.join(IDENTITY)} FROM run WHERE id=?"
    our_values, their_values = (db.execute(query, (run_id,)).fetchone() for db in (target, source))
    for name, ours, theirs in zip(IDENTITY, our_values, their_values, strict=True):
        if ours != theirs:
            yield (
                f"run {run_id[:12]}: `{name}` is {ours!r} in this store and {theirs!r} in the other"
            )
    for one in forbidding(*(_environment(db, run_id) for db in (target, source))):
        yield (
            f"run {run_id[:12]}: {one.name} {one.before} in this store and {one.after} in the other"
        )
    here, there = _slots(target, run_id), _slots(source, run_id)
    for slot in here.keys() & there.keys():
        both = here[slot].keys() & there[slot].keys()
        where = (
            f"run {run_id[:12]}, {_label(target, next(iter(here[slot].values())))}, round"
            f" {slot[1] + 1}"
        )
        if both not in (here[slot].keys(), there[slot].keys()):
            yield f"{where}: each store has a trial that the other lacks"
        for started in both:
            ours, theirs = here[slot][started], there[slot][started]
            if not _same_results(target, ours, source, theirs):
                yield (
                    f"{where}: trial {ours} of this store and trial {theirs} of the other differ in"
                    " their results"
                )


def _environment(db: file.Connection, run_id: str) -> Environment:
    (row,) = db.execute("SELECT rowid FROM run WHERE id=?", (run_id,)).fetchone()
    return Environment.of(rows.run(db, row).facts)


def _label(db: file.Connection, trial_id: int) -> str:
    (case,) = db.execute("SELECT case_json FROM trial WHERE id=?", (trial_id,)).fetchone()
    return Case.from_dict(json.loads(case)).label


def _same_results(one: file.Connection, first: int, other: file.Connection, second: int) -> bool:
    """Return whether two trials agree in all columns and parts that both files have."""
    for table in ("trial", *PARTS):
        columns = [name for name in _shared(one, other, table) if name not in NO_RESULT]
        key = "id" if table == "trial" else "trial_id"
        names = ", ".join(columns)
        query = f"SELECT {names} FROM {table} WHERE {key}=? ORDER BY {names}"
        both = zip_longest(one.execute(query, (first,)), other.execute(query, (second,)))
        if any(ours != theirs for ours, theirs in both):
            return False
    return True


def _is_newer(source: file.Connection, target: file.Connection, run_id: str) -> bool:
    """Return whether the copy of a run in `source` was continued after that in `target`.

    This is the copy that has trials which the other lacks. If both have some, or none, the later
    end decides; but a run with the same trials that had finished does not become unfinished.
    """
    gives, lacks = _missing(source, target, run_id), _missing(target, source, run_id)
    query = "SELECT ended, status FROM run WHERE id=?"
    mine, theirs = (db.execute(query, (run_id,)).fetchone() for db in (target, source))
    if bool(gives) != bool(lacks):
        return bool(gives)

    def end(copy: tuple[float | None, str]) -> tuple[bool, float]:
        ended_s, status = copy
        return not gives and status == FINISHED, ended_s or 0.0

    return end(theirs) > end(mine)


def _adopt(source: file.Connection, target: file.Connection, run_id: str) -> None:
    """Copy a run's status, end, plan and provenance to `target`."""
    query = "SELECT ended, status, plan, rounds, provenance FROM run WHERE id=?"
    target.execute(
        "UPDATE run SET ended=?, status=?, plan=?, rounds=?, provenance=? WHERE id=?",
        (*source.execute(query, (run_id,)).fetchone(), run_id),
    )
