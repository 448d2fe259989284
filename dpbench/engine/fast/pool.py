"""The schedule `pool`: the threads of the replicas persist between calls.

What it changes in `step.step`: `parallel_apply` wakes threads and does not start them, and the
first replica runs in the calling thread. Forwards run in turns where this is faster, which also
happens in all schedules below that use the pool. It relies on nothing else. A pool that an
interrupt has left with a running thread starts new ones.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from queue import SimpleQueue
from typing import Any

import torch

from dpbench.engine.fast.turns import TurnsIfFaster
from dpbench.engine.parallel_apply import Calls, Job, Stop, Workers
from dpbench.engine.turn import NOTHING, Context


class Pool(Workers):
    """Workers with one persistent thread per replica but the first, which the calling thread runs.

    Persistent threads avoid the cost of starting threads, and keep the state that libraries hold
    per thread (cuDNN's plans). They start with the first call that needs them, and end with `close`
    or when the pool is garbage-collected. In a forked child process, the pool starts new threads.
    """

    def __init__(self) -> None:
        self._inboxes: list[SimpleQueue[Any]] = []
        self._owner = os.getpid()
        self._turns = _Turns()

    @property
    def turn(self) -> TurnsIfFaster:  # type: ignore[override]  # each calling thread has its own
        """Return the turns of the calling thread's forwards."""
        return self._turns.of_caller

    def run(
        self, job: Job, count: int, starting: Context = NOTHING, stop: Stop = lambda: None
    ) -> None:
        """Run job 0 in the calling thread, and job i in thread i of the pool; wait for all jobs."""
        if os.getpid() != self._owner:
            self._inboxes = []
            self._owner = os.getpid()
            self._turns = _Turns()  # a replica may have had its turn in the forking process
        while len(self._inboxes) < count - 1:
            self._start()
        if count == 1:
            return job(0)
        calls = Calls(job, range(1, count))
        flushes = _flushes_denormals()
        try:
            with self.turn.timed(count):
                with starting:
                    for i in range(1, count):
                        self._inboxes[i - 1].put((calls, i, flushes))
                job(0)
                calls.wait()
        except BaseException:
            # after a second interrupt a thread may still be running: it gets no further jobs
            inboxes, self._inboxes = self._inboxes, []
            stop()
            calls.finish()
            self._inboxes = inboxes
            raise
        return None

    def _start(self) -> None:
        """Start the next thread of the pool.

        The thread references its inbox but not the pool, so that the pool can be garbage-collected.
        """
        inbox: SimpleQueue[Any] = SimpleQueue()
        name = f"replica-{len(self._inboxes) + 1}"
        weakref.finalize(self, inbox.put, None).atexit = False
        threading.Thread(target=_serve, args=(inbox,), name=name, daemon=True).start()
        self._inboxes.append(inbox)  # at the end: without a thread, an inbox is of no use

    def close(self) -> None:
        """Signal the threads to end, without waiting for them."""
        for inbox in self._inboxes:
            inbox.put(None)
        self._inboxes = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Make `copy` and `pickle` create a new pool, because threads cannot be copied."""
        return Pool, ()


class _Turns(threading.local):
    """The turns of each thread that calls a pool: those of another call have another length."""

    def __init__(self) -> None:
        self.of_caller = TurnsIfFaster()


def _serve(inbox: SimpleQueue[Any]) -> None:
    """Run the jobs from the inbox until the message None arrives."""
    while (message := inbox.get()) is not None:
        calls, i, flushes = message
        if _flushes_denormals() != flushes:
            torch.set_flush_denormal(flushes)
        calls.make(i)
        del calls, message


def _flushes_denormals() -> bool:
    """Return whether the calling thread rounds denormal numbers to zero: torch.set_flush_denormal.

    torch cannot tell, but half of the smallest normal number is denormal.
    """
    return sys.float_info.min / 2 == 0.0
