"""Steps: the steps of a trace, on the host and on its devices.

On the host, a step is an annotation `ProfilerStep#N`; a trace without these is cut where an
optimizer's step ends. The host is often several steps ahead of the devices. A step on the devices
therefore ends with the last activity that the host launched in it, and lasts from one such end to
the next. Where a trace shows no beginning of a step on the devices, and the host waits for them at
the end of each, a step is that of the host.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from dpbench.observe.kineto import DeviceEvent, HostEvent, TraceEvents
from dpbench.observe.stretches import STEP, UPDATE
from dpbench.records.activity import Interval
from dpbench.records.words import count

NAMED = 3
"""The most steps that a note names."""


class NamedStep(NamedTuple):
    """One step of a trace."""

    name: str
    start_us: float
    end_us: float
    whole: bool
    """Whether the trace has the beginning of the step."""
    follows: bool = False
    """Whether the previous step in the trace is also the previous one in the training loop."""


@dataclass(frozen=True, kw_only=True)
class TraceSteps:
    """The steps of a trace: as the host launched them (`host`), and on the devices (`timed`).

    If `by_device` is False, the devices do not show the steps, and `timed` equals `host`. `notes`
    are sentences on how the steps are defined.
    """

    host: tuple[NamedStep, ...]
    timed: tuple[NamedStep, ...]
    by_device: bool
    notes: tuple[str, ...]


def steps_of(main: Sequence[HostEvent], profile: TraceEvents) -> TraceSteps:
    """Return the steps of a trace; `main` has the events of its training thread by start."""
    host = host_steps(main)
    work = _work(host, profile)
    if not host:
        return TraceSteps(host=(), timed=(), by_device=False, notes=())
    timed = tuple(_timed(host, work, _end_before(host[0], profile)))
    if reason := _unknown_ends(host, work, profile) or _unknown_beginnings(host, work, timed):
        note = f"{profile.name}: {reason}, so that its steps are intervals of the host"
        return TraceSteps(host=host, timed=host, by_device=False, notes=(note,))
    return TraceSteps(
        host=tuple(host[number] for number in sorted(work)),
        timed=timed,
        by_device=True,
        notes=tuple(_notes(profile.name, host, timed, work)),
    )


def _unknown_ends(
    host: Sequence[NamedStep], work: Mapping[int, Interval], profile: TraceEvents
) -> str:
    """Return why the steps' ends on the devices are unknown; an empty text if they are known.

    `work` has the work of devices in each step of `host` that has any.
    """
    if not profile.device:
        return "the trace has no work of a device"
    if not work:
        return "the trace has no launch of a kernel or copy in a step"
    for one, other in pairwise(sorted(work)):
        if work[other][1] <= work[one][1]:
            return f"the devices end the work of {host[one].name} after that of {host[other].name}"
    return ""


def _unknown_beginnings(
    host: Sequence[NamedStep], work: Mapping[int, Interval], timed: Sequence[NamedStep]
) -> str:
    """Return why the host shows the steps better; an empty text if the devices do.

    The devices show none that begins with the end of another one. A host that ends each step after
    the devices has waited for them, so that its intervals have the whole step.
    """
    waited = all(host[number].end_us >= end_us for number, (_, end_us) in work.items())
    if any(step.whole for step in timed) or not waited:
        return ""
    return (
        "the trace shows the beginning of no step on the devices, and the host ends each step after"
        " them"
    )


def host_steps(main: Sequence[HostEvent]) -> tuple[NamedStep, ...]:
    """Return the steps on the host, from the events of the training thread, sorted by start.

    Without `ProfilerStep` annotations, a step ends where an optimizer's step ends. Of several
    classes of optimizers, only the one whose step comes last in the trace ends the steps. The first
    step may then have begun before the trace, so it is not whole.
    """
    marks = [(event, int(found["number"])) for event in main if (found := STEP.match(event.name))]
    return tuple(_annotated(marks) if marks else _updated(main))


def _annotated(marks: Sequence[tuple[HostEvent, int]]) -> Iterator[NamedStep]:
    """Yield the steps that the profiler has marked, from their annotations and numbers.

    A profiler that is started again begins at #0 again, so that names repeat.
    """
    times = Counter[str]()
    before = None
    for event, number in marks:
        times[event.name] += 1
        again = f" ({times[event.name]})" if times[event.name] > 1 else ""
        follows = before is not None and number == before + 1
        yield NamedStep(event.name + again, event.start_us, event.end_us, True, follows)
        before = number


def _updated(main: Sequence[HostEvent]) -> Iterator[NamedStep]:
    updates: list[HostEvent] = []
    for event in main:  # an optimizer may call another one within its step
        if UPDATE.match(event.name) and not (updates and event.start_us < updates[-1].end_us):
            updates.append(event)
    last = updates[-1].name if updates else ""
    start_us = main[0].start_us if main else 0.0
    ending = [event for event in updates if event.name == last]
    for number, event in enumerate(ending):
        later = number > 0
        yield NamedStep(f"step {number}", start_us, event.end_us, later, later)
        start_us = event.end_us


def step_at(steps: Sequence[NamedStep], at_us: float) -> int | None:
    """Return the index of the step that contains a moment; None if no step does."""
    place = bisect_right(steps, at_us, key=lambda step: step.start_us) - 1
    return place if place >= 0 and at_us < steps[place].end_us else None


def _work(host: Sequence[NamedStep], profile: TraceEvents) -> dict[int, Interval]:
    """Return the start and the end of the devices' work that each step launched, by its index."""
    work: dict[int, Interval] = {}
    for event in profile.device:
        launch = profile.launches.get(event.correlation)
        number = None if launch is None else step_at(host, launch.start_us)
        if number is not None:
            start_us, end_us = work.get(number, (event.start_us, event.end_us))
            work[number] = min(start_us, event.start_us), max(end_us, event.end_us)
    return work


def launched_before(profile: TraceEvents) -> list[DeviceEvent]:
    """Return the activities that were launched before the trace began, which lacks their launches.

    A stream runs its activities in the order of their launches: these come before its first
    activity with a launch; in a stream without launches, before the first one of their device.
    """
    first: dict[tuple[int, int | None], float] = {}
    unlaunched: list[DeviceEvent] = []
    for event in profile.device:
        if event.correlation not in profile.launches:
            unlaunched.append(event)
            continue
        for queue in ((event.device, event.stream), (event.device, None)):
            first[queue] = min(event.start_us, first.get(queue, event.start_us))

    def begins_us(event: DeviceEvent) -> float:
        of_device = first.get((event.device, None), float("-inf"))
        return first.get((event.device, event.stream), of_device)

    return [event for event in unlaunched if event.start_us < begins_us(event)]


def _end_before(first: NamedStep, profile: TraceEvents) -> float | None:
    """Return the end (us) of the work launched before the first step; None if unknown.

    It is known only if the devices still did this work when the host began the step: otherwise it
    may belong to a setup long before, and not to the step before.
    """
    if not first.whole:
        return None
    launched = [
        event
        for event in profile.device
        if (launch := profile.launches.get(event.correlation)) and launch.start_us < first.start_us
    ]
    before = [*launched_before(profile), *launched]
    end_us = max((event.end_us for event in before), default=float("-inf"))
    return end_us if end_us > first.start_us else None


def _timed(
    host: Sequence[NamedStep], work: Mapping[int, Interval], before_us: float | None
) -> Iterator[NamedStep]:
    """Yield the steps on the devices, without the steps that launched no work.

    A step begins with the end of the step before it; if this is unknown, with its first activity,
    and it is not whole. `before_us` is the end of the step before the first one, if known.
    """
    for number, (start_us, end_us) in sorted(work.items()):
        step = host[number]
        began_us = before_us if number == 0 else None
        if step.follows and number - 1 in work:
            began_us = work[number - 1][1]
        if began_us is not None and began_us < end_us:
            yield NamedStep(step.name, began_us, end_us, True, step.follows)
        else:
            yield NamedStep(step.name, start_us, end_us, False)


def _notes(
    path: str, host: Sequence[NamedStep], timed: Sequence[NamedStep], work: Mapping[int, Interval]
) -> Iterator[str]:
    partial = [step.name for step in timed if not step.whole]
    if partial:
        more = f" and of {count(len(partial) - NAMED, 'other step')}" if partial[NAMED:] else ""
        yield (
            f"{path}: the trace does not show the beginning of {', '.join(partial[:NAMED])}{more},"
            " the end of the devices' work before: it is taken as the first kernel or copy, and"
            " the step is not timed"
        )
    idle = [step.name for number, step in enumerate(host) if number not in work]
    if idle:
        yield (
            f"{path}: {count(len(idle), 'step')} launched no work on a device and "
            f"{'is' if len(idle) == 1 else 'are'} left out; the first is {idle[0]}"
        )
