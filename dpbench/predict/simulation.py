"""Simulation: one case on one described machine -> the timeline of a step."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from dpbench.predict import costs, events
from dpbench.predict.constants import DEFAULT, Constants
from dpbench.records import Case, Phase, Profile, Span, Task
from dpbench.records.machine import Machine, Unknown
from dpbench.strategies import load

EXCHANGEABLE = 9
"""From this number of ranks on, one representative rank is simulated: all ranks do the same work."""


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


@dataclass(frozen=True)
class Timeline:
    """A step's tasks, and when each began and ended, in seconds from the step's start."""

    tasks: tuple[Task, ...]
    times: tuple[tuple[float, float], ...]

    @property
    def seconds(self) -> float:
        """Return how long the step takes."""
        return max((end for _, end in self.times), default=0.0)

    def spans(self, step: int = 0, start_s: float = 0.0) -> list[Span]:
        """Return what a trace of this step would show: a span for each task that takes time."""
        return [
            Span(step, task.phase, task.device, "predicted", start_s + begin, start_s + end)
            for task, (begin, end) in zip(self.tasks, self.times, strict=True)
            if end > begin
        ]


def check(case: Case, machine: Machine) -> None:
    """Raise Unknown where a machine has too few devices for a case."""
    if case.devices > machine.devices:
        raise Unknown(
            f"{case.label}: {machine.name} has {machine.devices} GPUs ({machine.nodes} nodes of {machine.gpu.count}), "
            f"and the case wants {case.devices}; give --devices up to {machine.devices}, or a machine with more nodes"
        )
    if case.traits.threads and case.devices > machine.gpu.count:
        raise Unknown(
            f"{case.label}: {case.strategy} drives all devices from one process, and a node of {machine.name} has "
            f"{machine.gpu.count} GPUs; give --devices up to {machine.gpu.count}, or --strategies ddp"
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
    """Simulate one step of a case.

    `phases` leaves out the phases that a published figure did not time. `loop` says how the training loop differs from
    the strategy's own step.

    Raises Unknown where the machine has fewer devices than the case, or no way between two of them.
    """
    check(case, machine)
    tasks = only(loop.changed(_tasks(case, profile)), phases)
    jobs, number, capacity = costs.jobs(tasks, case, profile, machine, constants)
    times = events.simulate(jobs, capacity)
    late = _straggling(case, constants)
    return Timeline(tuple(tasks), tuple((times[n][0] * late, times[n][1] * late) for n in number))


@lru_cache(maxsize=64)
def _tasks(case: Case, profile: Profile) -> list[Task]:
    """Return the strategy's own tasks; of many equal ranks, those of one."""
    strategy = load(case.strategy)
    many = case.traits.ranks and case.devices >= EXCHANGEABLE
    return strategy.one_rank(case, profile) if many else strategy.tasks(case, profile)


def _straggling(case: Case, constants: Constants) -> float:
    """Return by how much the slowest of all ranks is behind the mean, as a factor."""
    if not case.traits.ranks or case.devices < 2:
        return 1.0
    return 1 + constants.variation * math.sqrt(2 * math.log(case.devices))


def only(tasks: Sequence[Task], phases: Collection[Phase]) -> list[Task]:
    """Return the tasks of some phases; what waited for another waits for what that one waited for."""
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
