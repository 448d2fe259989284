"""Parallel apply: run replicas in workers' threads, on their devices, with the caller's settings.

`run_on_devices` runs any function in this way. If several replicas fail, only one of their errors
is raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

from dpbench.engine.containers import devices_of
from dpbench.engine.errors import call_on, in_replica
from dpbench.engine.workers import (
    NOTHING,
    SAVED_RANDOM_STATES,
    Context,
    Spawn,
    Workers,
    capture,
    flush_denormals,
    flushes_denormals,
)
from dpbench.hardware.device import Device
from dpbench.hardware.devices import Devices, as_devices
from dpbench.records import HOST, Mark, Phase, no_mark

Result = TypeVar("Result")


def run_on_devices(
    work: Callable[[int], Result],
    devices: Sequence[Device],
    workers: Workers,
    *,
    starting: Context = NOTHING,
) -> list[Result]:
    """Call `work(i)` for each device i, with that device current, and return the list of results.

    The calling thread passes the calls to the workers' threads inside the context `starting`, such
    as a mark that records the host's time for this. If calls fail, the error of the failed device
    with the lowest index is raised after all calls have ended; `errors.in_replica` describes this
    error.
    """
    results: dict[int, Result] = {}

    def job(i: int) -> None:
        results[i] = work(i)

    _run([job], None, devices, workers, starting=starting)
    return [results[i] for i in range(len(devices))]


def in_stages(
    first: Callable[[int], None],
    between: Callable[[], None] | None,
    second: Callable[[int], None],
    devices: Sequence[Device],
    workers: Workers,
) -> None:
    """Call `first(i)` for each device i, then `between()` once, then `second(i)` for each device i.

    Threads, settings and errors are as in `run_on_devices`. Concurrent threads meet at a barrier
    between the two stages and do not return to the caller. The last thread to arrive calls
    `between`, so that only the other threads must be woken. An error in one device's stage does not
    stop the same stage of another device. After an error in `first`, neither `between` nor `second`
    is called; after an error in `between`, `second` is not called. If `between` is None, only the
    two stages run.
    """
    _run([first, second], between, devices, workers)


def _run(
    stages: Sequence[Callable[[int], None]],
    between: Callable[[], None] | None,
    devices: Sequence[Device],
    workers: Workers,
    *,
    starting: Context = NOTHING,
) -> None:
    """Run the stages one after the other on all devices, with `between` after all but the last."""
    errors: dict[int, BaseException] = {}
    settings = capture()
    guards = [device.guard() for device in devices]
    caller = threading.get_ident()
    flushes = flushes_denormals()
    at_once = workers.concurrent and len(devices) > 1
    states, checked = (
        (SAVED_RANDOM_STATES, SAVED_RANDOM_STATES.checked) if at_once else (NOTHING, nullcontext)
    )

    def attempt(stage: Callable[[int], None], i: int) -> None:
        try:
            if threading.get_ident() != caller:
                flush_denormals(flushes)
                devices[i].settle()
            with checked(), settings(), guards[i]:
                stage(i)
        except BaseException as error:
            errors[i] = error  # `_raise` raises it in the caller after all stages have ended

    # Only `pause` decides whether the next stage runs, so that it runs on all devices or on none: a
    # device that fails early does not stop another one that has not begun the same stage.
    stopped = False

    def pause() -> None:
        nonlocal stopped
        if not errors and between is not None:
            try:
                with settings(), guards[0]:  # the last thread to arrive calls this
                    between()
            except BaseException as error:
                errors[BETWEEN] = error
        stopped = bool(errors)

    with states:
        if len(stages) == 1:
            workers.run(partial(attempt, stages[0]), len(devices), starting)
        elif at_once:
            meeting = threading.Barrier(len(devices), action=pause)

            def job(i: int) -> None:
                for number, stage in enumerate(stages):
                    if number and not _meet(meeting):
                        return
                    if not stopped:
                        attempt(stage, i)

            workers.run(job, len(devices), starting)
        else:
            for number, stage in enumerate(stages):
                if number:
                    pause()
                if not stopped:
                    workers.run(partial(attempt, stage), len(devices), starting)
    _raise(errors, devices)


BETWEEN = -1
"""The key of an error that `between` has raised, which is raised unchanged."""


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


def _raise(errors: dict[int, BaseException], devices: Sequence[Device]) -> None:
    """Raise the error with the lowest key, if there is one: a device index, or `BETWEEN`."""
    for i in sorted(errors):
        try:
            raise errors[i] if i == BETWEEN else in_replica(errors[i], i, devices[i])
        finally:  # the frames and the errors reference each other: break the cycle
            errors.clear()


def parallel_apply(
    modules: Sequence[Any],
    inputs: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any]] | None = None,
    devices: Devices | None = None,
    *,
    workers: Workers = Spawn(),  # noqa: B008  it has no state
    mark: Mark = no_mark,
) -> list[Any]:
    """Call `modules[i](*inputs[i], **kwargs[i])` on `devices[i]`, each in its own worker.

    Without `devices`, each module runs on the device of its input's first tensor. An input that is
    not a tuple or list is passed as a single argument. A single module runs in the calling thread.
    If modules fail, the error of the failed module with the lowest index is raised after all calls
    have ended; `errors.in_replica` describes this error. Raises ValueError if the lengths of the
    four sequences differ.
    """
    devices = devices_of(inputs) if devices is None else as_devices(devices)
    kwargs = kwargs or [{}] * len(modules)
    if not len(modules) == len(inputs) == len(kwargs) == len(devices):
        raise ValueError(
            "parallel_apply needs one element of inputs, kwargs and devices per module; the"
            f" numbers of elements are {len(modules)} (modules), {len(inputs)} (inputs),"
            f" {len(kwargs)} (kwargs), {len(devices)} (devices)"
        )

    def call(i: int) -> Any:
        arguments = inputs[i] if isinstance(inputs[i], tuple | list) else (inputs[i],)
        with mark(Phase.FORWARD, devices[i].index):
            return call_on(devices[i], modules[i], arguments, kwargs[i])

    return run_on_devices(call, devices, workers, starting=mark(Phase.FORWARD, HOST))
