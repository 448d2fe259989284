"""What dpbench's engine costs the host beside the nets themselves: its phases on nets that compute next to nothing.

Chains of tiny layers of two lengths give each phase a fixed part and a part per parameter; what a real net adds to
them is bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from dpbench import ledger
from dpbench.clock import HostClock
from dpbench.engine import TrainStep
from dpbench.probe.figures import Figure, Timing, summary
from dpbench.probe.host import line
from dpbench.records import UNATTRIBUTED, Case, Phase, Trial

LAYERS = (6, 48)
ROWS = 8
WARMUP_STEPS, STEPS = 20, 60
"""`fastest` settles within the warm-up."""
PHASES = (
    Phase.SCATTER.value, Phase.REPLICATE.value, Phase.GATHER.value, Phase.LOSS.value, Phase.REDUCE.value,
    Phase.OPTIMIZER.value, UNATTRIBUTED,
)  # fmt: skip
"""All but forward and backward, which are the net's own."""


def figures(schedules: tuple[str, ...] = ("reference", "fastest"), devices: int = 2) -> Iterator[Figure]:
    """Yield each phase's seconds on a schedule: for a step, and for each parameter of the module."""
    alone = {layers: _phases("reference", layers, 1, ROWS // devices) for layers in LAYERS}
    for schedule in schedules:
        found = {layers: _phases(schedule, layers, devices, ROWS) for layers in LAYERS}
        # what the replicas' own backwards and the optimizer take is the net's; the rest is the engine's
        times = devices if schedule == "reference" else 1
        for layers, seconds in found.items():
            seconds["backward_more"] = _less(seconds[Phase.BACKWARD], alone[layers][Phase.BACKWARD], times)
            seconds["optimizer_more"] = _less(seconds[Phase.OPTIMIZER], alone[layers][Phase.OPTIMIZER], 1)
        for phase in (*PHASES, "backward_more", "optimizer_more"):
            lines = [
                line([(2.0 * layers, max(pick(found[layers][phase]), 1e-9)) for layers in LAYERS])
                for pick in (_best, _median)
            ]
            how = f"dpbench's {schedule}, {devices} devices, SGD: chains of {LAYERS[0]} and {LAYERS[1]} Linear(4, 4)"
            if phase.endswith("_more"):
                how = f"{how}: beyond what one device takes for its rows"
            (start_s, each_s), (start_median_s, each_median_s) = lines
            yield Figure(f"{schedule}_{phase}_s", start_s, f"{how}: a step's fixed part", start_median_s)
            yield Figure(f"{schedule}_{phase}_tensor_s", each_s, f"{how}: for each parameter", each_median_s)


def _best(timing: Timing) -> float:
    return timing.best_s


def _median(timing: Timing) -> float:
    return timing.median_s


def _less(timing: Timing, other: Timing, times: int) -> Timing:
    """Return what one timing has beyond so many of another."""
    return Timing(timing.best_s - times * other.best_s, timing.median_s - times * other.median_s)


def _phases(schedule: str, layers: int, devices: int, rows: int) -> dict[str, Timing]:
    """Return the seconds of a chain's phases."""
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    inputs, target = torch.randn(rows, 4), torch.zeros(rows, dtype=torch.int64)
    clock = HostClock()

    def momentum(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0, momentum=0.9)

    step = TrainStep(
        module, nn.functional.cross_entropy, momentum, ["cpu"] * devices, schedule, mark=clock.mark  # type: ignore[arg-type]
    )  # fmt: skip
    with step:
        for i in range(WARMUP_STEPS + STEPS):
            with clock.step(warmup=i < WARMUP_STEPS):
                step(inputs, target)
    case = Case(model="chain", strategy="dp", schedule=schedule, batch_size=rows, devices=devices)
    table = ledger.of_trial(Trial(case=case, steps=clock.steps(), spans=clock.spans()))[WARMUP_STEPS:]
    phases = (*PHASES, Phase.BACKWARD.value)
    return {phase: summary([row.get(phase, 0.0) for row in table]) for phase in phases}
