"""Activity: arithmetic of time intervals, and the times in which a device is busy.

An activity is one kernel, copy or collective on a device; its kind is compute, copy or
communication. Activities of different streams overlap, so the time of a kind is the length of the
union of its intervals. Communication is exposed where no compute kernel runs at the same time: |C|
- |C and K|, with the unions C of the communication and K of the compute kernels. The functions on
intervals work with any unit of time.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from dpbench.records.case import Phase

Interval = tuple[float, float]
"""(start, end)."""


class Kind(StrEnum):
    """The kind of an activity of a device."""

    COMPUTE = "compute"
    COPY = "copy"
    """A copy between a device and the host or within a device, or a fill of memory."""
    COMMUNICATION = "communication"
    """A kernel of a collective, or a copy between two devices."""


_COMMUNICATION = re.compile(r"(?:void\s+)?\w*(?:nccl|rccl)|Memcpy (?:PtoP|P2P)", re.IGNORECASE)
_COPY = re.compile(r"Memcpy|Memset|dma")
_LAUNCH = re.compile(r"Launch(?:Cooperative)?Kernel|GraphLaunch")
_SHARES = re.compile(r"all_?gather|broadcast", re.IGNORECASE)
_REDUCES = re.compile(r"reduce", re.IGNORECASE)
KERNELS = "kernel_busy_s"
"""The metric of a device in one step: seconds of kernels and copies."""
COLLECTIVES = "collective_busy_s"
EXPOSED = "exposed_communication_s"
HOST_READS = "host_reads_s"
"""The metric of a device in one step: the seconds in which its host waited for a value of it."""
HOST_WAITS = "host_waits_s"
"""The same for all waits: for values, for copies to the device, and for a batch."""
RANK_WAIT = "rank_wait_s"
"""The metric of a device in one collective: the seconds in which its rank waits for the last."""
EXPOSED_REDUCTION = "exposed_reduction_s"
"""The metric of a rank's device in one step: the exposed seconds of reducing gradients."""


@lru_cache(maxsize=4096)
def kind_of(name: str) -> Kind:
    """Return the kind of an activity from its name in a profile of torch."""
    if _COMMUNICATION.match(name):
        return Kind.COMMUNICATION
    return Kind.COPY if _COPY.match(name) else Kind.COMPUTE


@lru_cache(maxsize=4096)
def phase_of_collective(name: str) -> Phase | None:
    """Return the phase of a collective from the name of its kernel, whichever phase launched it.

    All-gather and broadcast count as `replicate`, all-reduce and reduce-scatter as `reduce`. None
    for others, such as all-to-all, which count for the phase that launched them.
    """
    if _SHARES.search(name):
        return Phase.REPLICATE
    return Phase.REDUCE if _REDUCES.search(name) else None


def launches_kernels(call: str) -> bool:
    """Return whether a call of the host to CUDA launches kernels, from its name in a profile."""
    return bool(_LAUNCH.search(call))


class Activity(NamedTuple):
    """One kernel, copy or collective on a device; `name` is that in the profile."""

    device: int
    name: str
    start_s: float
    end_s: float


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint, non-empty intervals in order of time."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(disjoint: Iterable[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - start for start, end in disjoint)


def difference(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the parts of `first` that are not in `second`; both are results of `union`."""
    rest: list[Interval] = []
    j = 0
    for begin, end in first:
        start = begin
        while j < len(second) and second[j][1] <= start:
            j += 1
        k = j
        while k < len(second) and second[k][0] < end:
            if start < second[k][0]:
                rest.append((start, second[k][0]))
            start = max(start, second[k][1])
            k += 1
        if start < end:
            rest.append((start, end))
    return rest


def overlapping(disjoint: Sequence[Interval], interval: Interval) -> Sequence[Interval]:
    """Return the intervals in a result of `union` that overlap or touch an interval."""
    first = bisect_left(disjoint, interval[0], key=lambda one: one[1])
    last = bisect_right(disjoint, interval[1], key=lambda one: one[0])
    return disjoint[first:last]


@dataclass(frozen=True, kw_only=True)
class Busy:
    """The seconds in which a device computed, copied, communicated and was idle.

    `span_s` is the time from the device's first to its last activity. `compute_s`, `copies_s` and
    `communication_s` are the times with at least one activity of that kind; they may overlap.
    `exposed_*` are the parts of them without a compute kernel. `kernels_s` is the time with a
    compute kernel or copy, and `idle_s` the time without any activity.
    """

    span_s: float = 0.0
    compute_s: float = 0.0
    copies_s: float = 0.0
    exposed_copies_s: float = 0.0
    communication_s: float = 0.0
    exposed_communication_s: float = 0.0
    kernels_s: float = 0.0
    idle_s: float = 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """Return the seconds by metric, those of communication only if there was any."""
        found = {COLLECTIVES: self.communication_s, EXPOSED: self.exposed_communication_s}
        return {KERNELS: self.kernels_s} | (found if self.communication_s else {})


def busy(activities: Iterable[Activity]) -> dict[int, Busy]:
    """Return the `Busy` of each device with an activity."""
    by_device: dict[int, dict[Kind, list[Interval]]] = {}
    for device, name, start_s, end_s in activities:
        by_device.setdefault(device, {kind: [] for kind in Kind})[kind_of(name)].append(
            (start_s, end_s)
        )
    return {device: _busy(kinds) for device, kinds in sorted(by_device.items())}


def _busy(kinds: dict[Kind, list[Interval]]) -> Busy:
    compute, copies, communication = (union(kinds[kind]) for kind in Kind)
    kernels = union([*compute, *copies])
    every = union([*kernels, *communication])
    if not every:
        return Busy()
    span_s = every[-1][1] - every[0][0]
    return Busy(
        span_s=span_s,
        compute_s=length(compute),
        copies_s=length(copies),
        exposed_copies_s=length(difference(copies, compute)),
        communication_s=length(communication),
        exposed_communication_s=length(difference(communication, compute)),
        kernels_s=length(kernels),
        idle_s=max(0.0, span_s - length(every)),
    )
