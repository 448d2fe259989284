"""Figures: the numbers that a probe measures, each with its range and method, and the timing of short calls."""

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
"""A function that returns a context manager, which each thread enters before its work.

States such as the grad mode are per thread.
"""
REPEATS = 9
"""The number of timed repetitions of a call in each pass of the probe."""
WARM = 3
"""The number of warm-up steps before the timed steps."""
LOOP_S = 4e-3
"""The minimum duration of a repetition in seconds.

A repetition of a shorter call consists of several calls, so that the cost of reading the clock is negligible.
"""


@dataclass(frozen=True)
class Timing:
    """The duration of one call in seconds: the typical one, and the 10th and 90th percentiles of all repetitions."""

    seconds: float
    low_s: float
    high_s: float


@dataclass(frozen=True)
class Figure:
    """One measured number of a machine. `name` ends with the unit, and `how` describes the measurement.

    `value` is the median of the values from `passes` passes of the probe. `low` and `high` are the smallest and the
    largest value of all passes. If the range within a pass was measured, from the 10th to the 90th percentile of the
    repetitions, `low` and `high` include it. They are None for a single pass in which no range was measured.
    """

    name: str
    value: float
    how: str
    low: float | None = None
    high: float | None = None
    passes: int = 1


def over_passes(passes: Sequence[Sequence[Figure]]) -> tuple[Figure, ...]:
    """Return one figure per name, with the median and the range of the figures with this name over all passes."""
    found: dict[str, list[Figure]] = {}
    for figures in passes:
        for one in figures:
            found.setdefault(one.name, []).append(one)
    return tuple(_joined(each) for each in found.values())


def _joined(each: Sequence[Figure]) -> Figure:
    """Return one figure from `each`, the same figure in several passes: its median and its range over all passes."""
    first, count = each[0], len(each)
    if count == 1:
        return first
    edges = [edge for one in each for edge in (one.value, one.low, one.high) if edge is not None]
    value = statistics.median(one.value for one in each)
    return replace(first, value=value, low=min(edges), high=max(edges), passes=count)


def figure(name: str, spent: Timing, how: str, *, per: float = 1.0) -> Figure:
    """Return a figure of the seconds per operation, from the timing of a call that performs `per` operations."""
    return spread(name, [seconds / per for seconds in astuple(spent)], how)


def rate(name: str, spent: Timing, how: str, *, amount: float) -> Figure:
    """Return a figure of a rate per second, from the timing of a call that processes `amount` bytes or FLOP."""
    return spread(name, [amount / seconds for seconds in astuple(spent)], how)


def ratio(name: str, beside: Timing, alone: Timing, how: str, *, share: float = 1.0) -> Figure:
    """Return a figure of a slowdown: the time `beside` of concurrent calls, divided by the time `alone` of one call.

    The quotient is also divided by `share`. If `share` is the number of calls, a slowdown of 1 means that the calls
    take turns without a loss of time.
    """
    pairs = ((beside.seconds, alone.seconds), (beside.low_s, alone.high_s), (beside.high_s, alone.low_s))
    return spread(name, [one / other / share for one, other in pairs], how)


def spread(name: str, values: Sequence[float], how: str) -> Figure:
    """Return a figure whose value is the first of `values`, and whose range is from the smallest to the largest value.

    The first value is the typical one. The others are percentiles, or come from parts of the data.
    """
    return Figure(name, values[0], how, min(values), max(values))


def timing(seconds: Sequence[float]) -> Timing:
    """Return the timing of repetitions that took `seconds`: the typical duration, and the 10th and 90th percentiles."""
    low_s, high_s = np.percentile(seconds, [10, 90])
    usual_s = typical(seconds)
    return Timing(usual_s, min(usual_s, float(low_s)), max(usual_s, float(high_s)))


def time_call(work: Work, repeats: int = REPEATS, *, setting: Setting = nullcontext) -> Timing:
    """Return the timing of a call of `work` in the calling thread, in the context that `setting` returns.

    The first calls are warm-up and are not counted. The call may be short; see `LOOP_S`.
    """
    return time_together([work], repeats, setting=setting)


def time_together(works: Sequence[Work], repeats: int = REPEATS, *, setting: Setting = nullcontext) -> Timing:
    """Return the timing of concurrent calls of all functions in `works`, from the first start to the last end.

    Each function runs in a separate thread, which first enters the context that `setting` returns. A single function
    runs in the calling thread.
    """
    loops = 1
    while (spent := _round(works, loops, setting)) < LOOP_S and loops < 1_000_000:
        loops = max(2 * loops, int(loops * LOOP_S / max(spent, 1e-9)))
    rounds = [_round(works, loops, setting) / loops for _ in range(repeats)]
    return timing(rounds)


def time_steps(steps: Sequence[Step], repeats: int) -> tuple[Timing, Timing]:
    """Return the timings of forward and of the whole step, for steps that run concurrently in persistent threads.

    Each function in `steps` runs in a separate thread, and a barrier starts each repetition in all threads at the same
    time. `makespans` defines the timings.
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

    `found` has, for each worker and step, the times at which the step began, its forward ended, and the step ended. A
    duration lasts from the start of the first worker to the end of the last worker. The warm-up steps are left out.
    """
    begins, forwards, ends = zip(*(zip(*together, strict=True) for together in zip(*found, strict=True)), strict=True)
    forward_s, whole_s = (
        [max(last) - min(first) for first, last in zip(begins, marks, strict=True)][WARM:] for marks in (forwards, ends)
    )
    return timing(forward_s), timing(whole_s)


def time_new_threads(works: Sequence[Work], repeats: int = REPEATS, after: After = lambda results: None) -> Timing:
    """Return the timing of concurrent calls of all functions in `works`, each in a thread that is started for the call.

    The time includes the start of the threads. After each repetition, `after` is called with the results, which stay in
    memory until then; this call is not timed.
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
    """Return the timing of a call of `work` in the calling thread.

    After each repetition, `after` is called with a list that contains the result; this call is not timed.
    """

    def once() -> float:
        begin = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - begin
        after([result])
        return seconds

    once()
    return timing([once() for _ in range(repeats)])


def typical(seconds: Sequence[float]) -> float:
    """Return the mean of the middle half of the durations, on which outliers have almost no effect."""
    return statistics.mean(middle_half(sorted(seconds)))


def _round(works: Sequence[Work], loops: int, setting: Setting) -> float:
    """Return the seconds of `loops` calls of each function in concurrent threads, from first start to last end."""
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
