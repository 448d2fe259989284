"""Copying: copy trials and runs from one store's database into another, and recover those of a damaged file.

Every stored bit is copied. Two trials are the same if they have the same run, case, round and start time. A file of an
older schema lacks columns, which get their defaults in the copy.

Recovery never changes the damaged file. It works on a copy, whose header is changed to state the number of pages that
the file really has. The first page says on which pages the tables begin. If SQLite cannot read the copy's tables, this
page is replaced by the first page of an empty store; the tables of every store begin on the same pages. Rows are then
looked up one by one by their number, because a damaged page then hides only the rows on it.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from dpbench.records import Case, Status
from dpbench.store import file, rows
from dpbench.store.file import StoreError
from dpbench.store.rows import UnreadableRow

PARTS = ("step", "span", "memory", "series")
"""The tables with the parts of trials; their column `trial_id` has the id of the trial."""
IDENTITY = ("plan", "host", "code", "started", "rounds")
"""The columns of a run that never change; two copies of the run that differ in one of them contradict each other."""
SHOWN = 5
"""The largest number of conflicts that an error lists."""
_PAGE = slice(16, 18)
_COUNT = slice(28, 32)
_LEAST_ROW = 64
"""A trial and its steps take at least this number of bytes, which bounds the number of rows to look up."""
_RECOVERED = "recovered"
"""The plan, host and code of a run whose own row is lost, so that no command resumes the run."""


@dataclass(frozen=True)
class Merged:
    """The result of a merge: the number of runs that were added, and the number of trials that were added to any run.

    `known` is the number of runs of the other store that this store had before the merge.
    """

    runs: int
    trials: int
    known: int


def refuse_replaced(db: file.Connection) -> None:
    """Raise StoreError if the file was deleted or replaced since it was opened for writing.

    Before it raises, it copies the trials of the open file into a new file in the same folder; the message names this
    file.
    """
    if file.same_file(db):
        return
    kept = db.path.with_name(f"{db.path.name}.kept-{os.getpid()}")
    try:
        kept.unlink(missing_ok=True)
        db.execute("VACUUM INTO ?", (str(kept),))
        where = f"all trials so far are in {kept}"
    except (sqlite3.Error, OSError) as error:
        where = f"its trials are lost, because {kept} cannot be written: {error.__cause__ or error}"
    raise StoreError(f"the store {db.path} was deleted or replaced while a run was writing to it; {where}")


def copy_run(source: file.Connection, row: int, target: file.Connection) -> None:
    """Copy the run with this rowid, without its trials, into the database `target`."""
    names = ", ".join(rows.columns_of(source, "run"))
    values = source.execute(f"SELECT {names} FROM run WHERE rowid=?", (row,)).fetchone()
    target.execute(f"INSERT INTO run ({names}) VALUES ({','.join('?' * len(values))})", values)


def copy_trial(source: file.Connection, trial_id: int, target: file.Connection, run_id: str) -> int:
    """Copy one trial into the run `run_id` of the database `target`, and return its id there."""
    names = [name for name in rows.columns_of(source, "trial") if name not in ("id", "run_id")]
    (values,) = source.execute(f"SELECT {', '.join(names)} FROM trial WHERE id=?", (trial_id,))
    marks = ",".join("?" * (1 + len(names)))
    new = target.execute(
        f"INSERT INTO trial (run_id, {', '.join(names)}) VALUES ({marks})", (run_id, *values)
    ).lastrowid
    assert new is not None
    for table in PARTS:
        columns = [name for name in rows.columns_of(source, table) if name != "trial_id"]
        found = source.execute(f"SELECT {', '.join(columns)} FROM {table} WHERE trial_id=?", (trial_id,))
        marks = ",".join("?" * (1 + len(columns)))
        target.executemany(
            f"INSERT INTO {table} (trial_id, {', '.join(columns)}) VALUES ({marks})", ((new, *row) for row in found)
        )
    return new


def merge(source: file.Connection, target: file.Connection) -> Merged:
    """Copy from `source` the runs and trials that `target` lacks; the caller has begun a transaction on `target`.

    If both databases have a copy of a run, the copy in `target` gets the missing trials. If the run ended later in
    `source`, it also gets the status and the provenance from there. Raises UnreadableRow for a damaged trial. Raises
    StoreError if two copies of a run contradict each other; the message names the runs and cases. Two copies contradict
    each other if they differ in plan, host, code, start or number of rounds, if a trial has different results in them,
    or if each has a trial of the same case and round that the other lacks.
    """
    copied = Merged(0, 0, 0)
    conflicts: list[str] = []
    for row, run_id in source.execute("SELECT rowid, id FROM run ORDER BY started, rowid").fetchall():
        if not target.execute("SELECT 1 FROM run WHERE id=?", (run_id,)).fetchone():
            copy_run(source, row, target)
            missing = _ids(source, run_id)
            copied = Merged(copied.runs + 1, copied.trials + len(missing), copied.known)
        else:
            found = [*_contradictions(source, target, run_id)]
            conflicts += found
            missing = [] if found else _missing(source, target, run_id)
            copied = Merged(copied.runs, copied.trials + len(missing), copied.known + 1)
            if not found:
                _adopt(source, target, run_id)
        for trial_id in missing:
            if source.execute("SELECT source FROM trial WHERE id=?", (trial_id,)).fetchone()[0] is not None:
                rows.trial(source, trial_id)  # raises for an ended trial that cannot be read
            copy_trial(source, trial_id, target, run_id)
    if conflicts:
        more = f"; and {len(conflicts) - SHOWN} more" if len(conflicts) > SHOWN else ""
        raise StoreError(
            f"the stores contradict each other, and nothing was merged: {'; '.join(conflicts[:SHOWN])}{more}. Remove "
            "each of these runs from one of the stores with `dpbench rm RUN --store FILE`"
        )
    return copied


def _ids(db: file.Connection, run_id: str) -> list[int]:
    return [number for (number,) in db.execute("SELECT id FROM trial WHERE run_id=? ORDER BY id", (run_id,))]


def _slots(db: file.Connection, run_id: str) -> dict[tuple[str, int], dict[float, int]]:
    """Return the ids of a run's ended trials by (fingerprint of the case, round) and by start time."""
    found: dict[tuple[str, int], dict[float, int]] = {}
    query = "SELECT fingerprint, round, started, id FROM trial WHERE run_id=? AND status NOT IN ('running', ?)"
    for fingerprint, number, started, trial_id in db.execute(query, (run_id, Status.KILLED)):
        found.setdefault((fingerprint, number), {})[started] = trial_id
    return found


def _missing(source: file.Connection, target: file.Connection, run_id: str) -> list[int]:
    """Return the ids, in `source`, of a run's ended trials that `target` lacks, in the order of their start."""
    here = _slots(target, run_id)
    return sorted(
        trial_id
        for slot, trials in _slots(source, run_id).items()
        for started, trial_id in trials.items()
        if started not in here.get(slot, {})
    )


def _contradictions(source: file.Connection, target: file.Connection, run_id: str) -> Iterator[str]:
    """Yield one text for each contradiction between two copies of a run."""
    query = f"SELECT {', '.join(IDENTITY)} FROM run WHERE id=?"
    mine, theirs = (db.execute(query, (run_id,)).fetchone() for db in (target, source))
    for name, one, other in zip(IDENTITY, mine, theirs, strict=True):
        if one != other:
            yield f"run {run_id[:12]}: `{name}` is {one!r} in this store and {other!r} in the other"
    here, there = _slots(target, run_id), _slots(source, run_id)
    for slot in here.keys() & there.keys():
        both = here[slot].keys() & there[slot].keys()
        where = f"run {run_id[:12]}, {_label(target, next(iter(here[slot].values())))}, round {slot[1] + 1}"
        if both not in (here[slot].keys(), there[slot].keys()):
            yield f"{where}: each store has a trial that the other lacks"
        for started in both:
            one, other = here[slot][started], there[slot][started]
            if _content(target, one) != _content(source, other):
                yield f"{where}: trial {one} of this store and trial {other} of the other differ in their results"


def _label(db: file.Connection, trial_id: int) -> str:
    """Return the label of a trial's case."""
    (case,) = db.execute("SELECT case_json FROM trial WHERE id=?", (trial_id,)).fetchone()
    return Case.from_dict(json.loads(case)).label


def _content(db: file.Connection, trial_id: int) -> tuple[object, ...]:
    """Return the results of a trial: columns that all versions of the schema have, and the rows of its steps."""
    names = "case_json, status, reason, verified, source, schema, setup, provenance"
    trial = db.execute(f"SELECT {names} FROM trial WHERE id=?", (trial_id,)).fetchone()
    steps = db.execute("SELECT step, seconds, warmup, end_s FROM step WHERE trial_id=? ORDER BY step", (trial_id,))
    return (trial, steps.fetchall())


def _adopt(source: file.Connection, target: file.Connection, run_id: str) -> None:
    """If the run ended later in `source`, copy its status, end and provenance from there to `target`."""
    query = "SELECT ended, status, provenance FROM run WHERE id=?"
    mine, theirs = (db.execute(query, (run_id,)).fetchone() for db in (target, source))
    if (theirs[0] or 0.0) > (mine[0] or 0.0):
        target.execute("UPDATE run SET ended=?, status=?, provenance=? WHERE id=?", (*theirs, run_id))
        rows.sign_run(target, run_id)


@dataclass(frozen=True)
class Recovered:
    """The result of a recovery: how many runs and how many trials were copied, and which rows are lost."""

    runs: int
    trials: int
    lost: tuple[UnreadableRow, ...]


def check(path: Path) -> list[str]:
    """Return the faults of a store's file that SQLite's quick check or dpbench's own checks find; empty if none.

    dpbench checks that each run and each trial can be read and matches its checksums, and that the run or the trial to
    which a row refers exists. Raises StoreError if the file is not a store.
    """
    try:
        with closing(file.open_to_read(path)) as db:
            faults = file.quick_check(db)
            try:
                for table, read in (("run", rows.run), ("trial", rows.outcome)):
                    ids = db.execute(f"SELECT rowid FROM {table} ORDER BY rowid").fetchall()
                    for (row,) in ids:
                        faults += [str(fault) for fault in _faults(db, table, row, read)]
                for table, row, parent, _ in db.execute("PRAGMA foreign_key_check").fetchall():
                    which = "a row" if row is None else f"row {row}"  # None for a table WITHOUT ROWID
                    faults.append(f"{path}: {which} of the table {table} refers to a missing row of the table {parent}")
            except file.DamagedStore as error:
                faults.append(str(error))
            return list(dict.fromkeys(faults))
    except file.DamagedStore as error:
        return [str(error)]


def _faults(db: file.Connection, table: str, row: int, read: rows.Reader[object]) -> Iterator[UnreadableRow]:
    """Yield the fault of a row of the table `run` or `trial`, if any; an ended trial is read with all its rows."""
    try:
        read(db, row)
        if table == "trial" and db.execute("SELECT source FROM trial WHERE id=?", (row,)).fetchone()[0] is not None:
            rows.trial(db, row)
    except UnreadableRow as fault:
        yield fault


def recover(path: Path, output: Path) -> Recovered:
    """Copy every readable run, and every readable ended trial, of the damaged store `path` into the new store `output`.

    Raises StoreError if `output` exists, if `path` does not exist, or if no run and no trial can be read.
    """
    if output.exists():
        raise StoreError(f"{output} exists already; give the name of a new file with --output")
    if not path.is_file():
        raise StoreError(f"the file {path} does not exist")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".recovering-", dir=output.parent) as name:
        made = Path(name) / "made.db"
        with closing(_opened(path, Path(name))) as source, closing(file.open_to_write(made)) as target:
            found = _copy(source, target, path)
            file.fold(target)
        if not (found.runs or found.trials):
            raise StoreError(f"no run and no trial in {path} can be read; {output} was not written")
        made.rename(output)
    return found


def _opened(path: Path, folder: Path) -> file.Connection:
    """Return a connection to a copy of a damaged store, in which SQLite can read as many tables as possible."""
    copy, empty = folder / "copy.db", folder / "empty.db"
    for end in ("", "-wal"):
        with suppress(FileNotFoundError):
            shutil.copyfile(f"{path}{end}", f"{copy}{end}")
    with suppress(sqlite3.Error, UnicodeDecodeError), closing(sqlite3.connect(copy, isolation_level=None)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # copies the pages of the log that match their checksums
    for end in ("-wal", "-shm"):
        Path(f"{copy}{end}").unlink(missing_ok=True)
    file.open_to_write(empty).close()
    fresh = empty.read_bytes()
    page = int.from_bytes(fresh[_PAGE], "big")
    data = bytearray(copy.read_bytes())
    data += bytes(-len(data) % page)
    whole = bytes(data)
    for first in (whole[:page], fresh[:page]):
        data[:page] = first
        data[_COUNT] = (len(data) // page).to_bytes(4, "big")
        data[18:20] = b"\1\1"  # the copy has no write-ahead log
        data[32:40] = bytes(8)  # there is no list of free pages
        data[92:96] = data[24:28]  # marks the number of pages as valid
        copy.write_bytes(data)
        db = file.connect(path, str(copy))
        if all(_readable(db, table) for table in ("run", "trial", *PARTS)):
            return db
        db.close()
    return file.connect(path, str(copy))


def _readable(db: file.Connection, table: str) -> bool:
    """Return whether SQLite knows the columns of a table."""
    try:
        return bool(rows.columns_of(db, table))
    except StoreError:
        return False


def _copy(source: file.Connection, target: file.Connection, path: Path) -> Recovered:
    """Copy the readable runs and ended trials to `target` from `source`, which is a copy of the file `path`."""
    lost, runs, trials = [], 0, 0
    most = path.stat().st_size // _LEAST_ROW
    for row in _rows(source, "run", most):
        try:
            rows.run(source, row)
            with file.transaction(target):
                copy_run(source, row, target)
            runs += 1
        except UnreadableRow as fault:
            lost.append(fault)
        except sqlite3.Error as error:
            lost.append(UnreadableRow(path, "run", row, str(error)))
    for row in _rows(source, "trial", most):
        try:
            ended = source.execute("SELECT source, run_id FROM trial WHERE id=?", (row,)).fetchone()
            if ended[0] is None:
                continue  # the trial had not ended: a resumed run measures it again
            rows.trial(source, row)
            with file.transaction(target):
                _own(target, ended[1])
                new = copy_trial(source, row, target, ended[1])
                rows.trial(target, new)  # a damaged order of the parts is found only in the copy
            trials += 1
        except UnreadableRow as fault:
            lost.append(fault)
        except (sqlite3.Error, StoreError) as error:
            lost.append(UnreadableRow(path, "trial", row, str(error.__cause__ or error)))
    for (run_id,) in target.execute("SELECT id FROM run WHERE status='running'").fetchall():
        target.execute("UPDATE run SET status='interrupted' WHERE id=?", (run_id,))
        rows.sign_run(target, run_id)
    return Recovered(runs, trials, tuple(lost))


def _rows(db: file.Connection, table: str, most: int) -> Iterator[int]:
    """Yield the rowids of a table in `db`, including each rowid that may be on a damaged page.

    If the largest rowid cannot be read, rowids up to `most` are tried.
    """
    queries = [f"SELECT max(rowid) FROM {table}"]
    if table == "trial":
        queries += [f"SELECT max(trial_id) FROM {part}" for part in PARTS]
    last = 0
    for query in queries:
        try:
            (found,) = db.execute(query).fetchone()
            last = max(last, found if isinstance(found, int) else 0)
        except StoreError:
            last = max(last, most)
    for row in range(1, min(last, 10 * most) + 1):
        try:
            if db.execute(f"SELECT 1 FROM {table} WHERE rowid=?", (row,)).fetchone():
                yield row
        except StoreError:
            yield row  # perhaps on a damaged page: reading the row raises the reason


def _own(target: file.Connection, run_id: str) -> None:
    """Add the run `run_id` to `target`, for trials whose run is lost; do nothing if `target` has the run."""
    if not isinstance(run_id, str):
        raise StoreError("the id of the trial's run is damaged")
    if not target.execute("SELECT 1 FROM run WHERE id=?", (run_id,)).fetchone():
        facts = (run_id, _RECOVERED, _RECOVERED, _RECOVERED, "interrupted", 0.0, None, 0, 0, 0.0, "{}")
        target.execute(f"INSERT INTO run ({rows.RUN}) VALUES ({','.join('?' * len(facts))})", facts)
        rows.sign_run(target, run_id)
