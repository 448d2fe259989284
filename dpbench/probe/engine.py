"""Engine: the host's cost of the engine itself, measured on nets that compute almost nothing.

For each phase, the steps of a short and a long chain of tiny layers give a fixed cost and a cost per parameter tensor.
Costs that depend on the bytes of a net's tensors are measured in other parts of the probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dpbench.engine import TrainStep
from dpbench.hardware.devices import open_devices
from dpbench.measure.clocks import HostClock
from dpbench.models import Model
from dpbench.probe.figures import Figure, spread
from dpbench.records import UNATTRIBUTED, Phase, Trial, plan
from dpbench.records.schedule import FASTEST, REFERENCE, SELECTED, Schedule

LAYERS = (6, 48)
ROWS = 8
SHORT, LONG = 2**21, 2**25
"""The bytes of memory that a short and a long sweep read; a chain makes a sweep in forward and another in backward.

A short sweep is about the size of a core's private cache. A long sweep takes milliseconds, so that a core whose replica
ends early enters a sleep state, from which it takes longer to respond.
"""
OF_LONG = ", with kernels that take milliseconds"
WARMUP_STEPS, STEPS = 5, 40
OWN = (
    Phase.SCATTER.value, Phase.REPLICATE.value, Phase.GATHER.value, Phase.REDUCE.value, Phase.OPTIMIZER.value,
    UNATTRIBUTED,
)  # fmt: skip
"""The phases whose whole time is the engine's own cost, and the key of the time that no phase covers.

The other phases, which are forward, loss and backward, also contain the time of the net itself.
"""
BLOCKS = 4
"""The number of blocks into which a chain's timed steps are split; the values of the blocks give a figure's range."""
Phases = Sequence[Mapping[str, float]]
"""The typical seconds of a step by phase: the first item is over all timed steps, each further item over one block."""
Found = Mapping[int, Phases]
"""The typical seconds of a chain's step by phase, for each number of layers; see `Phases`."""
SCHEDULES = {
    REFERENCE: (Schedule(), SHORT),
    "fastest_pool": (SELECTED[FASTEST], LONG),
    "fastest_serial": (replace(SELECTED[FASTEST], workers="serial"), SHORT),
}
"""The measured schedules by name, each with the number of bytes that a sweep reads.

The schedule `fastest` runs replicas in threads if a net has long kernels, and one after the other if it has short
kernels. Both variants are measured.
"""


def figures(devices: int = 2) -> Iterator[Figure]:
    """Yield, for each schedule and phase, the engine's fixed seconds per step and its seconds per parameter tensor.

    `devices` is the number of logical CPU devices.
    """
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
        long = OF_LONG if swept == LONG else ""
        how = f"dpbench's schedule {name.replace('_', ' with workers=')} on {devices} devices{long}"
        yield from of_chains(name, found, OWN, beyond(found, singles[swept], times), how)


def beyond(found: Found, alone: Found, times: Mapping[str, int]) -> Found:
    """Return the seconds of each phase in `times` without the net's own time: found - times[phase] * alone.

    `found` has the seconds of chains on several devices, and `alone` the seconds of the same chains on one device.
    `times` has, for each phase, how often the net runs in this phase, one run after another.
    """
    return {
        layers: [
            {phase: seconds[phase] - count * single[phase] for phase, count in times.items()}
            for seconds, single in zip(blocks, alone[layers], strict=True)
        ]
        for layers, blocks in found.items()
    }


def of_chains(name: str, found: Found, phases: Sequence[str], more: Found, how: str) -> Iterator[Figure]:
    """Yield, for each phase, a figure of the fixed seconds per step and one of the seconds per parameter tensor.

    The figures of the phases in `phases` come from `found`. Further figures come from `more`, which has the
    seconds of some phases beyond those that the net itself takes. Each figure's name begins with `name`, and its
    description with `how`.
    """
    how = f"{how}, with SGD, on chains of {LAYERS[0]} and {LAYERS[1]} Linear(4, 4) layers"
    tables = [(phase, phase, found, how) for phase in phases]
    tables += [
        (f"{phase}_more", phase, more, f"{how}: the seconds in addition to those of the same chain on one device")
        for phase in next((blocks[0] for blocks in more.values()), ())
    ]
    for label, phase, table, said in tables:
        blocks = zip(*(table[layers] for layers in LAYERS), strict=True)
        parts = [_two_parts({2 * n: one[phase] for n, one in zip(LAYERS, block, strict=True)}) for block in blocks]
        yield spread(f"{name}_{label}_s", [start_s for start_s, _ in parts], f"{said}: the fixed part of a step")
        yield spread(
            f"{name}_{label}_tensor_s", [each_s for _, each_s in parts], f"{said}: the part per parameter tensor"
        )


def _two_parts(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Return the fixed seconds of a step and its seconds per parameter tensor, both at least 0.

    `seconds` has the seconds of a step at two numbers of parameter tensors. The results are the intercept and the slope
    of the line through these two points.
    """
    (few, low), (many, high) = ((count, max(0.0, s)) for count, s in sorted(seconds.items()))
    slope = max(0.0, (high - low) / (many - few))
    return max(0.0, low - slope * few), slope


class _Read(torch.autograd.Function):
    """An autograd function that returns its input; it reads one block of memory in forward, another in backward."""

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
    """A layer that reads blocks of memory and so evicts the interpreter's data from a core's cache, as real nets do."""

    def __init__(self, there_bytes: int = 0, back_bytes: int = 0) -> None:
        super().__init__()
        # a list of tensors is not copied to replicas
        self.blocks = [torch.ones(size // 4) for size in (there_bytes, back_bytes)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Read the block of memory for forward and return `x` unchanged; backward reads another block."""
        found: torch.Tensor = _Read.apply(x, *self.blocks)  # type: ignore[no-untyped-call]
        return found


def chain(layers: int, swept: int = SHORT) -> Model:
    """Return a model of `layers` tiny layers, which reads `swept` bytes at the end of forward and of backward."""

    def batch(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(rows, 4), torch.zeros(rows, dtype=torch.int64)

    first, *rest = (nn.Linear(4, 4) for _ in range(layers))
    # after the first layer, because backward does not reach a layer whose input needs no gradient
    module = nn.Sequential(first, _Sweep(back_bytes=swept), *rest, _Sweep(there_bytes=swept))
    return Model("chain", module, batch, nn.functional.cross_entropy)


def trial_of(step: Callable[..., Any], clock: HostClock, rows: int, observe: Callable[[], Any] = tuple) -> Trial:
    """Run warm-up and timed steps of a chain of layers on a batch of `rows` samples, and return them as a trial.

    `step` runs one step and marks its phases on `clock`. After each step, `observe` returns the spans of that step that
    `clock` has not recorded, such as those from the timer of DistributedDataParallel.
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
    """Return the typical seconds of a step by phase, first over all timed steps of a trial, then over each block."""
    every = dict.fromkeys([*(phase.value for phase in Phase), UNATTRIBUTED], 0.0)
    return [every | part.ledger.typical() for part in (trial, *(_block(trial, i) for i in range(BLOCKS)))]


def _block(trial: Trial, number: int) -> Trial:
    """Return the trial with only the timed steps of block `number`; all other steps are marked as warm-up."""
    timed = [i for i, step in enumerate(trial.steps) if not step.warmup]
    size = len(timed) // BLOCKS
    kept = timed[number * size : (number + 1) * size]
    return replace(trial, steps=tuple(replace(step, warmup=i not in kept) for i, step in enumerate(trial.steps)))


def _phases(schedule: Schedule, layers: int, swept: int, devices: int, rows: int) -> Phases:
    """Run a chain under a schedule on `devices` logical CPU devices, and return its typical seconds by phase."""
    clock, model = HostClock(), chain(layers, swept)

    def momentum(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0, momentum=0.9)

    step = TrainStep(
        model.module, model.loss, momentum, open_devices("cpu", devices), schedule, mark=clock.mark  # type: ignore[arg-type]
    )  # fmt: skip
    with step:
        return seconds_of(trial_of(step, clock, rows))
