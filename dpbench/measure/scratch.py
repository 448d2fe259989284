"""Scratch: a folder for temporary files; if this process is killed, the next start of dpbench removes the folder.

The folder has a file that its process keeps locked. The system releases the lock when the process ends, so a folder
with an unlocked lock file belongs to an ended process. A folder without a lock file is never touched, whatever its
name.
"""

from __future__ import annotations

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


@contextmanager
def folder() -> Iterator[Path]:
    """Yield a new temporary folder, and remove it at the end; first remove the folders of killed processes."""
    sweep()
    found = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = -1
    try:
        # lock the file before it gets its final name, so that no other process finds it unlocked
        lock = os.open(found / f"{LOCK}.new", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, _CONTENT)
        (found / f"{LOCK}.new").rename(found / LOCK)
        yield found
    finally:
        shutil.rmtree(found, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def sweep() -> list[Path]:
    """Remove the folders whose processes have been killed, and return them."""
    swept = []
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError):  # the folder of another user, or one that another process removes
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid() and os.read(lock, len(_CONTENT)) == _CONTENT:
                    shutil.rmtree(path.parent, ignore_errors=True)
                    swept.append(path.parent)
            finally:
                os.close(lock)
    return swept
