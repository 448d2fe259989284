"""Tasks: one step of a case as a graph of tasks, from which the simulation computes its time.

`of_step` selects the description of a step by the traits of the case's strategy. `Graph` builds a
list of tasks, and `Chain` the tasks of a process that drives several devices under a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import count

from dpbench.predict.work import Profile, Task, bucket_sizes
from dpbench.records import HOST, Case, Phase, registry
from dpbench.records.errors import UsageError
from dpbench.records.registry import Role
from dpbench.records.schedule import SELECTED, Schedule, parse

EXCHANGEABLE = 9
"""From this number of ranks on, which all do the same work, only one is simulated."""


class Unpredictable(UsageError):
    """The steps of a strategy are not described as tasks, so their time cannot be predicted."""


@lru_cache(maxsize=64)
def of_step(case: Case, profile: Profile) -> list[Task]:
    """Return the tasks of one step; with `EXCHANGEABLE` or more ranks, of one rank only.

    `profile` has the sizes and costs of the model. Raises Unpredictable for a strategy whose
    traits are those of no strategy that is described here.
    """
    traits = case.traits
    ranks = [0] if traits.ranks and case.devices >= EXCHANGEABLE else range(len(case.rows))
    together = traits.role in (Role.WRAPPER, Role.ENGINE)
    if traits.role in (Role.BASELINE, Role.ALL_CORES) or (together and case.devices == 1):
        return _alone(case, profile)
    if together:
        return Chain(case, profile).tasks()
    if traits.role is Role.CONTROL:
        return _ddp(case, profile, ranks)
    if traits.ranks and traits.shards_weights:
        return _fsdp(case, profile, ranks)
    known = ", ".join(name for name in registry.own("strategies"))
    raise Unpredictable(
        f"the strategy {case.strategy} cannot be predicted, because its step is not described as"
        f" tasks; measure the strategy instead, or predict one of {known}"
    )


def schedule_of(case: Case) -> Schedule:
    """Return a case's schedule: for `copying` and `fastest`, the one that TrainStep prefers."""
    return SELECTED.get(case.schedule) or parse(case.schedule or Schedule.REFERENCE)


PASSES = {"sgd": 5, "adam": 7, "adamw": 9}
"""Bytes of weights, gradients and state that an optimizer moves in a step, per parameter byte."""
WHOLE = (1.0, "share")
"""The amount and unit of all kernels of forward, or of backward, on a device."""


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
    return [float(sum(sizes)) for sizes in bucket_sizes(profile.gradient_sizes)]


class Chain:
    """A builder of the tasks of one step, for one process that drives several devices.

    torch.nn.DataParallel does not mark the start of the replicas' threads, which is then a task of
    device 0 and not of the host. It adds the gradients as a part of backward.
    """

    def __init__(self, case: Case, profile: Profile) -> None:
        self._case, self._profile, self._schedule = case, profile, schedule_of(case)
        self._wrapper = case.traits.role is Role.WRAPPER
        self._rows = case.rows
        self._devices = range(len(self._rows))
        # a device without rows still takes part in updates by every device
        self._owners = range(case.devices if self._schedule.updates_everywhere else 1)
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
            where = 0 if self._wrapper else HOST
            started = [graph.add(Phase.FORWARD, where, "host", len(self._rows), unit, copied)]
        return [
            graph.launch(
                Phase.FORWARD,
                i,
                "gil",
                profile.forward_launches,
                WHOLE,
                copied,
                started,
            )
            for i in self._devices
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
        schedule, graph, profile = self._schedule, self._graph, self._profile
        phase = Phase.REDUCE
        overlap: list[int] = []
        if self._wrapper:
            phase = Phase.BACKWARD
            overlap = [task for end in ready for task in graph.tasks[end].overlap]
        sharded = schedule is Schedule.SHARDED
        tensors = 1 if sharded else profile.parameter_tensors * len(self._rows)
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
            profile.parameter_bytes,
            lambda i: [joined[i]],
            lambda i: overlap,
        )

    def _update(self, reduced: list[int]) -> None:
        """Append the updates; each waits for the task in `reduced` of its own device."""
        graph, profile, owners = self._graph, self._profile, self._owners
        sharded = self._schedule is Schedule.SHARDED
        share = 1 / len(owners) if sharded else 1.0
        host = "gil" if len(owners) > 1 else "host"
        stepped = [
            graph.update(self._case, profile, i, host, [reduced[i]], flat=sharded, share=share)
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


def _alone(case: Case, profile: Profile) -> list[Task]:
    """Return the tasks on one device: scatter, forward, loss, backward and optimizer."""
    graph = Graph()
    graph.update(case, profile, 0, "host", _to_backward(graph, case, profile, 0, 1))
    return graph.tasks


def _ddp(case: Case, profile: Profile, ranks: Sequence[int]) -> list[Task]:
    """Return the tasks of `ranks`; a bucket is reduced as soon as it is full."""
    graph = Graph()
    pieces = buckets(profile) if len(case.rows) > 1 else [float(profile.parameter_bytes)]
    ready = {i: _to_backward(graph, case, profile, i, len(pieces)) for i in ranks}
    reduced: dict[int, list[int]] = {i: [] for i in ranks}
    for number, size in enumerate(pieces):
        for i in ranks:
            # the last reduction overlaps with backward, whose span in a trace contains the
            # hidden part
            beside = graph.tasks[ready[i][-1]].overlap if number == len(pieces) - 1 else ()
            waits = [*reduced[i], ready[i][number]]
            reduced[i] = [
                graph.add(Phase.REDUCE, i, f"all_reduce:{number}", size, "bytes", waits, beside)
            ]
    for i in ranks:
        graph.update(case, profile, i, f"host:{i}", reduced[i])
    return graph.tasks


def _to_backward(graph: Graph, case: Case, profile: Profile, rank: int, parts: int) -> list[int]:
    """Append a rank's tasks up to backward; return the task that fills each of `parts` buckets."""
    rows, host = case.rows[rank], f"host:{rank}"
    part = (1 / parts, "share")
    last = graph.add(Phase.SCATTER, rank, f"copy:host:{rank}", rows * profile.input_bytes, "bytes")
    last = graph.launch(Phase.FORWARD, rank, host, profile.forward_launches, WHOLE, [last])
    last = graph.add(
        Phase.LOSS, rank, f"device:{rank}", rows * profile.output_bytes, "bytes", [last]
    )
    filled = []
    for _ in range(parts):
        last = graph.launch(
            Phase.BACKWARD, rank, host, profile.backward_launches / parts, part, [last]
        )
        filled.append(last)
    return filled


def _fsdp(case: Case, profile: Profile, ranks: Sequence[int]) -> list[Task]:
    """Return the tasks of `ranks`; the collectives of a unit run during the compute of other units.

    A unit is a group of parameters that one collective gathers. Units are assumed to be as large as
    DDP's buckets, because a profile does not describe the module's children.
    """
    graph = Graph()
    sizes = buckets(profile) if len(case.rows) > 1 else []
    parts = max(1, len(sizes))
    numbers = count()
    rows = {i: case.rows[i] for i in ranks}
    done = {
        i: graph.add(Phase.SCATTER, i, f"copy:host:{i}", rows[i] * profile.input_bytes, "bytes")
        for i in ranks
    }

    def collective(phase: Phase, kind: str, size: float, after: dict[int, int]) -> dict[int, int]:
        name = f"{kind}:{next(numbers)}"
        return {i: graph.add(phase, i, name, size, "bytes", [after[i]]) for i in ranks}

    work = (1 / parts, "share")
    for phase, launches, units in (
        (Phase.FORWARD, profile.forward_launches, sizes[::-1]),
        (Phase.BACKWARD, profile.backward_launches, sizes),
    ):
        # the units' weights are gathered one after the other, ahead of the compute that needs them
        gathered: list[dict[int, int]] = []
        for size in units:
            before = gathered[-1] if gathered else done
            gathered.append(collective(phase, "all_gather", size, before))
        for part in range(parts):
            for i in ranks:
                needs = [done[i], *([gathered[part][i]] if gathered else [])]
                done[i] = graph.launch(phase, i, f"host:{i}", launches / parts, work, needs)
            if phase is Phase.BACKWARD and sizes:
                last = collective(phase, "reduce_scatter", units[part], done)
        if phase is Phase.FORWARD:
            for i in ranks:
                output = rows[i] * profile.output_bytes
                done[i] = graph.add(Phase.LOSS, i, f"device:{i}", output, "bytes", [done[i]])
    for i in ranks:
        ends = [done[i], *([last[i]] if sizes else [])]
        graph.update(case, profile, i, f"host:{i}", ends, share=1 / len(case.rows))
    return graph.tasks
