"""Activity: arithmetic of time intervals, and how long a device computes, copies, communicates and
is idle.

An activity is one kernel, copy or collective on a device; its kind is compute, copy or
communication. Activities of different streams overlap, so the time of a kind is the length of the
union of its intervals, and not their sum. Communication is exposed where no compute kernel runs at
the same time: |C| - |C and K|, with the union C of the communication and the union K of the compute
kernels. The functions on intervals work with any unit of time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from dpbench.records.case import Phase

Interval = tuple[float, float]
"""The start and the end of an interval of time."""


class Kind(StrEnum):
    """The kind of an activity of a device."""

    COMPUTE = "compute"
    COPY = "copy"
    """A copy between a device and the host or within a device, or a fill of memory."""
    COMMUNICATION = "communication"
    """A kernel of a collective, or a copy between two devices."""


_COMMUNICATION = re.compile(r"(?:void\s+)?\w*(?:nccl|rccl)|Memcpy (?:PtoP|P2P)", re.IGNORECASE)
_COPY = re.compile(r"Memcpy|Memset|dma")
_SHARES = re.compile(r"all_?gather|broadcast", re.IGNORECASE)
_REDUCES = re.compile(r"reduce", re.IGNORECASE)
KERNELS, COLLECTIVES, EXPOSED = "kernel_busy_s", "collective_busy_s", "exposed_communication_s"
"""The metrics of a device in one step: seconds of kernels and copies, of communication, of exposed
communication.
"""
EXPOSED_REDUCTION = "exposed_reduction_s"
"""The metric of a rank's device in one step: the exposed seconds of the collectives that reduce
gradients.
"""


@lru_cache(maxsize=4096)
def kind_of(name: str) -> Kind:
    """Return the kind of an activity from its name in a profile of torch."""
    if _COMMUNICATION.match(name):
        return Kind.COMMUNICATION
    return Kind.COPY if _COPY.match(name) else Kind.COMPUTE


@lru_cache(maxsize=4096)
def phase_of_collective(name: str) -> Phase | None:
    """Return the phase of a collective from the name of its kernel, whichever phase launched the
    kernel.

    All-gather and broadcast count as `replicate`, all-reduce and reduce-scatter as `reduce`. Return
    None for other collectives, such as all-to-all, which count for the phase that launched them.
    """
    if _SHARES.search(name):
        return Phase.REPLICATE
    return Phase.REDUCE if _REDUCES.search(name) else None


class Activity(NamedTuple):
    """One kernel, copy or collective on a device: its name in the profile, and its start and its
    end in seconds.
    """

    device: int
    name: str
    start_s: float
    end_s: float


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint intervals in order of time.

    Empty intervals are left out.
    """
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
    """Return the total length of disjoint intervals, in their unit of time."""
    return sum(end - start for start, end in disjoint)


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of `one` and `other`, which are results of `union`."""
    common: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            common.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the parts of `one` that are not in `other`; both are results of `union`."""
    rest: list[Interval] = []
    j = 0
    for first, end in one:
        start = first
        while j < len(other) and other[j][1] <= start:
            j += 1
        k = j
        while k < len(other) and other[k][0] < end:
            if start < other[k][0]:
                rest.append((start, other[k][0]))
            start = max(start, other[k][1])
            k += 1
        if start < end:
            rest.append((start, end))
    return rest


@dataclass(frozen=True, kw_only=True)
class Busy:
    """The seconds in which a device computed, copied, communicated and was idle; 0 without
    activities.

    `span_s` is the time from the device's first to its last activity. `compute_s`, `copies_s` and
    `communication_s` are the times with at least one activity of that kind; these times may
    overlap. `exposed_copies_s` and `exposed_communication_s` are the parts of these times in which
    the device ran no compute kernel. `kernels_s` is the time with at least one compute kernel or
    copy, and `idle_s` the time without any activity.
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
        """Return the device's seconds by metric.

        Metrics of communication are left out if there was none.
        """
        found = {COLLECTIVES: self.communication_s, EXPOSED: self.exposed_communication_s}
        return {KERNELS: self.kernels_s} | (found if self.communication_s else {})


def busy(activities: Iterable[Activity]) -> dict[int, Busy]:
    """Return the `Busy` of each device that has an activity, by the device's index."""
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
