"""Disks without space: a limit on the length of files, for which nobody needs root, and a tmpfs."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def limited(limit: int) -> Iterator[None]:
    """Let no file of this process become longer than `limit` bytes, as on a disk without space."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@contextmanager
def mounted(folder: Path, size: int) -> Iterator[None]:
    """Mount a tmpfs of `size` bytes. Raises CalledProcessError where this process may not."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, left: int = 0) -> None:
    """Fill the disk of a folder but for `left` bytes."""
    free = os.statvfs(folder)
    (folder / "fill").write_bytes(bytes(max(0, free.f_bavail * free.f_frsize - left)))
