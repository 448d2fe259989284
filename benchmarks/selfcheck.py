"""The overhead of measuring: steps with and without recorded marks, and the Python code of one mark of GPUs."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from . import QUICK, keep, module, names_of_the_commit, result, timing

ARMS = {"listening": "on_s", "silent": "off_s"}
BUDGET_S = 1.0 if QUICK else 8.0
LIMIT_S = 60.0
BLOCK_S = STEP_S = 0.01


def in_turns() -> dict[str, list[float]]:
    """Return the seconds of each step by arm: "listening" with recorded marks, "silent" without.

    The arms alternate in one worker. asv caches the result for both arms; it is empty if the commit has no self-check.
    """
    try:
        with names_of_the_commit():
            from dpbench.records import Case, Effort

            server_of = module("measure.server").Server
            module("measure.worker.selfcheck")
    except NotImplementedError:
        return {}  # asv counts an exception here as a failure; setup_arm raises it
    case = Case(model="mlp", strategy="dp", schedule="reference", devices=2, batch_size=64)
    effort = Effort(budget_s=BUDGET_S)
    with TemporaryDirectory() as folder, server_of(Path(folder)) as server:
        if hasattr(server, "self_check"):
            from dpbench.measure.request import Arm, SelfCheck

            settings = SelfCheck(arm=Arm.MARKS, block_s=BLOCK_S, step_s=STEP_S)
            trial = server.self_check(case, effort, settings, LIMIT_S)
        else:  # earlier commits took the settings from the case
            asked = {"role": "self-check", "toggle": "marks", "block_s": str(BLOCK_S), "step_s": str(STEP_S)}
            trial = server.run(replace(case, options=tuple(sorted(asked.items()))), effort, 0, LIMIT_S)
    if trial.status != "ok":
        raise RuntimeError(f"{case.label}: {trial.status}: {trial.reason}")
    keep("selfcheck.track_marked_step_seconds", (), [trial])
    facts = trial.provenance["self_check"]
    return {arm: facts[name] for arm, name in ARMS.items()}


def setup_arm(cache: dict[str, list[float]], arm: str) -> None:
    if arm not in cache:
        raise NotImplementedError("this commit has no self-check")


@timing(
    params=(tuple(ARMS),),
    param_names=("marks",),
    setup=setup_arm,
    setup_cache=in_turns,
    rounds=1,  # another round would read the same cache
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


GPUS, BLOCKS, BLOCK_STEPS, PHASES = 8, 10 if QUICK else 50, 10, ("scatter", "replicate", "forward", "backward")


def setup_clock(gpus: int) -> None:
    with names_of_the_commit():
        module("measure.clocks").CudaClock([NoGpu(index) for index in range(gpus)])


@timing(params=((GPUS,),), param_names=("gpus",), setup=setup_clock)
def track_cuda_mark_seconds(gpus: int) -> dict[str, Any]:
    """Return the CPU seconds of Python code per mark, by block: neither a GPU nor the reading of marks is in them."""
    from dpbench.records import Phase

    clock = module("measure.clocks").CudaClock([NoGpu(index) for index in range(gpus)])
    phases, samples = [Phase(name) for name in PHASES], []
    for _ in range(BLOCKS):
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
