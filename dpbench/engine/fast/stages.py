"""Stages: run any work on all devices at once, in the threads of `workers`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

from dpbench.engine.parallel_apply import Job, Spawn, Stop, Team, Workers
from dpbench.engine.turn import NOTHING, Context, Latch
from dpbench.hardware.device import Device


class OneByOne(Spawn):
    """Workers that run the jobs in the calling thread; no job may wait for another."""

    def run(
        self, job: Job, count: int, starting: Context = NOTHING, stop: Stop = lambda: None
    ) -> None:
        """Run one job after another."""
        for i in range(count):
            job(i)


ONE_BY_ONE = OneByOne()


def run_on_devices(
    work: Callable[[int], object], devices: Sequence[Device], workers: Workers
) -> None:
    """Call `work(i)` for each device i, with that device current.

    If calls fail, the error of the failed device with the lowest index is raised after all calls
    have ended; `errors.in_replica` describes this error.
    """
    with Team(devices) as team:
        workers.run(partial(team.do, work), len(devices))


def in_stages(
    first: Callable[[int], None],
    between: Callable[[], None] | None,
    second: Callable[[int], None],
    devices: Sequence[Device],
    workers: Workers,
) -> None:
    """Call `first(i)` for each device i, then `between()` once, then `second(i)` for each device i.

    The threads meet between the two stages and do not return to the caller. The last thread to
    arrive calls `between`, so that only the other threads must be woken. An error in one
    device's stage does not stop the same stage of another device. After an error in `first`,
    neither `between` nor `second` is called; after an error in `between`, `second` is not called.
    """
    failed: BaseException | None = None

    def pause() -> bool:
        nonlocal failed
        if between is not None and not team.errors:
            try:
                with team.settings(), team.guards[0]:
                    between()
            except BaseException as error:
                failed = error
        # decided once, so that the second stage runs on all devices or on none
        return not (team.errors or failed)

    meeting = Meeting(len(devices), pause)

    def job(i: int) -> None:
        team.do(first, i)
        if meeting.goes_on(i):
            team.do(second, i)

    with Team(devices) as team:
        workers.run(job, len(devices), stop=meeting.stop)
    try:
        if failed is not None:
            raise failed
    finally:  # the error and its frames reference each other: break the cycle
        failed = None


class Meeting:
    """A meeting of several jobs: the last to arrive calls `decide`, which says whether all go on.

    Unlike at a `threading.Barrier`, a thread may be interrupted at any instruction of it.
    """

    def __init__(self, count: int, decide: Callable[[], bool]) -> None:
        self._count = count
        self._decide = decide
        self._arrivals = itertools.count(1)
        self._ends = [Latch() for _ in range(count)]
        self._decided = False
        self._stopped = False

    def goes_on(self, i: int) -> bool:
        """Wait in job i until all jobs have arrived, or `stop` is called; return the decision."""
        if next(self._arrivals) == self._count and not self._stopped:
            self._decided = self._decide()
            self._end()
        self._ends[i].wait()
        return self._decided and not self._stopped

    def stop(self) -> None:
        """End the meeting: no job waits any more, and none goes on."""
        self._stopped = True
        self._end()

    def _end(self) -> None:
        for end in self._ends:
            end.set()
