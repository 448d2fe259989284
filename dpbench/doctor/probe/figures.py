"""Figures: the numbers that a probe measures, with range and method, and the timing of calls."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, replace
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


@dataclass(frozen=True)
class Timing:
    """The duration of one call in seconds: the typical one, and the 10th and 90th percentiles."""

    seconds: float
    low_s: float
    high_s: float


@dataclass(frozen=True)
class Figure:
    """One measured number of a machine. `name` ends with the unit; `how` describes the measurement.

    `value` is the median over `passes` passes. `low` and `high` are the smallest and the largest
    value of all passes; they include the ranges within the passes, from the 10th to the 90th
    percentile of the repetitions, where measured. They are None without any range.
    """

    name: str
    value: float
    how: str
    low: float | None = None
    high: float | None = None
    passes: int = 1


def over_passes(passes: Sequence[Sequence[Figure]]) -> tuple[Figure, ...]:
    """Return one figure per name, with the median and the range of its values over all passes."""
    by_name: dict[str, list[Figure]] = {}
    for figures in passes:
        for one in figures:
            by_name.setdefault(one.name, []).append(one)
    return tuple(_joined(each) for each in by_name.values())


def _joined(each: Sequence[Figure]) -> Figure:
    first = each[0]
    if len(each) == 1:
        return first
    edges = [edge for one in each for edge in (one.value, one.low, one.high) if edge is not None]
    value = statistics.median(one.value for one in each)
    return replace(first, value=value, low=min(edges), high=max(edges), passes=len(each))


def figure(name: str, spent: Timing, how: str, *, per: float = 1.0) -> Figure:
    """Return a figure of the seconds per operation; the timed call performs `per` operations."""
    return spread(name, [seconds / per for seconds in astuple(spent)], how)


def spread(name: str, values: Sequence[float], how: str) -> Figure:
    """Return a figure with the first of `values` as its value, and the range of all."""
    return Figure(name, values[0], how, min(values), max(values))


def timing(seconds: Sequence[float]) -> Timing:
    """Return the timing of repetitions that took `seconds`.

    The typical duration is the mean of the middle half, on which outliers have almost no effect.
    """
    low_s, high_s = np.percentile(seconds, [10, 90])
    typical_s = statistics.mean(middle_half(sorted(seconds)))
    return Timing(typical_s, min(typical_s, float(low_s)), max(typical_s, float(high_s)))


def time_call(work: Work, repeats: int = REPEATS, *, setting: Setting = nullcontext) -> Timing:
    """Return the timing of a call of `work` in the calling thread, in the context of `setting`.

    The first calls are warm-up and are not counted.
    """
    return time_together([work], repeats, setting=setting)


def time_together(
    works: Sequence[Work], repeats: int = REPEATS, *, setting: Setting = nullcontext
) -> Timing:
    """Return the timing of concurrent calls of all `works`, from the first start to the last end.

    Each runs in its own thread, in the context that `setting` returns; a single one runs in the
    calling thread.
    """
    loops = 1
    while (spent := _round(works, loops, setting)) < LOOP_S and loops < 1_000_000:
        loops = max(2 * loops, int(loops * LOOP_S / max(spent, 1e-9)))
    rounds = [_round(works, loops, setting) / loops for _ in range(repeats)]
    return timing(rounds)


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

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(ends) - min(begins)


def lines(points: Sequence[tuple[float, Timing]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the intercepts and slopes of lines through the typical, low and high durations.

    `points` are pairs of work and its timing. Intercepts are in seconds, slopes in seconds per unit
    of work, such as bytes.
    """
    edges = zip(*(astuple(spent) for _, spent in points), strict=True)
    work = [amount for amount, _ in points]
    fitted = [line([*zip(work, edge, strict=True)]) for edge in edges]
    starts, slopes = zip(*fitted, strict=True)
    return starts, slopes


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
