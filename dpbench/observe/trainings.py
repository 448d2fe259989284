"""Trainings: the intervals of one training of a script, and the intervals that make up each of its steps.

A step consists of the intervals up to the one that the slowest optimizer ended: in a loop with several optimizers, this
is the one that steps most rarely, and of several such optimizers the one that first stepped last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from dpbench.observe.recorder import BY_HAND, EVALUATION, Interval, Raw
from dpbench.records import Phase
from dpbench.records.words import count

LONGEST = 16
"""The largest number of updates in one step of a loop with several optimizers; with more, each update is a step."""


def longest(intervals: Sequence[Interval], unknown: dict[str, int]) -> Sequence[Interval]:
    """Return the intervals of the training with the most updates, of those that a script runs one after another.

    Two trainings share neither an optimizer nor a trained module. Trainings that are left out are added to `unknown`,
    which has the number of steps by problem.
    """
    # until its first step an optimizer is not known, so that each accumulated backward may have been an update by hand
    calls = [sum(raw.kind == Phase.BACKWARD for raw in one.spans) for one in intervals if one.owner != BY_HAND]
    unclear = [one for one in intervals if keys(one) == {BY_HAND}]
    accumulated = {one.number for one in unclear if len(unclear) < max(calls, default=0)}
    found = _apart(intervals, lambda one: frozenset() if one.number in accumulated else keys(one))
    chosen = max(found, key=_updates, default=[])
    if len(found) < 2 or len(chosen) < 2:
        return intervals
    place = found.index(chosen)
    left = sum(map(_updates, found)) - _updates(chosen)
    unknown[f"the script runs {len(found)} trainings one after another: these are the steps of number {place + 1}, "
            f"which has the most updates; {count(left, 'update')} of the others are left out"] = 0  # fmt: skip
    # the time since the last update of the previous training belongs to no step
    return [chosen[0]._replace(start=None), *chosen[1:]] if place else chosen


def _updates(intervals: Sequence[Interval]) -> int:
    """Return the number of updates from the first interval to the last, including those that were not kept."""
    return intervals[-1].number - intervals[0].number + 1


def keys(interval: Interval) -> frozenset[int]:
    """Return the number of the optimizer that ended an interval, and the ids of the modules that it trained."""
    modules = {raw.note for raw in interval.spans if raw.kind == Phase.FORWARD and isinstance(raw.note, int)}
    return frozenset({interval.owner, *modules}) - ({BY_HAND} if modules else frozenset())


def _apart(intervals: Sequence[Interval], keys: Callable[[Interval], frozenset[int]]) -> list[list[Interval]]:
    """Return the intervals, cut wherever no key that was seen before comes again."""
    last = {key: at for at, one in enumerate(intervals) for key in keys(one)}
    found: list[list[Interval]] = [[]]
    reach = -1
    for at, one in enumerate(intervals):
        found[-1].append(one)
        reach = max([reach, *(last[key] for key in keys(one))])
        if at == reach:
            found.append([])
    return found[:-1]


def slowest(ended: Sequence[Interval], unknown: dict[str, int]) -> frozenset[int]:
    """Return the numbers of the optimizers whose steps end the steps of the loop; none if every optimizer's step does.

    Optimizers that the loop uses one after another, such as a new one in each epoch, each end the steps of their time.
    A loop in which such an optimizer steps too rarely is added to `unknown`.
    """
    found: set[int] = set()
    for part in _apart(ended, lambda one: frozenset({one.owner})):
        updates = Counter(one.owner for one in part)
        first = list(updates)  # in the order of their first steps
        slowest = min(reversed(first), key=lambda owner: updates[owner])
        if len(part) > LONGEST * updates[slowest]:
            optimizers = count(len(updates), "optimizer")
            unknown[f"one of {optimizers} steps too rarely to end the steps: every update counts as a step"] = len(
                ended
            )
            return frozenset()
        found.add(slowest)
    return frozenset(found)


def groups(intervals: Sequence[Interval], slowest: frozenset[int]) -> Iterator[list[Interval]]:
    """Yield the intervals of each step; intervals that are not consecutive never share a step.

    `slowest` has the numbers of the optimizers that end a step; it is empty if every interval is a step.
    """
    group: list[Interval] = []
    for one in intervals:
        if group and one.number != group[-1].number + 1:
            group = []
        group.append(one)
        if not slowest or one.owner in slowest:
            yield group
            group = []


def with_teachers(rows: Sequence[Sequence[Raw]], trained: Collection[int]) -> list[list[Raw]]:
    """Return the spans of each step; forwards without gradients that belong to the step get the kind `forward`.

    These are the forwards of modules that are never trained and that more than half of the steps call, such as a
    teacher. `trained` has the ids of the trained modules.
    """
    calls = Counter(note for raws in rows for note in {raw.note for raw in raws if raw.kind == EVALUATION})
    inside = {note for note, number in calls.items() if note not in trained and number > len(rows) / 2}
    return [
        [raw._replace(kind=Phase.FORWARD) if raw.kind == EVALUATION and raw.note in inside else raw for raw in raws]
        for raws in rows
    ]
