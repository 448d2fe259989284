"""Turns: forwards that run one after another, where this is faster than all at the same time.

Every operation of torch releases Python's interpreter lock, and takes it again when it has ended.
Two threads whose operations are short therefore wake each other at every operation, which takes
longer than the operations: 150 tiny layers, 1.5 ms in one thread, take 5.6 ms in two threads at the
same time, but 3 ms in turns. Backward needs the lock only to free what forward has saved. It
follows at the same time on all devices, when the last forward has ended, which it would disturb.
Forwards that compute for long lose by turns.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from dpbench.engine.turn import NOTHING, Context, InOrder, Turn

KEPT = 3
"""The number of runs of each kind, in turns and free, whose medians are compared: the last ones."""
LONG_S = 0.5
"""A run that takes longer has operations too long to gain by turns, so that none are tried."""
AGAIN = 100
"""Of so many runs, one is of the kind that has been slower."""


class TurnsIfFaster(Turn):
    """The turns of the threads of one pool, which are taken if they are faster.

    `timed` is the context of a run of all replicas. The runs after the first alternate between both
    kinds until the choice is `settled`. If forwards have waited for each other, no turns are taken
    from then on.
    """

    def __init__(self) -> None:
        self._order = InOrder(0)
        self._seconds: dict[bool, deque[float]] = {
            taken: deque(maxlen=KEPT) for taken in (False, True)
        }
        self._runs = 0
        self._asked = False
        self._in_vain = False
        self._long = False

    @property
    def settled(self) -> bool:
        """Return whether the runs so far suffice to choose, or turns are not tried."""
        tried = all(len(seconds) == KEPT for seconds in self._seconds.values())
        return tried or self._in_vain or self._long or self._runs == 0

    def of(self, i: int) -> Context:
        """Return the context of replica i's forward."""
        self._asked = True
        return self._order.of(i) if self.taken else NOTHING

    @contextmanager
    def timed(self, count: int) -> Iterator[None]:
        """Time the run of `count` replicas inside the context, and choose the kind of the next.

        A run without forwards is not counted.
        """
        self._asked = False
        order = self._order = InOrder(count)
        began = time.perf_counter()
        yield
        self._in_vain = self._in_vain or order.in_vain
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
