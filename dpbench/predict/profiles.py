"""Profiles: what a model costs on one device, from a known step or from FLOP and bytes.

`given` splits a step of one device that somebody measured; `counted` prices a whole phase's FLOP and bytes on a
described GPU, which `roofline` does op by op where there is a trace.
"""

from __future__ import annotations

from dataclasses import replace

from dpbench.predict import quick
from dpbench.predict.constants import DEFAULT, Constants
from dpbench.records import Cost, Phase, Profile, plan
from dpbench.records.machine import Machine, Unknown

DTYPES = {"fp32": ("fp32",), "tf32": ("tf32", "fp32"), "bf16": ("bf16", "fp16", "fp32"), "fp16": ("fp16", "fp32")}
"""Which peak stands for a precision, the best first."""
COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY = 0.55, 0.75
"""What whole networks reach of a GPU's peaks; single large matrix products reach 0.78-0.87 (ml-engineering)."""
KERNEL_S = 3e-6
"""No kernel is shorter."""
FIXED_SHARE = 0.1
"""The part of a known step that does not shrink with the batch, where only one batch was measured."""


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
    """Return the profile whose step of `samples` on one device takes `step_s` seconds.

    `other` is a second step, (seconds, samples), from which the part that does not depend on the batch follows.
    What copies, loss and optimizer cost is taken off; forward and backward share the rest.
    """
    if step_s <= 0:
        raise ValueError(f"a step of {step_s} s on one device: it must be positive")
    fixed = _fixed_share(step_s, samples, other)
    case = plan.baseline(model=profile.model, batch_size=samples, optimizer=optimizer)
    idle = replace(profile, forward=Cost(), backward=Cost(), source="given")

    def beside() -> float:
        return quick.seconds(case, idle, machine, constants, phases=phases)

    if (aside := beside()) > step_s / 2:  # then its batch cannot have come from memory that is not pinned
        idle = replace(idle, input_bytes=0.0)
        aside = beside()
    if aside > step_s / 2:
        idle = replace(idle, loss=Cost(), optimizer=Cost())
        aside = beside()
    rest = step_s - aside
    share = constants.forward_share if Phase.BACKWARD in phases else 1.0
    return replace(
        idle,
        forward=_cost(rest * share, samples, fixed),
        backward=_cost(rest * (1 - share), samples, fixed),
    )


def _fixed_share(step_s: float, samples: int, other: tuple[float, int] | None) -> float:
    """Return the part of a step that a batch of any size takes."""
    if other is None or other[1] == samples:
        return FIXED_SHARE
    slope = (step_s - other[0]) / (samples - other[1])
    return min(1.0, max(0.0, 1 - slope * samples / step_s))


def _cost(seconds: float, samples: int, fixed: float) -> Cost:
    return Cost(seconds * fixed, seconds * (1 - fixed) / samples)


def peaks(machine: Machine, precision: str) -> tuple[float, float]:
    """Return the FLOP a second of a precision and the bytes a second of memory; Unknown where one is not said."""
    gpu = machine.gpu
    peak = next((gpu.flop_per_s[d] for d in DTYPES.get(precision, (precision,)) if d in gpu.flop_per_s), 0.0)
    if not peak or not gpu.memory_bytes_per_s:
        raise Unknown(
            f"machine {machine.name}: [gpu] says neither the peak of {precision} nor, with it, memory_bytes_per_s; "
            f"its peaks: {', '.join(gpu.flop_per_s) or 'none'}; or give the step of one device: --step-s SECONDS"
        )
    return peak, gpu.memory_bytes_per_s


def counted(profile: Profile, machine: Machine, precision: str = "fp32", constants: Constants = DEFAULT) -> Profile:
    """Return a profile with seconds from counted FLOP and bytes: the slower of computing and moving, per phase."""
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
    """Return a profile of kernels alone whose phases take no less than the host takes to launch them."""
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
