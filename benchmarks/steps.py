"""Seconds of a training step and its phases, per strategy, measured as by `dpbench run`.

The devices are logical CPU devices. A machine with GPUs measures the benchmarks of `cuda` instead.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from . import QUICK, gpus, keep, module, names_of_the_commit, result, timing

STRATEGIES = ("single", "dp", "ddp")
BATCH_SIZES = {"mlp": 64, "resnet18": 16}
DEVICES = (1, 2)
PHASES = (
    "data",
    "scatter",
    "replicate",
    "forward",
    "gather",
    "loss",
    "backward",
    "reduce",
    "optimizer",
    "unattributed",
)

WORKERS = 4 if QUICK else 6
"""The number of fresh processes per case.

Steps differ more between processes than within one process.
"""
LIMIT_S = 60.0


def _case(strategy: str, model: str, devices: int) -> Any:
    from dpbench.records import Case

    batch = BATCH_SIZES[model]
    return module("records.plan").normalise(
        Case(
            model=model, strategy=strategy, devices=devices, batch_size=batch, schedule="reference"
        )
    )


def effort() -> Any:
    from dpbench.records import Effort

    if QUICK:
        return Effort(budget_s=0.3, warmup_steps=3, min_steps=5, max_steps=30, block_steps=5)
    return Effort(max_steps=100)


def trials_of(case: Any) -> list[Any]:
    """Run a case in `WORKERS` fresh workers of one server, and return the trial of each worker."""
    with TemporaryDirectory() as folder, module("measure.server").Server(Path(folder)) as server:
        trials = [server.run(case, effort(), number, LIMIT_S) for number in range(WORKERS)]
    for trial in trials:
        if trial.status != "ok":
            raise RuntimeError(f"{case.label}: {trial.status}: {trial.reason}")
    return trials


def setup_step(strategy: str, model: str, devices: int) -> None:
    if gpus():
        raise NotImplementedError(
            "this machine has GPUs, on which the benchmarks of `cuda` measure steps"
        )
    if strategy == "single" and devices > 1:
        raise NotImplementedError("the strategy single has one device")
    with names_of_the_commit():
        module("measure.server")
        registry = module("records.registry")
        registry.check("strategies", strategy)
        registry.check("models", model)
        _case(strategy, model, devices)
        effort()


@timing(
    params=(STRATEGIES, tuple(BATCH_SIZES), DEVICES),
    param_names=("strategy", "model", "devices"),
    setup=setup_step,
)
def track_step_seconds(strategy: str, model: str, devices: int) -> dict[str, Any]:
    trials = trials_of(_case(strategy, model, devices))
    keep(track_step_seconds, (strategy, model, devices), trials)
    return result([step.seconds for trial in trials for step in trial.steps if not step.warmup])


def phases_of_dp() -> dict[str, list[float]]:
    """Return, by phase, the seconds in each timed step of dp on two devices.

    Empty if the commit cannot measure them.

    asv caches the result, so that the seconds of all phases come from the same steps.
    """
    try:
        setup_step("dp", "resnet18", 2)
    except NotImplementedError:
        return {}  # asv counts an exception here as a failure; setup_phase raises it
    trials = trials_of(_case("dp", "resnet18", 2))
    if not hasattr(trials[0], "ledger"):  # an earlier commit
        return {}
    keep("steps.track_phase_seconds", (), trials)
    steps = [
        seconds
        for trial in trials
        for step, seconds in zip(trial.steps, trial.ledger.phases, strict=True)
        if not step.warmup
    ]
    return {phase: [seconds.get(phase, 0.0) for seconds in steps] for phase in PHASES}


def setup_phase(cache: dict[str, list[float]], phase: str) -> None:
    if phase not in cache:
        raise NotImplementedError(f"this commit does not measure the phase {phase}")


@timing(
    params=(PHASES,),
    param_names=("phase",),
    setup=setup_phase,
    setup_cache=phases_of_dp,
)
def track_phase_seconds(cache: dict[str, list[float]], phase: str) -> dict[str, Any]:
    return result(cache[phase])
