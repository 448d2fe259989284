"""Stages: run any work on all devices at once, in the threads of `workers`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from dpbench.engine.parallel_apply import NOTHING, Context, Job, Spawn, Team, Workers
from dpbench.hardware.device import Device


class OneByOne(Spawn):
    """Workers that run the jobs in the calling thread; no job may wait for another."""

    def run(self, job: Job, count: int, starting: Context = NOTHING) -> None:
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

    def job(i: int) -> None:
        with team.on(i):
            work(i)

    with Team(devices) as team:
        workers.run(job, len(devices))


def in_stages(
    first: Callable[[int], None],
    between: Callable[[], None] | None,
    second: Callable[[int], None],
    devices: Sequence[Device],
    workers: Workers,
) -> None:
    """Call `first(i)` for each device i, then `between()` once, then `second(i)` for each device i.

    The threads meet at a barrier between the two stages and do not return to the caller. The last
    thread to arrive calls `between`, so that only the other threads must be woken. An error in one
    device's stage does not stop the same stage of another device. After an error in `first`,
    neither `between` nor `second` is called; after an error in `between`, `second` is not called.
    """
    stopped = False
    failed: BaseException | None = None

    def pause() -> None:
        nonlocal stopped, failed
        if between is not None and not team.errors:
            try:
                with team.settings(), team.guards[0]:
                    between()
            except BaseException as error:
                failed = error
        # decided once, so that the second stage runs on all devices or on none
        stopped = bool(team.errors or failed)

    meeting = threading.Barrier(len(devices), action=pause)

    def job(i: int) -> None:
        with team.on(i):
            first(i)
        if _meet(meeting) and not stopped:
            with team.on(i):
                second(i)

    with Team(devices) as team:
        workers.run(job, len(devices))
    try:
        if failed is not None:
            raise failed
    finally:  # the error and its frames reference each other: break the cycle
        failed = None


def _meet(meeting: threading.Barrier) -> bool:
    """Wait until all threads have arrived; return False if another thread has broken the barrier.

    A thread that is interrupted while it waits breaks the barrier, so that the other threads stop
    waiting.
    """
    try:
        meeting.wait()
    except threading.BrokenBarrierError:
        return False
    except BaseException:
        meeting.abort()
        raise
    return True
