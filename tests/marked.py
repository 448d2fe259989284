"""Find every process that a test has started, at any depth and whatever its present parent is.

Every process that a test starts inherits a mark in its environment; forks and orphans keep this
mark.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

NAME = "DPBENCH_TEST_MARK"


def patience(timeout_s: float) -> float:
    """Return the seconds to wait where a quiet machine needs `timeout_s`.

    They are n times as many if n processes share a core. The load is the mean of the last minute,
    so a wait must ask again while it lasts.
    """
    return timeout_s * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def poll(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """Wait until `condition()` holds, with `patience`, and return what it gave last."""
    began_s = time.monotonic()
    while not (result := condition()) and time.monotonic() - began_s < patience(timeout_s):
        time.sleep(0.03)  # most conditions look at all processes, which takes milliseconds
    return result


class Mark:
    """A mark, and the processes that carry it."""

    def __init__(self) -> None:
        self.value = uuid.uuid4().hex
        self.env = {NAME: self.value}

    def alive(self) -> list[psutil.Process]:
        """Return the marked processes that live, this one apart.

        A zombie lives until it is reaped.
        """
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get(NAME) == self.value:
                    found.append(process)
        return found

    def settles(self, count: int = 0, timeout_s: float = 5.0) -> str:
        """Wait until no more than `count` are left.

        Return their command lines, "" when all is well.
        """
        poll(lambda: len(self.alive()) <= count, timeout_s)
        left = self.alive()
        return "" if len(left) <= count else "\n".join(map(describe, left))

    def end(self) -> None:
        """End all of them, each by its id."""
        for process in self.alive():
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)


def describe(process: psutil.Process) -> str:
    """Say which process this is."""
    with suppress(psutil.Error):
        return (
            f"{process.pid} (parent {process.ppid()}, {process.status()}):"
            f" {' '.join(process.cmdline())}"
        )
    return f"{process.pid}"


@contextmanager
def marked() -> Iterator[Mark]:
    """Yield a mark; then end the processes that still carry it."""
    mark = Mark()
    try:
        yield mark
    finally:
        mark.end()
