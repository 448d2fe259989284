"""Locking: a run to which a process adds trials has a lock, a file beside its store.

The file is not the store, because nothing but SQLite may open the store. Its name begins with that
of the store, of which links are followed, and ends with the beginning of the run's id.
"""

from __future__ import annotations

from contextlib import suppress
from glob import escape
from pathlib import Path

from dpbench.records import locks
from dpbench.store.file import StoreError
from dpbench.store.runs import inside

LONGEST = 200
"""The most characters of a store's name in the names of its locks: ids need room, too."""


def take(store: Path, run_id: str) -> locks.Lock:
    """Return the lock of a run. Raises StoreError if another process, or another Store, has it."""
    try:
        return locks.take(_file(store, run_id))
    except locks.Held as held:
        raise _in_use(store, run_id, str(held)) from held
    except OSError as error:
        raise StoreError(
            "cannot lock a run beside the store {store}, so that two processes could measure it:"
            " {why}",
            option="store",
            remedy="give a file on a local disk with {}",
            store=store,
            why=error,
        ) from error


def refuse_measured(store: Path, run_id: str) -> None:
    """Raise StoreError if a process adds trials to a run."""
    try:
        holder = locks.holder(_file(store, run_id))
    except OSError as error:
        raise StoreError(
            f"it is unknown whether a process is adding trials to the run {run_id[:12]} in the"
            f" store {store}: {error}; delete that file if no process is"
        ) from error
    if holder:
        raise _in_use(store, run_id, holder)


def sweep(store: Path) -> None:
    """Delete the locks of killed processes."""
    folder, beginning = _beside(store)
    for path in folder.glob(f"{escape(beginning)}*"):
        # the lock of another user, one in use, or one that another process deletes
        with suppress(OSError, locks.Held), locks.abandoned(path) as left:
            if left:
                path.unlink()


def _beside(store: Path) -> tuple[Path, str]:
    """Return the folder of a store's locks, and the beginning of their names."""
    real = store.resolve()
    return real.parent, f"{real.name[:LONGEST]}.lock-"


def _file(store: Path, run_id: str) -> Path:
    folder, beginning = _beside(store)
    return inside(folder, f"{beginning}{run_id[:12]}")


def _in_use(store: Path, run_id: str, holder: str) -> StoreError:
    return StoreError(
        f"{holder} is adding trials to the run {run_id[:12]} in the store {store}; wait until the"
        " process ends, or end it"
    )
