"""Run something on each device: in the workers, under the caller's settings, with every error brought home."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from dpbench.engine.errors import in_replica
from dpbench.engine.thread_settings import capture
from dpbench.engine.workers import NOTHING, Context, Workers
from dpbench.hardware.device import Device

Result = TypeVar("Result")


def on_each(
    work: Callable[[int], Result],
    devices: Sequence[Device],
    workers: Workers,
    *,
    compat: bool = False,
    starting: Context = NOTHING,
) -> list[Result]:
    """Call `work(i)` for each device with that device current, and return the results in order.

    Inside `starting` the calling thread sets the others to work: a cost of the schedule, not of a device.
    When some fail, the error of the lowest is raised after all have ended: see `errors.in_replica`.
    """
    results: dict[int, Result] = {}

    def job(i: int) -> None:
        results[i] = work(i)

    _run([job], None, devices, workers, compat=compat, starting=starting)
    return [results[i] for i in range(len(devices))]


def in_stages(
    first: Callable[[int], None],
    between: Callable[[], None] | None,
    second: Callable[[int], None],
    devices: Sequence[Device],
    workers: Workers,
) -> None:
    """Call `first(i)` for each device, then `between()` once, then `second(i)` for each, as `on_each` does.

    Threads meet between the stages instead of going back to the caller: the last to arrive calls `between`, and only
    the others have to be woken. After an error nothing of a later stage is called.
    """
    _run([first, second], between, devices, workers)


def _run(
    stages: Sequence[Callable[[int], None]],
    between: Callable[[], None] | None,
    devices: Sequence[Device],
    workers: Workers,
    *,
    compat: bool = False,
    starting: Context = NOTHING,
) -> None:
    """Run the stages on all devices; raise the error of `between`, or of the lowest device that has one."""
    errors: dict[int, BaseException] = {}
    settings = capture(compat=compat)
    guards = [device.guard() for device in devices]
    caller = threading.get_ident()

    def attempt(stage: Callable[[int], None], i: int) -> None:
        try:
            if threading.get_ident() != caller:
                devices[i].settle()
            with settings(), guards[i]:
                stage(i)
        except BaseException as error:  # whatever it is, it belongs to the caller
            errors[i] = error

    def pause() -> None:
        if errors or between is None:
            return
        try:
            with guards[0]:
                between()
        except BaseException as error:
            errors[BETWEEN] = error

    if len(stages) == 1:
        workers.run(partial(attempt, stages[0]), len(devices), starting)
    elif workers.concurrent and len(devices) > 1:
        meeting = threading.Barrier(len(devices), action=pause)

        def job(i: int) -> None:
            for number, stage in enumerate(stages):
                if number and not _meet(meeting):
                    return
                if not errors:
                    attempt(stage, i)

        workers.run(job, len(devices), starting)
    else:
        for number, stage in enumerate(stages):
            if number:
                pause()
            if not errors:
                workers.run(partial(attempt, stage), len(devices), starting)
    _raise(errors, devices)


BETWEEN = -1
"""Whose errors come from the work between two stages: the caller's own, not a replica's."""


def _meet(meeting: threading.Barrier) -> bool:
    """Wait for the other threads; return whether all have come. One that is interrupted lets the others go."""
    try:
        meeting.wait()
    except threading.BrokenBarrierError:
        return False
    except BaseException:
        meeting.abort()
        raise
    return True


def _raise(errors: dict[int, BaseException], devices: Sequence[Device]) -> None:
    """Raise the first of the errors, if there are any."""
    for i in sorted(errors):
        try:
            raise errors[i] if i == BETWEEN else in_replica(errors[i], i, devices[i])
        finally:  # the frames and the errors know each other: leave no cycle behind
            errors.clear()
