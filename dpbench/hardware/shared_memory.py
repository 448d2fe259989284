"""Shared memory: the size of /dev/shm, which containers make too small for several processes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from dpbench.records import words

LEAST_BYTES = 2**30
"""The least size of /dev/shm for DataLoader workers and for ranks on GPUs in one container."""
COST = "DataLoader workers end with a bus error, and ranks on GPUs cannot connect"


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """The bytes of /dev/shm, None if unknown, and whether this system is a container."""

    size_bytes: int | None
    container: bool

    @property
    def small(self) -> str:
        """Return a clause that /dev/shm is too small; "" if it is not, or its size is unknown."""
        if self.size_bytes is None or self.size_bytes >= LEAST_BYTES:
            return ""
        return f"/dev/shm has only {words.size(self.size_bytes)}"

    @property
    def change(self) -> str:
        """Return the change that makes /dev/shm larger."""
        if self.container:
            return "docker run --shm-size=8g, or --ipc=host"
        return "mount -o remount,size=8g /dev/shm as root"


def read(root: Path = Path("/")) -> SharedMemory:
    """Return what the files below `root` say."""
    return SharedMemory(size_bytes=_size(root / "dev/shm"), container=_in_container(root))


def _size(folder: Path) -> int | None:
    """Return the size of the file system of a folder.

    In a recorded tree, a file `.size` in the folder has it.
    """
    try:
        recorded = folder / ".size"
        if recorded.exists():
            return int(recorded.read_text(encoding="utf-8"))
        found = os.statvfs(folder)
    except (OSError, ValueError):
        return None
    return found.f_frsize * found.f_blocks


def _in_container(root: Path) -> bool:
    marks = (root / ".dockerenv", root / "run/.containerenv")
    try:
        groups = (root / "proc/1/cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        groups = ""
    named = re.search("docker|kubepods|containerd|libpod", groups)
    return any(mark.exists() for mark in marks) or bool(named)
