"""Steps: how a strategy describes its step, as a list of tasks.

`Graph` builds the list. Other functions append what the steps of several strategies have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from dpbench.records import Case, Phase
from dpbench.records.work import Group, StepSizes, Task

Size = TypeVar("Size", int, float)

BUCKET_BYTES = 25 * 2**20
"""The bytes at which a bucket of gradients is full, as in DistributedDataParallel."""
FIRST_BUCKET_BYTES = 2**20
"""The bytes at which DistributedDataParallel's first bucket of gradients is full."""

OPTIMIZER_PASSES = {"sgd": 5, "adam": 7, "adamw": 9}
"""Bytes of weights, gradients and state that an optimizer moves in a step, per parameter byte."""
WHOLE = (1.0, "share")
"""The amount and unit of all kernels of forward, or of backward, on a device."""


class Graph:
    """A builder of the list `tasks`, in which a task refers to other tasks by index."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._members: set[tuple[str, int]] = set()
        """The collective and the device of each task of a collective."""

    def add(
        self,
        phase: Phase,
        device: int,
        resource: str,
        amount: float,
        unit: str,
        after: Iterable[int] = (),
        overlap: Iterable[int] = (),
    ) -> int:
        """Append a task with the given fields of `Task`, and return its index."""
        task = Task(phase, device, resource, amount, unit, tuple(after), tuple(overlap))
        return self._append(task)

    def _append(self, task: Task) -> int:
        if task.group:
            member = task.resource, task.device
            if member in self._members:  # its bytes and its time would count once
                raise ValueError(
                    f"device {task.device} takes part in the collective {task.resource} twice: give"
                    " each collective of a step another number"
                )
            self._members.add(member)
        self.tasks.append(task)
        return len(self.tasks) - 1

    def untimed(
        self, phase: Phase, device: int, resource: str, amount: float, group: Group | None = None
    ) -> None:
        """Append a copy or collective of `amount` bytes that predictions leave out."""
        self._append(Task(phase, device, resource, amount, "bytes", (), (), group, False))

    def launch(
        self,
        phase: Phase,
        device: int,
        host: str,
        launches: float,
        kernels: tuple[float, str],
        after: Iterable[int] = (),
        overlap: Iterable[int] = (),
    ) -> int:
        """Append the host's launches and the kernels, and return the index of the kernels' task.

        `host` is the resource that makes the launches, and `kernels` is the amount of work with its
        unit. The kernels run at the same time as the launches, but never end before them.
        """
        before = tuple(after)
        handed = self.add(phase, device, host, launches, "launches", before, overlap)
        amount, unit = kernels
        return self.add(phase, device, f"device:{device}", amount, unit, before, [handed])

    def each(
        self,
        phase: Phase,
        devices: Iterable[int],
        collective: str,
        amount: float,
        group: Group,
        after: Callable[[int], Iterable[int]],
        overlap: Callable[[int], Iterable[int]] = lambda i: (),
    ) -> list[int]:
        """Append one collective of `amount` bytes as one task per device, and return their indices.

        `collective` is its kind and number, such as "all_reduce:3", which no other collective of
        the step has. `after(device)` and `overlap(device)` return the fields of this device's task.
        """
        tasks = [
            Task(phase, i, collective, amount, "bytes", (*after(i),), (*overlap(i),), group)
            for i in devices
        ]
        return [*map(self._append, tasks)]

    def update(
        self,
        case: Case,
        sizes: StepSizes,
        device: int,
        host: str,
        after: Iterable[int],
        *,
        flat: bool = False,
        share: float = 1.0,
    ) -> int:
        """Append the launches and kernels of the optimizer's step; return the kernels' index.

        `host` is the resource that makes the launches. With `flat`, the step is one launch for all
        parameters. `share` is the fraction of the parameters that the device updates.
        """
        launches = 1 if flat else sizes.parameter_tensors
        moved = OPTIMIZER_PASSES.get(case.optimizer, 5) * sizes.parameter_bytes * share
        return self.launch(Phase.OPTIMIZER, device, host, launches * share, (moved, "bytes"), after)


def bucket_sizes(sizes: Sequence[Size]) -> list[list[Size]]:
    """Return the sizes of the gradients in each bucket of DistributedDataParallel.

    `sizes` are in bytes, in the order in which backward finishes the gradients.
    """
    runs: list[list[Size]] = [[]]
    total, full = 0.0, FIRST_BUCKET_BYTES
    for size in sizes:
        runs[-1].append(size)
        total += size
        if total >= full:
            runs.append([])
            total, full = 0.0, BUCKET_BYTES
    return [run for run in runs if run]


def buckets(sizes: StepSizes) -> list[float]:
    """Return the bytes of DDP's buckets of gradients, in the order in which backward fills them.

    If the sizes of the gradients are unknown, one bucket has all.
    """
    gradients = sizes.gradient_sizes or (sizes.trainable_bytes,)
    return [float(sum(bucket)) for bucket in bucket_sizes(gradients)]


def alone(case: Case, sizes: StepSizes, *, row_bytes: float) -> Graph:
    """Return the step of one device: scatter, forward, loss, backward and optimizer.

    `row_bytes` are the bytes that are copied to the device for each row of the batch.
    """
    graph = Graph()
    graph.update(case, sizes, 0, "host", to_backward(graph, case, sizes, 0, 1, row_bytes=row_bytes))
    return graph


def to_backward(
    graph: Graph, case: Case, sizes: StepSizes, rank: int, parts: int, *, row_bytes: float
) -> list[int]:
    """Append a rank's tasks up to backward; return the task that fills each of `parts` buckets.

    `row_bytes` are the bytes that are copied to the rank's device for each of its rows.
    """
    rows, host = case.rows[rank], f"host:{rank}"
    part = (1 / parts, "share")
    last = scatter(graph, case, rank, row_bytes)
    last = graph.launch(Phase.FORWARD, rank, host, sizes.forward_launches, WHOLE, [last])
    last = graph.add(Phase.LOSS, rank, f"device:{rank}", rows * sizes.output_bytes, "bytes", [last])
    filled = []
    for _ in range(parts):
        last = graph.launch(
            Phase.BACKWARD, rank, host, sizes.backward_launches / parts, part, [last]
        )
        filled.append(last)
    return filled


def scatter(
    graph: Graph, case: Case, device: int, row_bytes: float, after: Iterable[int] = ()
) -> int:
    """Append the copy of a device's rows of the batch, and return its index.

    The batch comes from the host, or is on a device before the step: on every rank's own device, or
    else on device 0.
    """
    source = "host"
    if case.inputs == "device":
        source = str(device if case.traits.ranks else 0)
    size = case.rows[device] * row_bytes
    return graph.add(Phase.SCATTER, device, f"copy:{source}:{device}", size, "bytes", after)


def ring(devices: int) -> Group:
    """Return the group of a collective in a ring of the first `devices` devices."""
    every = tuple(range(devices))
    return Group(every, every, ring=True)
