"""Chain: the step of a process that drives several devices, under one of the engine's schedules."""

from __future__ import annotations

from dpbench.records import HOST, Case, Phase
from dpbench.records.schedule import Schedule
from dpbench.records.work import Group, StepSizes, Task
from dpbench.strategies._steps import WHOLE, Graph, alone, ring, scatter


def of_schedule(
    case: Case, sizes: StepSizes, schedule: Schedule, *, wrapper: bool = False
) -> list[Task]:
    """Return the tasks of one step under a schedule; `wrapper` is for torch.nn.DataParallel.

    A single device runs the module itself.
    """
    if case.devices > 1:
        return Chain(case, sizes, schedule, wrapper=wrapper).tasks()
    graph = alone(case, sizes, row_bytes=row_bytes(sizes, schedule))
    copy_target(graph, case, sizes, schedule)
    return graph.tasks


def row_bytes(sizes: StepSizes, schedule: Schedule) -> float:
    """Return the bytes of a row of the batch that a replica receives.

    Its target is among them if the replica computes its own part of the loss.
    """
    return sizes.input_bytes + sizes.target_bytes * schedule.keeps_replicas


def copy_target(graph: Graph, case: Case, sizes: StepSizes, schedule: Schedule) -> None:
    """Append the copy of the whole target to device 0, if that computes the loss.

    Logical CPU devices read the host's memory.
    """
    if not schedule.keeps_replicas and case.inputs != "device" and case.device_kind != "cpu":
        size = case.batch_size * sizes.target_bytes
        graph.untimed(Phase.SCATTER, 0, "copy:host:0", size)


class Chain:
    """A builder of the tasks of one step, for one process that drives several devices.

    torch.nn.DataParallel (`wrapper`) does not mark the start of the replicas' threads, which is
    then a task of device 0 and not of the host. It adds the gradients as a part of backward.
    """

    def __init__(
        self, case: Case, sizes: StepSizes, schedule: Schedule, *, wrapper: bool = False
    ) -> None:
        self._case, self._sizes, self._schedule = case, sizes, schedule
        self._wrapper = wrapper
        self._rows = case.rows
        self._devices = range(len(self._rows))
        # a device without rows still takes part in updates by every device
        self._owners = range(case.devices if self._schedule.updates_everywhere else 1)
        self._graph = Graph()
        self._collectives = 0

    def tasks(self) -> list[Task]:
        """Return the tasks of one step, from the scatter to the last transfer of weights."""
        forwards = self._forward(self._replicate(self._scatter()))
        if self._schedule.keeps_replicas:
            losses = self._local_loss(forwards)
        else:
            losses = [[self._gathered_loss(forwards)]] * len(self._rows)
            self._hand_out()
        self._update(self._reduce(self._backward(losses)))
        return self._graph.tasks

    def _scatter(self) -> list[int]:
        """The copies do not overlap, because one thread makes them."""
        graph, case = self._graph, self._case
        size = row_bytes(self._sizes, self._schedule)
        copies: list[int] = []
        for i in self._devices:
            copies.append(scatter(graph, case, i, size, copies[-1:]))
        copy_target(graph, case, self._sizes, self._schedule)
        return copies

    def _replicate(self, scattered: list[int]) -> list[int]:
        """Return the indices of the tasks that every forward waits for."""
        graph, sizes, schedule = self._graph, self._sizes, self._schedule
        weights = not schedule.updates_everywhere
        sent = sizes.buffer_bytes + sizes.parameter_bytes * weights
        tensors = sizes.buffer_tensors + sizes.parameter_tensors * weights
        rebuilt = schedule in (Schedule.REFERENCE, Schedule.POOL)
        modules = sizes.modules if rebuilt else 0
        joined = [
            graph.add(Phase.REPLICATE, i, "host", tensors, "tensors", scattered)
            for i in self._devices
        ]
        wire = graph.each(
            Phase.REPLICATE,
            self._devices,
            self._collective("broadcast"),
            sent,
            Group((0,), tuple(self._devices)),
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
        graph, sizes, schedule = self._graph, self._sizes, self._schedule
        started: list[int] = []
        if len(self._rows) > 1 and not schedule.keeps_replicas:
            unit = "threads" if schedule is Schedule.REFERENCE else "wakes"
            where = 0 if self._wrapper else HOST
            started = [graph.add(Phase.FORWARD, where, "host", len(self._rows), unit, copied)]
        return [
            graph.launch(
                Phase.FORWARD,
                i,
                "gil",
                sizes.forward_launches,
                WHOLE,
                copied,
                started,
            )
            for i in self._devices
        ]

    def _gathered_loss(self, forwards: list[int]) -> int:
        graph, size = self._graph, self._sizes.output_bytes
        gathered = [
            graph.add(Phase.GATHER, 0, f"copy:{i}:0", self._rows[i] * size, "bytes", forwards)
            for i in self._devices
        ]
        return graph.add(Phase.LOSS, 0, "device:0", sum(self._rows) * size, "bytes", gathered)

    def _hand_out(self) -> None:
        """Append the copies of the output's gradient to the replicas, within their backward."""
        for i in self._devices:
            size = self._rows[i] * self._sizes.output_bytes
            self._graph.untimed(Phase.BACKWARD, i, f"copy:0:{i}", size)

    def _local_loss(self, forwards: list[int]) -> list[list[int]]:
        """Return, per device, the indices of the tasks that backward waits for.

        On GPUs, every backward waits for the sum of the losses on device 0. On CPU devices, the
        loss is divided by the count of targets, which the host knows before any replica has
        finished.
        """
        graph, size = self._graph, self._sizes.output_bytes
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
        sizes = self._sizes
        return [
            self._graph.launch(
                Phase.BACKWARD,
                i,
                f"host:{i}",
                sizes.backward_launches,
                WHOLE,
                losses[i],
            )
            for i in self._devices
        ]

    def _reduce(self, ready: list[int]) -> list[int]:
        """Append the reduction of the gradients, and return its last task per owner.

        The owners are the devices that update weights. If the reduction is a part of backward, as
        in torch, backward's span in a trace contains its span.
        """
        schedule, graph, sizes = self._schedule, self._graph, self._sizes
        phase = Phase.REDUCE
        overlap: list[int] = []
        if self._wrapper:
            phase = Phase.BACKWARD
            overlap = [task for end in ready for task in graph.tasks[end].overlap]
        sharded = schedule is Schedule.SHARDED
        tensors = 1 if sharded else sizes.parameter_tensors * len(self._rows)
        owners = self._owners
        joined = [
            graph.add(phase, i, "host", tensors / len(owners), "tensors", ready, overlap)
            for i in owners
        ]
        kind = {Schedule.ALLREDUCE: "all_reduce", Schedule.SHARDED: "reduce_scatter"}
        return graph.each(
            phase,
            owners,
            self._collective(kind.get(schedule, "reduce")),
            sizes.trainable_bytes,
            self._reducing(),
            lambda i: [joined[i]],
            lambda i: overlap,
        )

    def _reducing(self) -> Group:
        """Return the group of the reduction; only collectives of GPUs need all devices to send."""
        schedule, owners = self._schedule, tuple(self._owners)
        on_gpus = self._case.device_kind == "cuda"
        if schedule is Schedule.ALLREDUCE and on_gpus:
            return ring(len(owners))
        every = schedule.updates_everywhere and on_gpus
        return Group(owners if every else tuple(self._devices), owners)

    def _update(self, reduced: list[int]) -> None:
        """Append the updates; each waits for the task in `reduced` of its own device."""
        graph, sizes, owners = self._graph, self._sizes, self._owners
        sharded = self._schedule is Schedule.SHARDED
        share = 1 / len(owners) if sharded else 1.0
        host = "gil" if len(owners) > 1 else "host"
        stepped = [
            graph.update(self._case, sizes, i, host, [reduced[i]], flat=sharded, share=share)
            for i in owners
        ]
        if sharded:
            group = Group(tuple(owners), tuple(owners))
            name, size = self._collective("all_gather"), sizes.trainable_bytes
            graph.each(Phase.REPLICATE, owners, name, size, group, lambda i: stepped)

    def _collective(self, kind: str) -> str:
        """Return the resource of the next collective of a kind, such as "all_reduce:3".

        Without flat buffers, torch joins tensors into messages of 10 MiB (`_coalesced`).
        """
        self._collectives += 1
        joined = "" if self._schedule is Schedule.SHARDED else "_coalesced"
        return f"{kind}{joined}:{self._collectives}"
