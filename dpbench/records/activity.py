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


RUNTIME = "cuda_runtime"
CALLS = frozenset({RUNTIME, "cuda_driver", "runtime", "hip_runtime", "xpu_runtime", "mtia_runtime"})
"""The types that profiles of torch give to the host's calls to a device, also those of old ones.

A call of these types launches the activities that have its correlation id, whatever its name is.
"""
_COMMUNICATION = re.compile(
    # a kernel's name without parameters and arguments; or a copy between two GPUs
    r"(?:void\s+)?(?:[\w:]|\(anonymous namespace\))*"
    r"(?:[nr]ccl|msccl|oneccl|userbuffers|cross_device_reduce|all_?reduce|all_?gather"
    r"|reduce_?scatter|all_?to_?all)"
    r"|Memcpy (?:PtoP|P2P)",
    re.IGNORECASE,
)
_COLLECTIVE = re.compile(
    # torch's annotations, such as nccl:all_reduce, its operators, and those of inference engines
    r"(?:\w*ccl|gloo|mpi|ucc):(?!:)|record_param_comms\b|(?:c10d|_c10d_functional\w*|symm_mem)::"
    r"|(?!aten::)\w+::\w*(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)",
    re.IGNORECASE,
)
_COPY = re.compile(r"Memcpy|Memset|dma")
_LAUNCH = re.compile(r"Launch(?:Cooperative)?Kernel|GraphLaunch")
_OVERLAPS = re.compile(r"GraphLaunch|LaunchKernelEx")
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
CLOCKS_AGREE_S = 100e-6
"""The seconds by which a profiler's clocks of the host and of a GPU may differ.

Up to 9 µs were published; records with wrong times are milliseconds off.
"""
RANK_WAIT = "rank_wait_s"
"""The metric of a device in one collective: the seconds in which its rank waits for the last."""
EXPOSED_REDUCTION = "exposed_reduction_s"
"""The metric of a rank's device in one step: the exposed seconds of reducing gradients."""


@lru_cache(maxsize=4096)
def kind_of(name: str, collective: str = "") -> Kind:
    """Return the kind of an activity from its name in a profile of torch.

    `collective` is the name of the collective that launched it, "" if none is known to have. It
    decides for kernels, because libraries other than NCCL give them any name.
    """
    if _COPY.match(name):
        return Kind.COMMUNICATION if _COMMUNICATION.match(name) else Kind.COPY
    return Kind.COMMUNICATION if collective or _COMMUNICATION.match(name) else Kind.COMPUTE


@lru_cache(maxsize=4096)
def phase_of_collective(name: str, collective: str = "") -> Phase | None:
    """Return the phase of a collective, whichever phase launched it.

    `collective` is its name, "" if unknown; else the `name` of the kernel tells. All-gather and
    broadcast count as `replicate`, all-reduce and reduce-scatter as `reduce`. None for others, such
    as all-to-all, which count for the phase that launched them.
    """
    for one in (collective, name):
        if _SHARES.search(one):
            return Phase.REPLICATE
        if _REDUCES.search(one):
            return Phase.REDUCE
    return None


class Operator(NamedTuple):
    """One operator or annotation of a host thread."""

    start: float
    end: float
    name: str


class Operators:
    """The operators of one thread, which tell the collective that makes a launch."""

    def __init__(self, operators: Iterable[Operator]) -> None:
        # an operator before those inside it
        self._all = sorted(operators, key=lambda one: (one.start, -one.end))
        self._outer: list[int] = []
        outer = -1
        for number, one in enumerate(self._all):
            while outer >= 0 and self._all[outer].end < one.end:
                outer = self._outer[outer]
            self._outer.append(outer)
            outer = number

    def collective(self, at: float) -> str:
        """Return the name of the collective that makes a launch at a time, "" if none does.

        A collective may also run other operators, such as a copy, whose launches are not its own.
        Of a collective's operators, the innermost one that names it counts.
        """
        place = bisect_right(self._all, at, key=lambda one: one.start) - 1
        names: list[str] = []
        while place >= 0:
            if self._all[place].end >= at:
                if not _COLLECTIVE.match(self._all[place].name):
                    break
                names.append(self._all[place].name)
            place = self._outer[place]
        return next(filter(phase_of_collective, names), next(iter(names), ""))


def launches_kernels(call: str) -> bool:
    """Return whether a call of the host to CUDA launches kernels, from its name in a profile."""
    return bool(_LAUNCH.search(call))


def may_overlap(call: str) -> bool:
    """Return whether the kernels of a call may begin before earlier ones on their stream end.

    Those of a graph may, and those launched with programmatic dependent launch.
    """
    return bool(_OVERLAPS.search(call))


class Activity(NamedTuple):
    """One kernel, copy or collective on a device; `name` is that in the profile.

    `collective` is the name of the collective that launched it, "" if none is known to have.
    """

    device: int
    name: str
    start_s: float
    end_s: float
    collective: str = ""

    @property
    def kind(self) -> Kind:
        """Return the kind of the activity."""
        return kind_of(self.name, self.collective)


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
    for one in activities:
        kinds = by_device.setdefault(one.device, {kind: [] for kind in Kind})
        kinds[one.kind].append((one.start_s, one.end_s))
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
