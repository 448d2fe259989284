"""Profiles: the durations of a model's phases on one device, from a known step or from FLOP and bytes.

`given` splits a known step on one device into phases. `counted` derives the durations of whole phases from their FLOP
and bytes on a described GPU; the module `roofline` does the same op by op for a traced model.
"""

from __future__ import annotations

from dataclasses import replace

from dpbench.predict import quick
from dpbench.predict.constants import DEFAULT, Constants
from dpbench.records import Cost, Phase, Profile, plan
from dpbench.records.machine import Machine, UnknownMachine

DTYPES = {"fp32": ("fp32",), "tf32": ("tf32", "fp32"), "bf16": ("bf16", "fp16", "fp32"), "fp16": ("fp16", "fp32")}
"""The names of the peaks that apply to each precision; the first that the machine file states is used."""
COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY = 0.55, 0.75
"""The shares of a GPU's peaks that whole networks reach.

Large matrix products reach 0.78-0.87 of the FLOP peak (ml-engineering).
"""
KERNEL_S = 3e-6
"""The minimum duration of a kernel, in seconds."""
FIXED_SHARE = 0.1
"""The assumed share of a step that does not depend on the batch size, if only one batch size was measured."""


def given(
    profile: Profile,
    step_s: float,
    samples: int,
    machine: Machine,
    constants: Constants = DEFAULT,
    *,
    other: tuple[float, int] | None = None,
    phases: frozenset[Phase] = frozenset(Phase),
    optimizer: str = "sgd",
) -> Profile:
    """Return `profile` with timings such that a step on one device with `samples` samples takes `step_s` seconds.

    `other` is a second step, (seconds, samples), which determines the part that does not depend on the batch. The
    calculated durations of copies, loss and optimizer are subtracted from the step; forward and backward share the
    rest.
    """
    if step_s <= 0:
        raise ValueError(f"the step on one device must take more than 0 s, got {step_s} s")
    fixed = _fixed_share(step_s, samples, other)
    case = plan.baseline(model=profile.model, batch_size=samples, optimizer=optimizer)
    idle = replace(profile, forward=Cost(), backward=Cost(), source="given")

    def rest_of_step() -> float:
        return quick.seconds(case, idle, machine, constants, phases=phases)

    if (aside := rest_of_step()) > step_s / 2:  # the batch cannot have been copied from pageable memory
        idle = replace(idle, input_bytes=0.0)
        aside = rest_of_step()
    if aside > step_s / 2:
        idle = replace(idle, loss=Cost(), optimizer=Cost())
        aside = rest_of_step()
    rest = step_s - aside
    share = constants.forward_share if Phase.BACKWARD in phases else 1.0
    return replace(
        idle,
        forward=_cost(rest * share, samples, fixed),
        backward=_cost(rest * (1 - share), samples, fixed),
    )


def _fixed_share(step_s: float, samples: int, other: tuple[float, int] | None) -> float:
    """Return the share of a step's duration that does not depend on the batch size."""
    if other is None or other[1] == samples:
        return FIXED_SHARE
    slope = (step_s - other[0]) / (samples - other[1])
    return min(1.0, max(0.0, 1 - slope * samples / step_s))


def _cost(seconds: float, samples: int, fixed: float) -> Cost:
    return Cost(seconds * fixed, seconds * (1 - fixed) / samples)


def peaks(machine: Machine, precision: str) -> tuple[float, float]:
    """Return the FLOP/s of a precision and the bytes/s of the memory.

    Raises UnknownMachine if the machine file lacks one of them.
    """
    gpu = machine.gpu
    peak = next((gpu.flop_per_s[d] for d in DTYPES.get(precision, (precision,)) if d in gpu.flop_per_s), 0.0)
    if not peak or not gpu.memory_bytes_per_s:
        raise UnknownMachine(
            f"machine {machine.name}: [gpu] needs both a peak for {precision} in flop_per_s (it has: "
            f"{', '.join(gpu.flop_per_s) or 'none'}) and memory_bytes_per_s (it has: "
            f"{gpu.memory_bytes_per_s or 'none'}); or give the duration of a step on one device: --step-s SECONDS"
        )
    return peak, gpu.memory_bytes_per_s


def counted(profile: Profile, machine: Machine, precision: str = "fp32", constants: Constants = DEFAULT) -> Profile:
    """Return a profile with timings from FLOP and bytes: per phase, the longer of computation and memory traffic.

    Raises UnknownMachine if the machine file lacks a peak.
    """
    peak, bytes_per_s = peaks(machine, precision)

    def cost(flop: float, moved: float, launches: int) -> Cost:
        sample = max(flop / (COMPUTE_EFFICIENCY * peak), moved / (MEMORY_EFFICIENCY * bytes_per_s))
        return Cost(launches * KERNEL_S * (1 if flop else 0), sample)

    p = profile
    found = replace(
        profile, source="counted",
        forward=cost(p.forward_flop, p.forward_bytes, p.forward_launches),
        backward=cost(p.backward_flop, p.backward_bytes, p.backward_launches),
    )  # fmt: skip
    return launched(found, machine, constants)


def launched(profile: Profile, machine: Machine, constants: Constants = DEFAULT) -> Profile:
    """Return a profile whose phases take at least as long as the host needs to launch their kernels."""
    host, c = machine.host, constants

    def least(cost: Cost | None, launches: int, each_s: float) -> Cost | None:
        return cost and replace(cost, least_s=launches * each_s)

    forward_s = host.factor * c.launch_s if host.launch_s is None else host.launch_s
    backward_s = host.factor * c.backward_launch_s if host.launch_s is None else host.launch_s
    return replace(
        profile,
        forward=least(profile.forward, profile.forward_launches, forward_s),
        backward=least(profile.backward, profile.backward_launches, backward_s),
        optimizer=least(profile.optimizer, profile.parameter_tensors, host.factor * c.update_s),
    )
