"""Merging: make one trial from the parts that the ranks measured, on one or several machines."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dpbench.records import HOST, Case, Memory, Phase, Sample, Span, Trial, Verified, host_device
from dpbench.records.activity import (
    EXPOSED_REDUCTION,
    RANK_WAIT,
    Activity,
    Busy,
    Kind,
    busy,
    phase_of_collective,
)
from dpbench.records.facts import TrialHost, stated
from dpbench.records.registry import Reduction
from dpbench.records.trial import joined, matched_reductions

PROFILED = "profiled_step"
"""The clock name that annotates spans whose durations come from profiled steps."""


def merge(parts: Sequence[Trial], hosts: Sequence[TrialHost] = ()) -> Trial:
    """Merge the trials of all ranks of a case into one trial.

    `joined` merges the steps and the spans; all samples are kept, and on one machine, whose ranks
    have one clock, each rank's waits for the last one in a reduction are added. `hosts` are the
    machines of the ranks; it is empty if they share one. A machine's memory is the sum of its
    ranks' resident sets. The duration of each setup stage is that of the slowest rank, and the
    verification result is the worst. Ranks with unlike GPUs have no data sheet together.
    """
    if len(parts) == 1:
        return parts[0]
    steps, spans = joined(_without_waits(parts))
    reasons = [part.facts.no_profile for part in parts if part.facts.no_profile]
    changed = stated(no_profile=reasons[0]) if reasons else {}
    if any(part.facts.data_sheet != parts[0].facts.data_sheet for part in parts):
        changed |= stated(data_sheet=None)
    order = list(Verified)
    return replace(
        parts[0].adding(changed),
        verified=max((part.verified for part in parts), key=order.index),
        steps=steps,
        spans=spans,
        samples=(
            *(sample for part in parts for sample in part.samples),
            *([] if hosts else _arrivals(parts)),
        ),
        memory=(
            *(m for part in parts for m in part.memory if m.device != HOST),
            *_resident(parts, hosts),
        ),
        setup={
            stage: max(part.setup.get(stage, 0.0) for part in parts) for stage in parts[0].setup
        },
    )


def _arrivals(parts: Sequence[Trial]) -> Iterator[Sample]:
    """Yield each rank's wait for the last one in each reduction that the host's clock measured."""
    spans = [span for part in parts for span in part.spans if span.on_host]
    for alike in matched_reductions(spans):
        if len(alike) >= len(parts):
            yield from arrivals([(span.device, span.start_s, span.end_s) for span in alike])


def arrivals(ranks: Sequence[tuple[int, float, float]]) -> Iterator[Sample]:
    """Yield each rank's wait for the last one in a collective.

    `ranks` has the device of each rank, with the begin and the end of its collective in seconds.
    """
    last_s = max(begin_s for _, begin_s, _ in ranks)
    at_s = (last_s + max(end_s for _, _, end_s in ranks)) / 2  # its end may end the step
    for device, begin_s, _ in ranks:
        yield Sample(at_s, device, RANK_WAIT, last_s - begin_s)


def _without_waits(parts: Sequence[Trial]) -> list[Trial]:
    """Shorten the parts' profiled reductions by the waits for other ranks.

    In each profiled step, the rank that arrives last has the shortest reduction, because it does
    not wait; it has none if its compute hides all. The median of these shortest durations over all
    steps serves as the duration without waiting. Each longer reduction is shortened to it by a
    later start. If the profile of a rank is withheld, nobody knows which rank arrives last, and no
    part keeps its profiled reductions.
    """
    if any(part.facts.no_profile for part in parts):
        return [
            replace(part, spans=tuple(one for one in part.spans if one.clock != PROFILED))
            for part in parts
        ]
    each = [values for part in parts for values in part.readings(EXPOSED_REDUCTION).values()]
    if not each:
        return list(parts)
    reduction_s = statistics.median(min(step) for step in zip(*each, strict=False))

    def cut(span: Span) -> Span:
        return (
            replace(span, start_s=max(span.start_s, span.end_s - reduction_s))
            if span.clock == PROFILED
            else span
        )

    return [replace(part, spans=tuple(map(cut, part.spans))) for part in parts]


def _resident(parts: Sequence[Trial], hosts: Sequence[TrialHost]) -> Iterator[Memory]:
    """Yield one memory record per machine: the sum of its ranks' peak resident sets."""
    for number, ranks in enumerate([host.ranks for host in hosts] or [range(len(parts))]):
        found = [m.peak_bytes for rank in ranks for m in parts[rank].memory if m.device == HOST]
        yield Memory(host_device(number), sum(found), "rss")


def shifted(part: Trial, seconds: float) -> Trial:
    """Return a part with `seconds` added to all times, to convert to another machine's clock."""
    if not seconds:
        return part
    return replace(
        part,
        steps=tuple(replace(step, end_s=step.end_s + seconds) for step in part.steps),
        spans=tuple(
            replace(span, start_s=span.start_s + seconds, end_s=span.end_s + seconds)
            for span in part.spans
        ),
        # readings of a profiled step, which is outside the series, have time 0
        samples=tuple(
            replace(one, time_s=one.time_s + seconds) if one.time_s else one for one in part.samples
        ),
    )


def silent(case: Case, profile: Sequence[Sequence[Activity]]) -> bool:
    """Return whether a rank's profile lacks the collectives that reduce gradients in backward.

    dpbench may not recognise those of a library, and then takes them for compute. Ranks that share
    a GPU reduce through the host.
    """
    expected = _reduces_in_backward(case) and case.devices > 1 and case.placement == "spread"
    return expected and not any(one.kind is Kind.COMMUNICATION for step in profile for one in step)


def _reduces_in_backward(case: Case) -> bool:
    return case.traits.ranks and case.traits.reduction is Reduction.OVERLAPPED


def exposed_reductions(case: Case, profile: Sequence[Sequence[Activity]]) -> dict[int, list[float]]:
    """Return, by device, the seconds per profiled step during which it only reduces gradients.

    It runs no compute kernel at that time. `profile` has the activities of each profiled step. The
    result is empty for strategies that do not reduce gradients during backward.
    """
    if not _reduces_in_backward(case):
        return {}
    each = [
        # a broadcast of buffers is not a reduction
        busy(
            a
            for a in step
            if a.kind is Kind.COMPUTE or phase_of_collective(a.name, a.collective) is Phase.REDUCE
        )
        for step in profile
    ]
    return {
        device: [times.get(device, Busy()).exposed_communication_s for times in each]
        for device in sorted({device for times in each for device in times})
    }


def reductions(
    case: Case, spans: Sequence[Span], profile: Sequence[Sequence[Activity]]
) -> list[Span]:
    """Return a span of the phase `reduce` per timed step and device, from profiled steps.

    Its length is the median of the device's `exposed_reductions`, and it ends with the last
    backward of the step. The list is empty if `spans` already has the phase, and for strategies
    that do not reduce gradients during backward.
    """
    last = dict[tuple[int, int], Span]()
    exposed = {
        device: statistics.median(each)
        for device, each in exposed_reductions(case, profile).items()
    }
    for span in spans:
        if span.phase is Phase.REDUCE:
            return []
        if span.phase is Phase.BACKWARD:
            last[span.step, span.device] = max(
                span, last.get((span.step, span.device), span), key=lambda s: s.end_s
            )
    return [
        replace(
            backward,
            phase=Phase.REDUCE,
            clock=PROFILED,
            start_s=max(backward.start_s, backward.end_s - exposed[backward.device]),
        )
        for backward in last.values()
        if exposed.get(backward.device)
    ]
