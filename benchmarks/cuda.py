"""Step time, imbalance and memory on this machine's GPUs, per strategy and number of GPUs.

Without a GPU, asv reports these benchmarks as not applicable.
"""

from __future__ import annotations

from typing import Any

from . import gpus, keep, module, names_of_the_commit, result, timing
from .steps import effort, trials_of

STRATEGIES = ("single", "torch_dp", "dp", "ddp")
BATCH_SIZES = {"mlp": 256, "resnet18": 128}
COUNTS = tuple(count for count in (1, 2, 4, 8) if count <= gpus()) or (1,)
"""The numbers of GPUs; without a GPU there is one value, whose cells are not applicable."""
TIMEOUT_S = 1800

Cell = tuple[str, str, int]
"""A strategy, a model and a number of GPUs."""
Numbers = dict[str, Any]
"""The result of each benchmark for one cell, by the name of the benchmark.

One that does not apply is missing.
"""


def cells() -> dict[Cell, Numbers]:
    """Return the numbers of each cell that this machine and this commit can measure.

    asv caches the result, so that all benchmarks have the numbers of the same trials.
    """
    if not gpus():
        return {}
    found: dict[Cell, Numbers] = {}
    for strategy in STRATEGIES:
        for model in BATCH_SIZES:
            for count in (1,) if strategy == "single" else COUNTS:
                try:
                    with names_of_the_commit():
                        found[strategy, model, count] = _numbers(strategy, model, count)
                except NotImplementedError:
                    continue  # asv counts an exception here as a failure; setup_cell raises it
    return found


def _numbers(strategy: str, model: str, count: int) -> Numbers:
    from dpbench.analysis import summary
    from dpbench.records import Case

    module("measure.server")
    effort()
    schedule = "reference" if strategy == "dp" else ""
    case = Case(
        model=model,
        strategy=strategy,
        devices=count,
        batch_size=BATCH_SIZES[model],
        schedule=schedule,
        device_kind="cuda",
    )
    trials = trials_of(module("records.plan").normalise(case))
    (row,) = summary.rows(trials)
    if "FAKE-GPU" in row.labels:
        raise NotImplementedError("times on fake GPUs mean nothing")
    keep("cuda", (strategy, model, count), trials)
    numbers = {
        "track_cuda_step_seconds": [
            s.seconds for trial in trials for s in trial.steps if not s.warmup
        ]
    }
    if row.imbalance and not row.imbalance.doubt:
        numbers["track_cuda_imbalance"] = row.imbalance.value
    if row.memory:
        numbers["track_cuda_peak_bytes"] = max(row.memory.values())
    return numbers


def _setup(name: str) -> Any:
    """Return a benchmark's setup, which reports a cell without its number as not applicable."""

    def setup_cell(cache: dict[Cell, Numbers], strategy: str, model: str, devices: int) -> None:
        if not gpus():
            raise NotImplementedError("this machine has no GPU")
        if name not in cache.get((strategy, model, devices), {}):
            raise NotImplementedError(f"{strategy} on {devices} GPUs has no {name} in this commit")

    return setup_cell


def _on_cells(name: str, **attributes: Any) -> Any:
    """Return a decorator that makes a function a benchmark of the numbers `name` of all cells."""
    none = not gpus()
    return timing(
        params=(
            STRATEGIES[:1] if none else STRATEGIES,
            tuple(BATCH_SIZES)[: 1 if none else None],
            COUNTS,
        ),
        param_names=("strategy", "model", "devices"),
        setup=_setup(name),
        setup_cache=cells,
        timeout=TIMEOUT_S,
        **attributes,
    )


@_on_cells("track_cuda_step_seconds")
def track_cuda_step_seconds(
    cache: dict[Cell, Numbers], strategy: str, model: str, devices: int
) -> dict[str, Any]:
    return result(cache[strategy, model, devices]["track_cuda_step_seconds"])


@_on_cells("track_cuda_imbalance", unit="device 0 / mean of the others")
def track_cuda_imbalance(
    cache: dict[Cell, Numbers], strategy: str, model: str, devices: int
) -> float:
    return float(cache[strategy, model, devices]["track_cuda_imbalance"])


@_on_cells("track_cuda_peak_bytes", unit="bytes")
def track_cuda_peak_bytes(
    cache: dict[Cell, Numbers], strategy: str, model: str, devices: int
) -> float:
    """Return the largest peak of allocated memory on any GPU."""
    return float(cache[strategy, model, devices]["track_cuda_peak_bytes"])
