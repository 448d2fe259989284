"""Trainings: the intervals of one training of a script, and those of each of its steps.

An interval lasts from one update of the weights to the next. A step may consist of several
intervals: it ends with an update by the slowest optimizer, the one that steps most rarely. If
several step equally rarely, it is the one whose first step came last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from dpbench.observe.recorder import BY_HAND, EVALUATION, Interval, Raw
from dpbench.records import Phase
from dpbench.records.words import count

LONGEST = 16
"""The largest mean number of updates in a step; above it, each update is a step."""


def longest(intervals: Sequence[Interval], unknown: dict[str, int]) -> Sequence[Interval]:
    """Return the intervals of the script's training with the most updates.

    Two trainings share neither an optimizer nor a trained module. If trainings are left out, a
    problem is added to `unknown`, which maps each problem to the number of steps that it affects.
    """
    # an optimizer is unknown until its first step: an accumulated backward before it looks like an
    # update by hand
    calls = [
        sum(raw.kind == Phase.BACKWARD for raw in one.spans)
        for one in intervals
        if one.owner != BY_HAND
    ]
    unclear = [one for one in intervals if keys(one) == {BY_HAND}]
    accumulated = {one.number for one in unclear if len(unclear) < max(calls, default=0)}
    trainings = _apart(
        intervals, lambda one: frozenset() if one.number in accumulated else keys(one)
    )
    chosen = max(trainings, key=_updates, default=[])
    if len(trainings) < 2 or len(chosen) < 2:
        return intervals
    place = trainings.index(chosen)
    left = sum(map(_updates, trainings)) - _updates(chosen)
    problem = (
        f"the script runs {len(trainings)} trainings one after another: only training {place + 1}"
        f" is stored, which has the most updates; the other trainings have {count(left, 'update')}"
    )
    unknown[problem] = 0
    # the time since the last update of the previous training belongs to no step
    return [chosen[0]._replace(start=None), *chosen[1:]] if place else chosen


def _updates(intervals: Sequence[Interval]) -> int:
    return intervals[-1].number - intervals[0].number + 1


def keys(interval: Interval) -> frozenset[int]:
    """Return the number of the optimizer that ended an interval, and the ids of its modules.

    These are the modules with a forward in it. If there are any, `BY_HAND` is left out.
    """
    modules = {
        raw.note
        for raw in interval.spans
        if raw.kind == Phase.FORWARD and isinstance(raw.note, int)
    }
    return frozenset({interval.owner, *modules}) - ({BY_HAND} if modules else frozenset())


def _apart(
    intervals: Sequence[Interval], keys: Callable[[Interval], frozenset[int]]
) -> list[list[Interval]]:
    """Return the intervals in parts, each of which ends where none of its keys occurs later."""
    last = {key: place for place, interval in enumerate(intervals) for key in keys(interval)}
    parts: list[list[Interval]] = [[]]
    reach = -1
    for place, interval in enumerate(intervals):
        parts[-1].append(interval)
        reach = max([reach, *(last[key] for key in keys(interval))])
        if place == reach:
            parts.append([])
    return parts[:-1]


def slowest(ended: Sequence[Interval], unknown: dict[str, int]) -> frozenset[int]:
    """Return the numbers of the optimizers that end the steps; empty if each update ends one.

    A loop may use optimizers one after another, such as a new one in each epoch; the slowest one of
    each period is then returned. If it steps too rarely (`LONGEST`), a problem is added to
    `unknown`, and the set is empty.
    """
    owners: set[int] = set()
    for part in _apart(ended, lambda one: frozenset({one.owner})):
        updates = Counter(one.owner for one in part)
        first = list(updates)  # in the order of their first steps
        slowest = min(reversed(first), key=lambda owner: updates[owner])
        if len(part) > LONGEST * updates[slowest]:
            optimizers = count(len(updates), "optimizer")
            unknown[
                f"one of {optimizers} steps too rarely to end the steps: every update counts as a"
                " step"
            ] = len(ended)
            return frozenset()
        owners.add(slowest)
    return frozenset(owners)


def groups(intervals: Sequence[Interval], slowest: frozenset[int]) -> Iterator[list[Interval]]:
    """Yield the intervals of each step; intervals that are not consecutive never share a step.

    `slowest` has the optimizers that end a step; if empty, every interval is a step.
    """
    group: list[Interval] = []
    for interval in intervals:
        if group and interval.number != group[-1].number + 1:
            group = []
        group.append(interval)
        if not slowest or interval.owner in slowest:
            yield group
            group = []


def with_teachers(rows: Sequence[Sequence[Raw]], trained: Collection[int]) -> list[list[Raw]]:
    """Return the spans of each step; evaluations that are part of the training become `forward`.

    These occur in more than half of the steps: of modules that are never trained, such as a
    teacher, and of any module in training mode or with gradients. `trained` has the ids of the
    trained modules.
    """
    calls = Counter(
        note for raws in rows for note in {raw.note for raw in raws if raw.kind == EVALUATION}
    )
    inside = {
        note for note, number in calls.items() if note not in trained and number > len(rows) / 2
    }
    return [
        [
            (
                raw._replace(kind=Phase.FORWARD)
                if raw.kind == EVALUATION and raw.note in inside
                else raw
            )
            for raw in raws
        ]
        for raws in rows
    ]
