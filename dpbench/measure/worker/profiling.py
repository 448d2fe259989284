"""Profiling: a few more steps under torch.profiler, for the activities of the GPUs in each step.

The first records of a session may be lost or have wrong times, so a step that is not recorded warms
the profiler up. An activity belongs to the step in which the host launched it, which the profiler
tells by the number of the launching call (its correlation id). Devices are idle between two steps,
so every activity lies in the interval of its step, and equal steps have equally many kernels. Where
this does not hold, records are lost or wrong, and all figures of the profile are withheld.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch._C._profiler import _ExperimentalConfig

from dpbench.hardware.device import Device
from dpbench.measure.merging import PROFILED
from dpbench.records import words
from dpbench.records.activity import (
    Activity,
    Kind,
    kind_of,
    launches_kernels,
    phase_of_collective,
)

_CALLS = frozenset({"cuda_runtime", "cuda_driver"})
"""The types of calls of the host to CUDA; torch before 2.10 does not tell them."""
_CALL = re.compile(r"_*(?:cuda|cu|hip)[A-Z]")
"""The names of these calls."""
_COLLECTIVE = re.compile("nccl:")
"""How torch names a collective on the host, also with RCCL."""


class ProfilerFailed(Exception):
    """The profiler itself has failed, or its records are incomplete or wrong."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The GPUs' activities in each profiled step; `withheld` says why there are none."""

    steps: Sequence[Sequence[Activity]] = ()
    withheld: str = ""


class _Range(NamedTuple):
    start_s: float
    end_s: float


def profiled(step: Callable[[], object], devices: Sequence[Device], count: int) -> Profile:
    """Run one step that is not recorded and `count` profiled steps, and return their profile.

    If several replicas share a GPU, its activities have the device index of the first of them.
    Errors of the step, such as out of memory, are raised.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    try:
        events = _recorded(step, devices, count, activities=kinds).events() or ()
    except ProfilerFailed as error:
        return Profile(withheld=str(error))
    first = {device.torch_device.index: device.index for device in reversed(devices)}
    return by_step(events, first, count)


def trace(step: Callable[[], object], devices: Sequence[Device], path: Path) -> None:
    """Profile one step and write a Chrome trace with the operators of all threads to `path`.

    Errors of the profiler and of the file are only printed, because the trial is valid without.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # replicas run in other threads, which the profiler leaves out by default
        everywhere = _ExperimentalConfig(profile_all_threads=True)
    except (OSError, TypeError) as error:  # TypeError: this torch cannot profile all threads
        print(f"no trace was written to {path}: {error}", file=sys.stderr)
        return
    kinds = torch.profiler.supported_activities()
    try:
        recorded = _recorded(step, devices, 1, activities=kinds, experimental_config=everywhere)
        recorded.export_chrome_trace(str(path))
    except (ProfilerFailed, OSError) as error:
        print(f"no trace was written to {path}: {error}", file=sys.stderr)


def _recorded(
    step: Callable[[], object], devices: Sequence[Device], count: int, **options: Any
) -> torch.profiler.profile:
    """Take `1 + count` steps, and return a profiler that has recorded all but the first.

    Raises ProfilerFailed, after all steps, if the profiler fails: the other ranks take them, too.
    """
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=count, repeat=1)
    profiler = torch.profiler.profile(schedule=schedule, **options)
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


def by_step(events: Iterable[Any], first: Mapping[int, int], count: int) -> Profile:
    """Return the profile of `count` steps, from the events of torch.profiler.

    A host event named `PROFILED` encloses each step. `first` maps the CUDA ordinal of each GPU of
    the case to a device index; activities of other GPUs are left out.
    """
    try:
        return Profile(steps=_by_step(events, first, count))
    except ProfilerFailed as error:
        return Profile(withheld=str(error))


def _by_step(events: Iterable[Any], first: Mapping[int, int], count: int) -> list[list[Activity]]:
    events = list(events)
    steps = sorted(_range(one) for one in events if _on_host(one) and one.name == PROFILED)
    if len(steps) != count:
        raise ProfilerFailed(f"the profiler recorded {len(steps)} of {count} steps")
    found = [one for one in events if is_activity(one)]
    calls = {one.id: one for one in events if _is_call(one)}
    launched = {one.id for one in found}
    lost = sum(launches_kernels(call.name) for id, call in calls.items() if id not in launched)
    if lost:
        launches = words.count(lost, "launch", "launches")
        raise ProfilerFailed(f"the profiler recorded no kernel for {launches}")
    if not found:
        raise ProfilerFailed("the profiler recorded no work of the GPUs; it may not be permitted")
    collectives = sorted(
        (_range(one), one.name) for one in events if _on_host(one) and _COLLECTIVE.match(one.name)
    )
    within: list[list[Activity]] = [[] for _ in steps]
    for one in found:
        call = calls.get(one.id)
        if call is None and kind_of(one.name) is not Kind.COPY:
            raise ProfilerFailed(f"the profiler recorded no launch of the kernel {one.name}")
        # libraries copy and fill memory by calls that the profiler does not record
        launch = _range(one) if call is None else _range(call)
        place = bisect_right(steps, launch.start_s, key=lambda step: step.start_s) - 1
        if place < 0 or launch.start_s > steps[place].end_s or one.device_index not in first:
            continue
        start_s, end_s = _range(one)
        # the clocks of host and GPU agree to within the duration of a launch
        error_s = launch.end_s - launch.start_s
        if start_s < launch.start_s - error_s or end_s > steps[place].end_s + error_s:
            raise ProfilerFailed(
                f"the profiler recorded {one.name} outside the step that launched it"
            )
        name = _named(one.name, launch, collectives)
        within[place].append(Activity(first[one.device_index], name, start_s, end_s))
    kernels = [
        Counter(one.device for one in step if kind_of(one.name) is not Kind.COPY) for step in within
    ]
    if any(one != other for one, other in pairwise(kernels)):
        numbers = ", ".join(str(one.total()) for one in kernels)
        raise ProfilerFailed(f"the profiled steps have different numbers of kernels: {numbers}")
    return within


def _named(kernel: str, launch: _Range, collectives: Sequence[tuple[_Range, str]]) -> str:
    """Return a kernel's name or, if it names no collective, that of the collective launching it.

    RCCL, the library of AMD's GPUs, has one kernel for all collectives.
    """
    if kind_of(kernel) is not Kind.COMMUNICATION or phase_of_collective(kernel):
        return kernel
    around = (name for span, name in collectives if span.start_s <= launch.start_s <= span.end_s)
    return next(around, kernel)


def is_activity(event: Any) -> bool:
    """Return whether an event of torch.profiler is an activity of a GPU.

    Annotations also appear on the GPU's timeline, but include idle time.
    """
    return event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)


def _on_host(event: Any) -> bool:
    return bool(event.device_type == DeviceType.CPU)


def _is_call(event: Any) -> bool:
    """Return whether an event is a call to CUDA; operators have ids of their own."""
    kind = getattr(event, "activity_type", None)
    return _on_host(event) and bool(kind in _CALLS if kind else _CALL.match(event.name))


def _range(event: Any) -> _Range:
    return _Range(event.time_range.start / 1e6, event.time_range.end / 1e6)
