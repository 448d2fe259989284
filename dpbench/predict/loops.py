"""Loops: how a training loop differs from a strategy's own step. Published figures were taken with such loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpbench.records import Phase, Task


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A training loop around a strategy.

    `batch_first` copies the whole batch to device 0, and from there to the other devices. `late_reduction` starts each
    rank's reduction when all of its backward has ended.
    """

    batch_first: bool = False
    late_reduction: bool = False

    def changed(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks of a step in this loop, from those of the strategy's own step."""
        found = _batch_first(tasks) if self.batch_first else list(tasks)
        return _late_reduction(found) if self.late_reduction else found


PLAIN = Loop()
"""The strategy's own step."""


def _batch_first(tasks: Sequence[Task]) -> list[Task]:
    copies = [task for task in tasks if task.phase is Phase.SCATTER]
    first = Task(Phase.SCATTER, 0, "copy:host:0", sum(task.amount for task in copies), "bytes")
    moved = [
        replace(task, after=tuple(at + 1 for at in task.after), overlap=tuple(at + 1 for at in task.overlap))
        for task in tasks
    ]
    return [first, *(_from_device_0(task) if task.phase is Phase.SCATTER else task for task in moved)]


def _from_device_0(task: Task) -> Task:
    return replace(task, resource=task.resource.replace("host", "0"), after=task.after or (0,))


def _late_reduction(tasks: Sequence[Task]) -> list[Task]:
    last = {task.device: at for at, task in enumerate(tasks) if task.phase is Phase.BACKWARD}
    return [
        replace(task, after=(*task.after, last[task.device]), overlap=()) if task.phase is Phase.REDUCE else task
        for task in tasks
    ]
