"""Memory: what each device needs for a case, whether it fits, and the largest batch that does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from dpbench import models
from dpbench.predict import strategy_memory
from dpbench.predict.allocator import OutOfDeviceMemory, Peak, Tape, replay
from dpbench.predict.torch_dp_memory import WrapperMemory
from dpbench.predict.trace import Build, OptimizerFactory, trace, trace_optimizer
from dpbench.records import Case, registry
from dpbench.records.schedule import REFERENCE, Schedule, parse
from dpbench.records.traits import Role
from dpbench.strategies import optimizer_of, precision_of

STEPS = 3
"""Steps to replay: the first makes the optimizer's state, the second is the first to find it, the third repeats it."""

CONTEXT_BYTES = 500 * 2**20
"""What a CUDA context takes beside the allocator: 0.47 to 0.55 GB at its start with kernels loaded lazily, up to 0.92
in use; S. Bekman, "Machine Learning Engineering Open Book", training/performance; a prior, not measured here."""
NCCL_BYTES = 1450 * 2**20
"""What NCCL's buffers take on every GPU after the first collective: 1 to 2 GB, 1.45 in its example; same source; a
prior."""


@dataclass(frozen=True)
class DeviceMemory:
    """What one device needs: the allocator's peaks, and with the priors what the driver would show."""

    device: int
    peak: Peak
    context_bytes: int
    nccl_bytes: int

    @property
    def process_bytes(self) -> int:
        """Return the whole: segments, context and communication."""
        return self.peak.reserved_bytes + self.context_bytes + self.nccl_bytes


class Traces:
    """The traces of one model with one optimizer, made when they are asked for and kept."""

    def __init__(self, build: Build, optimizer_fn: OptimizerFactory, *, device: str = "cpu", **how: Any) -> None:
        """Keep traces made with `how`, which is `trace`'s to understand."""
        self.of = lru_cache(maxsize=64)(lambda rows: trace(build, rows, optimizer_fn, device=device, **how))
        self.optimizer = lru_cache(maxsize=64)(lambda sizes: trace_optimizer(optimizer_fn, sizes, device=device))


def traces_of(case: Case, *, fake_only: bool = False) -> Traces:
    """Return the traces of a case's model; on a GPU its optimizer works on all parameters at once, as torch chooses.

    `fake_only` refuses models whose shapes depend on numbers, which take long to run.
    """
    factory = optimizer_of(case)

    def optimizer_fn(parameters: object) -> object:
        optimizer = factory(parameters)  # type: ignore[arg-type]
        if case.device_kind == "cuda":
            for group in optimizer.param_groups:
                group["foreach"] = True
        return optimizer

    device = fake_device(case)
    return Traces(
        lambda: models.load(case.model, case.size, case.seed),
        optimizer_fn,  # type: ignore[arg-type]
        device=device,
        precision=lambda: precision_of(replace(case, device_kind=torch.device(device).type)),
        fake_only=fake_only,
    )


def fake_device(case: Case) -> str:
    """Return the device whose operators a trace takes: attention in plain operators on emulated devices alone."""
    return "lazy:0" if case.device_kind == "emulated" else "cpu"


def tape_of(case: Case, traces: Traces, steps: int = STEPS) -> Tape:
    """Return what a case's devices take and give back in so many steps.

    Raises ValueError for a strategy whose memory is not known.
    """
    tape = Tape()
    role = case.traits.role
    if case.traits.one_device:
        strategy_memory.single(tape, traces.of(case.batch_size), steps)
    elif role is Role.CONTROL:
        for device, rows in enumerate(case.rows):
            strategy_memory.ddp(tape, traces.of(rows), steps, device)
    elif role in (Role.ENGINE, Role.WRAPPER):
        schedule = _schedule(case)
        parts = tuple(traces.of(rows) for rows in case.rows)
        shards = strategy_memory.Shards(traces.of(case.batch_size), parts, traces.optimizer)
        # distinct GPUs take collectives until weights stay where they are, or move in flat buffers
        collective = case.device_kind == "cuda" and case.placement == "spread" and len(parts) > 1
        kind = WrapperMemory if role is Role.WRAPPER else strategy_memory.EngineMemory
        kind(tape, shards, schedule, collective=collective).run(steps)
    else:
        known = ", ".join(registry.of_role(one) for one in Role if one is not Role.OTHER)
        raise ValueError(f"the memory of strategy {case.strategy!r} is not known; known: {known}")
    return tape


def _schedule(case: Case) -> Schedule:
    """Return the schedule of a case, `reference` where it has none; `fastest` as it is where everything is legal."""
    if not case.schedule:
        return parse(REFERENCE)
    if case.schedule == "fastest":
        from dpbench.engine.legal import BEST

        return BEST
    return parse(case.schedule)


def needed(case: Case, traces: Traces | None = None, *, capacity_bytes: int | None = None) -> list[DeviceMemory]:
    """Return what each device needs; raise OutOfDeviceMemory where `capacity_bytes` a device are not enough.

    The capacity is the whole device's: the priors for context and communication are taken off before the replay.
    """
    tape = tape_of(case, traces or traces_of(case))
    on_gpu = case.device_kind == "cuda"
    context = CONTEXT_BYTES if on_gpu else 0
    nccl = NCCL_BYTES if on_gpu and len(case.rows) > 1 and case.placement == "spread" else 0
    rounding = None if on_gpu else 1
    left = None if capacity_bytes is None else capacity_bytes - context - nccl
    if left is not None and left < 0:
        raise OutOfDeviceMemory(f"context and communication alone take {context + nccl} of {capacity_bytes} bytes")
    return [
        DeviceMemory(i, replay(tape, i, capacity_bytes=left, rounding_bytes=rounding), context, nccl)
        for i in range(len(case.rows))
    ]


def largest_batch(case_of: Callable[[int], Case], capacity_bytes: int, *, limit: int = 2**20) -> int:
    """Return the largest batch size whose case fits every device, by bisection over replays; 0 if not even 1 does."""
    traces = traces_of(case_of(1))

    def fits(batch_size: int) -> bool:
        try:
            needed(case_of(batch_size), traces, capacity_bytes=capacity_bytes)
        except OutOfDeviceMemory:
            return False
        return True

    fine, bad = 0, 1
    while bad <= limit and fits(bad):
        fine, bad = bad, 2 * bad
    while bad - fine > 1:
        middle = (fine + bad) // 2
        fine, bad = (middle, bad) if fits(middle) else (fine, middle)
    return fine
