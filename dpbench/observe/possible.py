"""Possible: which traces no machine can have recorded, and which lack what phases follow from.

`contradictions` and `gaps` test a trace, and `judged` says what follows. A file of several
processes, or with times of several clocks, is refused. A doubt about more than `TOLERATED` of a
trace leaves its phases unknown: no rule judges the loop, and its label is UNCLEAR. Any other doubt
is a note.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dpbench.observe.attribution import Attributed, threads_of
from dpbench.observe.kineto import DeviceEvent, RuntimeCall, TraceEvents
from dpbench.observe.verdict import WORTH
from dpbench.records.activity import CLOCKS_AGREE_S, launches_kernels, may_overlap
from dpbench.records.files import UnreadableFile
from dpbench.records.grouping import grouped
from dpbench.records.words import count, time

TOLERATED = WORTH
"""The share of a trace up to which a doubt leaves its phases known: no smaller cost stands out."""
ROUNDED_S = 2e-6
"""The longest overlap that rounding makes: old traces have whole microseconds."""
LATEST_S = 600.0
"""The longest time from a launch to its kernel; torch ends a job that waits for longer."""
NAMED = 3
"""The most processes that a refusal names."""
_OWN_FILE = "give each process a file of its own, as the profiler wrote it"


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """A reason to doubt a trace, and the share of the trace that it concerns.

    `remedy` is the way out if the file is refused for it; empty if it is not.
    """

    says: str
    share: float
    remedy: str = ""

    @property
    def hides_phases(self) -> bool:
        """Return whether it leaves no phase of the trace known."""
        return self.share > TOLERATED


def judged(profile: TraceEvents, attributed: Attributed) -> list[Doubt]:
    """Return the doubts about a trace.

    Raises UnreadableFile if none of its numbers can be right.
    """
    found = [*contradictions(profile), *gaps(profile, attributed)]
    for doubt in found:
        if doubt.remedy and doubt.hides_phases:
            raise UnreadableFile(f"{profile.path}: {doubt.says}; {doubt.remedy}")
    return found


def contradictions(profile: TraceEvents) -> Iterator[Doubt]:
    """Yield each doubt about a trace because no machine works like this.

    A trace has one process and one clock, and each of its events has a time. An operator of a host
    thread ends within the operator that called it. A stream runs one kernel or copy after another,
    so that it is never busy for longer than it exists. Each of them takes time and begins after its
    launch, and the profiler recorded meanwhile.
    """
    if len(profile.processes) > 1:
        names = ", ".join([*profile.processes[:NAMED], *["..."] * bool(profile.processes[NAMED:])])
        says = f"it has the events of {len(profile.processes)} processes ({names})"
        yield Doubt(says=says, share=1.0, remedy=_OWN_FILE)
    for note in profile.notes:
        says = note.removeprefix(f"{profile.name}: ")
        yield Doubt(says=says, share=profile.left_out)
    if crossed := sum(_crossed(profile)):
        says = (
            f"{crossed} of {len(profile.host)} operators and annotations of its host threads begin"
            " in another one of their thread and do not end within it, as in the merged traces of"
            " several processes"
        )
        yield Doubt(says=says, share=crossed / len(profile.host), remedy=_OWN_FILE)
    if not profile.device:
        return
    every = len(profile.device)
    if all(one.end_us == one.start_us for one in profile.device):
        yield Doubt(says=f"all {every} kernels and copies take no time", share=1.0)
    if shared := sum(one.correlation in profile.shared for one in profile.device):
        says = (
            f"several calls have the number of the launch of {shared} of {every} kernels and"
            " copies, as in the merged traces of several processes"
        )
        yield Doubt(says=says, share=shared / every, remedy=_OWN_FILE)
    if overlaps_s := list(_overlaps(profile)):
        says = (
            f"{len(overlaps_s)} of {every} kernels and copies begin before an earlier one on their"
            f" stream has ended, by up to {time(max(overlaps_s))}"
        )
        yield Doubt(says=says, share=len(overlaps_s) / every)
    yield from _clocks(profile)
    if profile.recorded_us:
        first_us = profile.recorded_us[0] - 1e6 * CLOCKS_AGREE_S
        last_us = profile.recorded_us[1] + 1e6 * CLOCKS_AGREE_S
        outside = sum(one.start_us < first_us or one.end_us > last_us for one in profile.device)
        if outside:
            says = (
                f"{outside} of {every} kernels and copies lie outside the time in which the"
                " profiler recorded"
            )
            yield Doubt(says=says, share=outside / every)


def _crossed(profile: TraceEvents) -> Iterator[bool]:
    """Yield, for each event of a host thread, whether it outlasts the event in which it begins."""
    for events in threads_of(profile.host).values():
        open_until_us: list[float] = []
        for event in events:
            while open_until_us and open_until_us[-1] <= event.start_us:
                open_until_us.pop()
            crosses = bool(open_until_us) and event.end_us > open_until_us[-1] + 1e6 * ROUNDED_S
            yield crosses
            if not crosses:
                open_until_us.append(event.end_us)


def _overlaps(profile: TraceEvents) -> Iterator[float]:
    """Yield the seconds of each overlap of activities on one stream that is not due to rounding."""
    streams = grouped(((one.device, one.stream), one) for one in profile.device)
    for events in streams.values():
        for overlap_s in _overlaps_of(events, profile.launches):
            if overlap_s > ROUNDED_S:
                yield overlap_s


def _overlaps_of(
    events: Sequence[DeviceEvent], launches: Mapping[int, RuntimeCall]
) -> Iterator[float]:
    """Yield how long each activity of a stream runs beside an earlier one that it must wait for."""
    last: DeviceEvent | None = None
    for event in sorted(events, key=lambda one: (one.start_us, one.end_us)):
        launch = launches.get(event.correlation)
        if last and not (launch and may_overlap(launch.name)):
            yield (min(event.end_us, last.end_us) - event.start_us) / 1e6
        if last is None or event.end_us > last.end_us:
            last = event


def _clocks(profile: TraceEvents) -> Iterator[Doubt]:
    """Yield the doubts about activities that begin before their launch, or long after it."""
    later_s = [
        (event.start_us - launch.start_us) / 1e6
        for event in profile.device
        if (launch := profile.launches.get(event.correlation))
    ]
    every = len(profile.device)
    apart_s = [abs(one) for one in later_s if abs(one) > LATEST_S]
    early_s = [-one for one in later_s if -LATEST_S <= one < -CLOCKS_AGREE_S]
    if apart_s:
        says = (
            f"{len(apart_s)} of {every} kernels and copies are {time(min(apart_s))} or more away"
            " from the call that launched them"
        )
        remedy = "the host and its devices must have times of one clock, in one unit"
        yield Doubt(says=says, share=len(apart_s) / every, remedy=remedy)
    if early_s:
        says = (
            f"{len(early_s)} of {every} kernels and copies begin before the call that launched"
            f" them, by up to {time(max(early_s))}: the clocks of host and device differ by more"
            f" than {time(CLOCKS_AGREE_S)}"
        )
        yield Doubt(says=says, share=len(early_s) / every)


def gaps(profile: TraceEvents, attributed: Attributed) -> Iterator[Doubt]:
    """Yield each doubt about a trace because it lacks records from which its phases follow."""
    if attributed.unlaunched:
        says = (
            f"the trace lacks the launch of {attributed.unlaunched} of {len(profile.device)}"
            " kernels and copies; these end no step, and compute kernels among them belong to no"
            " phase"
        )
        yield Doubt(says=says, share=attributed.unlaunched / len(profile.device))
    recorded = {event.correlation for event in profile.device}
    launching = [n for n, call in profile.launches.items() if launches_kernels(call.name)]
    if lost := sum(number not in recorded for number in launching):
        launches = count(lost, "launch", "launches")
        says = (
            f"the trace lacks the kernels of {launches}, which the profiler lost: busy times are"
            " too short; give the profiler's schedule at least one step of warm-up"
            if recorded
            else f"the trace has {launches} of kernels, and the profiler recorded no work of a GPU"
        )
        yield Doubt(says=says, share=lost / len(launching))
    if attributed.updates and not any(attributed.backwards):
        says = (
            "an optimizer updates weights, and no operator is marked as one of backward, so that"
            " nothing tells backward from forward"
        )
        yield Doubt(says=says, share=1.0)
