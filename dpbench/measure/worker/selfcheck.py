"""Self-check, worker side: time a case's step with and without marks, or with and without the sampler at work.

Marks time the phases of a step. The sampler is a separate process that reads counters of the GPUs and the host. Both
are components of measuring that may slow a step. One process takes all steps:

    marks      pair 0: on off   pair 1: off on   pair 2: on off ...      each word is a block of back-to-back steps
    sampler    part 0: . . . x x . . . . . . x x . . . .                 x: the sampler ran in this or the previous step

For marks, blocks with and without marks alternate, and the two blocks of a pair are compared, so that slow drift
cancels. The sampler is never switched off. The steps are divided into parts of equal duration, and the sampler's CPU
clock shows in which steps it ran. In each part, the mean of all steps is compared with the mean of the steps that the
sampler cannot have slowed down. The result is two lists of seconds per step: one with the component and one without
it. Each list has one value per pair or part. The trial itself has no steps.
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
"""Two durations of a step in seconds: wall-clock time, and the CPU time of all threads of the process."""
COLLECT = 20
"""The number of pairs (marks) or parts (sampler) from one garbage collection to the next."""
RunSteps = Callable[[int], None]
"""A function that runs the given number of steps and waits until the devices have finished them."""
_CPU_CLOCK = 2  # the low bits in the id of a process's CPU clock, as clock_getcpuclockid(3) returns it


def measure(case: Case, effort: Effort, settings: SelfCheck) -> Trial:
    """Time the case's step with and without marks, or the sampler at work, for about `effort.budget_s` seconds.

    Return a trial without steps; its provenance has the measured facts under the key "self_check".
    """
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
            if devices[0].event() is not None:  # the host spends CPU time on waiting for a GPU
                facts = {name: fact for name, fact in facts.items() if not name.endswith("_cpu_s")}
    return Trial(case=case, status=Status.OK, provenance={"self_check": facts | {"case": case.label}})


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Switch automatic garbage collection off inside this context."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _seconds(run: RunSteps, steps: int) -> Seconds:
    """Run a block of `steps` steps; return the mean wall-clock seconds and the mean CPU seconds per step.

    Unlike a median, a mean includes rare costs.
    """
    began, spent = time.perf_counter(), time.process_time()
    run(steps)
    return (time.perf_counter() - began) / steps, (time.process_time() - spent) / steps


def _pairs(run: RunSteps, marks: _Marks, count: int, steps: int) -> dict[str, Any]:
    """Time `count` pairs of blocks, one with and one without marks; return lists of mean seconds per step.

    Each block has `steps` steps, and each list has one value per pair. The keys are "on_s" and "off_s" for wall-clock
    time with and without marks, and "on_cpu_s" and "off_cpu_s" for CPU time.
    """
    found: dict[bool, list[Seconds]] = {True: [], False: []}
    for pair in range(max(2, count)):
        for on in (True, False) if pair % 2 == 0 else (False, True):
            with marks.switched(on):
                found[on].append(_seconds(run, steps))
        if pair % COLLECT == 0:
            gc.collect()
    wall = {f"{name}_s": [wall for wall, _ in found[on]] for name, on in ARMS.items()}
    return wall | {f"{name}_cpu_s": [cpu for _, cpu in found[on]] for name, on in ARMS.items()}


def _parts(run: RunSteps, sampler: _Sampler, count: int, part_s: float) -> dict[str, Any]:
    """Time `count` parts of `part_s` seconds each, and return the facts about the cost of the sampler.

    For each part, "on_s" has the mean seconds of all steps, and "off_s" the mean seconds of the steps that the sampler
    did not affect. "sampler_cpu_ratio" is the fraction of a core that the sampler used, and "steps_touched" is the
    number of steps in which it ran. Raises RuntimeError if the sampler affected all steps of a part.
    """
    on_s, off_s, touched = [], [], 0
    spent_s, began_s = sampler.spent_s(), time.perf_counter()
    for part in range(count):
        if part % COLLECT == 0:
            gc.collect()
        steps = _watched(run, sampler, part_s)
        # also leave out the step after one in which the sampler ran: its caches may still be cold
        alone = [s for (before, _), (at_work, s) in pairwise(((False, 0.0), *steps)) if not before and not at_work]
        if not alone:
            raise RuntimeError(
                "the sampler process ran in or just before every step of one part of the measurement (steps: "
                f"{len(steps)}), so its cost is unknown, because there are no steps without the sampler to compare "
                "with: repeat the self-check while the machine is idle"
            )
        on_s.append(statistics.fmean(seconds for _, seconds in steps))
        off_s.append(statistics.fmean(alone))
        touched += sum(at_work for at_work, _ in steps)
    cpu_ratio = (sampler.spent_s() - spent_s) / (time.perf_counter() - began_s)
    return {"on_s": on_s, "off_s": off_s, "sampler_cpu_ratio": cpu_ratio, "steps_touched": touched}


def _watched(run: RunSteps, sampler: _Sampler, seconds: float) -> list[tuple[bool, float]]:
    """Run steps for `seconds` seconds; return, for each step, whether the sampler ran in it and the step's seconds."""
    steps = []
    spent_s, at_s = sampler.spent_s(), time.perf_counter()
    until_s = at_s + seconds
    while at_s < until_s:
        run(1)
        before_s, began_s = spent_s, at_s
        # a step lasts from the end of the previous step to its own end, so that no time is lost; if the sampler runs
        # between the two readings, this step is flagged, and the time counts in the next step, which is also left out
        at_s = time.perf_counter()
        spent_s = sampler.spent_s()
        steps.append((spent_s > before_s, at_s - began_s))
    return steps


class _Marks:
    """The marks of a clock, which can be switched on and off; while off, a mark records nothing."""

    def __init__(self, listener: clocks.Clock) -> None:
        self._listener, self._on = listener, False

    def mark(self, phase: Phase, device: int) -> AbstractContextManager[Any]:
        """Return a context manager that marks a phase on a device; it records nothing while marks are off."""
        return self._listener.mark(phase, device) if self._on else no_mark(phase, device)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Enclose one step in this context; the clock times the step if marks are on."""
        if not self._on:
            yield
            return
        with self._listener.step(warmup=False):
            yield

    @contextmanager
    def switched(self, on: bool) -> Iterator[None]:
        """Inside this context, which encloses one block of steps, switch marks on if `on` is True, otherwise off."""
        self._on = on
        if on:
            with self._listener.block():
                yield
        else:
            yield
        self._on = False

    def per_step(self) -> float:
        """Return the number of marks that the clock has recorded, divided by the number of timed steps."""
        return len(self._listener.spans()) / max(1, len(self._listener.steps()))


class _Sampler:
    """A reader of the CPU time of the process `pid`, the sampler, which reads counters of the GPUs and the host."""

    def __init__(self, pid: int) -> None:
        self._pid, self._clock = pid, (~pid << 3) | _CPU_CLOCK

    def spent_s(self) -> float:
        """Return the CPU seconds that the sampler process has used so far, with nanosecond resolution.

        The value is up to date even while that process runs. Raises ProcessLookupError if that process has ended.
        """
        try:
            return time.clock_gettime(self._clock)
        except OSError as error:
            raise ProcessLookupError(
                f"the sampler process (process id {self._pid}) has ended, so its CPU time cannot be read"
            ) from error
