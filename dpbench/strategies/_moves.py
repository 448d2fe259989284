"""Moves: the bytes that one step under a schedule must move, by phase, source and target, computed from shapes."""

from __future__ import annotations

from collections.abc import Iterator

from dpbench.records import HOST, Case, Phase
from dpbench.records.schedule import Schedule, parse
from dpbench.records.work import Move, Shapes


def scheduled(case: Case, shapes: Shapes) -> Iterator[Move]:
    """Yield the moves of one step of the engine under the case's schedule."""
    schedule, rows = parse(case.schedule or "reference"), case.rows
    yield from batch(case, shapes, local=schedule.loss == "local")
    if case.devices == 1:
        return
    yield from _weights(schedule, shapes, len(rows))
    if schedule.loss == "gathered":
        yield from _outputs(case, shapes)
    yield from _gradients(schedule, shapes, len(rows))


def batch(case: Case, shapes: Shapes, *, local: bool) -> Iterator[Move]:
    """Yield the moves of the inputs and the target.

    If `local`, the rows of the target move to their replicas; otherwise the whole target moves to device 0.
    """
    for device, count in enumerate(case.rows):
        yield Move(Phase.SCATTER, HOST, device, count * (shapes.input_bytes + shapes.target_bytes * local))
    if not local and case.device_kind != "cpu":  # logical CPU devices read the host's memory
        yield Move(Phase.SCATTER, HOST, 0, case.batch_size * shapes.target_bytes)


def _weights(schedule: Schedule, shapes: Shapes, count: int) -> Iterator[Move]:
    """Yield the moves of weights and buffers to the replicas; only of buffers if every device updates its weights."""
    kept = schedule.replicas == "persistent" and schedule.update != "root"
    for device in range(1, count):
        yield Move(Phase.REPLICATE, 0, device, shapes.buffer_bytes + (0 if kept else shapes.parameter_bytes))
    if schedule.update == "sharded":
        yield from _exchanged(Phase.REPLICATE, shapes.trainable_bytes / count, count)


def _outputs(case: Case, shapes: Shapes) -> Iterator[Move]:
    """Yield the moves of the outputs to device 0, and of their gradients back, which the phase backward contains."""
    for device, rows in enumerate(case.rows[1:], start=1):
        yield Move(Phase.GATHER, device, 0, rows * shapes.output_bytes)
        yield Move(Phase.BACKWARD, 0, device, rows * shapes.output_bytes)


def _gradients(schedule: Schedule, shapes: Shapes, count: int) -> Iterator[Move]:
    """Yield the moves of the gradients to the devices that update, whole or by shares."""
    each = shapes.trainable_bytes / (2 if schedule.comm_dtype == "bf16" else 1)  # for fp32 parameters
    if schedule.update == "root":
        for device in range(1, count):
            yield Move(Phase.REDUCE, device, 0, each)
    else:
        yield from _exchanged(Phase.REDUCE, each / (count if schedule.update == "sharded" else 1), count)


def _exchanged(phase: Phase, each: float, count: int) -> Iterator[Move]:
    """Yield moves of equal bytes from every device to every other."""
    for source in range(count):
        for target in range(count):
            if source != target:
                yield Move(phase, source, target, each)
