"""Run something on each device: in the workers, under the caller's settings, with every error brought home."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from dpbench.devices import Device
from dpbench.engine.errors import in_replica
from dpbench.engine.settings import capture
from dpbench.engine.workers import NOTHING, Context, Workers

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
    errors: dict[int, BaseException] = {}
    settings = capture(compat=compat)
    guards = [device.guard() for device in devices]
    caller = threading.get_ident()

    def run(i: int) -> None:
        try:
            if threading.get_ident() != caller:
                devices[i].settle()
            with settings(), guards[i]:
                results[i] = work(i)
        except BaseException as error:  # whatever it is, it belongs to the caller
            errors[i] = error

    workers.run(run, len(devices), starting)
    for i in sorted(errors):
        try:
            raise in_replica(errors[i], i, devices[i])
        finally:  # the frames and the errors know each other: leave no cycle behind
            errors.clear()
    return [results[i] for i in range(len(devices))]
