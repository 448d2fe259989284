"""Turn: forwards that run one after another, in the order of their replicas."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import Empty, SimpleQueue
from typing import Any

Context = AbstractContextManager[Any]
NOTHING: Context = nullcontext()
PATIENCE_S = 0.5
"""A forward that has waited so long looks whether the one whose turn it is makes progress."""


class Latch:
    """What one thread waits for, and any thread sets.

    The waiting thread may be interrupted at any instruction, and then wait again: whether the latch
    is set does not depend on messages that an interrupt can lose. The locks of `threading.Event`
    and `Barrier` can stay taken after an interrupt.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._messages: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Set the latch, for ever."""
        self.is_set = True
        self._messages.put(None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the latch is set, or for `timeout_s` seconds; return whether it is set."""
        while not self.is_set:
            try:
                self._messages.get(timeout=timeout_s)
            except Empty:
                break
        return self.is_set


class Turn:
    """When the forwards of one run of replicas may begin: by default, all at once."""

    taken = False
    """Whether forwards run one after another, because that is faster."""

    @property
    def settled(self) -> bool:
        """Return whether the next runs are of the same kind, because no alternatives are tried."""
        return True

    def of(self, i: int) -> Context:
        """Return the context of replica i's forward; to enter it may wait for other replicas."""
        return NOTHING


AT_ONCE = Turn()


class InOrder(Turn):
    """Each forward of one run begins when that of the replica before it has ended.

    A forward goes on without its turn if the one whose turn it is makes no progress, because that
    one may be waiting for it; `in_vain` is then True.
    """

    def __init__(self, count: int) -> None:
        self._ended = [Latch() for _ in range(count)]
        self._clocks: dict[int, int] = {}
        self.in_vain = False

    @contextmanager
    def of(self, i: int) -> Iterator[None]:
        """Return the context of replica i's forward."""
        self._wait(i)
        if hasattr(time, "pthread_getcpuclockid"):
            self._clocks[i] = time.pthread_getcpuclockid(threading.get_ident())
        try:
            yield
        finally:
            self._ended[i].set()

    def _wait(self, i: int) -> None:
        before = -1.0
        while i and not self._ended[i - 1].wait(PATIENCE_S):
            spent = self._spent()
            if before >= 0 and spent - before < PATIENCE_S / 100:
                self.in_vain = True
                return
            before = spent

    def _spent(self) -> float:
        """Return the processor time of the thread whose turn it is, or 0 if none has begun."""
        running = next((i for i, one in enumerate(self._ended) if not one.is_set), -1)
        try:
            return time.clock_gettime(self._clocks[running])
        except (KeyError, OSError):  # it has not begun, or its thread has ended
            return 0.0
