"""Figures: what was measured, how, and how far its repetitions spread; and the timing of small things."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

Work = Callable[[], object]
After = Callable[[list[Any]], object]
Step = Callable[[], tuple[float, float, float]]
Setting = Callable[[], AbstractContextManager[Any]]
"""What each thread enters before it works: grad mode, for one, is a thread's own."""
WARM = 5
"""Steps before those that are timed."""
LOOP_S = 4e-3
"""A repetition repeats the work until it takes this long, so that the clock's own cost does not count."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: of the fastest tenth of its repetitions, and the median.

    What else runs on a machine only ever adds, so a machine's own figure is the low one; the median tells how much.
    """

    best_s: float
    median_s: float


@dataclass(frozen=True)
class Figure:
    """One measured number: its unit stands in the name, how it was measured in words beside it.

    `median` is the same number by the median repetition, where it is a time or a rate.
    """

    name: str
    value: float
    how: str
    median: float | None = None


def figure(name: str, timing: Timing, how: str, *, per: float = 1.0) -> Figure:
    """Return a figure of seconds, divided by how many things one call did."""
    return Figure(name, timing.best_s / per, how, timing.median_s / per)


def rate(name: str, timing: Timing, how: str, *, amount: float) -> Figure:
    """Return a figure of so much an amount a second."""
    return Figure(name, amount / timing.best_s, how, amount / timing.median_s)


def ratio(name: str, beside: Timing, alone: Timing, how: str, *, share: float = 1.0) -> Figure:
    """Return how much longer a call takes beside others than alone."""
    return Figure(name, beside.best_s / alone.best_s / share, how, beside.median_s / alone.median_s / share)


def time_call(work: Work, repeats: int = 21, *, setting: Setting = nullcontext) -> Timing:
    """Time a call that may be short; the first calls are for warmth alone."""
    return time_together([work], repeats, setting=setting)


def time_together(works: Sequence[Work], repeats: int = 21, *, setting: Setting = nullcontext) -> Timing:
    """Time works that run at once, each in its own thread under `setting`: seconds until each has done one call."""
    loops = 1
    while (spent := _round(works, loops, setting)) < LOOP_S and loops < 1_000_000:
        loops = max(2 * loops, int(loops * LOOP_S / max(spent, 1e-9)))
    rounds = [_round(works, loops, setting) / loops for _ in range(repeats)]
    return summary(rounds)


def time_steps(steps: Sequence[Step], repeats: int) -> tuple[Timing, Timing]:
    """Time steps that run at once in kept threads, all woken for each one together: their forwards, and the whole.

    Each step returns when it began, when its forward ended and when all of it did; from the first to begin to the last
    to end is what counts, as in a step's ledger.
    """
    barrier = threading.Barrier(len(steps))
    found: list[list[tuple[float, float, float]]] = [[] for _ in steps]

    def run(i: int) -> None:
        for _ in range(WARM + repeats):
            barrier.wait()
            found[i].append(steps[i]())

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begins, forwards, ends = zip(*(zip(*together, strict=True) for together in zip(*found, strict=True)), strict=True)
    forward_s, whole_s = (
        [max(last) - min(first) for first, last in zip(begins, marks, strict=True)][WARM:] for marks in (forwards, ends)
    )
    return summary(forward_s), summary(whole_s)


def time_new_threads(works: Sequence[Work], repeats: int = 21, after: After = lambda results: None) -> Timing:
    """Time works that run at once, each in a thread that is started, and ends, for one call.

    `after` has their results before the next call, off the clock: what they hold lives until then.
    """

    def once() -> float:
        results: list[Any] = [None] * len(works)

        def run(i: int) -> None:
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
    return summary([once() for _ in range(repeats)])


def time_before(work: Work, repeats: int, after: After) -> Timing:
    """Time a call in this thread whose result `after` has, off the clock, before the next."""

    def once() -> float:
        begin = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - begin
        after([result])
        return seconds

    once()
    return summary([once() for _ in range(repeats)])


def summary(seconds: Sequence[float]) -> Timing:
    """Return the fastest tenth's end, and the median, of repetitions."""
    ordered = sorted(seconds)
    return Timing(ordered[len(ordered) // 10], statistics.median(ordered))


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
