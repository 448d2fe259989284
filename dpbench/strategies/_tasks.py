"""Tasks: describe training steps as graphs of tasks, from which the predictor computes step times.

`Graph` builds a list of tasks, and `Chain` the tasks of a process that drives several devices under
a schedule. `scheduled` yields the transfers of one step under a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from dpbench.records import HOST, Case, Phase, Profile, Task, work
from dpbench.records.schedule import Schedule
from dpbench.records.work import BUCKET_BYTES, FIRST_BUCKET_BYTES, Move, Shapes


def scheduled(case: Case, shapes: Shapes, schedule: Schedule) -> Iterator[Move]:
    """Yield the transfers in one step of dpbench's engine under a schedule."""
    rows = case.rows
    yield from batch(case, shapes, local=schedule.loss == "local")
    if case.devices == 1:
        return
    yield from _weights(schedule, shapes, len(rows), case.devices)
    if schedule.loss == "gathered":
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

    Persistent replicas that update their weights themselves receive only the buffers. With
    `update=sharded`, every device also receives the shards that other devices have updated.
    """
    kept = schedule.replicas == "persistent" and schedule.update != "root"
    for device in range(1, count):
        yield Move(
            Phase.REPLICATE,
            0,
            device,
            shapes.buffer_bytes + (0 if kept else shapes.parameter_bytes),
        )
    if schedule.update == "sharded":
        yield from _exchanged(Phase.REPLICATE, shapes.trainable_bytes / devices, devices, devices)


def _outputs(case: Case, shapes: Shapes) -> Iterator[Move]:
    for device, rows in enumerate(case.rows[1:], start=1):
        yield Move(Phase.GATHER, device, 0, rows * shapes.output_bytes)
        yield Move(Phase.BACKWARD, 0, device, rows * shapes.output_bytes)


def _gradients(case: Case, schedule: Schedule, shapes: Shapes) -> Iterator[Move]:
    """Yield the transfers of the gradients to the devices that update weights.

    With `update=root`, device 0 receives all gradients. With `update=each`, every device does: on
    GPUs by a ring all-reduce. With `update=sharded`, every device receives its shard. Devices
    without rows of the batch receive gradients, but send them only in the collectives of GPUs.
    """
    collective = case.device_kind == "cuda"
    count, devices, each = len(case.rows), case.devices, shapes.trainable_bytes
    if schedule.update == "root":
        for device in range(1, count):
            yield Move(Phase.REDUCE, device, 0, each)
    elif schedule.update == "each" and collective:
        yield from ring(devices, each)
    else:
        part = each / (devices if schedule.update == "sharded" else 1)
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


def buckets(profile: Profile, first: int = FIRST_BUCKET_BYTES) -> list[float]:
    """Return the bytes of each bucket of gradients, in the order in which backward fills them.

    `first` is the size limit of the first bucket in bytes.
    """
    sizes = profile.gradient_sizes
    return [float(sum(sizes[i] for i in run)) for run in work.buckets(sizes, first=first)]


class Chain:
    """A builder of the tasks of one step, for one process that drives several devices.

    The default schedule is `reference`. Starting the replicas' threads is a task of the host if
    `threads_marked` is True, otherwise of device 0. `reduction` is the phase in which the gradients
    are added.
    """

    def __init__(
        self,
        case: Case,
        profile: Profile,
        schedule: Schedule | None = None,
        *,
        threads_marked: bool = True,
        reduction: Phase = Phase.REDUCE,
    ) -> None:
        self._case, self._profile, self._schedule = case, profile, schedule or Schedule()
        self._threads_marked, self._reduction = threads_marked, reduction
        self._rows = case.rows
        self._devices = range(len(self._rows))
        # a device without rows still takes part in updates by every device
        self._owners = range(1 if self._schedule.update == "root" else case.devices)
        self._graph = Graph()
        self._bytes = profile.parameter_bytes
        self._collectives = 0

    def tasks(self) -> list[Task]:
        """Return the tasks of one step, from the scatter to the last transfer of weights."""
        forwards = self._forward(self._replicate(self._scatter()))
        local = self._schedule.loss == "local"
        losses = (
            self._local_loss(forwards)
            if local
            else [[self._gathered_loss(forwards)]] * len(self._rows)
        )
        self._update(self._backward(losses))
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
        weights = schedule.replicas != "persistent" or schedule.update == "root"
        sent = profile.buffer_bytes + (profile.parameter_bytes if weights else 0)
        tensors = (
            1
            if schedule.storage == "flat"
            else profile.buffer_tensors + profile.parameter_tensors * weights
        )
        modules = profile.modules if schedule.replicas == "rebuilt" else 0
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
        serial = schedule.workers == "serial"
        started: list[int] = []
        if len(self._rows) > 1 and schedule.loss == "gathered" and not serial:
            unit = "threads" if schedule.workers == "spawn" else "wakes"
            where = HOST if self._threads_marked else 0
            started = [graph.add(Phase.FORWARD, where, "host", len(self._rows), unit, copied)]
        kernels: list[int] = []
        for i, rows in enumerate(self._rows):
            work = (rows * profile.forward_flop, "flop")
            host = "host" if serial else "gil"
            handed = graph.tasks[kernels[-1]].overlap if serial and kernels else ()
            kernels.append(
                graph.launch(
                    Phase.FORWARD,
                    i,
                    host,
                    profile.forward_launches,
                    work,
                    [*copied, *handed],
                    started,
                )
            )
        return kernels

    def _gathered_loss(self, forwards: list[int]) -> int:
        graph, size = self._graph, self._profile.output_bytes
        gathered = [
            graph.add(Phase.GATHER, 0, f"copy:{i}:0", self._rows[i] * size, "bytes", forwards)
            for i in self._devices
        ]
        return graph.add(Phase.LOSS, 0, "device:0", sum(self._rows) * size, "bytes", gathered)

    def _local_loss(self, forwards: list[int]) -> list[list[int]]:
        """Return, per device, the indices of the tasks that backward waits for.

        Every backward waits for the sum of the losses on device 0, except with backward=local on
        CPU devices. With backward=local, one host task per replica precedes its backward.
        """
        graph, size = self._graph, self._profile.output_bytes
        losses = [
            graph.add(Phase.LOSS, i, f"device:{i}", rows * size, "bytes", [forwards[i]])
            for i, rows in enumerate(self._rows)
        ]
        if self._schedule.backward == "local" and self._case.device_kind == "cpu":
            # the loss is divided by the count of targets, which the host knows before any replica
            # has finished
            return [
                [graph.add(Phase.LOSS, i, "gil", 1, "launches", [losses[i]])] for i in self._devices
            ]
        total = graph.add(Phase.LOSS, 0, "host", 1, "launches", losses)
        if self._schedule.backward == "joint":
            return [[losses[i], total] for i in self._devices]
        return [
            [graph.add(Phase.LOSS, i, "gil", 1, "launches", [losses[i], total])]
            for i in self._devices
        ]

    def _backward(self, losses: list[list[int]]) -> list[int]:
        """Return the indices of the tasks that the update waits for.

        `losses` has, per device, the indices of the tasks that its backward waits for.
        """
        pieces = [float(self._bytes)]
        if self._schedule.reduce == "overlap":
            scale = (
                self._bytes / self._profile.parameter_bytes
                if self._profile.parameter_bytes
                else 0.0
            )
            pieces = [size * scale for size in buckets(self._profile, first=BUCKET_BYTES)]
        segments = [self._segments(i, losses[i], len(pieces)) for i in self._devices]
        last = [segment[-1] for segment in segments]
        beside = self._schedule.reduce == "overlap" or self._reduction is Phase.BACKWARD
        reduced: list[int] = []
        for number, size in enumerate(pieces):
            # in a trace, backward's span contains a bucket's span
            overlap = (
                [task for end in last for task in self._graph.tasks[end].overlap] if beside else []
            )
            final = overlap if number == len(pieces) - 1 else []
            reduced = self._reduce(
                size, [*reduced, *(segment[number] for segment in segments)], final
            )
        return reduced

    def _segments(self, device: int, after: list[int], count: int) -> list[int]:
        """Append one device's backward in `count` equal parts, one per bucket of gradients."""
        parts = []
        profile = self._profile
        work = self._rows[device] * profile.backward_flop / count
        launches = profile.backward_launches / count
        for _ in range(count):
            host = f"host:{device}"
            after = [
                self._graph.launch(Phase.BACKWARD, device, host, launches, (work, "flop"), after)
            ]
            parts += after
        return parts

    def _reduce(self, size: float, ready: list[int], overlap: list[int]) -> list[int]:
        """Append the reduction of one message of `size` bytes; return its last task per owner.

        The owners are the devices that update weights. The reduction waits for the end of `ready`,
        and may run at the same time as `overlap`.
        """
        schedule, graph = self._schedule, self._graph
        share = size / self._bytes if self._bytes else 0.0
        tensors = (
            1.0
            if schedule.storage == "flat"
            else self._profile.parameter_tensors * share * len(self._rows)
        )
        owners = self._owners
        kind = {"root": "reduce", "each": "all_reduce", "sharded": "reduce_scatter"}[
            schedule.update
        ]
        joined = [
            graph.add(self._reduction, i, "host", tensors / len(owners), "tensors", ready, overlap)
            for i in owners
        ]
        name = self._collective(kind)
        return graph.each(
            self._reduction, owners, name, size, lambda i: [joined[i]], lambda i: overlap
        )

    def _update(self, after: list[int]) -> None:
        schedule, graph, profile = self._schedule, self._graph, self._profile
        owners = self._owners
        share = 1 / len(owners) if schedule.update == "sharded" else 1.0
        flat = schedule.optimizer == "flat"
        host = "gil" if len(owners) > 1 else "host"
        stepped = [
            graph.update(self._case, profile, i, host, after, flat=flat, share=share)
            for i in owners
        ]
        if schedule.update == "sharded":
            name = self._collective("all_gather")
            graph.each(Phase.REPLICATE, owners, name, profile.parameter_bytes, lambda i: stepped)

    def _collective(self, kind: str) -> str:
        """Return the resource of the next collective of a kind, such as "all_reduce:3".

        Without flat storage, torch joins tensors into messages of 10 MiB (`_coalesced`).
        """
        self._collectives += 1
        joined = "" if self._schedule.storage == "flat" else "_coalesced"
        return f"{kind}{joined}:{self._collectives}"
