"""Memory: what each device needs for a case, whether it fits, and the largest batch that fits.

torch.nn.DataParallel needs the same memory as the engine's schedule `reference`, with two
differences. First, torch releases its references to the replicas and outputs at the end of forward.
From then on, the autograd graph alone keeps weights, inputs and outputs allocated, and backward
frees the copied weights of a layer after their last use. Second, torch joins gradients into buffers
on every device before they are summed, with or without NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from dpbench import models
from dpbench.engine.train_step import OptimizerFactory
from dpbench.predict import strategy_memory
from dpbench.predict.allocator import (
    ROUNDING_BYTES,
    Names,
    OutOfDeviceMemory,
    Peak,
    Tape,
    clear,
    replay,
)
from dpbench.predict.recorder import AsOnGpus
from dpbench.predict.strategy_memory import EngineMemory
from dpbench.predict.tasks import schedule_of
from dpbench.predict.trace import Build, Trace, shapes_of, trace, trace_optimizer
from dpbench.predict.work import COALESCED_BYTES, chunks
from dpbench.records import Case, registry
from dpbench.records.errors import UsageError
from dpbench.strategies import OWN, Memory, load, optimizer_of, precision_of

Release = tuple[int, list[int]]
"""A pair (n, numbers): the allocations that are released after the first n backward ops."""


class WrapperMemory(EngineMemory):
    """The allocations of training with torch.nn.DataParallel."""

    def _step(self, step: int) -> None:
        tape = self._tape
        parts = self._shards.parts
        whole_trace = self._shards.whole
        self._gradients = clear(tape, self._gradients, keeps=self._keeps)
        target = tape.take_all(0, whole_trace.target_bytes)
        inputs = [tape.take_all(i, part.input_bytes) for i, part in enumerate(parts)]
        copies = (
            self._copied(self._sizes, 0),
            self._copied(whole_trace.buffer_bytes, len(self._sizes)),
        )
        names: list[Names] = [{} for _ in parts]
        for i, part in enumerate(parts):
            tape.play(i, part.forward, names[i])
        gathered = self._gather()
        copied = [[*weights, *buffers] for weights, buffers in zip(*copies, strict=True)]
        releases = [
            self._releases(part, copied[i], inputs[i], names[i]) for i, part in enumerate(parts)
        ]
        for held in releases:
            tape.give([holding for at, holdings in held for holding in holdings if at == 0])
        whole: Names = {}
        tape.play(0, whole_trace.loss, whole)
        self._hand_out(whole, names)
        for i, part in enumerate(parts):
            done = 0
            for at, holdings in sorted(releases[i]):
                tape.play(i, part.backward[done : max(done, at)], names[i])
                done = max(done, at)
                tape.give(holdings)
            tape.play(i, part.backward[done:], names[i])
        replica_gradients = self._of_replicas(names)
        new = self._sums()
        tape.give(replica_gradients)
        tape.give(new if self._gradients else [])  # added to the gradients of the step before
        self._gradients = self._gradients or new
        tape.give(holding for held in names for holding in held.values())
        first, later = self._shards.optimizer(tuple(self._stepped()))
        losses = [whole.pop(number) for number in whole_trace.losses if number in whole]
        tape.give(whole.values())
        tape.play(0, later if step else first, self._state[0])
        tape.give([*losses, *target, *gathered])

    def _copied(self, sizes: Sequence[int], first: int) -> list[list[tuple[list[int], list[int]]]]:
        """Copy device 0's tensors of these sizes, of which the first has the index `first`.

        Return, for each device, pairs of the indices of tensors that were copied together and the
        allocation of their copies; none for device 0.
        """
        tape = self._tape
        by_device = []
        runs = chunks(sizes, COALESCED_BYTES) if self._collective else [[size] for size in sizes]
        for i in self._devices:
            pairs = []
            index = first
            for run in runs:
                indices = list(range(index, index + len(run)))
                index += len(run)
                if i:
                    joined = (
                        tape.take(0, sum(run))
                        if self._collective and len(run) > 1 and i == 1
                        else []
                    )
                    pairs.append((indices, tape.take(i, sum(run))))
                    tape.give(joined)
            by_device.append(pairs)
        return by_device

    def _releases(
        self,
        part: Trace,
        copies: Sequence[tuple[list[int], list[int]]],
        inputs: Sequence[int],
        names: Names,
    ) -> list[Release]:
        """Return the releases of a device's copies, inputs and outputs during backward.

        The outputs are removed from `names`.
        """
        released_at = part.released_at
        releases = [(max(released_at[n] for n in joined), copy) for joined, copy in copies]
        begin = len(part.parameter_bytes) + len(part.buffer_bytes)
        releases += [(released_at[begin + k], [holding]) for k, holding in enumerate(inputs)]
        begin += len(part.input_bytes)
        return releases + [
            (released_at[begin + k], [names.pop(storage)])
            for k, storage in enumerate(part.outputs)
            if storage in names
        ]

    def _sums(self) -> list[int]:
        """Return the allocations of the summed gradients.

        On every device, torch joins the gradients of a group into a buffer; then device 0 sums the
        buffers. A variable of torch's loop over the groups refers to the buffers of a group, so
        they are released only after those of the next group are allocated. A group of one gradient
        has no buffers.
        """
        tape = self._tape
        others = self._devices[1:]
        sums: list[int] = []
        former: list[int] = []
        for run in chunks(self._gradient_bytes, COALESCED_BYTES):
            joined = self._devices if len(run) > 1 else range(0)
            flats = [holding for i in joined for holding in tape.take(i, sum(run))]
            tape.give(former)
            if self._collective:
                sums += tape.take(0, sum(run))
            else:
                here = tape.take(0, sum(run))
                sums += tape.take(0, sum(run))
                tape.give(here)
                for _ in others[1:]:
                    tape.give(tape.take(0, sum(run)))
            former = flats
        tape.give(former)
        return sums


ENGINES = {Memory.SCHEDULE: EngineMemory, Memory.WRAPPER: WrapperMemory}
"""The replays of one process that drives several devices."""
CONTEXT_BYTES = 500 * 2**20
"""The assumed bytes of a CUDA context outside the allocator; a prior, not a measurement.

A context takes 0.47 to 0.55 GB at its start with lazily loaded kernels, and up to 0.92 GB in use.
Source: S. Bekman, "Machine Learning Engineering Open Book", training/performance.
"""
NCCL_BYTES = 400 * 2**20
"""The assumed bytes of NCCL's buffers on every GPU after the first collective; a prior.

Published totals of memory contain 184 pairs of runs with the same batch on GPUs of 2018, on a
single GPU and on 2, 4 or 8. With several GPUs, GPU 0 uses 30 MiB more in the median, and at most
374 MiB more in nine of ten pairs. The runs are the group LPT of tests/data/published.csv, which
leaves out their memory. The source of `CONTEXT_BYTES` has an example of 1.45 GB on nodes of eight
H100.
"""


@dataclass(frozen=True)
class DeviceMemory:
    """The allocator's peaks on one device, and the assumed bytes outside: CUDA context and NCCL."""

    device: int
    peak: Peak
    outside_bytes: int

    @property
    def process_bytes(self) -> int:
        """Return the bytes that the driver would show."""
        return self.peak.reserved_bytes + self.outside_bytes


class Traces:
    """The traces of one model with one optimizer, made on first use and cached.

    `of(rows)` returns the trace at a batch size. `optimizer(sizes)` returns the ops of the first
    and of a later optimizer step for tensors of these sizes in bytes.
    """

    def __init__(
        self, build: Build, optimizer_fn: OptimizerFactory, *, device: str = "cpu", **how: Any
    ) -> None:
        """Take the arguments of the function `trace`, with its other options as `how`."""
        self.of = lru_cache(maxsize=64)(
            lambda rows: trace(build, rows, optimizer_fn, device=device, **how)
        )
        self.optimizer = lru_cache(maxsize=64)(
            lambda sizes: trace_optimizer(optimizer_fn, sizes, device=device)
        )


def traces_of(case: Case, *, fake_only: bool = False) -> Traces:
    """Return the traces of a case's model.

    On GPUs, the optimizer is multi-tensor (foreach), as is torch's default. With `fake_only`, a
    model that fails on fake tensors raises an error instead of running on real tensors.
    """

    def build() -> models.Model:
        return models.load(case.model, case.size, case.seed)

    factory = optimizer_of(case, shapes_of(build) if case.optimizer == OWN else None)

    def optimizer_fn(parameters: object) -> object:
        optimizer = factory(parameters)  # type: ignore[arg-type]
        if case.device_kind == "cuda":
            for group in optimizer.param_groups:
                group["foreach"] = True
        return optimizer

    device = "lazy:0" if case.device_kind == "emulated" else "cpu"  # lazy: unfused attention
    return Traces(
        build,
        optimizer_fn,  # type: ignore[arg-type]
        device=device,
        mode=AsOnGpus if case.device_kind == "cuda" else nullcontext,
        precision=lambda: precision_of(replace(case, device_kind=torch.device(device).type)),
        fake_only=fake_only,
    )


def tape_of(case: Case, traces: Traces) -> Tape:
    """Return the allocations and releases of all devices of a case in its first training steps.

    Raises ValueError for a strategy whose memory is not known.
    """
    tape = Tape()
    keeps = case.zero_grad == "zero"
    kind = getattr(registry.imported(case.strategy), "memory", Memory.UNKNOWN)
    # on one device, torch.nn.DataParallel calls the module itself
    if case.traits.one_device or (kind is Memory.WRAPPER and len(case.rows) == 1):
        strategy_memory.single(tape, traces.of(case.batch_size), keeps=keeps)
    elif kind in ENGINES:
        replicas = tuple(traces.of(rows) for rows in case.rows)
        shards = strategy_memory.Shards(traces.of(case.batch_size), replicas, traces.optimizer)
        collective = case.device_kind == "cuda" and case.placement == "spread" and len(replicas) > 1
        engine = ENGINES[kind]
        engine(tape, shards, schedule_of(case), collective=collective, keeps=keeps).run()
    elif kind is Memory.RANKS:
        for device, rows in enumerate(case.rows):
            strategy_memory.ddp(tape, traces.of(rows), device, keeps=keeps)
    else:
        supported = ", ".join(filter(_replayed, registry.own("strategies")))
        raise UsageError(
            f"the memory of the strategy {case.strategy!r} is not known; use one of {supported}"
        )
    return tape


def _replayed(name: str) -> bool:
    strategy = load(name)
    return strategy.traits.one_device or strategy.memory is not Memory.UNKNOWN


def needed(
    case: Case, traces: Traces | None = None, *, capacity_bytes: int | None = None
) -> list[DeviceMemory]:
    """Return the memory that a case needs on each device, from a replay of its allocations.

    `traces` are made if None. `capacity_bytes` is the total memory of a device, of which the CUDA
    context and NCCL take an assumed part. Raises OutOfDeviceMemory if a device needs more.
    """
    tape = tape_of(case, traces or traces_of(case))
    rounding, outside = 1, 0
    if case.device_kind == "cuda":
        rounding, outside = ROUNDING_BYTES, CONTEXT_BYTES
        if len(case.rows) > 1 and case.placement == "spread":
            outside += NCCL_BYTES
    left = None if capacity_bytes is None else capacity_bytes - outside
    if left is not None and left < 0:
        raise OutOfDeviceMemory(
            f"the device has {capacity_bytes} bytes, but the CUDA context and NCCL alone take"
            f" {outside} bytes; choose a device with more memory"
        )
    return [
        DeviceMemory(i, replay(tape, i, capacity_bytes=left, rounding_bytes=rounding), outside)
        for i in range(len(case.rows))
    ]


MOST_ROWS = 2**20
"""The batch size up to which `largest_batch` searches."""


def largest_batch(case: Case, traces: Traces, capacity_bytes: int) -> int:
    """Return the largest batch size of a case that fits on every device; 0 if 1 does not.

    `capacity_bytes` is the memory of each device. The batch size is doubled, and then bisected.
    """

    def fits(batch_size: int) -> bool:
        try:
            needed(replace(case, batch_size=batch_size), traces, capacity_bytes=capacity_bytes)
        except OutOfDeviceMemory:
            return False
        return True

    fine, bad = 0, 1
    while bad <= MOST_ROWS and fits(bad):
        fine, bad = bad, 2 * bad
    while bad - fine > 1:
        middle = (fine + bad) // 2
        fine, bad = (middle, bad) if fits(middle) else (fine, middle)
    return fine
