"""Figures: what was measured, how, and how far the passes of a probe are apart; and the timing of small things."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from dpbench import cores
from dpbench.ledger import middle_half

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
class Figure:
    """One measured number: its unit stands in the name, how it was measured in words beside it.

    `low` and `high` are the least and the largest number of a probe's passes, `value` their median.
    """

    name: str
    value: float
    how: str
    low: float | None = None
    high: float | None = None


def over_passes(passes: Sequence[Sequence[Figure]]) -> tuple[Figure, ...]:
    """Join the figures of all passes: what a machine does at one moment it may not do ten seconds later."""
    values: dict[str, list[float]] = {}
    for figures in passes:
        for one in figures:
            values.setdefault(one.name, []).append(one.value)
    return tuple(
        replace(one, value=statistics.median(values[one.name]), low=min(values[one.name]), high=max(values[one.name]))
        for one in passes[0]
    )


def figure(name: str, seconds: float, how: str, *, per: float = 1.0) -> Figure:
    """Return a figure of seconds, divided by how many things one call did."""
    return Figure(name, seconds / per, how)


def rate(name: str, seconds: float, how: str, *, amount: float) -> Figure:
    """Return a figure of so much an amount a second."""
    return Figure(name, amount / seconds, how)


def ratio(name: str, beside_s: float, alone_s: float, how: str, *, share: float = 1.0) -> Figure:
    """Return how much longer a call takes beside others than alone."""
    return Figure(name, beside_s / alone_s / share, how)


def time_call(work: Work, repeats: int = REPEATS, *, setting: Setting = nullcontext) -> float:
    """Time a call that may be short; the first calls are for warmth alone."""
    return time_together([work], repeats, setting=setting)


def time_together(works: Sequence[Work], repeats: int = REPEATS, *, setting: Setting = nullcontext) -> float:
    """Time works that run at once, each in its own thread under `setting`: seconds until each has done one call."""
    loops = 1
    while (spent := _round(works, loops, setting)) < LOOP_S and loops < 1_000_000:
        loops = max(2 * loops, int(loops * LOOP_S / max(spent, 1e-9)))
    rounds = [_round(works, loops, setting) / loops for _ in range(repeats)]
    return typical(rounds)


def time_steps(steps: Sequence[Step], repeats: int) -> tuple[float, float]:
    """Time steps that run at once in kept threads, all woken for each one together; see `makespans`."""
    barrier = threading.Barrier(len(steps))
    found: list[list[tuple[float, float, float]]] = [[] for _ in steps]

    def run(i: int) -> None:
        cores.stay(i)
        for _ in range(WARM + repeats):
            barrier.wait()
            found[i].append(steps[i]())

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return makespans(found)


def makespans(found: Sequence[Sequence[tuple[float, float, float]]]) -> tuple[float, float]:
    """Return the seconds of the forwards, and of the whole, of steps that several made at once.

    Each tells of each step when it began, when its forward ended and when all of it did; from the first to begin to the
    last to end is what counts, as in a step's ledger.
    """
    begins, forwards, ends = zip(*(zip(*together, strict=True) for together in zip(*found, strict=True)), strict=True)
    forward_s, whole_s = (
        [max(last) - min(first) for first, last in zip(begins, marks, strict=True)][WARM:] for marks in (forwards, ends)
    )
    return typical(forward_s), typical(whole_s)


def time_new_threads(works: Sequence[Work], repeats: int = REPEATS, after: After = lambda results: None) -> float:
    """Time works that run at once, each in a thread that is started, and ends, for one call.

    `after` has their results before the next call, off the clock: what they hold lives until then.
    """

    def once() -> float:
        results: list[Any] = [None] * len(works)

        def run(i: int) -> None:
            cores.stay(i)
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
    return typical([once() for _ in range(repeats)])


def time_before(work: Work, repeats: int, after: After) -> float:
    """Time a call in this thread whose result `after` has, off the clock, before the next."""

    def once() -> float:
        begin = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - begin
        after([result])
        return seconds

    once()
    return typical([once() for _ in range(repeats)])


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
        cores.stay(i)
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
