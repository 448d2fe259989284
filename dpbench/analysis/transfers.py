"""Links: the bytes that one training step must move, by phase, source and target, worked out from shapes.

What must cross a link whatever carries it: copies within a device, padding, and the few bytes of losses and weights
of local losses are left out. An all-reduce counts as a ring's. docs/measuring.md says what that leaves open.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from dpbench.records import HOST, Case, Phase
from dpbench.records.schedule import FASTEST, Schedule, parse

FACT = "model"
"""Where a trial's provenance holds what `Shapes` is made of."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The bytes of a model's tensors: weights and buffers as a whole; inputs, target and output per sample."""

    parameter_tensors: int
    parameter_bytes: int
    trainable_bytes: int
    buffer_bytes: int
    input_bytes: float
    target_bytes: float
    output_bytes: float

    @classmethod
    def of(cls, provenance: Mapping[str, Any]) -> Self | None:
        """Return the shapes that a worker found; None where it found less than all."""
        found = provenance.get(FACT) or {}
        names = [f.name for f in fields(cls)]
        return cls(**{name: found[name] for name in names}) if all(name in found for name in names) else None


@dataclass(frozen=True)
class Move:
    """Bytes from one device to another (-1: the host) in one phase of one step."""

    phase: Phase
    source: int
    target: int
    bytes: float


def moves(case: Case, shapes: Shapes) -> list[Move]:
    """Return what one step of a case moves; nothing where that is not known, or where replicas share a device."""
    if case.placement == "colocated" or case.schedule == FASTEST:
        return []
    ways = {"single": _one, "single_all_cores": _one, "dp": _dp, "torch_dp": _torch_dp, "ddp": _ddp}
    found = ways[case.strategy](case, shapes) if case.strategy in ways else ()
    return [move for move in found if move.bytes > 0]


def received(found: Iterable[Move], device: int) -> float:
    """Return the bytes that come to a device."""
    return sum(move.bytes for move in found if move.target == device)


def sent(found: Iterable[Move], device: int) -> float:
    """Return the bytes that leave a device."""
    return sum(move.bytes for move in found if move.source == device)


def _one(case: Case, shapes: Shapes) -> Iterator[Move]:
    """Yield the batch on its way to the one device."""
    yield Move(Phase.SCATTER, HOST, 0, case.batch_size * (shapes.input_bytes + shapes.target_bytes))


def _dp(case: Case, shapes: Shapes) -> Iterator[Move]:
    """Yield the moves of a schedule of the engine."""
    schedule, rows = parse(case.schedule or "reference"), case.rows
    yield from _batch(case, shapes, local=schedule.loss == "local")
    if case.devices == 1:
        return
    yield from _weights(schedule, shapes, len(rows))
    if schedule.loss == "gathered":
        yield from _outputs(case, shapes)
    yield from _gradients(schedule, shapes, len(rows))


def _batch(case: Case, shapes: Shapes, *, local: bool) -> Iterator[Move]:
    """Yield the inputs to their devices; the target as well, or whole to device 0 where the loss is taken there."""
    for device, count in enumerate(case.rows):
        yield Move(Phase.SCATTER, HOST, device, count * (shapes.input_bytes + shapes.target_bytes * local))
    if not local and case.device_kind != "cpu":  # logical CPU devices read the host's
        yield Move(Phase.SCATTER, HOST, 0, case.batch_size * shapes.target_bytes)


def _weights(schedule: Schedule, shapes: Shapes, count: int) -> Iterator[Move]:
    """Yield weights and buffers to the replicas; where every device updates, the weights are there already."""
    kept = schedule.replicas == "persistent" and schedule.update != "root"
    for device in range(1, count):
        yield Move(Phase.REPLICATE, 0, device, shapes.buffer_bytes + (0 if kept else shapes.parameter_bytes))
    if schedule.update == "sharded":
        yield from _exchanged(Phase.REPLICATE, shapes.trainable_bytes / count, count)


def _outputs(case: Case, shapes: Shapes) -> Iterator[Move]:
    """Yield the outputs to device 0, and their gradients back, which the phase backward contains."""
    for device, rows in enumerate(case.rows[1:], start=1):
        yield Move(Phase.GATHER, device, 0, rows * shapes.output_bytes)
        yield Move(Phase.BACKWARD, 0, device, rows * shapes.output_bytes)


def _gradients(schedule: Schedule, shapes: Shapes, count: int) -> Iterator[Move]:
    """Yield the gradients to whoever updates: all of them, or a share."""
    each = shapes.trainable_bytes / (2 if schedule.comm_dtype == "bf16" else 1)  # of parameters in fp32
    if schedule.update == "root":
        for device in range(1, count):
            yield Move(Phase.REDUCE, device, 0, each)
    else:
        yield from _exchanged(Phase.REDUCE, each / (count if schedule.update == "sharded" else 1), count)


def _exchanged(phase: Phase, each: float, count: int) -> Iterator[Move]:
    """Yield equal bytes from every device to every other."""
    for source in range(count):
        for target in range(count):
            if source != target:
                yield Move(phase, source, target, each)


def _torch_dp(case: Case, shapes: Shapes) -> Iterator[Move]:
    """Yield the reference schedule's moves; torch reduces inside backward."""
    for move in _dp(case, shapes):
        yield Move(Phase.BACKWARD, move.source, move.target, move.bytes) if move.phase is Phase.REDUCE else move


def _ddp(case: Case, shapes: Shapes) -> Iterator[Move]:
    """Yield each rank's rows, rank 0's buffers inside the forward, and a ring over the gradients."""
    yield from _batch(case, shapes, local=True)
    count = len(case.rows)
    for rank in range(1, count):
        yield Move(Phase.FORWARD, 0, rank, shapes.buffer_bytes)
    for rank in range(count if count > 1 else 0):
        ring = 2 * (count - 1) / count * shapes.trainable_bytes
        yield Move(Phase.REDUCE, rank, (rank + 1) % count, ring)
