"""Store file: open, identify and migrate the SQLite file, and merge its write-ahead log into it.

Schema history (`PRAGMA user_version`): 1 (first); 2 (memory by phase and kind, the device that
failed); 3 (checksums of rows); 4 (summaries of trials); 5 (no checksums); 6 (results on
machines); 7 (runs that are being measured have a lock, and no process id).
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

from dpbench.records import hidden, signals
from dpbench.records.errors import OptionError, UsageError
from dpbench.records.visible import visible

log = logging.getLogger(__name__)
PATIENCE_S = 30.0
"""The most seconds for which a statement waits for a locked file."""
SILENT_S, POLL_S = 2.0, 0.01
"""The seconds of waiting after which a warning is logged, and the seconds between two attempts."""
INSTRUCTIONS = 100_000
"""The instructions of SQLite's machine, some milliseconds, after which signals are handled."""
APPLICATION_ID = int.from_bytes(b"dpbn", "big")
"""The application id in the header of every store."""

MIGRATIONS = (
    """
    CREATE TABLE run (
        id TEXT PRIMARY KEY, plan TEXT NOT NULL, host TEXT NOT NULL, code TEXT NOT NULL,
        status TEXT NOT NULL, started REAL NOT NULL, ended REAL, rounds INTEGER NOT NULL,
        pid INTEGER NOT NULL, pid_born REAL NOT NULL, provenance TEXT NOT NULL
    );
    CREATE TABLE trial (
        id INTEGER PRIMARY KEY, run_id TEXT NOT NULL REFERENCES run(id), fingerprint TEXT NOT NULL,
        round INTEGER NOT NULL, case_json TEXT NOT NULL, status TEXT NOT NULL,
        reason TEXT NOT NULL DEFAULT '', verified TEXT, source TEXT, started REAL, schema INTEGER,
        setup TEXT, provenance TEXT
    );
    CREATE INDEX trial_slot ON trial(run_id, fingerprint, round);
    CREATE TABLE step (
        trial_id INTEGER NOT NULL REFERENCES trial(id), step INTEGER NOT NULL,
        seconds REAL NOT NULL, warmup INTEGER NOT NULL, end_s REAL NOT NULL,
        PRIMARY KEY (trial_id, step)
    ) WITHOUT ROWID;
    CREATE TABLE span (
        trial_id INTEGER NOT NULL REFERENCES trial(id), number INTEGER NOT NULL,
        step INTEGER NOT NULL, phase TEXT NOT NULL, device INTEGER NOT NULL, clock TEXT NOT NULL,
        start_s REAL NOT NULL, end_s REAL NOT NULL, PRIMARY KEY (trial_id, number)
    ) WITHOUT ROWID;
    CREATE TABLE memory (
        trial_id INTEGER NOT NULL REFERENCES trial(id), device INTEGER NOT NULL,
        peak_bytes INTEGER NOT NULL, source TEXT NOT NULL
    );
    -- one row per series: times and readings are zlib-compressed little-endian doubles
    CREATE TABLE series (
        trial_id INTEGER NOT NULL REFERENCES trial(id), device INTEGER NOT NULL,
        metric TEXT NOT NULL, n INTEGER NOT NULL, mean REAL NOT NULL, peak REAL NOT NULL,
        times BLOB NOT NULL, readings BLOB NOT NULL, PRIMARY KEY (trial_id, device, metric)
    ) WITHOUT ROWID
    """,
    """
    ALTER TABLE memory ADD COLUMN phase TEXT NOT NULL DEFAULT '';
    ALTER TABLE memory ADD COLUMN kind TEXT NOT NULL DEFAULT 'allocated';
    ALTER TABLE trial ADD COLUMN failed_device INTEGER
    """,
    "",  # files of versions 3 and 4 have columns for checksums, which keep their values
    "ALTER TABLE trial ADD COLUMN summary BLOB",
    "",  # stops earlier versions of dpbench, which would compare rows with outdated checksums
    "CREATE TABLE examination (host TEXT PRIMARY KEY, started REAL NOT NULL, result TEXT NOT NULL)",
    "",  # stops earlier versions of dpbench, which would take every run for one that has ended
)


def _fact(path: str) -> str:
    """Return the SQL expression of a text in a run's provenance; '?' if SQLite cannot read it.

    SQLite refuses JSON that Python writes, such as NaN.
    """
    return (
        "CASE WHEN typeof(provenance)<>'text' THEN '?' "
        f"WHEN json_valid(provenance) THEN json_extract(provenance,'{path}') ELSE '?' END"
    )


NAME, COMMIT, PROJECT = (
    _fact(f"$.{path}") for path in ("name", "dpbench.commit", "project.commit")
)
"""SQL expressions of a run's name, and of the commits of dpbench and of the project."""
INDEXES = {
    "run_started": "run(started)",
    "run_plan": "run(plan)",
    "run_name": f"run({NAME})",
    "run_commit": f"run({COMMIT})",
    "run_project": f"run({PROJECT})",
    "trial_case": "trial(fingerprint)",
}
"""Indexes that find a run, or the trials of a case, without reading all runs.

They are no part of the schema's version: a file without them is read more slowly, and earlier
versions of dpbench keep them up to date.
"""


_TABLES = re.findall(r"CREATE TABLE (\w+)", " ".join(MIGRATIONS))
_PLAIN = ("CREATE TABLE ", "CREATE INDEX ", "CREATE UNIQUE INDEX ")
"""The beginnings of the texts, as SQLite stores them, of what a store may contain."""
_KIND = re.compile(r"CREATE ((?:VIRTUAL )?\w+)")


class StoreError(OptionError, RuntimeError):
    """The error of a store that cannot be used; the message gives the reason and the remedy."""


ANOTHER: dict[str, Any] = {"option": "store", "remedy": "give another file with {}"}
"""The option and the remedy of most errors of a store."""


class Unusable(StoreError, sqlite3.OperationalError):
    """SQLite could not execute a statement, for example because the disk is read-only."""


class Locked(Unusable):
    """Another process has locked the file for longer than `PATIENCE_S`."""


class DamagedStore(StoreError, sqlite3.DatabaseError):
    """SQLite cannot read a part of the file."""


_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
"""SQLite's codes of damaged and of locked files: the lowest eight bits of extended codes."""


class State(NamedTuple):
    """What the system knows about a file: which one it is, and when it was last written."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int

    def is_other(self, other: State) -> bool:
        """Return whether two states are those of different files."""
        return (self.device, self.inode) != (other.device, other.inode)


class Connection(sqlite3.Connection):
    """A connection that knows its file, `path`, and turns SQLite's errors into StoreErrors."""

    path: Path
    columns: dict[str, list[str]]
    """The column names of each table that `rows.columns_of` has looked up."""
    left: State | None = None
    """The file as this connection left it; None if it is open read-only."""
    lost: str = ""
    """The error of a file that is lost to this connection, which then writes nothing any more."""

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """Execute a statement.

        Raises DamagedStore for a damaged file, and Unusable for other errors of SQLite.
        """
        return self.cursor(_Cursor).execute(sql, parameters)

    def executemany(self, sql: str, parameters: Any, /) -> sqlite3.Cursor:
        """Execute a statement for each row of `parameters`; the errors are those of `execute`."""
        return self.cursor(_Cursor).executemany(sql, parameters)

    @cached_property
    def _fault(self) -> str:
        """The first fault that SQLite's quick check finds; "" if the check fails.

        Unlike the error of a statement, it names a page.
        """
        with suppress(sqlite3.Error, UnicodeDecodeError):
            (found,) = sqlite3.Connection.execute(self, "PRAGMA quick_check(1)").fetchone()
            return "" if found == "ok" else _last_line(found)
        return ""

    @contextmanager
    def named(self) -> Iterator[None]:
        """Turn SQLite's errors inside this context into StoreErrors that name the file.

        Errors that only a mistake in dpbench causes, such as a violated constraint, are not
        converted. A statement that a signal has ended raises the signal's exception, which SQLite
        has dropped.
        """
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code == sqlite3.SQLITE_INTERRUPT:
                signals.check()
                raise KeyboardInterrupt from error
            if code in _DAMAGE:
                raise damaged(self.path, self._fault or error) from error
            if not isinstance(error, sqlite3.OperationalError):
                raise
            if code in _LOCKED:
                raise Locked(
                    "{held} for more than {seconds} s",
                    option="store",
                    remedy="wait until that process has ended, or give another file with {}",
                    held=_held(self.path),
                    seconds=f"{PATIENCE_S:g}",
                ) from error
            raise Unusable(
                "cannot use the store {path}: {why}", **ANOTHER, path=self.path, why=error
            ) from error
        except UnicodeDecodeError as error:  # SQLite's message quotes damaged text of the schema
            raise damaged(self.path, error) from error


class _Cursor(sqlite3.Cursor):
    """A cursor that raises StoreErrors also while rows are fetched, when SQLite may find damage."""

    connection: Connection

    def execute(self, *arguments: Any) -> Self:
        try:
            with self.connection.named():
                _patiently(self.connection.path, lambda: super(_Cursor, self).execute(*arguments))
        except BaseException:
            # after a signal, the traceback keeps this cursor: an open PRAGMA would prevent a commit
            self.close()
            raise
        return self

    def executemany(self, *arguments: Any) -> Self:
        with self.connection.named():
            # inside a transaction, which has locked the file
            return super().executemany(*arguments)

    def fetchone(self) -> Any:
        with self.connection.named():
            return super().fetchone()

    def fetchall(self) -> list[Any]:
        with self.connection.named():
            return super().fetchall()

    def __next__(self) -> Any:
        with self.connection.named():
            return super().__next__()


def damaged(path: Path, why: object) -> DamagedStore:
    """Return the error of a damaged file."""
    return DamagedStore(f"the store {path} is damaged: {why}; {way_out(path)}")


def way_out(path: object) -> str:
    """Return a clause with the command that saves what can be read of a damaged store."""
    command = f'sqlite3 {shlex.quote(str(path))} ".recover" | sqlite3 NEW.db'
    return (
        f"`{command}` copies what can be read into a new store (sqlite.org's sqlite3 has .recover; "
        "that of some systems lacks it)"
    )


def open_to_write(path: Path) -> Connection:
    """Return a connection for writing; create or migrate the file if necessary.

    Raises StoreError on failure; DamagedStore, before any change, if SQLite's quick check fails;
    UsageError for a name that is no path for SQLite.
    """
    _refuse_special(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # check read-only first, because opening for writing would already change the WAL
        if _check_header(path):
            with closing(connect_read_only(path)) as db:
                _check_version(path, db)
                refuse_damaged(db)
        db = connect(path, str(path))
        try:
            db.execute("PRAGMA journal_mode=WAL")
            # of this process, only `checkpoint` writes to the file, and notes how it leaves it
            db.execute("PRAGMA wal_autocheckpoint=0")
            db.execute("PRAGMA synchronous=NORMAL")
            db.execute("PRAGMA foreign_keys=ON")
            _migrate(db)
            _index(db)
            checkpoint(db)
        except BaseException:
            db.close()
            raise
    except StoreError:
        raise
    except (sqlite3.Error, OSError) as error:
        raise StoreError(
            "cannot open the store {path}: {why}", **ANOTHER, path=path, why=error
        ) from error
    return db


def open_spare() -> Connection:
    """Return an empty store without a name; SQLite keeps its file in TMPDIR, already deleted."""
    db = connect(Path("a temporary store"), "")
    _migrate(db)
    return db


def open_to_read(path: Path) -> Connection:
    """Return a read-only connection.

    Raises StoreError if the file is missing or not a store, and UsageError for a name that is no
    path for SQLite.
    """
    _refuse_special(path)
    if not path.exists():
        raise StoreError(
            "there is no store at {path}",
            option="store",
            remedy="run `dpbench run` first, or give another file with {}",
            path=path,
        )
    try:
        if not _check_header(path):
            raise StoreError(
                "the store {path} is empty",
                option="store",
                remedy="run `dpbench run` first, or give another file with {}",
                path=path,
            )
        db = connect_read_only(path)
        try:
            _check_version(path, db)
        except BaseException:
            db.close()
            raise
    except StoreError:
        raise
    except (sqlite3.Error, OSError) as error:
        raise StoreError(
            "cannot read the store {path}: {why}", **ANOTHER, path=path, why=error
        ) from error
    return db


def _refuse_special(path: Path) -> None:
    """Raise UsageError for a name that SQLite would take for a database in memory, or for a URI."""
    if str(path) == ":memory:":
        raise UsageError(
            f"a store cannot be {path}, SQLite's database in memory, because its results would be"
            " lost with the process; give the path of a file"
        )
    if str(path).startswith("file:"):
        raise UsageError(f"a store cannot be {path}, a URI of SQLite; give the path of a file")


def refuse_damaged(db: Connection) -> None:
    """Raise DamagedStore for the first fault that SQLite's quick check finds."""
    (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise damaged(db.path, _last_line(found))


def _last_line(fault: str) -> str:
    """Return a fault of SQLite's quick check without the line that names the database."""
    return fault.splitlines()[-1]


def state(path: Path) -> State | None:
    """Return the state of a file; None if there is none."""
    with suppress(FileNotFoundError, NotADirectoryError):
        found = path.stat()
        return State(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    return None


def checkpoint(db: Connection) -> None:
    """Write the log into the file, as far as readers allow, and note the state of the file.

    Until this connection writes again, only others change the file.
    """
    with suppress(sqlite3.OperationalError):  # what was committed is safe: a later one is enough
        db.execute("PRAGMA wal_checkpoint(PASSIVE)")
    db.left = state(db.path)


def fold(db: Connection) -> None:
    """Merge the write-ahead log into the file, so that the file can be copied or read alone.

    If another process uses the file or the disk is full, the log remains, without an error. Raises
    DamagedStore for a damaged file.
    """
    # Unusable: another process has the file open and will merge it, or the disk is full
    with suppress(Unusable), db.named():
        plain = sqlite3.Connection.execute  # raises SQLite's own errors, and lets SQLite wait
        plain(db, f"PRAGMA busy_timeout={PATIENCE_S * 1000:.0f}")
        plain(db, "PRAGMA wal_checkpoint(TRUNCATE)")
        plain(db, "PRAGMA journal_mode=DELETE")


@contextmanager
def snapshot(db: Connection) -> Iterator[None]:
    """Let all statements inside this context see one state of the file."""
    if db.in_transaction:
        yield
        return
    db.execute("BEGIN")
    try:
        yield
    finally:
        with suppress(sqlite3.Error):  # SQLite may have rolled back already
            db.execute("ROLLBACK")


@contextmanager
def transaction(db: Connection) -> Iterator[None]:
    """Run the statements inside this context in one transaction, after waiting for other writers.

    Raises StoreError if the file cannot be written, or is lost.
    """
    if db.lost:
        raise StoreError(db.lost)
    try:
        db.execute("BEGIN IMMEDIATE")
        try:
            yield
            db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # SQLite may have rolled back already
                db.execute("ROLLBACK")
            raise
    except Locked:
        raise
    except sqlite3.OperationalError as error:
        raise StoreError(
            f"cannot write to the store {db.path}: {error.__cause__ or error}; the store is"
            " unchanged. Remove the cause, and try again"
        ) from error


def connect_read_only(path: Path) -> Connection:
    """Return a read-only connection.

    To read a write-ahead log, SQLite needs an index file. Raises StoreError if the log has changes
    and the index can neither be found nor, in a read-only folder, created.
    """
    log_file, index = (path.with_name(f"{path.name}-{end}") for end in ("wal", "shm"))
    options = "mode=ro"
    if not index.exists() and not os.access(path.parent, os.W_OK):
        if log_file.exists() and log_file.stat().st_size:
            raise StoreError(
                "the store {path} has changes in {log}, which cannot be read in a folder that is"
                " read-only",
                option="store",
                remedy="copy both files to another folder, and give the copy with {}",
                path=path,
                log=log_file.name,
            )
        options += "&immutable=1"
    return connect(path, f"{path.resolve().as_uri()}?{options}")


def connect(path: Path, address: str) -> Connection:
    """Return a connection to the file `path`; `address` is its path or URI."""
    uri = address.startswith("file:")
    db = sqlite3.connect(address, uri=uri, isolation_level=None, timeout=0, factory=Connection)
    # SQLite calls Python within a long statement, so that handlers of signals can run and end it
    db.set_progress_handler(lambda: 0, INSTRUCTIONS)
    db.path = path
    db.columns = {}
    return db


def _migrate(db: Connection) -> None:
    """Migrate the file, with a transaction per step, because another process may do the same."""
    for number, script in enumerate(MIGRATIONS, start=1):
        with transaction(db):
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version < number:
                for statement in script.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id={APPLICATION_ID}")
                db.execute(f"PRAGMA user_version={number}")


def _index(db: Connection) -> None:
    there = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type='index'")}
    for name in INDEXES.keys() - there:
        with suppress(sqlite3.DatabaseError, StoreError), transaction(db):
            db.execute(f"CREATE INDEX IF NOT EXISTS {name} ON {INDEXES[name]}")


def _check_header(path: Path) -> bool:
    """Return whether the file exists and is not empty, after a check of its header.

    Changes and creates no file. Raises StoreError for a directory, for a file that is not a store,
    and for a store that a newer version of dpbench has written.

    SQLite reads the header: if Python closed the file, the system would drop all locks of this
    process on it, and another process could merge the log of a connection that still writes
    (https://sqlite.org/howtocorrupt.html, section 2.2).
    """
    if path.is_dir():
        raise StoreError(
            "{path} is a directory", option="store", remedy="give a file with {}", path=path
        )
    if not path.exists() or (size := path.stat().st_size) == 0:
        return False
    if size == 1:  # for SQLite, which made such files itself, the file is empty
        raise _another_kind(path)
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as db:
        try:
            # the file may still lack pages that are in the log
            db.execute("PRAGMA writable_schema=ON")
            (version,) = db.execute("PRAGMA user_version").fetchone()
            (application,) = db.execute("PRAGMA application_id").fetchone()
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_NOTADB:
                return True  # the header is being written; `_check_version` waits for the writer
            raise _another_kind(path) from error
    _refuse_newer(path, version)
    # 0: a store being created or another database; see _check_version
    if application not in (0, APPLICATION_ID):
        raise _another_database(path)
    return True


def _another_kind(path: Path) -> StoreError:
    return StoreError(
        "{path} is not a store of dpbench, but another kind of file, or its first bytes are"
        " damaged",
        **ANOTHER,
        path=path,
    )


def _another_database(path: Path) -> StoreError:
    return StoreError(
        "{path} is not a store of dpbench, but another SQLite database", **ANOTHER, path=path
    )


def _check_version(path: Path, db: sqlite3.Connection) -> None:
    """Repeat the checks of `_check_header` for changes that are still in the write-ahead log."""
    # tables first: another process that creates the store commits its tables and its id together
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (application,) = db.execute("PRAGMA application_id").fetchone()
    _refuse_newer(path, version)
    if tables and application != APPLICATION_ID:
        raise _another_database(path)
    _refuse_computed(path, db)


def _refuse_computed(path: Path, db: sqlite3.Connection) -> None:
    """Raise StoreError for a file with more than plain tables and indexes, before it is queried.

    A view can run for ever, and a trigger changes other rows than a statement names. The text of an
    entry decides, because a virtual table has the type of a plain one.
    """
    for name, sql in db.execute("SELECT name, sql FROM sqlite_master").fetchall():
        if sql and not str(sql).startswith(_PLAIN):
            kind = _KIND.match(str(sql))
            raise _computed(path, f"{kind[1] if kind else 'entry'} {name}")
    for table in _TABLES:
        query = "SELECT name FROM pragma_table_xinfo(?) WHERE hidden"
        for (column,) in db.execute(query, (table,)).fetchall():
            raise _computed(path, f"computed column {column} of the table {table}")


def _computed(path: Path, what: str) -> StoreError:
    return StoreError(
        "the store {path} has the {what}, but dpbench uses only files of plain tables",
        option="store",
        remedy="drop it with sqlite3 if you have made it yourself, or give another file with {}",
        path=path,
        what=visible(what),
    )


def _refuse_newer(path: Path, version: int) -> None:
    if version > len(MIGRATIONS):
        raise StoreError(
            "the store {path} has schema version {version}, but this version of dpbench supports"
            " only versions up to {newest}",
            option="store",
            remedy="update dpbench, or give another file with {}",
            path=path,
            version=version,
            newest=len(MIGRATIONS),
        )


def _patiently(path: Path, action: Callable[[], Any]) -> Any:
    """Repeat `action` while the file is locked, for at most `PATIENCE_S` seconds.

    After `SILENT_S` seconds, log which processes have locked it. SQLite's own wait would hold back
    signals.
    """
    begun_s = time.monotonic()
    silent = True
    while True:
        try:
            return action()
        except sqlite3.OperationalError as error:
            code = getattr(error, "sqlite_errorcode", 0)
            if code == sqlite3.SQLITE_READONLY_ROLLBACK:
                _roll_back(path)
                continue
            waited_s = time.monotonic() - begun_s
            if code & 0xFF not in _LOCKED or waited_s > PATIENCE_S:
                raise
            if silent and waited_s > SILENT_S:
                silent = False
                log.warning("%s; this process waits for at most %g s", _held(path), PATIENCE_S)
            time.sleep(POLL_S)


def _roll_back(path: Path) -> None:
    """Let SQLite undo a killed process's transaction, which a read-only connection cannot do."""
    with closing(sqlite3.connect(path, timeout=PATIENCE_S)) as db:
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()


def _held(path: Path) -> str:
    """Return a clause that names the processes that have locked a store, if they are known."""
    import psutil

    holders: dict[int, str] = {}
    for name in (path, path.with_name(f"{path.name}-shm")):
        with suppress(OSError, ValueError, psutil.Error):
            inode = f":{name.stat().st_ino}"
            for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines():
                *_, pid, file, _, _ = line.split()
                if file.endswith(inode) and int(pid) not in (0, os.getpid()) and "->" not in line:
                    command = visible(hidden.text(" ".join(psutil.Process(int(pid)).cmdline())))
                    holders[int(pid)] = f"process {pid} ({command[:80]})"
    return f"the store {path} is locked by {' and '.join(holders.values()) or 'another process'}"
