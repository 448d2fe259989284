"""Figures: the numbers that a probe measures, and the timing of calls."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from scipy.optimize import nnls

from dpbench.hardware import processes
from dpbench.records.ledger import middle_half

Work = Callable[[], object]
Setting = Callable[[], AbstractContextManager[Any]]
"""Returns a context manager that each thread enters, as the grad mode is per thread."""
REPEATS = 9
"""The number of timed repetitions in each pass."""
LOOP_S = 4e-3
"""The least seconds of a repetition, which has several calls if they are shorter."""


Figure = tuple[str, float]
"""A measured number of a machine: its name, which ends with the unit, and its value."""


def typical(seconds: Sequence[float]) -> float:
    """Return the typical duration of repetitions that took `seconds`.

    It is the mean of the middle half, on which outliers have almost no effect.
    """
    return statistics.mean(middle_half(sorted(seconds)))


def time_call(work: Work, repeats: int = REPEATS, *, setting: Setting = nullcontext) -> float:
    """Return the seconds of a call of `work` in the calling thread, in the context of `setting`.

    The first calls are warm-up and are not counted.
    """
    return time_together([work], repeats, setting=setting)


def time_together(
    works: Sequence[Work], repeats: int = REPEATS, *, setting: Setting = nullcontext
) -> float:
    """Return the seconds of concurrent calls of all `works`, from the first start to the last end.

    Each runs in its own thread, in the context that `setting` returns; a single one runs in the
    calling thread.
    """
    loops = 1
    while (spent := _round(works, loops, setting)) < LOOP_S and loops < 1_000_000:
        loops = max(2 * loops, int(loops * LOOP_S / max(spent, 1e-9)))
    return typical([_round(works, loops, setting) / loops for _ in range(repeats)])


def _round(works: Sequence[Work], loops: int, setting: Setting) -> float:
    """Return the seconds of `loops` calls of each function, from first start to last end."""
    if len(works) == 1:
        with setting():
            begin = time.perf_counter()
            for _ in range(loops):
                works[0]()
            return time.perf_counter() - begin
    barrier = threading.Barrier(len(works))
    begins = [0.0] * len(works)
    ends = [0.0] * len(works)

    def run(i: int) -> None:
        processes.stay(i)
        work = works[i]
        with setting():
            barrier.wait()
            begins[i] = time.perf_counter()
            for _ in range(loops):
                work()
            ends[i] = time.perf_counter()

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(ends) - min(begins)


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the intercept, at least 0, and the slope, above 0, of the line through the points.

    The points are pairs of work and seconds; the line has the least squared relative errors. If
    noise makes the fitted slope 0, the slope is the smallest measured number of seconds per unit of
    work, and only the intercept is fitted.
    """
    design = np.array([[1 / seconds, work / seconds] for work, seconds in points])
    scale = np.abs(design).max(axis=0)
    (start, slope), _ = nnls(design / scale, np.ones(len(points)))
    if slope > 0:
        return float(start / scale[0]), float(slope / scale[1])
    least = min(seconds / work for work, seconds in points)
    (start,), _ = nnls(design[:, :1] / scale[0], 1 - design[:, 1] * least)
    return float(start / scale[0]), least
