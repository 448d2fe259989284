"""Cores: which ones this process was given, and threads that stay on one of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

CORES: tuple[int, ...] = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
"""The cores of this process when it started, in order; none where the system does not say, or cannot bind threads."""
_here = threading.local()


def stay(number: int) -> None:
    """Keep the calling thread on one core, counted among those of the process; threads that it starts inherit it.

    Schedulers that gather threads on few cores leave two of them on one for milliseconds after they wake.
    """
    core = CORES[number % len(CORES)] if CORES else None
    if core is not None and getattr(_here, "core", None) != core:
        os.sched_setaffinity(0, {core})
        _here.core = core


def roam() -> None:
    """Let the calling thread use every core again."""
    if CORES:
        os.sched_setaffinity(0, CORES)
    _here.core = None


@contextmanager
def staying(number: int) -> Iterator[None]:
    """Keep the calling thread on one core for a while."""
    stay(number)
    try:
        yield
    finally:
        roam()
