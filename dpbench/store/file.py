"""Store file: open, identify and migrate the SQLite file; merge its write-ahead log into the file on closing.

Schema history (`PRAGMA user_version`): 1 (first); 2 (memory by phase and kind, the device that failed).
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

PATIENCE_S = 30.0
MAGIC = b"SQLite format 3\0"
APPLICATION_ID = int.from_bytes(b"dpbn", "big")
"""The application id in the header of every store, which distinguishes it from other databases."""

MIGRATIONS = (
    """
    CREATE TABLE run (
        id TEXT PRIMARY KEY, plan TEXT NOT NULL, host TEXT NOT NULL, code TEXT NOT NULL, status TEXT NOT NULL,
        started REAL NOT NULL, ended REAL, rounds INTEGER NOT NULL, pid INTEGER NOT NULL, pid_born REAL NOT NULL,
        provenance TEXT NOT NULL
    );
    CREATE TABLE trial (
        id INTEGER PRIMARY KEY, run_id TEXT NOT NULL REFERENCES run(id), fingerprint TEXT NOT NULL,
        round INTEGER NOT NULL, case_json TEXT NOT NULL, status TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '',
        verified TEXT, source TEXT, started REAL, schema INTEGER, setup TEXT, provenance TEXT
    );
    CREATE INDEX trial_slot ON trial(run_id, fingerprint, round);
    CREATE TABLE step (
        trial_id INTEGER NOT NULL REFERENCES trial(id), step INTEGER NOT NULL, seconds REAL NOT NULL,
        warmup INTEGER NOT NULL, end_s REAL NOT NULL, PRIMARY KEY (trial_id, step)
    ) WITHOUT ROWID;
    CREATE TABLE span (
        trial_id INTEGER NOT NULL REFERENCES trial(id), number INTEGER NOT NULL, step INTEGER NOT NULL,
        phase TEXT NOT NULL, device INTEGER NOT NULL, clock TEXT NOT NULL, start_s REAL NOT NULL, end_s REAL NOT NULL,
        PRIMARY KEY (trial_id, number)
    ) WITHOUT ROWID;
    CREATE TABLE memory (
        trial_id INTEGER NOT NULL REFERENCES trial(id), device INTEGER NOT NULL, peak_bytes INTEGER NOT NULL,
        source TEXT NOT NULL
    );
    -- one row per series: times and readings are zlib-compressed little-endian doubles
    CREATE TABLE series (
        trial_id INTEGER NOT NULL REFERENCES trial(id), device INTEGER NOT NULL, metric TEXT NOT NULL,
        n INTEGER NOT NULL, mean REAL NOT NULL, peak REAL NOT NULL, times BLOB NOT NULL, readings BLOB NOT NULL,
        PRIMARY KEY (trial_id, device, metric)
    ) WITHOUT ROWID
    """,
    """
    ALTER TABLE memory ADD COLUMN phase TEXT NOT NULL DEFAULT '';
    ALTER TABLE memory ADD COLUMN kind TEXT NOT NULL DEFAULT 'allocated';
    ALTER TABLE trial ADD COLUMN failed_device INTEGER
    """,
)


class StoreError(RuntimeError):
    """The error of a store that cannot be used; the message gives the reason and the remedy."""


def open_to_write(path: Path) -> sqlite3.Connection:
    """Return a connection for writing; create or migrate the file if necessary. Raises StoreError on failure."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if _check_header(path):  # check read-only first, because opening for writing would already change the WAL
            with closing(_connect_read_only(path)) as db:
                _check_version(path, db)
        db = sqlite3.connect(path, isolation_level=None, timeout=PATIENCE_S)
        try:
            _patiently(lambda: db.execute("PRAGMA journal_mode=WAL"))
            db.execute("PRAGMA synchronous=NORMAL")
            db.execute("PRAGMA foreign_keys=ON")
            _migrate(db)
        except BaseException:
            db.close()
            raise
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"cannot open the store {path}: {error}; give another file with --store") from error
    return db


def open_to_read(path: Path) -> sqlite3.Connection:
    """Return a read-only connection. Raises StoreError if the file is missing or is not a valid store."""
    if not path.exists():
        raise StoreError(f"there is no store at {path}; run `dpbench run` first, or give another file with --store")
    try:
        if not _check_header(path):
            raise StoreError(f"the store {path} is empty; run `dpbench run` first, or give another file with --store")
        db = _connect_read_only(path)
        try:
            _check_version(path, db)
        except BaseException:
            db.close()
            raise
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"cannot read the store {path}: {error}; give another file with --store") from error
    return db


def columns_of(db: sqlite3.Connection, table: str) -> list[str]:
    """Return the names of a table's columns.

    The columns depend on the version of dpbench that wrote the file, because files that are only read are not migrated.
    """
    return [name for _, name, *_ in db.execute(f"PRAGMA table_info({table})")]


def fold(db: sqlite3.Connection) -> None:
    """Merge the write-ahead log into the file, so that the file alone can be copied, or read on a read-only disk.

    If that fails, for example because another process uses the file, the log remains, and no error is raised.
    """
    with suppress(sqlite3.OperationalError):  # another process has the file open and will merge it, or the disk is full
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.execute("PRAGMA journal_mode=DELETE")


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Run the statements inside this context in one transaction; wait for other writers when it begins.

    Raises StoreError if the file cannot be written.
    """
    try:
        db.execute("BEGIN IMMEDIATE")
        try:
            yield
            db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # SQLite may have rolled back already
                db.execute("ROLLBACK")
            raise
    except sqlite3.OperationalError as error:
        (_, _, path) = db.execute("PRAGMA database_list").fetchone()
        raise StoreError(
            f"cannot write to the store {path}: {error}; the store is unchanged. Remove the cause, and try again"
        ) from error


def _connect_read_only(path: Path) -> sqlite3.Connection:
    uri = f"{path.resolve().as_uri()}?mode=ro"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=PATIENCE_S)


def _migrate(db: sqlite3.Connection) -> None:
    """Migrate the file to the newest schema.

    Each migration is a transaction, because another process may migrate the same file at the same time.
    """
    for number, script in enumerate(MIGRATIONS, start=1):
        with transaction(db):
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version < number:
                for statement in script.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id={APPLICATION_ID}")
                db.execute(f"PRAGMA user_version={number}")


def _check_header(path: Path) -> bool:
    """Return whether the file exists and is not empty, after a check of its first bytes.

    The file is not opened as a database and not changed. Raises StoreError for a directory, for a file that is not a
    store, and for a store that a newer version of dpbench has written.
    """
    if path.is_dir():
        raise StoreError(f"{path} is a directory; give a file with --store")
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        header = file.read(100)
    if len(header) < 100 or not header.startswith(MAGIC):
        raise StoreError(f"{path} is not a store of dpbench, but another kind of file; give another file with --store")
    version, application = (int.from_bytes(header[at : at + 4], "big", signed=True) for at in (60, 68))
    _refuse_newer(path, version)
    if application not in (0, APPLICATION_ID):  # 0: a store being created or another database; see _check_version
        raise StoreError(
            f"{path} is not a store of dpbench, but another SQLite database; give another file with --store"
        )
    return True


def _check_version(path: Path, db: sqlite3.Connection) -> None:
    """Raise StoreError if the database belongs to another program, or if a newer version of dpbench has written it.

    Unlike the first bytes of the file, the database also includes changes that are still in its write-ahead log.
    """
    # tables first: another process that creates the store commits its tables and its id together
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (application,) = db.execute("PRAGMA application_id").fetchone()
    _refuse_newer(path, version)
    if tables and application != APPLICATION_ID:
        raise StoreError(
            f"{path} is not a store of dpbench, but another SQLite database; give another file with --store"
        )


def _refuse_newer(path: Path, version: int) -> None:
    if version > len(MIGRATIONS):
        raise StoreError(
            f"the store {path} has schema version {version}, but this version of dpbench supports only versions up to "
            f"{len(MIGRATIONS)}; update dpbench, or give another file with --store"
        )


def _patiently(action: Callable[[], object]) -> None:
    """Call `action` again as long as the file is locked, for at most `PATIENCE_S` seconds.

    SQLite's own waiting for locks does not apply to a change of the journal mode.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            action()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
