"""The overhead of measuring: steps with and without marks, and the Python code of one GPU mark."""

from __future__ import annotations

import time
from typing import Any

from . import QUICK, module, names_of_the_commit, result, timing

ARMS = {"listening": True, "silent": False}
BLOCKS, BLOCK_S = 10 if QUICK else 400, 0.01


def in_turns() -> dict[str, list[float]]:
    """Return mean step seconds by block, with ("listening") and without ("silent") recorded marks.

    Blocks of both arms alternate, so that slow drift affects them alike. asv caches the result for
    both arms; it is empty if the commit lacks a name that the benchmark needs.
    """
    try:
        with names_of_the_commit():
            from dpbench import models, strategies
            from dpbench.hardware.devices import open_devices
            from dpbench.records import Case, no_mark

            clock_of = module("measure.clocks").choose
    except NotImplementedError:
        return {}  # asv counts an exception here as a failure; setup_arm raises it
    case = Case(model="mlp", strategy="dp", schedule="reference", devices=2, batch_size=64)
    devices, model = (
        open_devices("cpu", case.devices),
        models.load(case.model, case.size, case.seed),
    )
    clock, batch, listening = clock_of(devices), model.batch(case.batch_size, case.seed), True

    def mark(phase: Any, device: int) -> Any:
        return clock.mark(phase, device) if listening else no_mark(phase, device)

    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with strategies.load(case.strategy).start(case, model, devices, mark) as step:

        def block(steps: int) -> float:
            began_s = time.perf_counter()
            with clock.block():
                for _ in range(steps):
                    with clock.step(warmup=False):
                        step(*batch)
            return (time.perf_counter() - began_s) / steps

        steps = max(1, round(BLOCK_S / block(20)))
        for number in range(BLOCKS):
            for arm in ARMS if number % 2 else reversed(ARMS):
                listening = ARMS[arm]
                found[arm].append(block(steps))
    return found


def setup_arm(cache: dict[str, list[float]], arm: str) -> None:
    if arm not in cache:
        raise NotImplementedError("this commit lacks a name that this benchmark needs")


@timing(
    params=(tuple(ARMS),),
    param_names=("marks",),
    setup=setup_arm,
    setup_cache=in_turns,
)
def track_marked_step_seconds(cache: dict[str, list[float]], arm: str) -> dict[str, Any]:
    return result(cache[arm])


class NoEvent:
    """An event without a driver behind it."""

    def elapsed_time(self, end: NoEvent) -> float:
        return 0.0


class NoGpu:
    """A device whose events and waits cost nothing but a call."""

    EVENT = NoEvent()

    def __init__(self, index: int) -> None:
        self.index = index

    def event(self, reuse: NoEvent | None = None) -> NoEvent:
        return self.EVENT

    def synchronize(self) -> None: ...


GPUS, CLOCK_BLOCKS, BLOCK_STEPS = 8, 10 if QUICK else 50, 10
PHASES = ("scatter", "replicate", "forward", "backward")


def setup_clock(gpus: int) -> None:
    with names_of_the_commit():
        module("measure.clocks").CudaClock([NoGpu(index) for index in range(gpus)])


@timing(params=((GPUS,),), param_names=("gpus",), setup=setup_clock)
def track_cuda_mark_seconds(gpus: int) -> dict[str, Any]:
    """Return the Python CPU seconds per mark, by block, without GPUs and the reading of marks."""
    from dpbench.records import Phase

    clock = module("measure.clocks").CudaClock([NoGpu(index) for index in range(gpus)])
    phases, samples = [Phase(name) for name in PHASES], []
    for _ in range(CLOCK_BLOCKS):
        with clock.block():
            began_s = time.thread_time()
            for _ in range(BLOCK_STEPS):
                with clock.step(warmup=False):
                    for phase in phases:
                        for index in range(gpus):
                            with clock.mark(phase, index):
                                pass
            samples.append((time.thread_time() - began_s) / (BLOCK_STEPS * len(phases) * gpus))
    return result(samples)
