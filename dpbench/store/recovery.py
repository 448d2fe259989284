"""Recovery: list the damage of a store's file, and copy everything that can be read into a new store.

The damaged file is never changed. Recovery works on a copy, in whose header the number of pages is set to match the
length of the file. If SQLite cannot read the copy's tables, the first page, which describes the tables, is replaced by
that of an empty store, which has its tables on the same pages. Rows are then looked up one by one by their number, so
that a damaged page hides only the rows on it.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from dpbench.store import copying, file, rows
from dpbench.store.file import StoreError
from dpbench.store.rows import UnreadableRow

_PAGE = slice(16, 18)
_COUNT = slice(28, 32)
_LEAST_ROW = 64
"""A trial and its steps take at least this number of bytes, which bounds the number of rows to look up."""
_RECOVERED = "recovered"
"""The plan, host and code of a run whose own row is lost, so that no command resumes the run."""


@dataclass(frozen=True)
class Recovered:
    """The result of a recovery: the numbers of runs and trials that were copied, and the rows that are lost."""

    runs: int
    trials: int
    lost: tuple[UnreadableRow, ...]


def check(path: Path) -> list[str]:
    """Return the faults of a store's file; empty if SQLite's quick check and dpbench's own rules find none.

    The rules are: each run and each trial can be read and matches its checksums, and each row that refers to a run or a
    trial refers to an existing one. Raises StoreError if the file is not a store.
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
    """Yield the fault of a row of the table `run` or `trial`, if any; an ended trial is read with all its parts."""
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
        if all(_readable(db, table) for table in ("run", "trial", *copying.PARTS)):
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
                copying.copy_run(source, row, target)
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
                new = copying.copy_trial(source, row, target, ended[1])
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
        queries += [f"SELECT max(trial_id) FROM {part}" for part in copying.PARTS]
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
