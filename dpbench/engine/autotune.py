"""Autotune: choose between a thread pool and no threads by timing both in the first training steps."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from dpbench.hardware.device import Device
from dpbench.records import Mark, Phase
from dpbench.records.schedule import Schedule
from dpbench.records.words import time as duration

PAUSE, SKIP, BLOCK = 2, 1, 3
"""Counts of updates: PAUSE untimed ones at the start; in each block, SKIP untimed ones, then BLOCK timed ones."""
PAIRS = range(4, 9)
"""The choice can be made when the number of timed block pairs is in this range; it must be made at the last number."""
T95 = {4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
"""Student's t for a two-sided 95 % confidence interval, by the number of block pairs."""
ALIKE = 0.02
"""Running without threads must save more than this fraction of an update's time; otherwise the pool is kept."""
WORK = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER)
"""The phases that also exist in training on one device."""


class Autotuner:
    """The choice between a pool of threads and no threads, made by timing both in the first updates.

    The pool is faster if kernels are long; if kernels are short, its threads compete for the interpreter lock. The
    choice does not change any result. The two candidates run in blocks of updates, in ABBA order, so that a drift of
    the machine's speed cancels. Two neighbouring blocks form a pair. The choice depends on the median, over the pairs,
    of the ratio of the two candidates' times. The choice is made as soon as the confidence interval of the ratios
    excludes 1, at the latest after the last pair. The time of an update includes all calls of a gradient accumulation.
    `advice` is a message if training on one CPU device is likely to be faster, otherwise "".
    """

    def __init__(self, schedule: Schedule, devices: Sequence[Device]) -> None:
        self.schedule, self._devices = schedule, devices
        self._on_host = devices[0].torch_device.type == "cpu"
        self._candidates = (schedule, replace(schedule, workers="serial"))
        self._running = schedule
        self._blocks: list[tuple[int, list[float]]] = []
        self._works_s: list[float] = []
        self._order = self._turns()
        self._counts, self._update_s, self._work_s = False, 0.0, 0.0
        self.settled = len(devices) == 1
        self.advice = ""

    def _turns(self) -> Iterator[tuple[int, bool]]:
        """Yield, for each update, the index of the candidate that runs it, and whether the update is timed."""
        for _ in range(PAUSE):
            yield 0, False
        for pair in range(PAIRS.stop - 1):
            for candidate in (0, 1) if pair % 2 == 0 else (1, 0):
                self._blocks.append((candidate, []))
                for number in range(SKIP + BLOCK):
                    yield candidate, number >= SKIP

    def next(self) -> Schedule:
        """Return the schedule of the update that begins now."""
        self._count()
        if not self.settled:
            turn = next(self._order, None)
            if turn is None or self._is_decided():
                self._settle()
            else:
                candidate, self._counts = turn
                self._running = self._candidates[candidate]
        return self._running

    def _count(self) -> None:
        """Store the time of the update that has just ended, if it was a timed one."""
        if self._counts:
            candidate, seconds = self._blocks[-1]
            seconds.append(self._update_s)
            if candidate == 1:
                self._works_s.append(self._work_s)
        self._counts, self._update_s, self._work_s = False, 0.0, 0.0

    def _ratios(self) -> list[float]:
        """Return, for each complete pair of blocks, the logarithm of (seconds with the pool / seconds without threads).

        The seconds of a block are the median over its timed updates.
        """
        pairs = [dict(self._blocks[i : i + 2]) for i in range(0, len(self._blocks) - 1, 2)]
        return [
            math.log(statistics.median(pair[0]) / statistics.median(pair[1])) for pair in pairs if pair[0] and pair[1]
        ]

    def _is_decided(self) -> bool:
        """Return whether a pair of blocks has just ended and the confidence interval of the log ratios excludes 0."""
        at_pair = len(self._blocks) % 2 == 1 and not self._blocks[-1][1]
        ratios = self._ratios() if at_pair else []
        return len(ratios) in PAIRS and abs(statistics.fmean(ratios)) > _half(ratios)

    def _settle(self) -> None:
        """Choose the candidate for all later updates; set `advice` if training on one device is likely to be faster."""
        self.settled, self._running = True, self.schedule
        ratios = self._ratios()
        if len(ratios) not in PAIRS:
            return  # too few pairs, because too many steps have failed
        chosen = int(statistics.median(ratios) > ALIKE)
        self._running = self._candidates[chosen]
        took_s = statistics.median(s for candidate, seconds in self._blocks if candidate == chosen for s in seconds)
        alone_s = statistics.median(self._works_s)
        if self._on_host and alone_s < took_s:
            self.advice = (
                f"one device is likely to be faster: about {duration(alone_s)} per update, estimated from the phases "
                f"that also exist in training on one device, whereas an update on {len(self._devices)} devices takes "
                f"{duration(took_s)}; train on one device"
            )

    @contextmanager
    def timed(self, mark: Mark) -> Iterator[Mark]:
        """Add the time spent inside the context to the current update's time; yield the mark to use inside.

        Once the choice is made, yield `mark` itself and time nothing.
        """
        if self.settled:
            yield mark
            return

        @contextmanager
        def watching(phase: Phase, device: int) -> Iterator[None]:
            start_s = time.perf_counter()
            with mark(phase, device):
                yield
            if phase in WORK:
                self._work_s += time.perf_counter() - start_s

        self._synchronize()
        start_s = time.perf_counter()
        try:
            yield watching if self._running.workers == "serial" and self._on_host else mark
        except BaseException:
            self._counts = False
            raise
        self._synchronize()
        self._update_s += time.perf_counter() - start_s

    def _synchronize(self) -> None:
        """Wait for all devices to finish their work."""
        for device in self._devices:
            device.synchronize()


def _half(ratios: Sequence[float]) -> float:
    """Return half the width of the 95 % confidence interval of the mean of `ratios`, which are log ratios."""
    return T95[len(ratios)] * statistics.stdev(ratios) / math.sqrt(len(ratios))
