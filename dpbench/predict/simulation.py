"""Simulation: the timeline of one step of a case on a described machine.

A task is a part of a strategy's step. A job is a task with its cost on the machine. A collective is
a single job, regardless of the number of its devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpbench.predict import events, network
from dpbench.predict.constants import DEFAULT, Constants, HostCosts
from dpbench.predict.events import SimulatedJob
from dpbench.predict.machine import Machine, UnknownMachine
from dpbench.predict.network import DeviceGroup
from dpbench.predict.tasks import of_step
from dpbench.predict.work import Cost, Profile
from dpbench.records import Case, Phase, Span, registry, words
from dpbench.records.registry import Role
from dpbench.records.work import COLLECTIVES, Task
from dpbench.strategies import OPTIMIZER_PASSES

GIL = "gil"
LOCAL = "local"
"""The shared resource for copies within one device: its memory."""


def jobs_of(
    tasks: Sequence[Task], case: Case, profile: Profile, machine: Machine, constants: Constants
) -> tuple[list[SimulatedJob], list[int], dict[object, float]]:
    """Return a step's jobs, each task's index in them, and the capacities of the shared resources.

    Capacities are in bytes per second, but 1 for the interpreter lock.
    """
    overlapped = case.traits.ranks and any(
        (task.phase is Phase.REDUCE and task.overlap) or task.resource.startswith("reduce_scatter:")
        for task in tasks
    )
    prices = _Prices(
        case, profile, machine, constants, overlapped=overlapped and len(case.rows) > 1
    )
    members: list[list[Task]] = []
    job_of_task: list[int] = []
    collectives: dict[str, int] = {}
    for task in tasks:
        index = collectives.get(task.resource, len(members))
        if index == len(members):
            members.append([])
        if task.resource.partition(":")[0] in COLLECTIVES:
            collectives[task.resource] = index
        members[index].append(task)
        job_of_task.append(index)
    jobs = []
    for group in members:
        after = dict.fromkeys(job_of_task[other] for task in group for other in task.after)
        overlap = dict.fromkeys(job_of_task[other] for task in group for other in task.overlap)
        beside = tuple(other for other in overlap if other not in after)
        jobs.append(replace(prices.job(group[0]), after=tuple(after), overlap=beside))
    capacity: dict[object, float] = {GIL: 1.0, LOCAL: prices.memory_bytes_per_s}
    for way, rate in network.capacities(machine).items():
        capacity[way] = rate
    return jobs, job_of_task, capacity


class _Prices:
    def __init__(
        self,
        case: Case,
        profile: Profile,
        machine: Machine,
        constants: Constants,
        *,
        overlapped: bool,
    ) -> None:
        self._overlapped = overlapped
        self._case = case
        self._profile = profile
        self._machine = machine
        self._c = constants
        self._group = DeviceGroup(machine, case.devices, constants)
        self._rows = case.rows
        self.memory_bytes_per_s = machine.gpu.memory_bytes_per_s or constants.memory_bytes_per_s
        host = HostCosts.of(machine.host, constants)
        self._host_costs = host
        self._each_s = {
            "launches": host.launch_s,
            "modules": host.module_s,
            "tensors": host.tensor_s,
            "threads": host.thread_s,
            "wakes": host.wake_s,
        }
        self._update = self._update_scale()

    def job(self, task: Task) -> SimulatedJob:
        """Return the job of one task, without its dependencies."""
        if task.unit == "share":
            return self._share(task)
        return self._bytes(task) if task.unit == "bytes" else self._host(task)

    def _host(self, task: Task) -> SimulatedJob:
        """The amount is a number of host operations, such as launches."""
        spent = task.amount * self._each_s[task.unit]
        others = len(self._rows) - 1
        if task.unit == "launches":
            spent = self._launches(task, spent)
        if task.resource != GIL:
            return SimulatedJob(spent, task.resource)
        spent *= 1 + self._host_costs.hand_off * others
        if not self._machine.host.gil:
            return SimulatedJob(spent, f"host:{task.device}")
        # all threads compete for the interpreter lock
        return SimulatedJob(0.0, amount=spent, way=(GIL,))

    def _launches(self, task: Task, spent: float) -> float:
        """`spent` is the duration in seconds of the launches in forward.

        Backward and the optimizer have durations of their own. In forward and in backward, all
        launches together take at most the share `host_share` of the phase's duration in the
        profile. In backward, the threads of one process slow down each other's launches.
        """
        profile = self._profile
        rows = self._rows[min(max(0, task.device), len(self._rows) - 1)]
        if task.phase is Phase.FORWARD:
            return _capped(spent, profile.forward, rows, self._c.host_share)
        if task.phase is Phase.BACKWARD:
            backward = self._host_costs.backward_launch_s
            part = task.amount / profile.backward_launches if profile.backward_launches else 1.0
            whole = _capped(
                profile.backward_launches * backward, profile.backward, rows, self._c.host_share
            )
            crowd = 0 if self._case.traits.ranks else len(self._rows) - 1
            return part * whole * (1 + self._c.contention * crowd)
        if task.phase is Phase.OPTIMIZER:
            return self._update * task.amount * self._host_costs.update_s
        return spent

    def _share(self, task: Task) -> SimulatedJob:
        """The amount is the share of the phase's duration in the profile."""
        profile = self._profile
        cost = profile.forward if task.phase is Phase.FORWARD else profile.backward
        if cost is None:
            raise ValueError(
                f"the profile of {profile.model} has no duration for the phase {task.phase}; add"
                " durations with dpbench.predict.profiles.given or"
                " dpbench.predict.profiles.counted"
            )
        rows = self._rows[task.device]
        whole_s = cost.at(rows)
        if task.phase is Phase.BACKWARD and self._overlapped:
            whole_s = self._group.beside_s(whole_s, profile.parameter_bytes)
        return SimulatedJob(task.amount * whole_s, task.resource)

    def _bytes(self, task: Task) -> SimulatedJob:
        """The amount is bytes over links, in a collective, or within device memory."""
        kind, _, rest = task.resource.partition(":")
        if kind == "copy":
            return self._copy(task, *rest.split(":"))
        if kind in COLLECTIVES:
            name = kind.removesuffix("_coalesced")
            seconds = self._group.one_s if name == kind else self._group.coalesced_s
            return SimulatedJob(seconds(name, task.amount), "collectives")
        loss = self._profile.loss
        output = self._profile.output_bytes
        if task.phase is Phase.LOSS and loss is not None and output:
            return SimulatedJob(loss.at(task.amount / output), task.resource)
        scale = self._update if task.phase is Phase.OPTIMIZER else 1.0
        return SimulatedJob(scale * task.amount / self.memory_bytes_per_s, task.resource)

    def _update_scale(self) -> float:
        """Return the optimizer's duration in the profile / the calculated one; 1 if it has none."""
        profile = self._profile
        if profile.optimizer is None:
            return 1.0
        moved = (
            OPTIMIZER_PASSES.get(self._case.optimizer, 5)
            * profile.parameter_bytes
            / self.memory_bytes_per_s
        )
        launches = profile.parameter_tensors * self._host_costs.update_s
        return profile.optimizer.at(self._rows[0]) / max(moved, launches)

    def _copy(self, task: Task, source: str, target: str) -> SimulatedJob:
        """`source` and `target` are indices of devices, or "host" for its pageable memory."""
        if task.amount <= 0 or source == target:
            return SimulatedJob(0.0)
        node = self._machine.gpu.count
        ends = [end if end == "host" else f"gpu{int(end) % node}" for end in (source, target)]
        if source == "host":
            # the calling thread waits for a pageable copy, so each process runs one at a time
            rate = self._machine.host.pageable_bytes_per_s or self._c.pageable_bytes_per_s
            return SimulatedJob(
                self._c.copy_s + task.amount / rate,
                f"pageable:{task.device if self._case.traits.ranks else 0}",
            )
        return SimulatedJob(
            self._c.copy_s, amount=task.amount, way=network.route(self._machine, *ends)
        )


def _capped(launches_s: float, cost: Cost | None, rows: int, share: float) -> float:
    """Limit the launches to a share of the duration of their phase, if that is known."""
    return min(launches_s, share * cost.at(rows)) if cost else launches_s


@dataclass(frozen=True)
class Timeline:
    """The tasks of a step, and the (begin, end) of each in seconds from the start of the step."""

    tasks: tuple[Task, ...]
    times: tuple[tuple[float, float], ...]

    @property
    def seconds(self) -> float:
        """Return the duration of the step in seconds."""
        return max((end for _, end in self.times), default=0.0)

    def spans(self) -> list[Span]:
        """Return a span for each task with a duration above 0, in a trial of this step alone."""
        return [
            Span(0, task.phase, task.device, "predicted", begin, end)
            for task, (begin, end) in zip(self.tasks, self.times, strict=True)
            if end > begin
        ]


def check(case: Case, machine: Machine) -> None:
    """Raise UnknownMachine if a machine has too few devices for a case.

    A strategy that drives all devices from one process needs them on one node.
    """
    if case.devices > machine.devices:
        raise UnknownMachine(
            "{label}: the machine {machine} has {gpus} (nodes: {nodes}, GPUs per node: {each}), but"
            " the case needs {count}",
            option="devices",
            remedy="give {} up to {most}, or choose a machine with more nodes",
            label=case.label,
            machine=machine.name,
            gpus=words.count(machine.devices, "GPU"),
            nodes=machine.nodes,
            each=machine.gpu.count,
            count=case.devices,
            most=machine.devices,
        )
    if case.traits.threads and case.devices > machine.gpu.count:
        raise UnknownMachine(
            "{label}: the strategy {strategy} drives all devices from one process on one node, but"
            " the case has {count} devices and a node of {machine} has {gpus}",
            option="devices",
            remedy="give {} up to {most}, or {strategies} {ranks}",
            label=case.label,
            strategy=case.strategy,
            count=case.devices,
            machine=machine.name,
            gpus=words.count(machine.gpu.count, "GPU"),
            most=machine.gpu.count,
            ranks=registry.of_role(Role.CONTROL),
        )


def step(
    case: Case, profile: Profile, machine: Machine, constants: Constants = DEFAULT
) -> Timeline:
    """Return the simulated timeline of one step of a case.

    Raises UnknownMachine if the machine has too few devices, or no route between two of them.
    """
    check(case, machine)
    return timeline(of_step(case, profile), case, profile, machine, constants)


def timeline(
    tasks: Sequence[Task], case: Case, profile: Profile, machine: Machine, constants: Constants
) -> Timeline:
    """Return the simulated timeline of `tasks`, which are those of a step of the case."""
    jobs, number, capacity = jobs_of(tasks, case, profile, machine, constants)
    times = events.simulate(jobs, capacity)
    late = _straggling(case, constants)
    return Timeline(tuple(tasks), tuple((times[n][0] * late, times[n][1] * late) for n in number))


def _straggling(case: Case, constants: Constants) -> float:
    """Return the expected step of the slowest rank / the mean of all ranks."""
    if not case.traits.ranks or case.devices < 2:
        return 1.0
    return 1 + constants.variation * math.sqrt(2 * math.log(case.devices))
