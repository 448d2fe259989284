"""Turns: forwards that run one after another, where this is faster than all at the same time.

Every operation of torch releases Python's interpreter lock, and takes it again when it has ended.
Two threads whose operations are short therefore wake each other at every operation, which takes
longer than the operations: 150 tiny layers, 1.5 ms in one thread, take 5.6 ms in two threads at the
same time, but 3 ms in turns. Backward needs the lock only to free what forward has saved. It
follows at the same time on all devices, when the last forward has ended, which it would disturb.
Forwards that compute for long lose by turns.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

KEPT = 3
"""The number of runs of each kind, in turns and free, whose medians are compared: the last ones."""
LONG_S = 0.5
"""A run that takes longer has operations too long to gain by turns, so that none are tried."""
AGAIN = 100
"""Of so many runs, one is of the kind that has been slower."""
PATIENCE_S = 0.5
"""A forward that has waited so long runs without its turn: another may be waiting for it.

From then on, the pool takes no turns.
"""


class Turns:
    """The context of a forward, for the threads of one pool; it does nothing if turns are slower.

    `timed` is the context of a run of all replicas. The runs after the first alternate between both
    kinds until the choice is `settled`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = 0
        self._seconds: dict[bool, deque[float]] = {
            taken: deque(maxlen=KEPT) for taken in (False, True)
        }
        self._runs = 0
        self._asked = False
        self._in_vain = False
        self._long = False
        self.taken = False

    @property
    def settled(self) -> bool:
        """Return whether the runs so far suffice to choose, or turns are not tried."""
        tried = all(len(seconds) == KEPT for seconds in self._seconds.values())
        return tried or self._in_vain or self._long or self._runs == 0

    def __enter__(self) -> None:
        self._asked = True
        if not self.taken:
            return
        if self._lock.acquire(timeout=PATIENCE_S):
            self._holder = threading.get_ident()
        else:
            self._in_vain = True

    def __exit__(self, *error: object) -> None:
        if self._holder == threading.get_ident():
            self._holder = 0
            self._lock.release()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time the run inside the context, if it has forwards, and choose the kind of the next."""
        self._asked = False
        began = time.perf_counter()
        yield
        if self._asked:
            self.choose(time.perf_counter() - began)

    def choose(self, seconds: float) -> None:
        """Choose the kind of the next run, after one that took `seconds`."""
        self._runs += 1
        self._long = seconds > LONG_S
        if self._runs > 1:  # the first run also allocates memory
            self._seconds[self.taken].append(seconds)
        free, in_turns = self._seconds[False], self._seconds[True]
        if self._in_vain or self._long:
            self.taken = False
        elif self.settled:
            self.taken = (median(in_turns) < median(free)) is (self._runs % AGAIN != 0)
        else:
            self.taken = not self.taken
