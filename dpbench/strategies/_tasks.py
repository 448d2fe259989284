"""Tasks: describe training steps as graphs of tasks, from which the predictor computes step times.

`Graph` builds a list of tasks, and `Chain` the tasks of a process that drives several devices under
a schedule. `scheduled` yields the transfers of one step under a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from dpbench.records import HOST, Case, Phase, Profile, Task, work
from dpbench.records.schedule import Schedule
from dpbench.records.work import Move, Shapes


def scheduled(case: Case, shapes: Shapes, schedule: Schedule) -> Iterator[Move]:
    """Yield the transfers in one step of dpbench's engine under a schedule."""
    rows = case.rows
    yield from batch(case, shapes, local=schedule.keeps_replicas)
    if case.devices == 1:
        return
    yield from _weights(schedule, shapes, len(rows), case.devices)
    if not schedule.keeps_replicas:
        yield from _outputs(case, shapes)
    yield from _gradients(case, schedule, shapes)


def batch(case: Case, shapes: Shapes, *, local: bool) -> Iterator[Move]:
    """Yield the transfers of the inputs and the target of a batch to the devices.

    If `local`, the rows of the target move to their replicas. Otherwise the whole target moves to
    device 0, unless the devices are logical CPU devices, which read the host's memory.
    """
    on_device = case.inputs == "device"
    for device, count in enumerate(case.rows):
        if on_device and (case.traits.ranks or device == 0):
            continue  # the batch is there before the step
        size = count * (shapes.input_bytes + shapes.target_bytes * local)
        yield Move(Phase.SCATTER, 0 if on_device else HOST, device, size)
    if on_device:
        return
    if not local and case.device_kind != "cpu":  # logical CPU devices read the host's memory
        yield Move(Phase.SCATTER, HOST, 0, case.batch_size * shapes.target_bytes)


def _weights(schedule: Schedule, shapes: Shapes, count: int, devices: int) -> Iterator[Move]:
    """Yield the transfers of weights and buffers to the first `count` of `devices` devices.

    Replicas that update their weights themselves receive only the buffers. Under `sharded`, every
    device also receives the parts that other devices have updated.
    """
    sent = shapes.buffer_bytes + (0 if schedule.updates_everywhere else shapes.parameter_bytes)
    for device in range(1, count):
        yield Move(Phase.REPLICATE, 0, device, sent)
    if schedule is Schedule.SHARDED:
        yield from _exchanged(Phase.REPLICATE, shapes.trainable_bytes / devices, devices, devices)


def _outputs(case: Case, shapes: Shapes) -> Iterator[Move]:
    for device, rows in enumerate(case.rows[1:], start=1):
        yield Move(Phase.GATHER, device, 0, rows * shapes.output_bytes)
        yield Move(Phase.BACKWARD, 0, device, rows * shapes.output_bytes)


def _gradients(case: Case, schedule: Schedule, shapes: Shapes) -> Iterator[Move]:
    """Yield the transfers of the gradients to the devices that update weights.

    Device 0 receives all gradients. Under `allreduce`, every device does: on GPUs by a ring
    all-reduce. Under `sharded`, every device receives its part. Devices without rows of the batch
    receive gradients, but send them only in the collectives of GPUs.
    """
    collective = case.device_kind == "cuda"
    count, devices, each = len(case.rows), case.devices, shapes.trainable_bytes
    if not schedule.updates_everywhere:
        for device in range(1, count):
            yield Move(Phase.REDUCE, device, 0, each)
    elif schedule is Schedule.ALLREDUCE and collective:
        yield from ring(devices, each)
    else:
        part = each / (devices if schedule is Schedule.SHARDED else 1)
        yield from _exchanged(Phase.REDUCE, part, devices if collective else count, devices)


def ring(count: int, size: float) -> Iterator[Move]:
    """Yield the transfers of a ring all-reduce of `size` bytes between `count` devices."""
    for device in range(count if count > 1 else 0):
        yield Move(Phase.REDUCE, device, (device + 1) % count, 2 * (count - 1) / count * size)


def _exchanged(phase: Phase, each: float, sources: int, targets: int) -> Iterator[Move]:
    for source in range(sources):
        for target in range(targets):
            if source != target:
                yield Move(phase, source, target, each)


PASSES = {"sgd": 5, "adam": 7, "adamw": 9}
"""Bytes of weights, gradients and state that an optimizer moves in a step, per parameter byte."""


class Graph:
    """A builder of the list `tasks`, in which a task refers to other tasks by index."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

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
        self.tasks.append(Task(phase, device, resource, amount, unit, tuple(after), tuple(overlap)))
        return len(self.tasks) - 1

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
        devices: Sequence[int],
        collective: str,
        amount: float,
        after: Callable[[int], Iterable[int]],
        overlap: Callable[[int], Iterable[int]] = lambda i: (),
    ) -> list[int]:
        """Append one collective of `amount` bytes as one task per device, and return their indices.

        `after(device)` and `overlap(device)` return the fields of this device's task.
        """
        return [
            self.add(phase, i, collective, amount, "bytes", after(i), overlap(i)) for i in devices
        ]

    def update(
        self,
        case: Case,
        profile: Profile,
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
        launches = 1 if flat else profile.parameter_tensors
        moved = PASSES.get(case.optimizer, 5) * profile.parameter_bytes * share
        return self.launch(Phase.OPTIMIZER, device, host, launches * share, (moved, "bytes"), after)


def buckets(profile: Profile) -> list[float]:
    """Return the bytes of DDP's buckets of gradients, in the order in which backward fills them."""
    return [float(sum(sizes)) for sizes in work.bucket_sizes(profile.gradient_sizes)]


class Chain:
    """A builder of the tasks of one step, for one process that drives several devices.

    Starting the replicas' threads is a task of the host if `threads_marked` is True, otherwise of
    device 0. `reduction` is the phase in which the gradients are added.
    """

    def __init__(
        self,
        case: Case,
        profile: Profile,
        schedule: Schedule,
        *,
        threads_marked: bool = True,
        reduction: Phase = Phase.REDUCE,
    ) -> None:
        self._case, self._profile, self._schedule = case, profile, schedule
        self._threads_marked, self._reduction = threads_marked, reduction
        self._rows = case.rows
        self._devices = range(len(self._rows))
        # a device without rows still takes part in updates by every device
        self._owners = range(case.devices if schedule.updates_everywhere else 1)
        self._graph = Graph()
        self._collectives = 0

    def tasks(self) -> list[Task]:
        """Return the tasks of one step, from the scatter to the last transfer of weights."""
        forwards = self._forward(self._replicate(self._scatter()))
        losses = (
            self._local_loss(forwards)
            if self._schedule.keeps_replicas
            else [[self._gathered_loss(forwards)]] * len(self._rows)
        )
        self._update(self._reduce(self._backward(losses)))
        return self._graph.tasks

    def _scatter(self) -> list[int]:
        """The copies do not overlap, because one thread makes them."""
        graph, size = self._graph, self._profile.input_bytes
        copies: list[int] = []
        for i, rows in enumerate(self._rows):
            copies.append(
                graph.add(Phase.SCATTER, i, f"copy:host:{i}", rows * size, "bytes", copies[-1:])
            )
        return copies

    def _replicate(self, scattered: list[int]) -> list[int]:
        """Return the indices of the tasks that every forward waits for."""
        graph, profile, schedule = self._graph, self._profile, self._schedule
        weights = not schedule.updates_everywhere
        sent = profile.buffer_bytes + profile.parameter_bytes * weights
        tensors = profile.buffer_tensors + profile.parameter_tensors * weights
        rebuilt = schedule in (Schedule.REFERENCE, Schedule.POOL)
        modules = profile.modules if rebuilt else 0
        joined = [
            graph.add(Phase.REPLICATE, i, "host", tensors, "tensors", scattered)
            for i in self._devices
        ]
        wire = graph.each(
            Phase.REPLICATE,
            self._devices,
            self._collective("broadcast"),
            sent,
            lambda i: [joined[i]],
        )
        # the copies are transferred while Python rebuilds the module trees
        trees = [
            graph.add(Phase.REPLICATE, i, "host", modules, "modules", [joined[i]])
            for i in self._devices
        ]
        return [*wire, *trees]

    def _forward(self, copied: list[int]) -> list[int]:
        """Return the indices of the kernels' tasks; every forward waits for `copied`.

        Replicas that run in threads share one interpreter lock.
        """
        graph, profile, schedule = self._graph, self._profile, self._schedule
        started: list[int] = []
        if len(self._rows) > 1 and not schedule.keeps_replicas:
            unit = "threads" if schedule is Schedule.REFERENCE else "wakes"
            where = HOST if self._threads_marked else 0
            started = [graph.add(Phase.FORWARD, where, "host", len(self._rows), unit, copied)]
        return [
            graph.launch(
                Phase.FORWARD,
                i,
                "gil",
                profile.forward_launches,
                (rows * profile.forward_flop, "flop"),
                copied,
                started,
            )
            for i, rows in enumerate(self._rows)
        ]

    def _gathered_loss(self, forwards: list[int]) -> int:
        graph, size = self._graph, self._profile.output_bytes
        gathered = [
            graph.add(Phase.GATHER, 0, f"copy:{i}:0", self._rows[i] * size, "bytes", forwards)
            for i in self._devices
        ]
        return graph.add(Phase.LOSS, 0, "device:0", sum(self._rows) * size, "bytes", gathered)

    def _local_loss(self, forwards: list[int]) -> list[list[int]]:
        """Return, per device, the indices of the tasks that backward waits for.

        On GPUs, every backward waits for the sum of the losses on device 0. On CPU devices, the
        loss is divided by the count of targets, which the host knows before any replica has
        finished.
        """
        graph, size = self._graph, self._profile.output_bytes
        losses = [
            graph.add(Phase.LOSS, i, f"device:{i}", rows * size, "bytes", [forwards[i]])
            for i, rows in enumerate(self._rows)
        ]
        on_host = self._case.device_kind == "cpu"
        total = [] if on_host else [graph.add(Phase.LOSS, 0, "host", 1, "launches", losses)]
        return [
            [graph.add(Phase.LOSS, i, "gil", 1, "launches", [losses[i], *total])]
            for i in self._devices
        ]

    def _backward(self, losses: list[list[int]]) -> list[int]:
        """Return the indices of the kernels' tasks.

        `losses` has, per device, the indices of the tasks that its backward waits for.
        """
        profile = self._profile
        return [
            self._graph.launch(
                Phase.BACKWARD,
                i,
                f"host:{i}",
                profile.backward_launches,
                (rows * profile.backward_flop, "flop"),
                losses[i],
            )
            for i, rows in enumerate(self._rows)
        ]

    def _reduce(self, ready: list[int]) -> list[int]:
        """Append the reduction of the gradients, and return its last task per owner.

        The owners are the devices that update weights. If the reduction is a part of backward, as
        in torch, backward's span in a trace contains its span.
        """
        schedule, graph, profile = self._schedule, self._graph, self._profile
        inside = self._reduction is Phase.BACKWARD
        overlap = [task for end in ready for task in graph.tasks[end].overlap] if inside else []
        sharded = schedule is Schedule.SHARDED
        tensors = 1 if sharded else profile.parameter_tensors * len(self._rows)
        owners = self._owners
        joined = [
            graph.add(self._reduction, i, "host", tensors / len(owners), "tensors", ready, overlap)
            for i in owners
        ]
        kind = {Schedule.ALLREDUCE: "all_reduce", Schedule.SHARDED: "reduce_scatter"}
        return graph.each(
            self._reduction,
            owners,
            self._collective(kind.get(schedule, "reduce")),
            profile.parameter_bytes,
            lambda i: [joined[i]],
            lambda i: overlap,
        )

    def _update(self, after: list[int]) -> None:
        graph, profile, owners = self._graph, self._profile, self._owners
        sharded = self._schedule is Schedule.SHARDED
        share = 1 / len(owners) if sharded else 1.0
        host = "gil" if len(owners) > 1 else "host"
        stepped = [
            graph.update(self._case, profile, i, host, after, flat=sharded, share=share)
            for i in owners
        ]
        if sharded:
            name = self._collective("all_gather")
            graph.each(Phase.REPLICATE, owners, name, profile.parameter_bytes, lambda i: stepped)

    def _collective(self, kind: str) -> str:
        """Return the resource of the next collective of a kind, such as "all_reduce:3".

        Without flat buffers, torch joins tensors into messages of 10 MiB (`_coalesced`).
        """
        self._collectives += 1
        joined = "" if self._schedule is Schedule.SHARDED else "_coalesced"
        return f"{kind}{joined}:{self._collectives}"
