"""Workers: the threads that run the replicas: new threads for each call, a pool, or the calling thread only."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any, Protocol

Job = Callable[[int], None]
"""The work of one replica, called with the replica's number. It stores its results and errors; it must not raise."""
Context = AbstractContextManager[Any]
NOTHING: Context = nullcontext()


class Workers(Protocol):
    """The interface of all workers.

    Workers that are `concurrent` run all jobs at the same time, so that jobs may wait for each other.
    """

    concurrent: bool

    def run(self, job: Job, count: int, starting: Context = NOTHING) -> None:
        """Call `job(i)` for each i below `count` and wait for all of them; threads are started inside `starting`."""

    def close(self) -> None:
        """End the threads, if any persist; `run` starts them again."""


class Spawn:
    """A new thread per replica and call, as in torch.nn.DataParallel."""

    concurrent = True

    def run(self, job: Job, count: int, starting: Context = NOTHING) -> None:
        """Start one thread per job and join all of them; a single job runs in the calling thread."""
        if count == 1:
            return job(0)
        with starting:
            threads = [threading.Thread(target=job, args=(i,), name=f"replica-{i}") for i in range(count)]
            for thread in threads:
                thread.start()
        _all(thread.join for thread in threads)
        return None

    def close(self) -> None:
        """Do nothing: every thread ends with its call."""


class Serial:
    """The calling thread runs the replicas in turn, so that threads do not compete for the interpreter lock."""

    concurrent = False

    def run(self, job: Job, count: int, starting: Context = NOTHING) -> None:
        """Call the jobs in order."""
        for i in range(count):
            job(i)

    def close(self) -> None:
        """Do nothing: there are no threads."""


class Pool:
    """One persistent thread per replica, except for the first replica, which runs in the calling thread.

    Persistent threads avoid the cost of starting threads, and keep the state that libraries hold per thread (cuDNN's
    plans). They start with the first call that needs them, and end with `close` or when the pool is collected. A forked
    child starts new threads.
    """

    concurrent = True

    def __init__(self) -> None:
        self._inboxes: list[SimpleQueue[Any]] = []
        self._owner = os.getpid()

    def run(self, job: Job, count: int, starting: Context = NOTHING) -> None:
        """Pass job i to thread i, run job 0 in the calling thread, and wait for the others."""
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
                self._inboxes = []  # a thread may still be running: give it no further jobs
                raise

    def _start(self) -> None:
        """Start the next thread. It references its inbox but not the pool, so that the pool can be collected."""
        inbox: SimpleQueue[Any] = SimpleQueue()
        name = f"replica-{len(self._inboxes) + 1}"
        threading.Thread(target=_serve, args=(inbox,), name=name, daemon=True).start()
        weakref.finalize(self, inbox.put, None).atexit = False
        self._inboxes.append(inbox)

    def close(self) -> None:
        """Signal the threads to end."""
        for inbox in self._inboxes:
            inbox.put(None)
        self._inboxes = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a new pool, because threads belong to one process and one owner."""
        return Pool, ()


def _all(waits: Iterable[Callable[[], object]]) -> None:
    """Wait for all, even when interrupted: a job still running in the next step would write into that step's tensors.

    The interrupt is raised at the end. A second interrupt ends the wait at once.
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
    """Run jobs until the message None arrives."""
    while (message := inbox.get()) is not None:
        job, i, done = message
        job(i)
        del job, message  # a waiting thread must not keep a step's objects alive
        done.put(None)


def choose(name: str) -> Workers:
    """Return the workers for a value of a schedule's switch `workers`: "spawn", "pool" or "serial"."""
    kinds: dict[str, type[Workers]] = {"spawn": Spawn, "pool": Pool, "serial": Serial}
    return kinds[name]()
