"""The worker's part of the self-check: one step with and without what measures it, in turns, in one process.

    pair 0: on off   pair 1: off on   pair 2: on off ...      a block is so many steps back to back

What drifts over more than two blocks cancels within a pair. The trial's steps are none; the blocks' seconds a step
are facts, a list for each arm, pair by pair.
"""

from __future__ import annotations

import gc
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from dpbench import clock, models
from dpbench.devices import Device
from dpbench.engine.devices import open_devices
from dpbench.records import Case, Effort, Mark, Phase, Status, Trial, no_mark
from dpbench.strategies import dp

ROLE = "self-check"
"""The option `role` of a case that is no measurement of its own."""
ARMS = {"on": True, "off": False}
Seconds = tuple[float, float]
"""A step's seconds, and the CPU seconds of all the process's threads in it."""
COLLECT = 20
"""Pairs between two collections of garbage."""
LOOKS, CHUNK = 50, 50
"""How often marks are timed in a loop, and how many of one step."""
Arm = Callable[[bool], AbstractContextManager[None]]
"""Encloses a block with what is checked switched on, or off."""
_CPU_CLOCK = 2  # of another process, as in clock_getcpuclockid(3)


def measure(case: Case, effort: Effort) -> Trial:
    """Time the case's step in both arms for `effort.budget_s` seconds; its options say of what, and a block's length.

    options: toggle "marks", or "sampler" with the "pid" of a sampler process; "block_s".
    """
    options = dict(case.options)
    torch.set_num_threads(1)
    devices = open_devices(case.device_kind, case.devices, ids=case.device_ids, placement=case.placement)
    model = models.load(case.model, case.size, case.seed)
    batch = model.batch(case.batch_size, case.seed)
    marks = _Marks(clock.choose(devices))
    sampler = _Sampler(int(options["pid"])) if options["toggle"] == "sampler" else None
    arm = marks.switched if sampler is None else sampler.switched
    with dp.start(case, model, devices, marks.mark) as step:
        blocks = _pairs(lambda: step(*batch), marks, arm, devices, effort, float(options["block_s"]))
    facts: dict[str, Any] = {f"{name}_s": [wall for wall, _ in blocks[on]] for name, on in ARMS.items()}
    if devices[0].event() is None:  # a host that waits for a GPU spends CPU time on that
        facts |= {f"{name}_cpu_s": [cpu for _, cpu in blocks[on]] for name, on in ARMS.items()}
    facts["case"] = case.label
    if sampler is None:
        facts |= {"marks_per_step": marks.per_step(), "mark_s": _mark_s(clock.choose(devices))}
    else:
        facts["sampler_cpu_ratio"] = sampler.cpu_ratio()
    return Trial(case=case, status=Status.OK, provenance={"self_check": facts})


def _pairs(
    step: Callable[[], Any], marks: _Marks, arm: Arm, devices: Sequence[Device], effort: Effort, block_s: float
) -> dict[bool, list[Seconds]]:
    """Return the seconds a step of each block, by arm."""

    def block(steps: int) -> Seconds:
        """Return a block's seconds a step: means, which hold what comes now and then too."""
        for device in devices:
            device.synchronize()
        began, spent = time.perf_counter(), time.process_time()
        for _ in range(steps):
            with marks.step():
                step()
        for device in devices:
            device.synchronize()
        return (time.perf_counter() - began) / steps, (time.process_time() - spent) / steps

    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        block(effort.warmup_steps)
        steps = max(1, round(block_s / block(effort.min_steps)[0]))
        found: dict[bool, list[Seconds]] = {True: [], False: []}
        for pair in range(max(2, round(effort.budget_s / (2 * block_s)))):
            for on in (True, False) if pair % 2 == 0 else (False, True):
                with arm(on):
                    found[on].append(block(steps))
            if pair % COLLECT == 0:
                gc.collect()
    finally:
        gc.enable()
    return found


def _mark_s(listener: clock.Clock) -> float:
    """Return what a mark that is listened to costs in a loop, over one that is not: the median of many short looks.

    A look is a mean of some steps' marks, because a clock may do more in one step than in the next.
    """

    def once(mark: Mark) -> float:
        began = time.perf_counter()
        for _ in range(CHUNK):
            with mark(Phase.FORWARD, 0):
                pass
        return (time.perf_counter() - began) / CHUNK

    def look() -> float:
        found = []
        for _ in range(clock.READ_EVERY):
            with listener.step(warmup=False):
                found.append(once(listener.mark) - once(no_mark))
        return statistics.fmean(found)

    with listener.block():
        return statistics.median(look() for _ in range(LOOKS))


class _Marks:
    """The marks of a clock, listening or not: what the loop passes, or every `mark` argument's default."""

    def __init__(self, listener: clock.Clock) -> None:
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
    """The sampler process, running or stopped: what it would have to be started anew for costs more than it does."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._cpu_s = self._wall_s = 0.0

    @contextmanager
    def switched(self, on: bool) -> Iterator[None]:
        """Let the process run within a block, or stop it."""
        os.kill(self._pid, signal.SIGCONT if on else signal.SIGSTOP)
        before_s, began_s = self._spent_s(), time.perf_counter()
        try:
            yield
        finally:
            if on:
                self._cpu_s += self._spent_s() - before_s
                self._wall_s += time.perf_counter() - began_s
            os.kill(self._pid, signal.SIGCONT)

    def _spent_s(self) -> float:
        return time.clock_gettime((~self._pid << 3) | _CPU_CLOCK)

    def cpu_ratio(self) -> float:
        """Return the cores that the process keeps busy while it runs."""
        return self._cpu_s / self._wall_s if self._wall_s else 0.0
