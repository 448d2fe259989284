"""Profiling: a few more steps under torch.profiler, for the activities of the GPUs in each step.

The first records of a session may be lost or have wrong times, so a step that is not recorded warms
the profiler up. An activity belongs to the step in which the host launched it, which the profiler
tells by the number of the launching call (its correlation id). Devices are idle between two steps,
so every activity begins after its launch and ends before its step does, and equal steps have
equally many kernels. Where this does not hold, records are lost or wrong, and all figures of the
profile are withheld. The clock of a GPU may be up to `CLOCKS_AGREE_S` off the host's: its times
are then corrected.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler_util import FunctionEvent

from dpbench.hardware.device import Device
from dpbench.measure.merging import PROFILED
from dpbench.records import files, words
from dpbench.records.activity import (
    CALLS,
    CLOCKS_AGREE_S,
    RUNTIME,
    Activity,
    Kind,
    Operator,
    Operators,
    kind_of,
    launches_kernels,
)
from dpbench.records.grouping import grouped

_CALL = re.compile(r"_*(?:cuda|cu|hip)[A-Z]|INVALID$")
"""The names of the host's calls to CUDA.

INVALID is Kineto's name for those that it does not know, such as `__cudaLaunchKernel` of CUDA 13 in
torch 2.11.
"""


class ProfilerFailed(Exception):
    """The profiler itself has failed, or its records are incomplete or wrong."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The GPUs' activities in each profiled step; `withheld` says why there are none.

    `off_s` is the largest time in seconds by which an activity begins before its launch or ends
    after its step; below 0, all are inside by at least so much.
    """

    steps: Sequence[Sequence[Activity]] = ()
    withheld: str = ""
    off_s: float | None = None


class _Range(NamedTuple):
    start_s: float
    end_s: float


def profiled(step: Callable[[], object], devices: Sequence[Device], count: int) -> Profile:
    """Run one step that is not recorded and `count` profiled steps, and return their profile.

    If several replicas share a GPU, its activities have the device index of the first of them.
    Errors of the step, such as out of memory, are raised.
    """
    try:
        events = record(step, devices, count)
    except ProfilerFailed as error:
        return Profile(withheld=str(error))
    first = {device.torch_device.index: device.index for device in reversed(devices)}
    return by_step(events, first, count)


def record(
    step: Callable[[], object], devices: Sequence[Device], count: int, *, all_threads: bool = False
) -> Sequence[Any]:
    """Run one step that is not recorded and `count` others; return the events of torch.profiler.

    Operators and ranges of other threads are recorded with `all_threads` only. Raises
    ProfilerFailed, after all steps, if the profiler fails.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    options = {"experimental_config": _everywhere()} if all_threads else {}
    return _typed(_recorded(step, devices, count, activities=kinds, **options))


def _everywhere() -> _ExperimentalConfig:
    """Return the setting with which the profiler records all threads.

    By default, it leaves out those in which replicas run. Raises TypeError if this torch has no
    such setting.
    """
    return _ExperimentalConfig(profile_all_threads=True)


def trace(step: Callable[[], object], devices: Sequence[Device], path: Path) -> None:
    """Profile one step and write a Chrome trace with the operators of all threads to `path`.

    Errors of the profiler and of the file are only printed, because the trial is valid without.
    """
    try:
        everywhere = _everywhere()
    except TypeError as error:  # this torch cannot profile all threads
        print(f"no trace was written to {path}: {error}", file=sys.stderr)
        return
    kinds = torch.profiler.supported_activities()
    try:
        recorded = _recorded(step, devices, 1, activities=kinds, experimental_config=everywhere)
        with files.replacing(path) as part:
            recorded.export_chrome_trace(str(part))
    except (ProfilerFailed, OSError) as error:
        print(f"no trace was written to {path}: {error}", file=sys.stderr)


def _recorded(
    step: Callable[[], object], devices: Sequence[Device], count: int, **options: Any
) -> torch.profiler.profile:
    """Take `1 + count` steps, and return a profiler that has recorded all but the first.

    Raises ProfilerFailed, after all steps, if the profiler fails: the other ranks take them, too.
    """
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=count, repeat=1)
    # there is one cycle to keep; torch 2.11 warns even so that it would drop those before
    profiler = torch.profiler.profile(schedule=schedule, acc_events=True, **options)
    failures: list[RuntimeError] = []

    def control(call: Callable[[], object]) -> None:
        if failures:
            return
        try:
            call()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            failures.append(error)

    for device in devices:
        device.synchronize()
    control(profiler.start)
    try:
        for _ in range(1 + count):
            with torch.profiler.record_function(PROFILED):
                step()
                for device in devices:
                    device.synchronize()
            control(profiler.step)
    finally:
        control(profiler.stop)
    if failures:
        raise ProfilerFailed(f"torch.profiler failed: {failures[0]}") from failures[0]
    return profiler


def _typed(recorded: torch.profiler.profile) -> Sequence[Any]:
    """Return a profiler's events, with all calls to CUDA; these have a type.

    Torch 2.11 does not tell types, and not all calls have a name there. Kineto links each call to
    the operator that makes it, and links no operator.
    """
    events = list(recorded.events() or [])
    results = recorded.profiler and recorded.profiler.kineto_results
    if not results:
        return events
    known = [one for one in results.events() if one.device_type() == DeviceType.CPU]
    events += _left_out(known, results.trace_start_ns(), events)
    if all(hasattr(event, "activity_type") for event in events):
        return events
    linked = {
        (one.correlation_id(), one.name()) for one in known if one.linked_correlation_id() > 0
    }
    for event in events:
        if on_host(event) and (event.id, event.name) in linked:
            event.activity_type = RUNTIME
    return events


def _left_out(
    kineto: Iterable[Any], trace_start_ns: int, events: Iterable[Any]
) -> Iterator[FunctionEvent]:
    """Yield the calls to CUDA among Kineto's host events that torch leaves out of its events.

    Of two calls with one name, one within the other, torch takes the inner one for a duplicate. It
    is none if other threads made them, which torch does not profile.
    """
    known = {one.id for one in events if is_call(one)}
    for one in kineto:
        if not _CALL.match(one.name()) or one.correlation_id() in known:
            continue
        start_us = (one.start_ns() - trace_start_ns) / 1e3
        end_us = start_us + one.duration_ns() / 1e3
        call = FunctionEvent(
            one.correlation_id(), one.name(), one.start_thread_id(), start_us, end_us
        )
        call.activity_type = RUNTIME
        yield call


def by_step(events: Iterable[Any], first: Mapping[int, int], count: int) -> Profile:
    """Return the profile of `count` steps, from the events of torch.profiler.

    A host event named `PROFILED` encloses each step. `first` maps the CUDA ordinal of each GPU of
    the case to a device index; activities of other GPUs are left out.
    """
    try:
        return _by_step(events, first, count)
    except ProfilerFailed as error:
        return Profile(withheld=str(error))


def _by_step(events: Iterable[Any], first: Mapping[int, int], count: int) -> Profile:
    events = list(events)
    steps = sorted(_range(one) for one in events if on_host(one) and one.name == PROFILED)
    if len(steps) != count:
        raise ProfilerFailed(f"the profiler recorded {len(steps)} of {count} steps")
    found = [one for one in events if is_activity(one)]
    calls = {one.id: one for one in events if is_call(one)}
    launched = {one.id for one in found}
    # of a call without a name, nobody knows whether it launches kernels
    lost = sum(launches_kernels(call.name) for id, call in calls.items() if id not in launched)
    if lost:
        raise ProfilerFailed(
            f"the profiler recorded no kernel for {words.count(lost, 'launch', 'launches')}"
        )
    if not found:
        raise ProfilerFailed("the profiler recorded no work of the GPUs; it may not be permitted")
    operators = _operators(events)
    launches = {id: _range(call) for id, call in calls.items()}
    off = {
        gpu: _off([one for one in found if one.device_index == gpu], launches, steps)
        for gpu in first
    }
    within: list[list[Activity]] = [[] for _ in steps]
    for one in found:
        if one.id not in launches and kind_of(one.name) is not Kind.COPY:
            raise ProfilerFailed(f"the profiler recorded no launch of the kernel {one.name}")
        if one.device_index not in first:
            continue
        start_s, end_s = (at_s - off[one.device_index].ahead_s for at_s in _range(one))
        # libraries copy and fill memory by calls that the profiler does not record
        launch = launches.get(one.id, _Range(start_s, end_s))
        place = _place(launch, steps)
        if place is not None:
            thread = getattr(calls.get(one.id), "thread", 0)
            collective = _collective(launch.start_s, thread, operators)
            device = first[one.device_index]
            within[place].append(Activity(device, one.name, start_s, end_s, collective))
    kernels = [Counter(one.device for one in step if one.kind is not Kind.COPY) for step in within]
    if any(one != other for one, other in pairwise(kernels)):
        numbers = ", ".join(str(one.total()) for one in kernels)
        raise ProfilerFailed(f"the profiled steps have different numbers of kernels: {numbers}")
    known = [one.most_s for one in off.values() if one.most_s is not None]
    return Profile(steps=within, off_s=max(known, default=None))


def _place(launch: _Range, steps: Sequence[_Range]) -> int | None:
    """Return the index of the step in which a launch began; None if it is in no step."""
    place = bisect_right(steps, launch.start_s, key=lambda step: step.start_s) - 1
    return place if place >= 0 and launch.start_s <= steps[place].end_s else None


class _Off(NamedTuple):
    """How far a GPU's clock is ahead of the host's; `most_s` is `Profile.off_s` of this GPU."""

    ahead_s: float
    most_s: float | None


def _off(of_gpu: Iterable[Any], launches: Mapping[int, _Range], steps: Sequence[_Range]) -> _Off:
    """Return by how many seconds the clock of a GPU is ahead of the host's, as far as it shows.

    `of_gpu` are the GPU's activities. Each begins after its launch, and ends before its step, which
    waits for it. The result is the difference closest to 0 for which this holds, because a kernel
    that waits in a queue may begin any time after its launch. If it holds for none, the result is
    the one with the smallest error. Raises ProfilerFailed if an activity is more than
    `CLOCKS_AGREE_S` off.
    """
    early: list[tuple[float, str]] = []
    late: list[tuple[float, str]] = []
    for one in of_gpu:
        launch = launches.get(one.id)
        place = None if launch is None else _place(launch, steps)
        if launch is None or place is None:
            continue
        start_s, end_s = _range(one)
        early.append((launch.start_s - start_s, f"{one.name} begins {{}} before its launch"))
        late.append((end_s - steps[place].end_s, f"{one.name} ends {{}} after its step"))
    if not early:
        return _Off(0.0, None)
    off_s, told = max(*early, *late)
    if off_s > CLOCKS_AGREE_S:
        raise ProfilerFailed(
            f"{told.format(words.time(off_s))}, but the clocks of GPU and host may differ by at"
            f" most {words.time(CLOCKS_AGREE_S)}"
        )
    least_s, most_s = max(late)[0], -max(early)[0]
    ahead_s = (least_s + most_s) / 2 if least_s > most_s else min(max(0.0, least_s), most_s)
    return _Off(ahead_s, off_s)


def _operators(events: Iterable[Any]) -> dict[int, Operators]:
    """Return the operators of the host by thread; torch gives a call that of its operator."""
    return {
        thread: Operators(own)
        for thread, own in grouped(
            (getattr(one, "thread", 0), Operator(*_range(one), _named(one)))
            for one in events
            if on_host(one) and not is_call(one)
        ).items()
    }


def _collective(at_s: float, thread: int, operators: Mapping[int, Operators]) -> str:
    """Return the name of the collective that makes a launch, "" if none.

    Torch cannot tell the thread of a call that Kineto links to no operator: any may make it.
    """
    own = [operators[thread]] if thread in operators else operators.values()
    return next(filter(None, (one.collective(at_s) for one in own)), "")


def _named(operator: Any) -> str:
    """Return the name of an operator, with that of the collective which torch states for it.

    Torch 2.13 and later have it.
    """
    stated = getattr(getattr(operator, "event_metadata", None), "collective_name", None)
    return f"{operator.name} {stated}" if stated else str(operator.name)


def is_activity(event: Any) -> bool:
    """Return whether an event of torch.profiler is an activity of a GPU.

    Annotations also appear on the GPU's timeline, but include idle time.
    """
    return event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)


def on_host(event: Any) -> bool:
    """Return whether an event of torch.profiler is one of the host."""
    return bool(event.device_type == DeviceType.CPU)


def is_call(event: Any) -> bool:
    """Return whether an event is a call to CUDA; operators have ids of their own."""
    kind = getattr(event, "activity_type", None)
    return on_host(event) and bool(kind in CALLS if kind else _CALL.match(event.name))


def _range(event: Any) -> _Range:
    return _Range(event.time_range.start / 1e6, event.time_range.end / 1e6)
