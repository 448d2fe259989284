"""Figures: what was measured, how, and how far the passes of a probe are apart; and the timing of small things."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from dpbench.hardware import affinity
from dpbench.records.ledger import middle_half

Work = Callable[[], object]
After = Callable[[list[Any]], object]
Step = Callable[[], tuple[float, float, float]]
Setting = Callable[[], AbstractContextManager[Any]]
"""What each thread enters before it works: grad mode, for one, is a thread's own."""
REPEATS = 9
"""Of a call, in each pass."""
WARM = 3
"""Steps before those that are timed."""
LOOP_S = 4e-3
"""A repetition repeats the work until it takes this long, so that the clock's own cost does not count."""


@dataclass(frozen=True)
class Timing:
    """The seconds of one call: the typical repetition, and the 10th and 90th percentile of all repetitions."""

    seconds: float
    low_s: float
    high_s: float


@dataclass(frozen=True)
class Figure:
    """One measured number: its unit stands in the name, how it was measured in words beside it.

    `value` is the median over the probe's `passes`. `low` and `high` are the least 10th and the largest 90th percentile
    of the repetitions within a pass, where it repeats; else the least and the largest value of several passes; None
    where one pass measured the figure once.
    """

    name: str
    value: float
    how: str
    low: float | None = None
    high: float | None = None
    passes: int = 1


def over_passes(passes: Sequence[Sequence[Figure]]) -> tuple[Figure, ...]:
    """Join the figures of all passes: what a machine does at one moment it may not do ten seconds later."""
    found: dict[str, list[Figure]] = {}
    for figures in passes:
        for one in figures:
            found.setdefault(one.name, []).append(one)
    return tuple(_joined(each) for each in found.values())


def _joined(each: Sequence[Figure]) -> Figure:
    """Return one figure of several passes as one."""
    first, count = each[0], len(each)
    if count == 1:
        return first
    edges = [edge for one in each for edge in (one.value, one.low, one.high) if edge is not None]
    value = statistics.median(one.value for one in each)
    return replace(first, value=value, low=min(edges), high=max(edges), passes=count)


def figure(name: str, spent: Timing, how: str, *, per: float = 1.0) -> Figure:
    """Return a figure of seconds, divided by how many things one call did."""
    return spread(name, [seconds / per for seconds in astuple(spent)], how)


def rate(name: str, spent: Timing, how: str, *, amount: float) -> Figure:
    """Return a figure of so much an amount a second."""
    return spread(name, [amount / seconds for seconds in astuple(spent)], how)


def ratio(name: str, beside: Timing, alone: Timing, how: str, *, share: float = 1.0) -> Figure:
    """Return how much longer a call takes beside others than alone."""
    pairs = ((beside.seconds, alone.seconds), (beside.low_s, alone.high_s), (beside.high_s, alone.low_s))
    return spread(name, [one / other / share for one, other in pairs], how)


def spread(name: str, values: Sequence[float], how: str) -> Figure:
    """Return a figure of the first value; the others are the same figure from parts of what was measured."""
    return Figure(name, values[0], how, min(values), max(values))


def timing(seconds: Sequence[float]) -> Timing:
    """Return the typical repetition and the spread of all."""
    low_s, high_s = np.percentile(seconds, [10, 90])
    usual_s = typical(seconds)
    return Timing(usual_s, min(usual_s, float(low_s)), max(usual_s, float(high_s)))


def time_call(work: Work, repeats: int = REPEATS, *, setting: Setting = nullcontext) -> Timing:
    """Time a call that may be short; the first calls are for warmth alone."""
    return time_together([work], repeats, setting=setting)


def time_together(works: Sequence[Work], repeats: int = REPEATS, *, setting: Setting = nullcontext) -> Timing:
    """Time works that run at once, each in its own thread under `setting`: seconds until each has done one call."""
    loops = 1
    while (spent := _round(works, loops, setting)) < LOOP_S and loops < 1_000_000:
        loops = max(2 * loops, int(loops * LOOP_S / max(spent, 1e-9)))
    rounds = [_round(works, loops, setting) / loops for _ in range(repeats)]
    return timing(rounds)


def time_steps(steps: Sequence[Step], repeats: int) -> tuple[Timing, Timing]:
    """Time steps that run at once in kept threads, all woken for each one together; see `makespans`."""
    barrier = threading.Barrier(len(steps))
    found: list[list[tuple[float, float, float]]] = [[] for _ in steps]

    def run(i: int) -> None:
        affinity.stay(i)
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
    """Return the seconds of the forwards, and of the whole, of steps that several made at once.

    Each tells of each step when it began, when its forward ended and when all of it did; from the first to begin to the
    last to end is what counts, as in a step's ledger.
    """
    begins, forwards, ends = zip(*(zip(*together, strict=True) for together in zip(*found, strict=True)), strict=True)
    forward_s, whole_s = (
        [max(last) - min(first) for first, last in zip(begins, marks, strict=True)][WARM:] for marks in (forwards, ends)
    )
    return timing(forward_s), timing(whole_s)


def time_new_threads(works: Sequence[Work], repeats: int = REPEATS, after: After = lambda results: None) -> Timing:
    """Time works that run at once, each in a thread that is started, and ends, for one call.

    `after` has their results before the next call, off the clock: what they hold lives until then.
    """

    def once() -> float:
        results: list[Any] = [None] * len(works)

        def run(i: int) -> None:
            affinity.stay(i)
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
    """Time a call in this thread whose result `after` has, off the clock, before the next."""

    def once() -> float:
        begin = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - begin
        after([result])
        return seconds

    once()
    return timing([once() for _ in range(repeats)])


def typical(seconds: Sequence[float]) -> float:
    """Return the mean of the middle half of repetitions: parts of it add up, and what disturbs a few does not count."""
    return statistics.mean(middle_half(sorted(seconds)))


def _round(works: Sequence[Work], loops: int, setting: Setting) -> float:
    """Return the seconds in which every work is done so many times."""
    if len(works) == 1:
        with setting():
            begin = time.perf_counter()
            for _ in range(loops):
                works[0]()
            return time.perf_counter() - begin
    barrier = threading.Barrier(len(works))
    begins, ends = [0.0] * len(works), [0.0] * len(works)

    def run(i: int) -> None:
        affinity.stay(i)
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
