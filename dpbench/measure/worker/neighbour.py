"""Neighbour: another model that takes steps on other devices while a case is timed.

The other model runs in another process under the same strategy, settings and number of devices as
the case, on the next devices. It starts before the case is verified, and stops after the last step
of the case. A trial whose neighbour has failed, or has taken no step while the case was measured,
fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

import torch

from dpbench import models, strategies
from dpbench.hardware import processes
from dpbench.hardware.device import Device
from dpbench.hardware.devices import open_devices
from dpbench.measure.failures import of_error
from dpbench.models import Model
from dpbench.records import Case, no_mark

_FORK = get_context("fork")
Draw = Callable[[Case, Model, Device], Sequence[tuple[Any, Any]]]
"""A function (case, model, first device) that sets the precision and returns the steps' batches.

The batches are in the memory that `case.inputs` names.
"""
WAIT_S = 60.0
"""The longest wait in seconds for the neighbour's first steps, and later for its end."""
FIRST = 3
"""The number of steps that the neighbour takes before it reports that it is running."""


class NeighbourFailed(RuntimeError):
    """The other model failed, or did not run, while the case was measured."""


@contextmanager
def running(case: Case, draw: Draw) -> Iterator[dict[str, Any]]:
    """Run the case's neighbour inside this context, and yield a dictionary, filled on exit.

    It then has `neighbour_steps`, the number of steps that the neighbour took inside the context;
    without a neighbour it stays empty. The calling process must not have used CUDA or several
    threads. Raises NeighbourFailed if the neighbour fails, or takes no step inside the context.
    """
    facts: dict[str, Any] = {}
    if not case.neighbour:
        yield facts
        return
    own_end, other_end = _FORK.Pipe()
    killed_before = processes.killed_for_memory()
    process = _FORK.Process(
        target=_run, args=(case, draw, other_end, os.getpid()), name="neighbour"
    )
    process.start()
    other_end.close()
    try:
        before = _reply(case, own_end, process, killed_before)
        yield facts
        with suppress(OSError):  # the neighbour has ended: `_reply` raises the reason
            own_end.send("stop")
        facts["neighbour_steps"] = _reply(case, own_end, process, killed_before) - before
    finally:
        process.kill()
        process.join()
    if not facts["neighbour_steps"]:
        raise NeighbourFailed(
            f"the model {case.neighbour} took no step while the case was measured"
        )


def _reply(case: Case, pipe: Connection, process: ForkProcess, killed_before: int | None) -> int:
    """Return the number of steps that the neighbour reports next.

    Raises NeighbourFailed if the neighbour reports an error, ends, or does not answer within
    `WAIT_S` seconds.
    """
    try:
        reply = pipe.recv() if pipe.poll(WAIT_S) else f"no answer within {WAIT_S:g} s"
    except (EOFError, OSError):  # OSError: the neighbour died within its message
        process.join(WAIT_S)
        reply = processes.ending(process.exitcode) + processes.advice(
            process.exitcode, killed_before
        )
    if isinstance(reply, int):
        return reply
    raise NeighbourFailed(f"the model {case.neighbour}, which runs concurrently, failed: {reply}")


def _run(case: Case, draw: Draw, pipe: Connection, parent: int) -> None:
    """Take steps of the other model until the parent asks to stop.

    The number of steps is sent after `FIRST` steps and at the end; if the model fails, the reason.
    """
    processes.die_with_parent(parent)
    try:
        neighbour = replace(case, model=case.neighbour, neighbour="")
        torch.set_num_threads(1)
        devices = devices_of(case)
        devices[0].settle()
        model = models.load(neighbour.model, neighbour.size, neighbour.seed)
        batches = draw(neighbour, model, devices[0])
        steps = 0
        with strategies.begin(
            strategies.load(neighbour.strategy), neighbour, model, devices, no_mark
        ) as step:
            while not pipe.poll():
                step(*batches[steps % len(batches)])
                for device in devices:
                    device.synchronize()
                steps += 1
                if steps == FIRST:
                    pipe.send(steps)
        pipe.send(steps)
    except BaseException as error:
        pipe.send(of_error(error, device_ids=case.device_ids).reason)
    os._exit(0)


def devices_of(case: Case) -> list[Device]:
    """Return the devices after those of the case, with indices from 0, for its neighbour."""
    devices = open_devices(case.device_kind, 2 * case.devices, ids=case.device_ids)[case.devices :]
    for number, device in enumerate(devices):
        device.index = number
    return devices
