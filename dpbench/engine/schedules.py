"""Schedules: what runs the steps of each schedule.

The plain engine runs `reference`. `dpbench.engine.fast` adds the others when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from dpbench.engine.parallel_apply import Spawn, Workers
from dpbench.engine.replicate import Replicate, replicate
from dpbench.engine.step import step
from dpbench.engine.training import Training
from dpbench.records.schedule import Schedule


class Means(NamedTuple):
    """The threads and the function `replicate` of a schedule that copies weights in each call."""

    workers: Workers
    replicate: Replicate


COPYING: dict[Schedule, Callable[[nn.Module], Means]] = {
    Schedule.REFERENCE: lambda module: Means(Spawn(), replicate)
}
"""For each schedule that a wrapper can run, a function that returns its means for a module."""


class Runner(Protocol):
    """What runs the steps of one schedule, with the state that persists between them.

    `schedule` is the schedule that runs, and `note` says why it is not the preferred one. `unfit`
    is a reason, found in a step, for which replicas should not be kept.
    """

    schedule: Schedule
    note: str
    unfit: str

    @property
    def settled(self) -> bool:
        """Return whether the next steps run alike, because no alternatives are tried."""

    def run(self, inputs: tuple[Any, ...], target: Any, *, first: bool, last: bool) -> torch.Tensor:
        """Run one training step, and return the loss: see `step.step`."""

    def changed(self) -> bool:
        """Return whether something has changed on which the persistent state depends."""

    def stale(self) -> list[int]:
        """Return the indices of parameters that differ between the module and its replicas."""

    def sync(self) -> None:
        """Make the next step copy the weights to all replicas."""

    def abandon(self) -> None:
        """After a failed step, leave each `.grad` as an ordinary loop would."""

    def close(self) -> None:
        """End the threads; leave module and optimizer as an ordinary loop would."""


class Copying:
    """Steps that copy the weights to the devices through autograd; nothing must be noticed."""

    unfit = ""

    def __init__(self, training: Training, schedule: Schedule, note: str = "") -> None:
        self.schedule = schedule
        self.note = note
        several = len(training.devices) > 1
        means = COPYING[schedule if several else Schedule.REFERENCE](training.module)
        self._workers = means.workers
        self.run = partial(step, training, workers=self._workers, replicate=means.replicate)

    @property
    def settled(self) -> bool:
        """Return whether the threads have chosen how forwards run."""
        return getattr(self._workers.turn, "settled", True)

    def changed(self) -> bool:
        """Return False: every step reads the module anew."""
        return False

    def stale(self) -> list[int]:
        """Return an empty list: every step copies the weights."""
        return []

    def sync(self) -> None:
        """Do nothing: every step copies the weights."""

    def abandon(self) -> None:
        """Do nothing: a failed backward leaves each `.grad` as in an ordinary loop."""

    def close(self) -> None:
        """End the threads."""
        self._workers.close()


RUNNERS: dict[str, Callable[[Training, str], Runner]] = {
    Schedule.REFERENCE: lambda training, unfit: Copying(training, Schedule.REFERENCE)
}
"""For each schedule, and for "copying" and "fastest", a function that returns what runs the steps.

Its second argument is the reason, found in an earlier step, for which replicas should not be kept.
It raises Refused if the schedule cannot run this training.
"""
