"""Fastest: the best schedule that needs no tolerance, for this module, loss, optimizer and devices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dpbench.devices import Device
from dpbench.schedule import Schedule

PAUSE, PAIRS = 2, 6
"""Steps that no trial counts, and pairs of timed ones: two candidates settle within 14 steps."""


class Trials:
    """Takes turns between a pool of threads and none over the first steps, then settles for the faster.

    Threads win where kernels are long; where they are short, two threads cost each other the interpreter's lock. The
    choice moves no bit.
    """

    def __init__(self, schedule: Schedule, devices: Sequence[Device]) -> None:
        self._devices, self.schedule = devices, schedule
        self._candidates = [schedule, replace(schedule, workers="serial")] if len(devices) > 1 else [schedule]
        self._seconds: dict[str, list[float]] = {one.workers: [] for one in self._candidates}
        self._started_s: float | None = None
        self._running = schedule
        self._order = self._turns()
        self.settled = len(self._candidates) == 1

    def _turns(self) -> Iterator[tuple[Schedule, bool]]:
        """Yield which schedule runs next, and whether it counts."""
        for _ in range(PAUSE):
            yield self._candidates[0], False
        for _ in range(PAIRS):
            for one in self._candidates:
                yield one, True

    def next(self) -> Schedule:
        """Return the schedule of the step that begins now, having timed the one before."""
        if self.settled:
            return self._running
        for device in self._devices:
            device.synchronize()
        now_s = time.perf_counter()
        if self._started_s is not None:
            self._seconds[self._running.workers].append(now_s - self._started_s)
        turn = next(self._order, None)
        if turn is None:
            self.settled = True
            self._running = min(self._candidates, key=lambda one: statistics.median(self._seconds[one.workers]))
            return self._running
        self._running, counts = turn
        self._started_s = now_s if counts else None
        return self._running
