"""Moves: the bytes that one step of a case moves between devices, as its strategy describes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dpbench.records import HOST, Case, Phase, Trial
from dpbench.records.work import Group, Move, Shapes, StepSizes, Task
from dpbench.strategies import described

PARTS = ("reduce_scatter", "all_gather")
"""The collectives in which a device has, or gets, one part of the message."""


FORWARD_ALONE = (Phase.SCATTER, Phase.REPLICATE, Phase.FORWARD, Phase.GATHER)
"""The phases of a step that does not train."""


def of_trial(trial: Trial) -> list[Move]:
    """Return the moves in one step of a trial's case; empty if they are unknown.

    A trial of an external strategy states them, so that they are known without its code.
    """
    if trial.facts.moves is not None:
        ends = range(HOST, trial.case.devices)
        stated = [move for move in trial.facts.moves if {move.source, move.target} <= {*ends}]
        return [move for move in stated if 0 < move.bytes < math.inf]
    shapes = Shapes.of(trial.facts.model)
    return of_step(trial.case, shapes) if shapes else []


def of_step(case: Case, shapes: Shapes) -> list[Move]:
    """Return the moves of bytes in one step, by phase; empty if unknown.

    `shapes` has the sizes of the model's tensors. The moves are unknown if the replicas share a
    device, or if the strategy does not describe its step. The engine does not if TrainStep selects
    the schedule, which it does at run time, or if the schedule is that of another version of
    dpbench.

    For a case that runs the forward alone, the moves end with the gathering of outputs, and no
    target is moved.
    """
    if case.placement == "colocated":
        return []
    shapes = shapes if case.trains else replace(shapes, target_bytes=0.0)
    tasks = described(case, StepSizes(**vars(shapes))) or ()
    phases = [*(Phase if case.trains else FORWARD_ALONE)]
    found = [move for move in _moves(tasks) if move.bytes > 0 and move.phase in phases]
    return sorted(found, key=lambda move: phases.index(move.phase))


def _moves(tasks: Sequence[Task]) -> Iterator[Move]:
    """Yield the transfers of copies and collectives; those of all rings of a phase are added."""
    rings: dict[tuple[Phase, Group, float], float] = {}
    seen: set[str] = set()
    for task in tasks:
        kind, _, ends = task.resource.partition(":")
        if kind == "copy":
            source, target = (HOST if end == "host" else int(end) for end in ends.split(":"))
            if source != target:
                yield Move(task.phase, source, target, task.amount)
        elif task.group and task.resource not in seen:
            seen.add(task.resource)  # each device of a collective has a task
            of_kind = kind.removesuffix("_coalesced")
            if task.group.ring:
                key = task.phase, task.group, _passes(of_kind, len(task.group.receivers))
                rings[key] = rings.get(key, 0) + task.amount
            else:
                yield from _exchanged(task, task.group, of_kind)
    for (phase, group, passes), size in rings.items():
        members = group.receivers
        for device, following in zip(members, members[1:] + members[:1], strict=True):
            if device != following:
                yield Move(phase, device, following, passes * size)


def _passes(kind: str, count: int) -> float:
    """Return how often the message of a ring of `count` devices goes over each of its links."""
    return (count - 1) / count if kind in PARTS else 2 * (count - 1) / count


def _exchanged(task: Task, group: Group, kind: str) -> Iterator[Move]:
    """Yield the transfers of a collective in which each sender sends to each receiver."""
    parts = {"all_reduce": 1, **dict.fromkeys(PARTS, len(group.receivers))}
    size = task.amount / parts[kind] if kind in parts else task.amount
    for source in group.senders:
        for target in group.receivers:
            if source != target:
                yield Move(task.phase, source, target, size)
