"""Profiles: the durations of a model's phases on one device.

`given` and `split` divide a known step on one device into phases. `counted` derives the durations
of whole phases from their FLOP and bytes on a described GPU; `profile` does the same op by op for a
traced model.

An op takes as long as its computation, its memory traffic, or the shortest kernel, whichever is
longest. An op with `half_flop` FLOP computes at half of the best rate, and one with `half_bytes`
bytes moves them at half of the best rate. The model therefore adds both to the work of every op and
divides by the best rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dpbench.predict import simulation
from dpbench.predict.constants import DEFAULT, Constants, HostCosts
from dpbench.predict.machine import Machine, UnknownMachine
from dpbench.predict.work import Cost, Profile
from dpbench.records import Phase, plan
from dpbench.records.errors import UnknownName, UsageError

if TYPE_CHECKING:
    from dpbench.predict.recorder import Op
    from dpbench.predict.trace import Trace

FOREACH_TENSORS = (770, 448, 336, 252, 210)
"""The maximum number of tensors in one multi-tensor launch, for one to five tensor lists.

`depth_to_max_tensors` in torch 2.13's `ATen/native/cuda/MultiTensorApply.cuh` for CUDA 13, which
also gives the maximum number of blocks in a launch, `FOREACH_BLOCKS`, and the elements of a block,
`FOREACH_ELEMENTS`. With CUDA 12, the limits are a seventh of these.
"""
FOREACH_BLOCKS, FOREACH_ELEMENTS = 2240, 65_536


@dataclass(frozen=True, kw_only=True)
class Speed:
    """A GPU's peaks from its data sheet, attainable shares, and minimum kernel duration.

    `flop_share` is the share of the dense peak that the best bf16 matrix product reaches: A100 SXM
    0.87, A100 PCIe 0.81, H100 0.80, B200 0.78, MI300X 0.51 (S. Bekman, "Machine Learning
    Engineering Open Book", MAMF table). An op with `half_flop` FLOP or `half_bytes` bytes reaches
    half of the attainable rate; both are fitted to the efficiency tables of Calculon: 60 % at 1
    GFLOP, 75 % at 10 MB and 90 % at 100 MB. dpbench measured none of these.
    `convolution_flop_per_s` is the peak for convolutions, which cuDNN runs in TF32 by default where
    available; 0 means no separate peak.
    """

    flop_per_s: float
    bytes_per_s: float
    flop_share: float = 0.85
    bytes_share: float = 0.92
    half_flop: float = 4.2e8
    half_bytes: float = 2.25e6
    least_s: float = 2.5e-6
    convolution_flop_per_s: float = 0.0

    def op_s(self, op: Op) -> float:
        """Return the duration of one op in seconds; 0 for an op without a kernel."""
        faster = self.convolution_flop_per_s if "convolution" in op.name else 0.0
        return self.seconds(op.flop, op.bytes, max(faster, self.flop_per_s))

    def seconds(self, flop: float, size_bytes: float, flop_per_s: float | None = None) -> float:
        """Return the duration of one kernel in seconds; 0 without traffic.

        `flop_per_s` replaces the peak of this object.
        """
        if not size_bytes:
            return 0.0
        compute = (
            (flop + self.half_flop) / (self.flop_share * (flop_per_s or self.flop_per_s))
            if flop
            else 0.0
        )
        move = (size_bytes + self.half_bytes) / (self.bytes_share * self.bytes_per_s)
        return max(compute, move, self.least_s)


@dataclass(frozen=True)
class Pass:
    """One multi-tensor op of an optimizer on `lists` of tensors, with `passes` accesses each."""

    lists: int
    passes: int


UPDATES: dict[str, tuple[Pass, ...]] = {
    # momentum: buf *= m; buf += g; p -= lr * buf
    "SGD": (Pass(1, 2), Pass(2, 3), Pass(2, 3)),
    # m.lerp(g); v *= b; v += g * g; sqrt(v); /= c; += eps; p += m / root
    "Adam": (Pass(2, 3), Pass(1, 2), Pass(2, 3), Pass(2, 2), Pass(1, 2), Pass(1, 2), Pass(3, 4)),
}
UPDATES["AdamW"] = (Pass(1, 2), *UPDATES["Adam"])  # p *= 1 - lr * decay
"""The multi-tensor ops of a step of optimizers in `torch.optim` (2.13, foreach); SGD has momentum.
"""


def optimizer_s(name: str, sizes_bytes: Sequence[int], speed: Speed) -> tuple[float, int]:
    """Return the duration in seconds and the number of launches of an optimizer step.

    Both come from `UPDATES` instead of a trace, because traces are made on the host, where torch
    splits multi-tensor ops into single-tensor ops. Raises LookupError for an optimizer that is not
    in `UPDATES`.
    """
    if name not in UPDATES:
        raise UnknownName(
            f"the kernels of the optimizer {name} are not known; use one of these optimizers:"
            f" {', '.join(UPDATES)}"
        )
    total = sum(sizes_bytes)
    blocks = sum(math.ceil(size / 4 / FOREACH_ELEMENTS) for size in sizes_bytes)
    seconds = 0.0
    count = 0
    for op in UPDATES[name]:
        launches = max(
            math.ceil(len(sizes_bytes) / FOREACH_TENSORS[op.lists - 1]),
            math.ceil(blocks / FOREACH_BLOCKS),
        )
        count += launches
        seconds += launches * speed.seconds(0.0, op.passes * total / max(launches, 1))
    return seconds, count


def phase_s(trace: Trace, phase: Phase, speed: Speed) -> float:
    """Return the total duration in seconds of a phase's kernels, which run one after the other."""
    if phase is Phase.OPTIMIZER:
        return optimizer_s(trace.optimizer_name, trace.parameter_bytes, speed)[0]
    return sum(map(speed.op_s, trace.during(phase)))


def of_trace(trace: Trace) -> Profile:
    """Return the counts of a traced model as a profile without timings."""
    rows = trace.rows
    forward, backward = trace.during(Phase.FORWARD), trace.during(Phase.BACKWARD)
    return Profile(
        model=trace.model,
        parameter_tensors=len(trace.parameter_bytes),
        parameter_bytes=sum(trace.parameter_bytes),
        buffer_bytes=sum(trace.buffer_bytes),
        buffer_tensors=len(trace.buffer_bytes),
        modules=trace.modules,
        input_bytes=sum(trace.input_bytes) / rows,
        output_bytes=sum(trace.output_bytes) / rows,
        forward_flop=sum(op.flop for op in forward) / rows,
        backward_flop=sum(op.flop for op in backward) / rows,
        forward_launches=sum(op.bytes > 0 for op in forward),
        backward_launches=sum(op.bytes > 0 for op in backward),
        forward_bytes=sum(op.bytes for op in forward) / rows,
        backward_bytes=sum(op.bytes for op in backward) / rows,
        gradient_bytes=tuple(trace.parameter_bytes[n] for n in trace.ready),
        source="traced",
    )


def profile(low: Trace, high: Trace, speed: Speed) -> Profile:
    """Return a profile with durations that are linear in the batch size, from two traces.

    Raises ValueError unless `high` has the larger batch.
    """
    if low.rows >= high.rows:
        raise UsageError(
            "a profile needs traces of two batch sizes, the smaller one first; the traces have"
            f" {low.rows} and {high.rows} rows"
        )

    def cost(phase: Phase) -> Cost:
        first = phase_s(low, phase, speed)
        second = phase_s(high, phase, speed)
        slope = max(0.0, (second - first) / (high.rows - low.rows))
        return Cost(max(0.0, second - slope * high.rows), slope)

    return replace(
        of_trace(high),
        forward=cost(Phase.FORWARD),
        loss=cost(Phase.LOSS),
        backward=cost(Phase.BACKWARD),
        optimizer=cost(Phase.OPTIMIZER),
    )


COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY = 0.55, 0.75
"""The assumed shares of a GPU's peak FLOP/s and memory bandwidth that whole networks reach.

Large matrix products reach 0.78-0.87 of the peak FLOP/s (ml-engineering).
"""
KERNEL_S = 3e-6
"""The seconds that a profile from counts adds for each kernel."""
FIXED_SHARE = 0.1
"""The assumed share of a step that does not depend on the batch size, if one size was measured."""


def given(
    profile: Profile,
    step_s: float,
    samples: int,
    machine: Machine,
    constants: Constants = DEFAULT,
    *,
    optimizer: str = "sgd",
) -> Profile:
    """Return `profile` with timings such that a step of `samples` samples takes `step_s` seconds.

    The step runs on one device. Besides forward and backward, it is simulated; see `split`. Raises
    ValueError unless `step_s` is positive.
    """
    alone = plan.baseline(model=profile.model, batch_size=samples, optimizer=optimizer)

    def rest_s(idle: Profile) -> float:
        return simulation.step(alone, idle, machine, constants).seconds

    return split(profile, step_s, samples, rest_s, forward_share=constants.forward_share)


def split(
    profile: Profile,
    step_s: float,
    samples: int,
    rest_s: Callable[[Profile], float],
    *,
    forward_share: float,
    fixed_share: float = FIXED_SHARE,
) -> Profile:
    """Return `profile` with timings of forward and backward from a step on one device.

    The step has `samples` samples and takes `step_s` seconds. `rest_s(idle)` returns the calculated
    duration of its copies, loss and optimizer; forward and backward of `idle` take 0 s. The rest is
    subtracted from `step_s`, unless it exceeds half of `step_s`. Forward has the share
    `forward_share` of the difference. The share `fixed_share` of forward and of backward does not
    depend on the batch size. Raises ValueError unless `step_s` is positive.
    """
    if step_s <= 0:
        raise UsageError(
            f"the duration of the step on one device must be more than 0 s, but {step_s} s was"
            " given"
        )
    idle = replace(profile, forward=Cost(), backward=Cost(), source="given")
    aside = rest_s(idle)
    if aside > step_s / 2:  # the batch cannot have been copied from pageable memory
        idle = replace(idle, input_bytes=0.0)
        aside = rest_s(idle)
    if aside > step_s / 2:
        idle = replace(idle, loss=Cost(), optimizer=Cost())
        aside = rest_s(idle)
    both = step_s - aside
    return replace(
        idle,
        forward=_cost(both * forward_share, samples, fixed_share),
        backward=_cost(both * (1 - forward_share), samples, fixed_share),
    )


def _cost(seconds: float, samples: int, fixed: float) -> Cost:
    return Cost(seconds * fixed, seconds * (1 - fixed) / samples)


def peaks(machine: Machine, precision: str) -> tuple[float, float]:
    """Return the peak FLOP/s of a GPU in a precision, and the peak bytes/s of its memory.

    Raises UnknownMachine if the machine file lacks one of them. A peak of another precision does
    not stand for it: GPUs before Ampere have no tensor cores for bf16.
    """
    gpu = machine.gpu
    peak = gpu.flop_per_s.get(precision, 0.0)
    if not peak or not gpu.memory_bytes_per_s:
        raise UnknownMachine(
            "machine {name}: the section [gpu] of the machine file must state both a peak for"
            " {precision} in flop_per_s (stated for: {peaks}) and memory_bytes_per_s (stated:"
            " {rate})",
            option="machine",
            value=machine.name,
            remedy=(
                "add the missing values, or give the duration of a step on one device with"
                " {step_s:SECONDS}"
            ),
            name=machine.name,
            precision=precision,
            peaks=", ".join(gpu.flop_per_s) or "none",
            rate=gpu.memory_bytes_per_s or "none",
        )
    return peak, gpu.memory_bytes_per_s


def counted(
    profile: Profile, machine: Machine, precision: str = "fp32", constants: Constants = DEFAULT
) -> Profile:
    """Return `profile` with timings of forward and backward, calculated from FLOP and bytes.

    Each takes the longer of computation and memory traffic, plus `KERNEL_S` for each kernel. Raises
    UnknownMachine if the machine file lacks the peak FLOP/s or the memory bandwidth.
    """
    peak, bytes_per_s = peaks(machine, precision)

    def cost(flop: float, moved: float, launches: int) -> Cost:
        sample = max(flop / (COMPUTE_EFFICIENCY * peak), moved / (MEMORY_EFFICIENCY * bytes_per_s))
        return Cost(launches * KERNEL_S * (1 if flop else 0), sample)

    priced = replace(
        profile,
        source="counted",
        forward=cost(profile.forward_flop, profile.forward_bytes, profile.forward_launches),
        backward=cost(profile.backward_flop, profile.backward_bytes, profile.backward_launches),
    )
    return launched(priced, machine, constants)


def slower(profile: Profile, factor: float) -> Profile:
    """Return `profile` with `factor` times the device's computation; launches stay as they are."""

    def cost(one: Cost | None) -> Cost | None:
        return one and replace(one, fixed_s=factor * one.fixed_s, sample_s=factor * one.sample_s)

    return replace(
        profile,
        forward=cost(profile.forward),
        loss=cost(profile.loss),
        backward=cost(profile.backward),
        optimizer=cost(profile.optimizer),
    )


def launched(profile: Profile, machine: Machine, constants: Constants = DEFAULT) -> Profile:
    """Return `profile` where no phase is shorter than the host's launches of its kernels."""
    host = HostCosts.of(machine.host, constants)

    def least(cost: Cost | None, launches: int, each_s: float) -> Cost | None:
        return cost and replace(cost, least_s=launches * each_s)

    return replace(
        profile,
        forward=least(profile.forward, profile.forward_launches, host.launch_s),
        backward=least(profile.backward, profile.backward_launches, host.backward_launch_s),
        optimizer=least(profile.optimizer, profile.parameter_tensors, host.update_s),
    )
