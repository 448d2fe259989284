"""Run on devices: call a function for each device in the workers, under the caller's settings, and raise errors."""

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


def run_on_devices(
    work: Callable[[int], Result],
    devices: Sequence[Device],
    workers: Workers,
    *,
    compat: bool = False,
    starting: Context = NOTHING,
) -> list[Result]:
    """Call `work(i)` for each device with that device current, and return the results in order.

    `starting` is a context in which the calling thread starts the workers, so that a mark can count this time for the
    host. When calls fail, the error of the failed device with the lowest index is raised after all have ended: see
    `errors.in_replica`.
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
    """Call `first(i)` for each device, then `between()` once, then `second(i)` for each, as `run_on_devices` does.

    The threads meet at a barrier between the stages instead of returning to the caller. The last thread to arrive calls
    `between`, so that only the other threads have to be woken. After an error no later stage is called.
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
    """Run the stages on all devices.

    Raises the error of `between`, or else that of the failed device with the lowest index.
    """
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
        except BaseException as error:  # raised in the caller after all have ended
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
"""The key of an error of `between`, which is raised unchanged because it belongs to no replica."""


def _meet(meeting: threading.Barrier) -> bool:
    """Wait for the other threads; return whether all have arrived. An interrupted thread releases the others."""
    try:
        meeting.wait()
    except threading.BrokenBarrierError:
        return False
    except BaseException:
        meeting.abort()
        raise
    return True


def _raise(errors: dict[int, BaseException], devices: Sequence[Device]) -> None:
    """Raises the error of `between`, or else that of the failed device with the lowest index, if there are errors."""
    for i in sorted(errors):
        try:
            raise errors[i] if i == BETWEEN else in_replica(errors[i], i, devices[i])
        finally:  # the frames and the errors reference each other: break the cycle
            errors.clear()
