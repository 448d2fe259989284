"""Steps of published measurements: they may lack phases, or differ from the strategy's own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from msgspec import structs

from dpbench.predict import simulation
from dpbench.predict.constants import DEFAULT, Constants
from dpbench.predict.machine import Machine
from dpbench.predict.simulation import Timeline
from dpbench.predict.tasks import of_step, only
from dpbench.predict.work import Profile
from dpbench.records import Case, Phase
from dpbench.records.work import Task


@dataclass(frozen=True, kw_only=True)
class LoopDifferences:
    """The differences between a training loop and the strategy's own step.

    With `batch_first`, the whole batch is first copied to device 0, and then its parts from device
    0 to the other devices. With `late_reduction`, each rank reduces gradients only after its whole
    backward has ended.
    """

    batch_first: bool = False
    late_reduction: bool = False

    def changed(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks of a step in this training loop.

        `tasks` are the tasks of the strategy's own step.
        """
        found = _batch_first(tasks) if self.batch_first else list(tasks)
        return _late_reduction(found) if self.late_reduction else found


PLAIN = LoopDifferences()
"""The training loop that runs the strategy's own step without changes."""


def step(
    case: Case,
    profile: Profile,
    machine: Machine,
    constants: Constants = DEFAULT,
    *,
    phases: Collection[Phase] = tuple(Phase),
    loop: LoopDifferences = PLAIN,
) -> Timeline:
    """Return the simulated timeline of one step of a case.

    `phases` are the phases that were measured. `loop` describes how the training loop differs from
    the strategy's own step. Raises UnknownMachine as `simulation.step` does.
    """
    simulation.check(case, machine)
    tasks = of_phases(loop.changed(of_step(case, profile)), phases)
    return simulation.timeline(tasks, case, profile, machine, constants)


def of_phases(tasks: Sequence[Task], phases: Collection[Phase]) -> list[Task]:
    """Return the tasks of these phases; the tasks of all other phases are removed."""
    if set(phases) >= set(Phase):
        return list(tasks)
    return only(tasks, lambda task: task.phase in phases)


def _batch_first(tasks: Sequence[Task]) -> list[Task]:
    copies = [task for task in tasks if task.phase is Phase.SCATTER]
    first = Task(Phase.SCATTER, 0, "copy:host:0", sum(task.amount for task in copies), "bytes")
    moved = [
        structs.replace(
            task,
            after=tuple(at + 1 for at in task.after),
            overlap=tuple(at + 1 for at in task.overlap),
        )
        for task in tasks
    ]
    return [
        first,
        *(_from_device_0(task) if task.phase is Phase.SCATTER else task for task in moved),
    ]


def _from_device_0(task: Task) -> Task:
    return structs.replace(
        task, resource=task.resource.replace("host", "0"), after=task.after or (0,)
    )


def _late_reduction(tasks: Sequence[Task]) -> list[Task]:
    last = {task.device: at for at, task in enumerate(tasks) if task.phase is Phase.BACKWARD}
    return [
        (
            structs.replace(task, after=(*task.after, last[task.device]), overlap=())
            if task.phase is Phase.REDUCE
            else task
        )
        for task in tasks
    ]
