"""Engine: the host's cost of the engine itself, measured on nets that compute almost nothing.

A short and a long chain of tiny layers give a fixed cost and a cost per parameter for each phase. The costs that depend
on the bytes of a real net are measured separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dpbench.engine import TrainStep
from dpbench.engine.legal import BEST
from dpbench.hardware.devices import open_devices
from dpbench.measure.clocks import HostClock
from dpbench.models import Model
from dpbench.probe.figures import Figure, spread
from dpbench.records import UNATTRIBUTED, Phase, Trial, ledger, plan
from dpbench.records.schedule import REFERENCE, Schedule

LAYERS = (6, 48)
ROWS = 8
SHORT, LONG = 2**21, 2**25
"""The bytes that a chain's sweep reads.

The short sweep is about the size of a core's private cache. The long sweep takes milliseconds: a core whose replica
ends early falls asleep, and takes longer to wake up.
"""
OF_LONG = ", kernels of milliseconds"
WARMUP_STEPS, STEPS = 5, 40
OWN = (
    Phase.SCATTER.value, Phase.REPLICATE.value, Phase.GATHER.value, Phase.REDUCE.value, Phase.OPTIMIZER.value,
    UNATTRIBUTED,
)  # fmt: skip
"""The engine's phases: all except forward, loss and backward, which belong to the net."""
BLOCKS = 4
"""The number of blocks into which a chain's steps are split; the range over the blocks is the spread of a figure."""
Phases = Sequence[Mapping[str, float]]
"""Seconds by phase: first over all timed steps, then over each block of steps."""
Found = Mapping[int, Phases]
"""Seconds by phase for each number of layers."""
SCHEDULES = {
    REFERENCE: (Schedule(), SHORT),
    "fastest_pool": (BEST, LONG),
    "fastest_serial": (replace(BEST, workers="serial"), SHORT),
}
"""The measured schedules with their sweeps.

`fastest` runs replicas in threads for nets with long kernels and serially for nets with short kernels. Both variants
are measured.
"""


def figures(devices: int = 2) -> Iterator[Figure]:
    """Yield the cost of each phase under each schedule in seconds: a fixed part per step, and a part per parameter."""
    singles = {
        swept: {layers: _phases(Schedule(), layers, swept, 1, ROWS // devices) for layers in LAYERS}
        for swept in (SHORT, LONG)
    }
    for name, (schedule, swept) in SCHEDULES.items():
        found = {layers: _phases(schedule, layers, swept, devices, ROWS) for layers in LAYERS}
        # the net's own loss, backward and update are subtracted; the rest is the engine's cost
        times = {Phase.BACKWARD.value: 1 if name == "fastest_pool" else devices}
        if name == REFERENCE:
            times[Phase.OPTIMIZER.value] = 1
        else:
            times[Phase.LOSS.value] = times[Phase.BACKWARD.value]
        how = f"dpbench's {name.replace('_', ' with workers=')}, {devices} devices{OF_LONG if swept == LONG else ''}"
        yield from of_chains(name, found, OWN, beyond(found, singles[swept], times), how)


def beyond(found: Found, alone: Found, times: Mapping[str, int]) -> Found:
    """Return the seconds of each phase in `times`, minus `times[phase]` times the seconds of that phase in `alone`.

    `alone` has the seconds of the same chains on one device.
    """
    return {
        layers: [
            {phase: seconds[phase] - count * single[phase] for phase, count in times.items()}
            for seconds, single in zip(blocks, alone[layers], strict=True)
        ]
        for layers, blocks in found.items()
    }


def of_chains(name: str, found: Found, phases: Sequence[str], more: Found, how: str) -> Iterator[Figure]:
    """Yield the fixed cost and the cost per parameter of each phase in `phases`, and of each additional cost in `more`.

    `found` has the seconds of all phases. `more` has the seconds that some phases take in addition to those on one
    device.
    """
    how = f"{how}, SGD: chains of {LAYERS[0]} and {LAYERS[1]} Linear(4, 4)"
    tables = [(phase, phase, found, how) for phase in phases]
    tables += [
        (f"{phase}_more", phase, more, f"{how}: minus the seconds of the same chain on one device")
        for phase in next((blocks[0] for blocks in more.values()), ())
    ]
    for label, phase, table, said in tables:
        blocks = zip(*(table[layers] for layers in LAYERS), strict=True)
        parts = [_two_parts({2 * n: one[phase] for n, one in zip(LAYERS, block, strict=True)}) for block in blocks]
        yield spread(f"{name}_{label}_s", [start_s for start_s, _ in parts], f"{said}: a step's fixed part")
        yield spread(f"{name}_{label}_tensor_s", [each_s for _, each_s in parts], f"{said}: for each parameter")


def _two_parts(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Return the intercept and the slope, both at least 0, of the line through the seconds at two parameter counts."""
    (few, low), (many, high) = ((count, max(0.0, s)) for count, s in sorted(seconds.items()))
    slope = max(0.0, (high - low) / (many - few))
    return max(0.0, low - slope * few), slope


class _Read(torch.autograd.Function):
    """Return the tensor unchanged; read one block of memory in forward and another in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.back = back
        there.sum()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.back.sum()
        return gradient, None, None


class _Sweep(nn.Module):
    """A layer that evicts the interpreter's data from a core's private cache by reading memory, as real nets do."""

    def __init__(self, there_bytes: int = 0, back_bytes: int = 0) -> None:
        super().__init__()
        # a list of tensors is not copied to replicas
        self.blocks = [torch.ones(size // 4) for size in (there_bytes, back_bytes)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` unchanged, after reading one block; backward reads the other block."""
        found: torch.Tensor = _Read.apply(x, *self.blocks)  # type: ignore[no-untyped-call]
        return found


def chain(layers: int, swept: int = SHORT) -> Model:
    """Return a chain of `layers` tiny layers, with a sweep of `swept` bytes at the end of forward and of backward."""

    def batch(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(rows, 4), torch.zeros(rows, dtype=torch.int64)

    first, *rest = (nn.Linear(4, 4) for _ in range(layers))
    # after the first layer, because backward does not reach a layer whose input needs no gradient
    module = nn.Sequential(first, _Sweep(back_bytes=swept), *rest, _Sweep(there_bytes=swept))
    return Model("chain", module, batch, nn.functional.cross_entropy)


def trial_of(step: Callable[..., Any], clock: HostClock, rows: int, observe: Callable[[], Any] = tuple) -> Trial:
    """Return the trial of a chain's warm-up and timed steps.

    `observe` returns those spans of the last step that only a library's timer records.
    """
    batch = chain(1).batch(rows, 0)
    for i in range(WARMUP_STEPS + STEPS):
        with clock.step(warmup=i < WARMUP_STEPS):
            step(*batch)
        for span in observe():
            clock.add(*span)
    case = plan.baseline(model="chain", batch_size=rows)
    return Trial(case=case, steps=clock.steps(), spans=clock.spans())


def seconds_of(trial: Trial) -> Phases:
    """Return a trial's typical seconds by phase: first over all timed steps, then over each block of steps."""
    every = dict.fromkeys([*(phase.value for phase in Phase), UNATTRIBUTED], 0.0)
    return [every | ledger.typical(part) for part in (trial, *(_block(trial, i) for i in range(BLOCKS)))]


def _block(trial: Trial, number: int) -> Trial:
    """Return the trial with all steps outside one block marked as warm-up."""
    timed = [i for i, step in enumerate(trial.steps) if not step.warmup]
    size = len(timed) // BLOCKS
    kept = timed[number * size : (number + 1) * size]
    return replace(trial, steps=tuple(replace(step, warmup=i not in kept) for i, step in enumerate(trial.steps)))


def _phases(schedule: Schedule, layers: int, swept: int, devices: int, rows: int) -> Phases:
    """Return a chain's seconds by phase under a schedule."""
    clock, model = HostClock(), chain(layers, swept)

    def momentum(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0, momentum=0.9)

    step = TrainStep(
        model.module, model.loss, momentum, open_devices("cpu", devices), schedule, mark=clock.mark  # type: ignore[arg-type]
    )  # fmt: skip
    with step:
        return seconds_of(trial_of(step, clock, rows))
