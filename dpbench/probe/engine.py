"""What an engine costs the host beside the nets themselves: its phases on nets that compute next to nothing.

Chains of tiny layers of two lengths give each phase a fixed part and a part per parameter; what a real net adds to
them is bytes.
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
"""Bytes that a chain's sweep reads: about what a core's own cache holds; and what takes milliseconds, so that a core
whose replica is done goes to sleep before the others are, and takes longer to be woken."""
OF_LONG = ", kernels of milliseconds"
WARMUP_STEPS, STEPS = 5, 40
OWN = (
    Phase.SCATTER.value, Phase.REPLICATE.value, Phase.GATHER.value, Phase.REDUCE.value, Phase.OPTIMIZER.value,
    UNATTRIBUTED,
)  # fmt: skip
"""All but forward, loss and backward, which are the net's own."""
BLOCKS = 4
"""Parts of a chain's steps: how far they are apart is the spread of its figures."""
Phases = Sequence[Mapping[str, float]]
"""Seconds by phase: of all timed steps, then of each block of them."""
Found = Mapping[int, Phases]
"""Those of each number of layers."""
SCHEDULES = {
    REFERENCE: (Schedule(), SHORT),
    "fastest_pool": (BEST, LONG),
    "fastest_serial": (replace(BEST, workers="serial"), SHORT),
}
"""What `fastest` settles for, it decides for each net: long kernels are worth threads, short ones do without."""


def figures(devices: int = 2) -> Iterator[Figure]:
    """Yield each phase's seconds on each schedule: for a step, and for each parameter of the module."""
    singles = {
        swept: {layers: _phases(Schedule(), layers, swept, 1, ROWS // devices) for layers in LAYERS}
        for swept in (SHORT, LONG)
    }
    for name, (schedule, swept) in SCHEDULES.items():
        found = {layers: _phases(schedule, layers, swept, devices, ROWS) for layers in LAYERS}
        # what the replicas' own losses and backwards, and the optimizer, take is the net's; the rest is the engine's
        times = {Phase.BACKWARD.value: 1 if name == "fastest_pool" else devices}
        if name == REFERENCE:
            times[Phase.OPTIMIZER.value] = 1
        else:
            times[Phase.LOSS.value] = times[Phase.BACKWARD.value]
        how = f"dpbench's {name.replace('_', ' with workers=')}, {devices} devices{OF_LONG if swept == LONG else ''}"
        yield from of_chains(name, found, OWN, beyond(found, singles[swept], times), how)


def beyond(found: Found, alone: Found, times: Mapping[str, int]) -> Found:
    """Return what phases take beyond so many times the same chain's alone."""
    return {
        layers: [
            {phase: seconds[phase] - count * single[phase] for phase, count in times.items()}
            for seconds, single in zip(blocks, alone[layers], strict=True)
        ]
        for layers, blocks in found.items()
    }


def of_chains(name: str, found: Found, phases: Sequence[str], more: Found, how: str) -> Iterator[Figure]:
    """Yield the two parts of each phase, and of what some phases have beyond one device's."""
    how = f"{how}, SGD: chains of {LAYERS[0]} and {LAYERS[1]} Linear(4, 4)"
    tables = [(phase, phase, found, how) for phase in phases]
    tables += [
        (f"{phase}_more", phase, more, f"{how}: beyond the same chain's without it")
        for phase in next((blocks[0] for blocks in more.values()), ())
    ]
    for label, phase, table, said in tables:
        blocks = zip(*(table[layers] for layers in LAYERS), strict=True)
        parts = [_two_parts({2 * n: one[phase] for n, one in zip(LAYERS, block, strict=True)}) for block in blocks]
        yield spread(f"{name}_{label}_s", [start_s for start_s, _ in parts], f"{said}: a step's fixed part")
        yield spread(f"{name}_{label}_tensor_s", [each_s for _, each_s in parts], f"{said}: for each parameter")


def _two_parts(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Return the start and the slope of the line through two counts of parameters, neither below zero."""
    (few, low), (many, high) = ((count, max(0.0, s)) for count, s in sorted(seconds.items()))
    slope = max(0.0, (high - low) / (many - few))
    return max(0.0, low - slope * few), slope


class _Read(torch.autograd.Function):
    """Pass a tensor on; read one block of memory on the way there, and another on the way back."""

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
    """What real nets do and tiny ones do not: leave little of the interpreter in a core's own cache."""

    def __init__(self, there_bytes: int = 0, back_bytes: int = 0) -> None:
        super().__init__()
        # in a list: no replica has a copy of its own
        self.blocks = [torch.ones(size // 4) for size in (there_bytes, back_bytes)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        found: torch.Tensor = _Read.apply(x, *self.blocks)  # type: ignore[no-untyped-call]
        return found


def chain(layers: int, swept: int = SHORT) -> Model:
    """Return a chain of so many tiny layers, with a sweep where forward ends, and one where backward does."""

    def batch(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(rows, 4), torch.zeros(rows, dtype=torch.int64)

    first, *rest = (nn.Linear(4, 4) for _ in range(layers))
    # behind the first layer, because what needs no gradient is not met on the way back
    module = nn.Sequential(first, _Sweep(back_bytes=swept), *rest, _Sweep(there_bytes=swept))
    return Model("chain", module, batch, nn.functional.cross_entropy)


def trial_of(step: Callable[..., Any], clock: HostClock, rows: int, observe: Callable[[], Any] = tuple) -> Trial:
    """Take a chain's steps; `observe` tells spans that only a library's own timer knows."""
    batch = chain(1).batch(rows, 0)
    for i in range(WARMUP_STEPS + STEPS):
        with clock.step(warmup=i < WARMUP_STEPS):
            step(*batch)
        for span in observe():
            clock.add(*span)
    case = plan.baseline(model="chain", batch_size=rows)
    return Trial(case=case, steps=clock.steps(), spans=clock.spans())


def seconds_of(trial: Trial) -> Phases:
    """Return a chain's typical seconds by phase, every phase named: over all timed steps, and over each block."""
    every = dict.fromkeys([*(phase.value for phase in Phase), UNATTRIBUTED], 0.0)
    return [every | ledger.typical(part) for part in (trial, *(_block(trial, i) for i in range(BLOCKS)))]


def _block(trial: Trial, number: int) -> Trial:
    """Return the trial with all steps but those of one block as warm-up."""
    timed = [i for i, step in enumerate(trial.steps) if not step.warmup]
    size = len(timed) // BLOCKS
    kept = timed[number * size : (number + 1) * size]
    return replace(trial, steps=tuple(replace(step, warmup=i not in kept) for i, step in enumerate(trial.steps)))


def _phases(schedule: Schedule, layers: int, swept: int, devices: int, rows: int) -> Phases:
    """Return the seconds of a chain's phases."""
    clock, model = HostClock(), chain(layers, swept)

    def momentum(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0, momentum=0.9)

    step = TrainStep(
        model.module, model.loss, momentum, open_devices("cpu", devices), schedule, mark=clock.mark  # type: ignore[arg-type]
    )  # fmt: skip
    with step:
        return seconds_of(trial_of(step, clock, rows))
