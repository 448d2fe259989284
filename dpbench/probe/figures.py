"""Figures: the measured numbers of a probe with their methods and spreads, and the timing of short calls."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from dpbench.hardware import processes
from dpbench.records.ledger import middle_half

Work = Callable[[], object]
After = Callable[[list[Any]], object]
Step = Callable[[], tuple[float, float, float]]
Setting = Callable[[], AbstractContextManager[Any]]
"""A context that each thread enters before its work, because state such as the grad mode is per thread."""
REPEATS = 9
"""The repetitions of a call in each pass."""
WARM = 3
"""The warm-up steps before the timed ones."""
LOOP_S = 4e-3
"""The minimum duration of a repetition in seconds.

Shorter work is repeated within one repetition, so that the cost of reading the clock is negligible.
"""


@dataclass(frozen=True)
class Timing:
    """The duration of one call in seconds: typical, and the 10th and 90th percentile over all repetitions."""

    seconds: float
    low_s: float
    high_s: float


@dataclass(frozen=True)
class Figure:
    """One measured number. `name` ends with the unit, and `how` describes the measurement.

    `value` is the median over the probe's `passes`. For a figure with repetitions, `low` is the lowest 10th percentile
    over the passes, and `high` the highest 90th percentile. For other figures they are the lowest and the highest value
    of several passes, or None after a single pass.
    """

    name: str
    value: float
    how: str
    low: float | None = None
    high: float | None = None
    passes: int = 1


def over_passes(passes: Sequence[Sequence[Figure]]) -> tuple[Figure, ...]:
    """Return the figures of all passes; figures with the same name are joined into one."""
    found: dict[str, list[Figure]] = {}
    for figures in passes:
        for one in figures:
            found.setdefault(one.name, []).append(one)
    return tuple(_joined(each) for each in found.values())


def _joined(each: Sequence[Figure]) -> Figure:
    """Return the values of one figure in several passes as one figure."""
    first, count = each[0], len(each)
    if count == 1:
        return first
    edges = [edge for one in each for edge in (one.value, one.low, one.high) if edge is not None]
    value = statistics.median(one.value for one in each)
    return replace(first, value=value, low=min(edges), high=max(edges), passes=count)


def figure(name: str, spent: Timing, how: str, *, per: float = 1.0) -> Figure:
    """Return a figure of the duration of one operation in seconds, from a call that performs `per` operations."""
    return spread(name, [seconds / per for seconds in astuple(spent)], how)


def rate(name: str, spent: Timing, how: str, *, amount: float) -> Figure:
    """Return a figure of a rate per second, from a call that processes `amount`."""
    return spread(name, [amount / seconds for seconds in astuple(spent)], how)


def ratio(name: str, beside: Timing, alone: Timing, how: str, *, share: float = 1.0) -> Figure:
    """Return a figure of a slowdown: the duration of concurrent calls over that of one call, divided by `share`."""
    pairs = ((beside.seconds, alone.seconds), (beside.low_s, alone.high_s), (beside.high_s, alone.low_s))
    return spread(name, [one / other / share for one, other in pairs], how)


def spread(name: str, values: Sequence[float], how: str) -> Figure:
    """Return a Figure whose value is the first of `values` and whose range is their minimum and maximum.

    The other values come from percentiles or from parts of the data.
    """
    return Figure(name, values[0], how, min(values), max(values))


def timing(seconds: Sequence[float]) -> Timing:
    """Return the typical duration and the 10th and 90th percentile of repetitions."""
    low_s, high_s = np.percentile(seconds, [10, 90])
    usual_s = typical(seconds)
    return Timing(usual_s, min(usual_s, float(low_s)), max(usual_s, float(high_s)))


def time_call(work: Work, repeats: int = REPEATS, *, setting: Setting = nullcontext) -> Timing:
    """Return the timing of a call that may be short; the first calls warm up and are not timed."""
    return time_together([work], repeats, setting=setting)


def time_together(works: Sequence[Work], repeats: int = REPEATS, *, setting: Setting = nullcontext) -> Timing:
    """Return the timing of concurrent calls under `setting`, from the first start to the last end.

    Each call has a separate thread; a single call runs in the calling thread.
    """
    loops = 1
    while (spent := _round(works, loops, setting)) < LOOP_S and loops < 1_000_000:
        loops = max(2 * loops, int(loops * LOOP_S / max(spent, 1e-9)))
    rounds = [_round(works, loops, setting) / loops for _ in range(repeats)]
    return timing(rounds)


def time_steps(steps: Sequence[Step], repeats: int) -> tuple[Timing, Timing]:
    """Return the timings of forward and of the whole step, for steps that run concurrently in persistent threads.

    A barrier starts each step in all threads at the same time. See `makespans` for the timings.
    """
    barrier = threading.Barrier(len(steps))
    found: list[list[tuple[float, float, float]]] = [[] for _ in steps]

    def run(i: int) -> None:
        processes.stay(i)
        for _ in range(WARM + repeats):
            barrier.wait()
            found[i].append(steps[i]())

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return makespans(found)


def makespans(found: Sequence[Sequence[tuple[float, float, float]]]) -> tuple[Timing, Timing]:
    """Return the timings of forward and of the whole step, for steps that several workers ran concurrently.

    `found` has, for each worker and step, the times at which the step began, its forward ended, and the step ended. As
    in the ledger, a duration lasts from the first worker's start to the last worker's end.
    """
    begins, forwards, ends = zip(*(zip(*together, strict=True) for together in zip(*found, strict=True)), strict=True)
    forward_s, whole_s = (
        [max(last) - min(first) for first, last in zip(begins, marks, strict=True)][WARM:] for marks in (forwards, ends)
    )
    return timing(forward_s), timing(whole_s)


def time_new_threads(works: Sequence[Work], repeats: int = REPEATS, after: After = lambda results: None) -> Timing:
    """Return the timing of calls that run concurrently, each in a thread that is started for that call.

    `after` receives the results outside the timed region, before the next call. Until then, the results stay in memory.
    """

    def once() -> float:
        results: list[Any] = [None] * len(works)

        def run(i: int) -> None:
            processes.stay(i)
            results[i] = works[i]()

        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begin
        after(results)
        return seconds

    once()
    return timing([once() for _ in range(repeats)])


def time_before(work: Work, repeats: int, after: After) -> Timing:
    """Return the timing of a call in this thread; `after` receives its result outside the timed region."""

    def once() -> float:
        begin = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - begin
        after([result])
        return seconds

    once()
    return timing([once() for _ in range(repeats)])


def typical(seconds: Sequence[float]) -> float:
    """Return the mean of the middle half of durations, which outliers hardly affect."""
    return statistics.mean(middle_half(sorted(seconds)))


def _round(works: Sequence[Work], loops: int, setting: Setting) -> float:
    """Return the duration in seconds of `loops` calls of each function in `works`, in concurrent threads."""
    if len(works) == 1:
        with setting():
            begin = time.perf_counter()
            for _ in range(loops):
                works[0]()
            return time.perf_counter() - begin
    barrier = threading.Barrier(len(works))
    begins, ends = [0.0] * len(works), [0.0] * len(works)

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
