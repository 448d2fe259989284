"""Locks: files that a process keeps locked as long as it uses what they stand for.

The system releases a lock when its process ends, however it ends, and knows it in every container
that has the file; neither clocks nor process ids play a part. A lock belongs to the process that
took it: a forked child closes it, so that no child that lives on keeps it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakSet

from dpbench.records.unix import fcntl
from dpbench.records.visible import visible

_MARK = b"dpbench locks this file as long as it uses what the file stands for\n"
_MOST = 1000
"""The most bytes of a file that are read."""
PATIENCE_S, POLL_S = 0.5, 0.01
"""The seconds for which `take` waits for those that only look at a lock, and between attempts."""


class Held(Exception):
    """Another process, which the text names, has locked the file."""


class Lock:
    """A file that this process has locked."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        _taken.add(self)

    def release(self) -> None:
        """Delete the file and end the lock; do nothing if it has ended, or in a forked child."""
        if self._descriptor >= 0:
            # first, so that who takes the lock next finds that its file is no longer at the path
            with suppress(OSError):
                self.path.unlink()
            self.close()

    def close(self) -> None:
        """Close the file; the lock ends with the last process that has it open."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


_taken: WeakSet[Lock] = WeakSet()


def _close_all() -> None:
    for lock in _taken:
        lock.close()


os.register_at_fork(after_in_child=_close_all)


def take(path: Path) -> Lock:
    """Lock the file at `path`, which is created if necessary, and return the lock.

    Raises Held if another process has locked it, and OSError if the file cannot be created, or if
    its file system has no locks.
    """
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            descriptor = _locked(path, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)
        except Held:
            if time.monotonic() > until_s:
                raise
        else:
            lock = Lock(path, descriptor)
            if _is_at(path, descriptor):
                try:
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, _MARK + _name().encode())
                except BaseException:
                    lock.release()
                    raise
                return lock
            lock.close()  # its last owner has deleted it
        time.sleep(POLL_S)


def holder(path: Path) -> str:
    """Return who has locked the file at `path`, such as "process 12 on HOST"; "" if nobody has.

    Creates no file. Raises OSError if the file cannot be opened.
    """
    try:
        os.close(_locked(path, os.O_RDONLY, fcntl.LOCK_SH))
    except FileNotFoundError:
        pass
    except Held as held:
        return str(held)
    return ""


@contextmanager
def abandoned(path: Path) -> Iterator[bool]:
    """Yield whether the file is a lock that this user's process left behind; lock it meanwhile.

    Raises Held if its process still runs, and OSError if the file cannot be opened.
    """
    descriptor = _locked(path, os.O_RDONLY, fcntl.LOCK_EX)
    try:
        mine = os.fstat(descriptor).st_uid == os.getuid()
        yield mine and os.read(descriptor, len(_MARK)) == _MARK
    finally:
        os.close(descriptor)


def _locked(path: Path, flags: int, kind: int) -> int:
    """Return a descriptor of the file, which is locked. Raises Held and OSError."""
    # a link or a pipe in a folder that others can write neither leads elsewhere nor blocks
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o666)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        found = os.read(descriptor, _MOST).removeprefix(_MARK).decode(errors="replace")
        os.close(descriptor)
        raise Held(visible(found.strip()) or "another process") from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_at(path: Path, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    return False


def _name() -> str:
    return f"process {os.getpid()} on {os.uname().nodename}\n"
