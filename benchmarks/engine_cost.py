"""Step times on emulated devices: the engine's schedule `reference` and torch.nn.DataParallel."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from . import QUICK, keep, module, names_of_the_commit, result, timing

STRATEGIES = {"dp": "reference", "torch_dp": ""}
"""The schedule of each strategy."""
BATCH_SIZES = {"mlp": 64, "resnet18": 16}
PAIRS = tuple(itertools.product(STRATEGIES, BATCH_SIZES))
BUDGET_S = 0.3 if QUICK else 1.5
WORKERS = 2 if QUICK else 6
"""The number of fresh processes, each of which runs blocks of steps of the two strategies
alternately.
"""
LIMIT_S = 120.0


def pairs() -> dict[tuple[str, str], list[float]]:
    """Return the seconds of all timed steps by (strategy, model).

    The result is empty if the commit cannot run them.

    asv caches the result, so that the steps of both strategies come from the same processes.
    """
    found: dict[tuple[str, str], list[float]] = {}
    every: list[Any] = []
    try:
        with names_of_the_commit():
            from dpbench.records import Case, Effort

            server_of = module("measure.server").Server
    except NotImplementedError:
        return {}  # asv counts an exception here as a failure; setup_step raises it
    with TemporaryDirectory() as folder, server_of(Path(folder)) as server:
        for model, batch in BATCH_SIZES.items():
            case = Case(
                model=model, strategy="", devices=2, batch_size=batch, device_kind="emulated"
            )
            cases = [
                replace(case, strategy=name, schedule=schedule)
                for name, schedule in STRATEGIES.items()
            ]
            for number in range(WORKERS):
                trials = server.run_together(cases, Effort(budget_s=BUDGET_S), number, LIMIT_S)
                if any(trial.status == "skipped" for trial in trials):
                    # earlier commits cannot run torch.nn.DataParallel on emulated devices
                    return {}
                for trial in trials:
                    if trial.status != "ok":
                        raise RuntimeError(f"{trial.case.label}: {trial.status}: {trial.reason}")
                    steps = [step.seconds for step in trial.steps if not step.warmup]
                    found.setdefault((trial.case.strategy, model), []).extend(steps)
                every += trials
                cases.reverse()
    keep("engine_cost.track_emulated_step_seconds", (), every)
    return found


def setup_step(cache: dict[tuple[str, str], list[float]], strategy: str, model: str) -> None:
    if (strategy, model) not in cache:
        raise NotImplementedError(
            "this commit cannot run torch.nn.DataParallel on emulated devices"
        )


@timing(
    params=(tuple(STRATEGIES), tuple(BATCH_SIZES)),
    param_names=("strategy", "model"),
    setup=setup_step,
    setup_cache=pairs,
)
def track_emulated_step_seconds(
    cache: dict[tuple[str, str], list[float]], strategy: str, model: str
) -> dict[str, Any]:
    return result(cache[strategy, model])
