"""Scratch: a folder for temporary files.

The folder has a file that its process keeps locked (`records/locks.py`), so that the next start of
dpbench removes the folders of killed processes. A folder without a lock file is never touched,
whatever its name.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dpbench.records import locks

PREFIX = "dpbench-"
LOCK = "lock"
_NO_FAULT_OF_THE_FOLDER = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@contextmanager
def folder() -> Iterator[Path]:
    """Yield a new temporary folder, after removing those of killed processes; remove it at the end.

    A process that is forked meanwhile does not remove it. Raises OSError, with the remedy, if
    temporary files cannot be written.
    """
    with explained():
        sweep()
        created = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = None
    process = os.getpid()
    try:
        with explained():
            lock = locks.take(created / LOCK)
        yield created
    finally:
        if os.getpid() == process:
            shutil.rmtree(created, ignore_errors=True)
        if lock:
            lock.release()


@contextmanager
def explained() -> Iterator[None]:
    """Add the folder of temporary files and the remedy to an OSError raised in this context.

    The context must only read and write temporary files. Errors that another folder would not avoid
    stay as they are.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NO_FAULT_OF_THE_FOLDER:
            raise
        where = tempfile.tempdir or os.environ.get("TMPDIR") or "/tmp"
        remedy = "free space there, or set the environment variable TMPDIR to another folder"
        why = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
        text = f"temporary files cannot be written to {where} ({why}): {remedy}"
        raise OSError(error.errno, text) from error


def sweep() -> list[Path]:
    """Remove the folders whose processes have been killed, and return them."""
    swept = []
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        # the folder of another user, one in use, or one that another process removes
        with suppress(OSError, locks.Held), locks.abandoned(path) as left:
            if left:
                shutil.rmtree(path.parent, ignore_errors=True)
                swept.append(path.parent)
    return swept
