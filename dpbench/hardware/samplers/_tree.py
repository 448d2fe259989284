"""Process tree: the processes that belong to this run, found at a cost that does not disturb it.

Walking all of /proc costs percents of a core. Linux lists each thread's children, so that reading the tree suffices.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

ROOT_PID = "DPBENCH_ROOT_PID"
"""The environment variable with the process id of the watched tree's root."""


def root_pid() -> int:
    """Return the process id of the root to watch: from the environment, or the parent of this process."""
    return int(os.environ.get(ROOT_PID) or os.getppid())


class ProcessTree:
    """A process and its descendants, except for this process; read again at most every `refresh_s` seconds."""

    def __init__(self, root: int, refresh_s: float = 0.5, now: Callable[[], float] = time.perf_counter) -> None:
        self.root = root
        self.refresh_s = refresh_s
        self._now = now
        self._walked_s = -float("inf")
        self._pids: frozenset[int] = frozenset()

    def pids(self) -> frozenset[int]:
        """Return the tree's process ids, read at most `refresh_s` seconds ago; some processes may have ended since."""
        if self._now() - self._walked_s >= self.refresh_s:
            self._walked_s = self._now()
            self._pids = descendants(self.root) - {os.getpid()}
        return self._pids


def descendants(root: int) -> frozenset[int]:
    """Return `root` and all its descendants; empty if it has ended."""
    if not has_children_files():
        return _descendants_by_psutil(root)
    found: set[int] = set()
    todo = [root]
    while todo:
        pid = todo.pop()
        try:
            todo += _children(pid)
        except OSError:  # ended between being listed and being read
            continue
        found.add(pid)
    return frozenset(found)


def has_children_files() -> bool:
    """Return whether this kernel lists children (Linux with CONFIG_PROC_CHILDREN)."""
    return os.access(f"/proc/self/task/{os.getpid()}/children", os.R_OK)


def read_file(path: str, most_bytes: int = 1 << 16) -> bytes:
    """Return the content of a file of /proc, by the fewest system calls."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, most_bytes)
    finally:
        os.close(descriptor)


def _children(pid: int) -> list[int]:
    """Return a process's children; each of its threads lists those that it has started."""
    children: list[int] = []
    with os.scandir(f"/proc/{pid}/task") as threads:
        for thread in threads:
            try:
                children += map(int, read_file(f"{thread.path}/children").split())
            except FileNotFoundError:  # a thread that has ended
                continue
    return children


def _descendants_by_psutil(root: int) -> frozenset[int]:
    import psutil

    try:
        return frozenset((root, *(child.pid for child in psutil.Process(root).children(recursive=True))))
    except psutil.NoSuchProcess:
        return frozenset()
