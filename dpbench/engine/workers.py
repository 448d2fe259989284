"""Workers: the threads that the replicas run in. New ones every time, kept ones, or none at all."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any, Protocol

Job = Callable[[int], None]
"""One replica's work, called with the replica's number. It keeps its own results and errors: it must not raise."""
Context = AbstractContextManager[Any]
NOTHING: Context = nullcontext()


class Workers(Protocol):
    """Who runs the jobs of one step. `concurrent` ones run all jobs at once, so that jobs may wait for each other."""

    concurrent: bool

    def run(self, job: Job, count: int, starting: Context = NOTHING) -> None:
        """Call `job(i)` for each i below `count`, getting threads to work inside `starting`; return when all end."""

    def close(self) -> None:
        """End the threads, if any are kept; `run` starts them again."""


class Spawn:
    """A new thread per replica and call, as in torch.nn.DataParallel."""

    concurrent = True

    def run(self, job: Job, count: int, starting: Context = NOTHING) -> None:
        """Start, and join, one thread per job; a single job runs in the calling thread."""
        if count == 1:
            return job(0)
        with starting:
            threads = [threading.Thread(target=job, args=(i,), name=f"replica-{i}") for i in range(count)]
            for thread in threads:
                thread.start()
        _all(thread.join for thread in threads)
        return None

    def close(self) -> None:
        """Do nothing: no thread outlives its call."""


class Serial:
    """The calling thread, one replica after the other: no thread waits for another's interpreter lock."""

    concurrent = False

    def run(self, job: Job, count: int, starting: Context = NOTHING) -> None:
        """Call the jobs in order."""
        for i in range(count):
            job(i)

    def close(self) -> None:
        """Do nothing: there are no threads."""


class Pool:
    """One kept thread per replica but the first, which the calling thread runs itself.

    Kept threads spare their start, and keep what libraries hold per thread (cuDNN's plans). They start with the
    first call that needs them, and end with `close`, or with the pool. A forked child starts its own.
    """

    concurrent = True

    def __init__(self) -> None:
        self._inboxes: list[SimpleQueue[Any]] = []
        self._owner = os.getpid()

    def run(self, job: Job, count: int, starting: Context = NOTHING) -> None:
        """Hand job i to thread i, run job 0 here, and wait for the others."""
        if os.getpid() != self._owner:
            self._inboxes, self._owner = [], os.getpid()
        while len(self._inboxes) < count - 1:
            self._start()
        done: SimpleQueue[None] = SimpleQueue()
        with starting if count > 1 else NOTHING:
            for i in range(1, count):
                self._inboxes[i - 1].put((job, i, done))
        try:
            job(0)
        finally:
            try:
                _all(done.get for _ in range(1, count))
            except BaseException:
                self._inboxes = []  # a thread may still be at work: it gets nothing more to do
                raise

    def _start(self) -> None:
        """Start the next thread; it knows its inbox but not the pool, which can so be collected."""
        inbox: SimpleQueue[Any] = SimpleQueue()
        name = f"replica-{len(self._inboxes) + 1}"
        threading.Thread(target=_serve, args=(inbox,), name=name, daemon=True).start()
        weakref.finalize(self, inbox.put, None).atexit = False
        self._inboxes.append(inbox)

    def close(self) -> None:
        """Tell the threads to end."""
        for inbox in self._inboxes:
            inbox.put(None)
        self._inboxes = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a new pool: threads belong to one process and one owner."""
        return Pool, ()


def _all(waits: Iterable[Callable[[], object]]) -> None:
    """Wait for all, even when interrupted: work that goes on beside the next step would write into it.

    The interrupt is raised at the end. A second one ends the waiting at once.
    """
    interrupt: BaseException | None = None
    for wait in waits:
        try:
            wait()
        except BaseException as error:
            if interrupt is not None:
                raise
            interrupt = error
            wait()
    if interrupt is not None:
        raise interrupt


def _serve(inbox: SimpleQueue[Any]) -> None:
    """Run jobs until told to end."""
    while (message := inbox.get()) is not None:
        job, i, done = message
        job(i)
        del job, message  # nothing of a step may outlive it in a waiting thread
        done.put(None)


def choose(name: str) -> Workers:
    """Return the workers that a schedule's switch names."""
    kinds: dict[str, type[Workers]] = {"spawn": Spawn, "pool": Pool, "serial": Serial}
    return kinds[name]()
