"""Events: when jobs on resources begin and end.

A job waits for the end of the jobs in `after` and for the start of those in `overlap`, and never
ends before the latter. From start to end, it occupies a resource that serves one job at a time (a
stream, a thread). It first works for its `seconds`, and then moves its `amount` as a flow over
resources that all flows share fairly (links, the interpreter lock). All flow rates are recalculated
when a flow begins or ends.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True)
class SimulatedJob:
    """A job that works for `seconds` and then moves `amount` over the shared resources in `way`.

    `resource` serves one job at a time; "" means none. `amount` is in bytes on links and in seconds
    on the interpreter lock. `after` and `overlap` are indices into the list of jobs; see the
    module.
    """

    seconds: float
    resource: str = ""
    amount: float = 0.0
    way: tuple[object, ...] = ()
    after: tuple[int, ...] = ()
    overlap: tuple[int, ...] = ()


def simulate(
    jobs: Sequence[SimulatedJob], capacity: Mapping[object, float]
) -> list[tuple[float, float]]:
    """Return (start, end) of each job, in seconds from the start of the simulation.

    `capacity` maps each shared resource to its amount per second. Raises ValueError if jobs wait
    for each other in a cycle.
    """
    run = _Run(jobs, capacity)
    run.go()
    if left := [number for number, (_, end) in enumerate(run.times) if math.isnan(end)]:
        raise ValueError(
            f"jobs {left[:5]} of {len(jobs)} wait for each other in a cycle, so they never end;"
            " remove one of the dependencies in their `after` and `overlap`"
        )
    return run.times


class _Run:
    def __init__(self, jobs: Sequence[SimulatedJob], capacity: Mapping[object, float]) -> None:
        self._jobs = jobs
        self._capacity = capacity
        self.times = [(math.nan, math.nan)] * len(jobs)
        self._waits = [len(job.after) + len(job.overlap) for job in jobs]
        self._beside = [len(job.overlap) for job in jobs]
        self._worked = [False] * len(jobs)
        self._followers: list[list[int]] = [[] for _ in jobs]
        self._companions: list[list[int]] = [[] for _ in jobs]
        for number, job in enumerate(jobs):
            for dependency in job.after:
                self._followers[dependency].append(number)
            for dependency in job.overlap:
                self._companions[dependency].append(number)
        self._now = 0.0
        self._ends: list[tuple[float, int]] = []
        self._busy: set[str] = set()
        self._queues: dict[str, deque[int]] = {}
        self._left: dict[int, float] = {}
        self._rates: dict[int, float] = {}

    def go(self) -> None:
        for number in [number for number, waits in enumerate(self._waits) if not waits]:
            self._ready(number)  # may release other jobs
        while self._ends or self._left:
            flow, at_flow = self._next_flow()
            at_job = self._ends[0][0] if self._ends else math.inf
            self._advance(min(at_flow, at_job))
            if at_job <= at_flow:
                self._served(heapq.heappop(self._ends)[1])
            else:
                del self._left[flow]
                self._rates = {}
                self._done(flow)

    def _next_flow(self) -> tuple[int, float]:
        """Return the job whose flow ends next, and that time; (-1, inf) without flows."""
        if not self._left:
            return -1, math.inf
        if not self._rates:
            self._rates = rates(
                {number: self._jobs[number].way for number in self._left}, self._capacity
            )
        flow = min(self._left, key=lambda number: self._left[number] / self._rates[number])
        return flow, self._now + self._left[flow] / self._rates[flow]

    def _advance(self, now: float) -> None:
        for number in self._left:
            self._left[number] = max(
                0.0, self._left[number] - self._rates[number] * (now - self._now)
            )
        self._now = now

    def _ready(self, number: int) -> None:
        """Start a job, or queue it if its resource is busy."""
        resource = self._jobs[number].resource
        if resource in self._busy:
            self._queues.setdefault(resource, deque()).append(number)
        else:
            self._start(number)

    def _start(self, number: int) -> None:
        job = self._jobs[number]
        if job.resource:
            self._busy.add(job.resource)
        self.times[number] = (self._now, math.nan)
        heapq.heappush(self._ends, (self._now + job.seconds, number))
        for other in self._companions[number]:
            self._release(other)

    def _release(self, number: int) -> None:
        self._waits[number] -= 1
        if not self._waits[number]:
            self._ready(number)

    def _served(self, number: int) -> None:
        """Start the flow of a job whose `seconds` have passed."""
        job = self._jobs[number]
        if job.amount > 0 and job.way:
            self._left[number] = job.amount
            self._rates = {}
        else:
            self._done(number)

    def _done(self, number: int) -> None:
        """End a job whose work is done, once all jobs in its `overlap` have ended."""
        self._worked[number] = True
        if not self._beside[number]:
            self._end(number)

    def _end(self, number: int) -> None:
        job = self._jobs[number]
        self.times[number] = (self.times[number][0], self._now)
        if job.resource:
            self._busy.discard(job.resource)
            if queue := self._queues.get(job.resource):
                self._start(queue.popleft())
        for other in self._followers[number]:
            self._release(other)
        for other in self._companions[number]:
            self._beside[other] -= 1
            if self._worked[other] and not self._beside[other]:
                self._end(other)


Flow = TypeVar("Flow", bound=Hashable)
Resource = TypeVar("Resource", bound=Hashable)


def rates(
    flows: Mapping[Flow, Sequence[Resource]], capacity: Mapping[Resource, float]
) -> dict[Flow, float]:
    """Return the max-min fair rate of each flow: a rate can rise only if one no larger falls.

    `flows` maps each flow to its resources, and `capacity` each resource to its total rate. By
    progressive filling, all rates grow together until a resource is full, which fixes the rates of
    its flows; the others continue to grow.
    """
    left = dict(capacity)
    crossing: dict[Resource, set[Flow]] = {}
    for flow, way in flows.items():
        for resource in way:
            crossing.setdefault(resource, set()).add(flow)
    fixed: dict[Flow, float] = {}
    while crossing:
        full = min(crossing, key=lambda resource: left[resource] / len(crossing[resource]))
        share = left[full] / len(crossing[full])
        for flow in tuple(crossing[full]):
            fixed[flow] = share
            for resource in flows[flow]:
                left[resource] = max(0.0, left[resource] - share)
                crossing[resource].discard(flow)
        crossing = {resource: users for resource, users in crossing.items() if users}
    return fixed
