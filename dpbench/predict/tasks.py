"""Tasks: those of a step's tasks that a prediction times, as the case's strategy describes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from msgspec import structs

from dpbench.predict.work import Profile
from dpbench.records import Case, registry
from dpbench.records.errors import UsageError
from dpbench.records.schedule import SELECTED, Schedule, parse
from dpbench.records.work import Task
from dpbench.strategies import described

EXCHANGEABLE = 9
"""From this number of ranks on, only one is simulated if all do the same work."""


class Unpredictable(UsageError):
    """A strategy does not describe its steps, so their time cannot be predicted."""


@lru_cache(maxsize=64)
def of_step(case: Case, profile: Profile) -> list[Task]:
    """Return the timed tasks of one step; with `EXCHANGEABLE` or more such ranks, of one only.

    `profile` has the sizes and costs of the model. The batch always comes from the host. Raises
    Unpredictable for a strategy that does not describe its step.
    """
    # one device runs the module itself, under every schedule
    schedule = schedule_of(case) if case.schedule and case.devices > 1 else ""
    tasks = described(replace(case, schedule=schedule, inputs=Case.inputs), profile.sizes)
    if tasks is None:
        known = ", ".join(registry.own("strategies"))
        raise Unpredictable(
            f"the strategy {case.strategy} cannot be predicted, because its step is not described:"
            " add the method describe(case, sizes) to its class, as"
            " dpbench.strategies.Strategy.describe says, measure the strategy instead, or predict"
            f" one of {known}"
        )
    one = case.traits.ranks and case.devices >= EXCHANGEABLE and _exchangeable(tasks)
    return only(tasks, lambda task: task.timed and (not one or task.device == 0))


def _exchangeable(tasks: Sequence[Task]) -> bool:
    """Return whether all devices have tasks of the same kinds, and meet in collectives alone."""
    kinds: dict[int, list[tuple[str, str, str]]] = {}
    for task in tasks:
        if any(tasks[other].device != task.device for other in (*task.after, *task.overlap)):
            return False
        if task.timed:
            kind = task.resource.partition(":")[0]
            kinds.setdefault(task.device, []).append((task.phase, kind, task.unit))
    return all(one == kinds[0] for one in kinds.values())


def only(tasks: Sequence[Task], keeps: Callable[[Task], bool]) -> list[Task]:
    """Return the tasks for which `keeps` is true.

    A task that depends on a removed task inherits the dependencies of the removed task.
    """
    kept: list[Task] = []
    place: dict[int, tuple[int, ...]] = {}
    for number, task in enumerate(tasks):
        after = [at for before in task.after for at in place[before]]
        beside = [at for before in task.overlap for at in place[before]]
        if not keeps(task):
            place[number] = tuple(dict.fromkeys((*after, *beside)))
            continue
        place[number] = (len(kept),)
        overlap = tuple(dict.fromkeys(at for at in beside if at not in after))
        kept.append(structs.replace(task, after=tuple(dict.fromkeys(after)), overlap=overlap))
    return kept


def schedule_of(case: Case) -> Schedule:
    """Return a case's schedule: for `copying` and `fastest`, the one that TrainStep prefers."""
    return SELECTED.get(case.schedule) or parse(case.schedule or Schedule.REFERENCE)
