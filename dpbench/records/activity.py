"""Activity: arithmetic of time intervals, and how long a device computes, copies, communicates and is idle.

An activity is one kernel, copy or collective on a device. Activities of different streams overlap, so the time of a
kind is the length of the union of its intervals, and not their sum. Communication is exposed where no compute kernel
runs at the same time: |C| - |C and K|, with the union C of the communication and the union K of the compute kernels.
The functions on intervals work with any unit of time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

Interval = tuple[float, float]
"""The start and the end of an interval of time."""


class Kind(StrEnum):
    """The kind of an activity of a device."""

    COMPUTE = "compute"
    COPY = "copy"
    """A copy between a device and the host or within a device, or a fill of memory."""
    COMMUNICATION = "communication"
    """A kernel of a collective, or a copy between two devices."""


class Activity(NamedTuple):
    """One kernel, copy or collective on a device, with its start and its end in seconds."""

    device: int
    kind: Kind
    start_s: float
    end_s: float


_COMMUNICATION = re.compile(r"(?:void\s+)?\w*(?:nccl|rccl)|Memcpy (?:PtoP|P2P)", re.IGNORECASE)
_COPY = re.compile(r"Memcpy|Memset|dma")


def kind_of(name: str) -> Kind:
    """Return the kind of the activity that a profiler of torch calls `name`."""
    if _COMMUNICATION.match(name):
        return Kind.COMMUNICATION
    return Kind.COPY if _COPY.match(name) else Kind.COMPUTE


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint intervals in order of time; empty intervals are left out."""
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
    """Return the parts that lie in both of two unions, which `union` returned."""
    found: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the parts of the union `one` that do not lie in the union `other`; `union` returned both."""
    found: list[Interval] = []
    j = 0
    for first, end in one:
        start = first
        while j < len(other) and other[j][1] <= start:
            j += 1
        k = j
        while k < len(other) and other[k][0] < end:
            if start < other[k][0]:
                found.append((start, other[k][0]))
            start = max(start, other[k][1])
            k += 1
        if start < end:
            found.append((start, end))
    return found


@dataclass(frozen=True, kw_only=True)
class Busy:
    """How a device spent the time `span_s` from its first to its last activity, in seconds.

    `compute_s`, `copies_s` and `communication_s` are the lengths of the unions of the activities of a kind; they may
    overlap. The exposed parts are those during which the device ran no compute kernel. `idle_s` is the time in which
    the device ran nothing.
    """

    span_s: float = 0.0
    compute_s: float = 0.0
    copies_s: float = 0.0
    exposed_copies_s: float = 0.0
    communication_s: float = 0.0
    exposed_communication_s: float = 0.0
    idle_s: float = 0.0


def busy(activities: Iterable[Activity]) -> dict[int, Busy]:
    """Return how each device spent the time from the first to the last of its activities, by device."""
    by_device: dict[int, dict[Kind, list[Interval]]] = {}
    for device, kind, start_s, end_s in activities:
        by_device.setdefault(device, {kind: [] for kind in Kind})[kind].append((start_s, end_s))
    return {device: _busy(kinds) for device, kinds in sorted(by_device.items())}


def _busy(kinds: dict[Kind, list[Interval]]) -> Busy:
    unions = {kind: union(intervals) for kind, intervals in kinds.items()}
    every = union(interval for intervals in unions.values() for interval in intervals)
    if not every:
        return Busy()
    compute, copies, communication = (unions[kind] for kind in Kind)
    span_s = every[-1][1] - every[0][0]
    return Busy(
        span_s=span_s,
        compute_s=length(compute),
        copies_s=length(copies),
        exposed_copies_s=length(difference(copies, compute)),
        communication_s=length(communication),
        exposed_communication_s=length(difference(communication, compute)),
        idle_s=max(0.0, span_s - length(every)),
    )
