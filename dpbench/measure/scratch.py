"""Scratch: a folder for temporary files.

The folder has a file that its process keeps locked. The system releases the lock when the process
ends, so the next start of dpbench removes the folders of killed processes. A folder without a lock
file is never touched, whatever its name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "dpbench-"
LOCK = "lock"
_CONTENT = b"dpbench locks this file as long as it uses the folder\n"
_NO_FAULT_OF_THE_FOLDER = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@contextmanager
def folder() -> Iterator[Path]:
    """Yield a new temporary folder, after removing those of killed processes; remove it at the end.

    Raises OSError, with the remedy, if temporary files cannot be written.
    """
    with explained():
        sweep()
        created = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = -1
    try:
        with explained():
            # lock the file before it gets its final name, so that no other process finds it
            # unlocked
            lock = os.open(created / f"{LOCK}.new", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.write(lock, _CONTENT)
            (created / f"{LOCK}.new").rename(created / LOCK)
        yield created
    finally:
        shutil.rmtree(created, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


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


def write_whole(path: Path, text: str) -> None:
    """Write a text file such that no reader finds a part of it, even if this process is killed.

    Raises OSError if the file cannot be written, for example on a full disk.
    """
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.rename(path)


def sweep() -> list[Path]:
    """Remove the folders whose processes have been killed, and return them."""
    swept = []
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError):  # the folder of another user, or one that another process removes
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if (
                    os.fstat(lock).st_uid == os.getuid()
                    and os.read(lock, len(_CONTENT)) == _CONTENT
                ):
                    shutil.rmtree(path.parent, ignore_errors=True)
                    swept.append(path.parent)
            finally:
                os.close(lock)
    return swept
