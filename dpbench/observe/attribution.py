"""Attribution: the phases of the host and of the devices in each step of a trace.

The phases of the host come from annotations and, where there are none, from operators: autograd's
sequence numbers and threads tell forward from backward.

A kernel belongs to the step and the phase in which the host launched it, even if it runs later.
All-reduce and reduce-scatter are `reduce`, all-gather and broadcast are `replicate`, wherever they
were launched. Each time that the host is in a phase, it launches a group of kernels. The phase on a
device lasts from the start of the first to the end of the last kernel of the group, waits included,
but without the time in which the device runs only another group. Copies and collectives count where
the device runs no compute kernel: an all-reduce during backward divides backward where it is
exposed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dpbench.observe.kineto import DeviceEvent, HostEvent, TraceEvents
from dpbench.observe.steps import NamedStep, TraceSteps, launched_before, step_at, steps_of
from dpbench.observe.stretches import LOADER, STEP, UPDATE, Stretch, phase_of_copy, stretches
from dpbench.records import HOST, Phase, Span, Step
from dpbench.records.activity import (
    Activity,
    Interval,
    Kind,
    difference,
    overlapping,
    phase_of_collective,
    union,
)


@dataclass(frozen=True, kw_only=True)
class Attributed:
    """The steps of one trace with their spans, in seconds since the first event (`zero_us`).

    `activities` has those of all devices, also outside the steps. `host` has, for each step, the
    seconds that the host spent in each phase, and `ahead_s` the seconds from the end of the step on
    the host to its end on the devices, negative if the host ended it later. `ahead_s` is empty if
    the steps are intervals of the host; `notes` then say why. `unlaunched` is the number of
    activities whose launch the trace should have and lacks; compute kernels among them belong to no
    phase.
    """

    names: tuple[str, ...]
    steps: tuple[Step, ...]
    spans: tuple[Span, ...]
    host: tuple[Mapping[str, float], ...]
    ahead_s: tuple[float, ...]
    activities: tuple[Activity, ...]
    unlaunched: int
    updates: Mapping[str, int]
    """The number of calls of `step` within the steps, by the optimizer's class name."""
    backwards: tuple[int, ...]
    """The number of times that the host began backward, by step."""
    notes: tuple[str, ...]


def attribute(profile: TraceEvents) -> Attributed:
    """Return the steps of a trace with the spans of the host and of the devices."""
    zero_us = profile.zero_us
    threads = threads_of([*profile.host, *profile.waits])
    main = _main_thread(threads)
    steps = steps_of(threads.get(main, ()), profile)
    copied = _copied(profile)
    backwards = sorted(event.start_us for event in profile.host if event.backward)
    by_thread = {
        name: list(stretches(events, copied.get(name, {}), backwards))
        for name, events in threads.items()
    }
    timeline = _timeline(by_thread, main, steps.host)
    spans: list[Span] = []
    busy: list[Interval] = [(event.start_us, event.end_us) for event in profile.device]
    for device in sorted({event.device for event in profile.device}):
        events = [event for event in profile.device if event.device == device]
        on_device = _device_stretches(events, profile, by_thread, timeline, steps)
        busy += [(one.start_us, one.end_us) for _, one in on_device]
        spans += _device_spans(on_device, device, steps.timed, zero_us)
    host_device = HOST if profile.on_gpus else 0
    spans += _host_spans(timeline, union(busy), steps.timed, zero_us, host_device)
    began = [step_at(steps.host, one.start_us) for one in timeline if one.phase is Phase.BACKWARD]
    missing = sum(event.correlation not in profile.launches for event in profile.device)
    return Attributed(
        names=tuple(step.name for step in steps.timed),
        steps=tuple(
            Step((one.end_us - one.start_us) / 1e6, not one.whole, (one.end_us - zero_us) / 1e6)
            for one in steps.timed
        ),
        spans=tuple(sorted(spans, key=lambda span: (span.step, span.start_s))),
        host=_by_phase(timeline, steps.host),
        ahead_s=tuple(
            (timed.end_us - host.end_us) / 1e6
            for timed, host in zip(steps.timed, steps.host, strict=True)
            if steps.by_device
        ),
        activities=tuple(
            Activity(
                device=one.device,
                name=one.name,
                start_s=(one.start_us - zero_us) / 1e6,
                end_s=(one.end_us - zero_us) / 1e6,
                collective=one.collective,
            )
            for one in profile.device
        ),
        unlaunched=missing - len(launched_before(profile)),
        updates=Counter(
            update["name"]
            for event in threads.get(main, ())
            if (update := UPDATE.match(event.name))
            and step_at(steps.host, event.start_us) is not None
        ),
        backwards=tuple(began.count(number) for number in range(len(steps.host))),
        notes=steps.notes,
    )


def threads_of(host: Iterable[HostEvent]) -> dict[str, list[HostEvent]]:
    """Return the events of each thread by start, an event before the events inside it."""
    by_thread: dict[str, list[HostEvent]] = {}
    for event in host:
        by_thread.setdefault(event.thread, []).append(event)
    for events in by_thread.values():
        events.sort(key=lambda event: (event.start_us, -event.end_us))
    return by_thread


def _main_thread(threads: Mapping[str, Sequence[HostEvent]]) -> str:
    """Return the name of the thread that runs the training loop, "" for a trace without threads.

    It has the most step annotations; at equal numbers, the most annotations of optimizers and
    DataLoaders, then the most events outside backward.
    """

    def evidence(name: str) -> tuple[int, int, int]:
        steps = sum(1 for event in threads[name] if STEP.match(event.name))
        updates = sum(
            1 for event in threads[name] if UPDATE.match(event.name) or LOADER.match(event.name)
        )
        return steps, updates, sum(1 for event in threads[name] if not event.backward)

    return max(threads, key=evidence, default="")


def _copied(profile: TraceEvents) -> dict[str, dict[float, Phase]]:
    """Return the phase of each call that copies between host and device, by thread and start."""
    phases: dict[str, dict[float, Phase]] = {}
    for event in profile.device:
        launch = profile.launches.get(event.correlation)
        phase = phase_of_copy(event.name)
        if launch and phase:
            phases.setdefault(launch.thread, {})[launch.start_us] = phase
    return phases


def _timeline(
    by_thread: Mapping[str, Sequence[Stretch]], main: str, steps: Sequence[NamedStep]
) -> list[Stretch]:
    """Return the stretches of the training loop in order of time.

    They are those of the thread `main` and, while it is in no phase, the backward and reduce of
    other threads, for which it waits. Neighbouring stretches of one phase within a step are joined,
    with the Python code between them.
    """
    timeline = list(by_thread.get(main, ()))
    taken = union((stretch.start_us, stretch.end_us) for stretch in timeline)
    waited: dict[Phase, list[Interval]] = {}
    for thread, others in by_thread.items():
        for stretch in others if thread != main else ():
            if stretch.phase in (Phase.BACKWARD, Phase.REDUCE):
                waited.setdefault(stretch.phase, []).append((stretch.start_us, stretch.end_us))
    for phase, intervals in waited.items():
        waits = [Stretch(start, end, phase) for start, end in difference(union(intervals), taken)]
        timeline += waits
        taken = union([*taken, *((stretch.start_us, stretch.end_us) for stretch in waits)])
    joined: list[Stretch] = []
    for stretch in sorted(timeline):
        last = joined[-1] if joined else None
        if (
            last
            and last.phase is stretch.phase
            and step_at(steps, last.start_us) == step_at(steps, stretch.start_us)
        ):
            joined[-1] = last._replace(end_us=max(last.end_us, stretch.end_us))
        else:
            joined.append(stretch)
    return joined


def _at(stretches: Sequence[Stretch], at_us: float) -> Stretch | None:
    place = bisect_right(stretches, at_us, key=lambda one: one.start_us) - 1
    return stretches[place] if place >= 0 and at_us <= stretches[place].end_us else None


def _device_stretches(
    events: Sequence[DeviceEvent],
    profile: TraceEvents,
    by_thread: Mapping[str, Sequence[Stretch]],
    timeline: Sequence[Stretch],
    steps: TraceSteps,
) -> list[tuple[int | None, Stretch]]:
    """Return the stretches on one device, each with the index of the step that launched it.

    The index is None if no step launched it, if its launch is unknown, and if the steps are
    intervals of the host.
    """
    computed: defaultdict[_Group, list[Interval]] = defaultdict(list)
    beside: defaultdict[_Group, list[Interval]] = defaultdict(list)
    for event in events:
        kind = event.kind
        launch = profile.launches.get(event.correlation)
        number = stretch = own = None
        if launch is not None:
            number = step_at(steps.host, launch.start_us) if steps.by_device else None
            stretch = _at(timeline, launch.start_us)
            own = _at(by_thread.get(launch.thread, ()), launch.start_us) or stretch
        launched = own.phase if own else None
        phase = phase_of_copy(event.name)
        if kind is Kind.COMMUNICATION:
            phase = phase_of_collective(event.name, event.collective)
        apart = kind is Kind.COMMUNICATION and phase is not None and phase is not launched
        if not apart and (
            kind is not Kind.COPY or phase is None or launched not in (None, Phase.FORWARD)
        ):
            phase = launched
        group = _Group(number, stretch, phase, apart)
        active = computed if kind is Kind.COMPUTE else beside
        active[group].append((event.start_us, event.end_us))
    return list(_split(computed, beside))


class _Group(NamedTuple):
    """The activities that one stretch of the host launched in one phase: step, stretch and phase.

    `apart` is whether they are collectives that count for another phase than that of the stretch.
    """

    number: int | None
    stretch: Stretch | None
    phase: Phase | None
    apart: bool


def _split(
    computed: Mapping[_Group, Sequence[Interval]], beside: Mapping[_Group, Sequence[Interval]]
) -> Iterator[tuple[int | None, Stretch]]:
    """Yield the stretches on one device, each with the index of its step.

    Copies and collectives (`beside`) count where no kernel computes. A group lasts from its first
    to its last activity, but for the time in which only other groups are active.
    """
    computing = union(one for intervals in computed.values() for one in intervals)
    active = {}
    for group in {**computed, **beside}:
        alone = [
            part
            for one in union(beside.get(group, ()))
            for part in difference([one], overlapping(computing, one))
        ]
        active[group] = union([*computed.get(group, ()), *alone])
    every = union(one for intervals in active.values() for one in intervals)
    for (number, _, phase, apart), own in active.items():
        if phase is None or not own:
            continue
        parts = own
        if not apart:
            hull = own[0][0], own[-1][1]
            parts = difference([hull], difference(overlapping(every, hull), own))
        for start_us, end_us in parts:
            yield number, Stretch(start_us, end_us, phase)


def _pieces(stretch: Stretch, steps: Sequence[NamedStep]) -> Iterator[tuple[int, float, float]]:
    """Yield the step's index, the start and the end (us) of each part of a stretch in a step."""
    place = max(0, bisect_right(steps, stretch.start_us, key=lambda step: step.start_us) - 1)
    for number in range(place, len(steps)):
        step = steps[number]
        if step.start_us >= stretch.end_us:
            return
        start_us, end_us = max(stretch.start_us, step.start_us), min(stretch.end_us, step.end_us)
        if start_us < end_us:
            yield number, start_us, end_us


def _spans(
    stretches: Iterable[Stretch], device: int, steps: Sequence[NamedStep], zero_us: float
) -> Iterator[Span]:
    clock = "host" if device == HOST else "cuda_event"
    for stretch in stretches:
        for number, start_us, end_us in _pieces(stretch, steps):
            start_s, end_s = (start_us - zero_us) / 1e6, (end_us - zero_us) / 1e6
            yield Span(number, stretch.phase, device, clock, start_s, end_s)


def _device_spans(
    stretches: Iterable[tuple[int | None, Stretch]],
    device: int,
    steps: Sequence[NamedStep],
    zero_us: float,
) -> Iterator[Span]:
    """Yield each stretch's span in the step of its index; without one, in that of its time."""
    for number, stretch in stretches:
        if number is None:
            yield from _spans([stretch], device, steps, zero_us)
            continue
        # it may run beside the step before
        start_us = max(stretch.start_us, steps[number].start_us)
        if start_us < stretch.end_us:
            start_s, end_s = (start_us - zero_us) / 1e6, (stretch.end_us - zero_us) / 1e6
            yield Span(number, stretch.phase, device, "cuda_event", start_s, end_s)


def _host_spans(
    timeline: Iterable[Stretch],
    busy: Sequence[Interval],
    steps: Sequence[NamedStep],
    zero_us: float,
    device: int,
) -> Iterator[Span]:
    """Yield the spans of the host: the parts of its phases in which no device works.

    The host continues before the devices have finished a phase. Their spans therefore show how long
    it takes, and the host's spans show when the devices waited for the host. `busy` is the union of
    the devices' spans and activities. `device` is the device of all spans except data.
    """
    for stretch in timeline:
        whole = stretch.start_us, stretch.end_us
        alone = difference([whole], overlapping(busy, whole))
        where = HOST if stretch.phase is Phase.DATA else device
        yield from _spans(
            (Stretch(start, end, stretch.phase) for start, end in alone), where, steps, zero_us
        )


def _by_phase(
    timeline: Iterable[Stretch], steps: Sequence[NamedStep]
) -> tuple[dict[str, float], ...]:
    by_step: list[dict[Phase, float]] = [{} for _ in steps]
    for stretch in timeline:
        for number, start_us, end_us in _pieces(stretch, steps):
            by_step[number][stretch.phase] = (
                by_step[number].get(stretch.phase, 0.0) + (end_us - start_us) / 1e6
            )
    return tuple(
        {phase.value: seconds[phase] for phase in Phase if phase in seconds} for seconds in by_step
    )
