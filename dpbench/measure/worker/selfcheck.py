"""The worker's part of the self-check: one step with and without what measures it, in turns, in one process.

    marks      pair 0: on off   pair 1: off on   pair 2: on off ...      a block is so many steps back to back
    sampler    part 0: . . . x x . . . . . . x x . . . .                 x: steps in or just after which it was at work

What drifts over more than two blocks cancels within a pair of them, and over more than a part within the part. The
sampler is left alone: its own CPU clock tells the steps that it ran in, so that all it does is counted, as often as it
does it, and the few steps that it touches are held against their neighbours. The trial's steps are none; the seconds
a step are facts, a list for each arm, pair by pair or part by part.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any

import torch

from dpbench import models
from dpbench.hardware.devices import open_devices
from dpbench.measure import clocks
from dpbench.measure.request import Arm, SelfCheck
from dpbench.records import Case, Effort, Phase, Status, Trial, no_mark
from dpbench.strategies import load

ARMS = {"on": True, "off": False}
Seconds = tuple[float, float]
"""A step's seconds, and the CPU seconds of all the process's threads in it."""
COLLECT = 20
"""Pairs, or parts, between two collections of garbage."""
Run = Callable[[int], None]
"""Runs so many steps, to their end."""
_CPU_CLOCK = 2  # of another process, as in clock_getcpuclockid(3)


def measure(case: Case, effort: Effort, settings: SelfCheck) -> Trial:
    """Time the case's step with and without one part of measuring, for `effort.budget_s` seconds."""
    torch.set_num_threads(1)
    devices = open_devices(case.device_kind, case.devices, ids=case.device_ids, placement=case.placement)
    devices[0].settle()
    model = models.load(case.model, case.size, case.seed)
    batch = model.batch(case.batch_size, case.seed)
    listener = clocks.choose(devices)
    marks = _Marks(listener)
    sampler = _Sampler(settings.sampler_pid) if settings.arm is Arm.SAMPLER else None
    block_s = settings.block_s
    count = max(2, round(effort.budget_s / block_s))

    def run(steps: int) -> None:
        for _ in range(steps):
            with marks.step():
                step(*batch)
        for device in devices:
            device.synchronize()

    with load(case.strategy).start(case, model, devices, marks.mark) as step, _garbage_kept():
        run(effort.warmup_steps)
        step_s = _seconds(run, effort.min_steps)[0]
        if sampler is not None:
            facts = _parts(run, sampler, count, block_s)
        else:
            if isinstance(listener, clocks.HostClock):
                listener.read_each_s *= step_s / settings.step_s
            facts = _pairs(run, marks, count // 2, max(1, round(block_s / step_s)))
            facts["marks_per_step"] = marks.per_step()
            if devices[0].event() is not None:  # a host that waits for a GPU spends CPU time on that
                facts = {name: fact for name, fact in facts.items() if not name.endswith("_cpu_s")}
    return Trial(case=case, status=Status.OK, provenance={"self_check": facts | {"case": case.label}})


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Collect no garbage but where it is asked for."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _seconds(run: Run, steps: int) -> Seconds:
    """Return a block's seconds a step: means, which hold what comes now and then too."""
    began, spent = time.perf_counter(), time.process_time()
    run(steps)
    return (time.perf_counter() - began) / steps, (time.process_time() - spent) / steps


def _pairs(run: Run, marks: _Marks, count: int, steps: int) -> dict[str, Any]:
    """Return the seconds a step of so many pairs of blocks, marks heard in one of them."""
    found: dict[bool, list[Seconds]] = {True: [], False: []}
    for pair in range(max(2, count)):
        for on in (True, False) if pair % 2 == 0 else (False, True):
            with marks.switched(on):
                found[on].append(_seconds(run, steps))
        if pair % COLLECT == 0:
            gc.collect()
    wall = {f"{name}_s": [wall for wall, _ in found[on]] for name, on in ARMS.items()}
    return wall | {f"{name}_cpu_s": [cpu for _, cpu in found[on]] for name, on in ARMS.items()}


def _parts(run: Run, sampler: _Sampler, count: int, part_s: float) -> dict[str, Any]:
    """Return the seconds a step of so many parts: of all its steps, and of those that the sampler left alone."""
    on_s, off_s, touched = [], [], 0
    spent_s, began_s = sampler.spent_s(), time.perf_counter()
    for part in range(count):
        if part % COLLECT == 0:
            gc.collect()
        steps = _watched(run, sampler, part_s)
        # the next step may still find its caches cold
        alone = [s for (before, _), (at_work, s) in pairwise(((False, 0.0), *steps)) if not before and not at_work]
        if not alone:
            raise RuntimeError(f"the sampler was at work in each of {len(steps)} steps: there are none without it")
        on_s.append(statistics.fmean(seconds for _, seconds in steps))
        off_s.append(statistics.fmean(alone))
        touched += sum(at_work for at_work, _ in steps)
    cpu_ratio = (sampler.spent_s() - spent_s) / (time.perf_counter() - began_s)
    return {"on_s": on_s, "off_s": off_s, "sampler_cpu_ratio": cpu_ratio, "steps_touched": touched}


def _watched(run: Run, sampler: _Sampler, seconds: float) -> list[tuple[bool, float]]:
    """Run steps for so long; return of each whether the sampler was at work in it, and its seconds."""
    steps = []
    spent_s, at_s = sampler.spent_s(), time.perf_counter()
    until_s = at_s + seconds
    while at_s < until_s:
        run(1)
        before_s, began_s = spent_s, at_s
        # from end to end, so that nothing is lost; time first, so that what comes between falls to the step after
        at_s = time.perf_counter()
        spent_s = sampler.spent_s()
        steps.append((spent_s > before_s, at_s - began_s))
    return steps


class _Marks:
    """The marks of a clock, listening or not: what the loop passes, or every `mark` argument's default."""

    def __init__(self, listener: clocks.Clock) -> None:
        self._listener, self._on = listener, False

    def mark(self, phase: Phase, device: int) -> AbstractContextManager[Any]:
        """Mark, if anybody listens."""
        return self._listener.mark(phase, device) if self._on else no_mark(phase, device)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Enclose one step."""
        if not self._on:
            yield
            return
        with self._listener.step(warmup=False):
            yield

    @contextmanager
    def switched(self, on: bool) -> Iterator[None]:
        """Listen within a block, or do not."""
        self._on = on
        if on:
            with self._listener.block():
                yield
        else:
            yield
        self._on = False

    def per_step(self) -> float:
        """Return how many marks a step has."""
        return len(self._listener.spans()) / max(1, len(self._listener.steps()))


class _Sampler:
    """The sampler process, told by its CPU clock."""

    def __init__(self, pid: int) -> None:
        self._pid, self._clock = pid, (~pid << 3) | _CPU_CLOCK

    def spent_s(self) -> float:
        """Return the CPU seconds that the process has spent; to the nanosecond, also while it runs."""
        try:
            return time.clock_gettime(self._clock)
        except OSError as error:
            raise ProcessLookupError(f"the sampler process {self._pid} has ended") from error
