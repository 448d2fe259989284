"""Simulation: the timeline of one step of a case on a described machine."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from dpbench.predict import costs, events
from dpbench.predict.constants import DEFAULT, Constants
from dpbench.records import Case, Phase, Profile, Span, Task
from dpbench.records.machine import Machine, UnknownMachine
from dpbench.strategies import load

EXCHANGEABLE = 9
"""From this rank count on, only one representative rank is simulated, because all ranks do the same work."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The differences of a training loop from the strategy's own step.

    With `batch_first`, the whole batch is copied to device 0, and from device 0 to the other devices. With
    `late_reduction`, each rank starts its reduction when its backward has ended.
    """

    batch_first: bool = False
    late_reduction: bool = False

    def changed(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks of a step in this loop, given those of the strategy's own step."""
        found = _batch_first(tasks) if self.batch_first else list(tasks)
        return _late_reduction(found) if self.late_reduction else found


PLAIN = Loop()
"""A training loop without differences from the strategy's own step."""


@dataclass(frozen=True)
class Timeline:
    """The tasks of a step, and the (begin, end) of each in seconds from the start of the step."""

    tasks: tuple[Task, ...]
    times: tuple[tuple[float, float], ...]

    @property
    def seconds(self) -> float:
        """Return the duration of the step in seconds."""
        return max((end for _, end in self.times), default=0.0)

    def spans(self, step: int = 0, start_s: float = 0.0) -> list[Span]:
        """Return a span for each task with a duration above 0, as a measured trace of the step would have them."""
        return [
            Span(step, task.phase, task.device, "predicted", start_s + begin, start_s + end)
            for task, (begin, end) in zip(self.tasks, self.times, strict=True)
            if end > begin
        ]


def check(case: Case, machine: Machine) -> None:
    """Raises UnknownMachine if a machine has too few devices for a case, or too few on one node for one process."""
    if case.devices > machine.devices:
        raise UnknownMachine(
            f"{case.label}: {machine.name} has {machine.devices} GPUs ({machine.nodes} nodes of {machine.gpu.count}), "
            f"but the case needs {case.devices}; give --devices up to {machine.devices}, or a machine with more nodes"
        )
    if case.traits.threads and case.devices > machine.gpu.count:
        raise UnknownMachine(
            f"{case.label}: {case.strategy} drives all devices from one process on one node, and a node of "
            f"{machine.name} has {machine.gpu.count} GPUs; give --devices up to {machine.gpu.count}, or "
            "--strategies ddp"
        )


def step(
    case: Case,
    profile: Profile,
    machine: Machine,
    constants: Constants = DEFAULT,
    *,
    phases: Collection[Phase] = tuple(Phase),
    loop: Loop = PLAIN,
) -> Timeline:
    """Return the simulated timeline of one step of a case.

    `phases` are the phases to simulate; a published figure may leave some out. `loop` describes how the training loop
    differs from the strategy's own step.

    Raises UnknownMachine if the machine has fewer devices than the case needs, or no route between two of them.
    """
    check(case, machine)
    tasks = only(loop.changed(_tasks(case, profile)), phases)
    jobs, number, capacity = costs.jobs(tasks, case, profile, machine, constants)
    times = events.simulate(jobs, capacity)
    late = _straggling(case, constants)
    return Timeline(tuple(tasks), tuple((times[n][0] * late, times[n][1] * late) for n in number))


@lru_cache(maxsize=64)
def _tasks(case: Case, profile: Profile) -> list[Task]:
    """Return the tasks of the strategy's own step; from `EXCHANGEABLE` ranks on, only those of one rank."""
    strategy = load(case.strategy)
    many = case.traits.ranks and case.devices >= EXCHANGEABLE
    return strategy.one_rank(case, profile) if many else strategy.tasks(case, profile)


def _straggling(case: Case, constants: Constants) -> float:
    """Return the expected duration of the slowest rank's step, relative to the mean of all ranks."""
    if not case.traits.ranks or case.devices < 2:
        return 1.0
    return 1 + constants.variation * math.sqrt(2 * math.log(case.devices))


def only(tasks: Sequence[Task], phases: Collection[Phase]) -> list[Task]:
    """Return the tasks of some phases; a task that depends on a removed task gets the dependencies of that task."""
    if set(phases) >= set(Phase):
        return list(tasks)
    kept: list[Task] = []
    place: dict[int, tuple[int, ...]] = {}
    for number, task in enumerate(tasks):
        after = tuple(dict.fromkeys(at for before in task.after for at in place[before]))
        beside = tuple(at for before in task.overlap for at in place[before] if at not in after)
        if task.phase in phases:
            place[number] = (len(kept),)
            kept.append(replace(task, after=after, overlap=tuple(dict.fromkeys(beside))))
        else:
            place[number] = (*after, *beside)
    return kept


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
