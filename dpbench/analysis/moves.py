"""Moves: the bytes that one step of a case moves between devices, from the traits of its strategy.

A strategy whose traits are those of no strategy that is described here has no moves: its transfers
are unknown.
"""

from __future__ import annotations

from collections.abc import Iterator

from dpbench.records import HOST, Case, Phase
from dpbench.records.registry import Role
from dpbench.records.schedule import Schedule, known
from dpbench.records.work import Move, Shapes


def of_step(case: Case, shapes: Shapes) -> Iterator[Move]:
    """Yield the transfers in one training step; none if they are unknown.

    `shapes` has the sizes of the model's tensors. The transfers are unknown if TrainStep selects
    the schedule, which it does at run time, and for a schedule of another version of dpbench.
    """
    traits = case.traits
    schedule = known(case.schedule or Schedule.REFERENCE)
    if traits.role in (Role.BASELINE, Role.ALL_CORES):
        yield from _alone(case, shapes)
    elif traits.role is Role.ENGINE and schedule is not None:
        yield from _scheduled(case, shapes, schedule)
    elif traits.role is Role.WRAPPER:
        for move in _scheduled(case, shapes, Schedule.REFERENCE):
            phase = Phase.BACKWARD if move.phase is Phase.REDUCE else move.phase
            yield Move(phase, move.source, move.target, move.bytes)
    elif traits.role is Role.CONTROL:
        yield from _ddp(case, shapes)
    elif traits.ranks and traits.shards_weights:
        yield from _fsdp(case, shapes)


def _alone(case: Case, shapes: Shapes) -> Iterator[Move]:
    """Yield the transfer of the batch to the device, unless it is there before the step."""
    if case.inputs != "device":
        size = case.batch_size * (shapes.input_bytes + shapes.target_bytes)
        yield Move(Phase.SCATTER, HOST, 0, size)


def _ddp(case: Case, shapes: Shapes) -> Iterator[Move]:
    """Yield the transfers of rows and of rank 0's buffers, and a ring all-reduce."""
    yield from _batch(case, shapes, local=True)
    count = len(case.rows)
    for rank in range(1, count):
        yield Move(Phase.FORWARD, 0, rank, shapes.buffer_bytes)
    yield from _ring(count, shapes.trainable_bytes)


def _fsdp(case: Case, shapes: Shapes) -> Iterator[Move]:
    """Yield the transfers of rows, and the messages of collectives along a ring.

    The weights are gathered twice, in forward and in backward, and the gradients are reduced once.
    """
    yield from _batch(case, shapes, local=True)
    size = len(case.rows)
    for rank in range(size if size > 1 else 0):
        ring, following = (size - 1) / size, (rank + 1) % size
        yield Move(Phase.FORWARD, rank, following, ring * shapes.parameter_bytes)
        both = shapes.parameter_bytes + shapes.trainable_bytes
        yield Move(Phase.BACKWARD, rank, following, ring * both)


def _scheduled(case: Case, shapes: Shapes, schedule: Schedule) -> Iterator[Move]:
    """Yield the transfers of dpbench's engine under a schedule."""
    yield from _batch(case, shapes, local=schedule.keeps_replicas)
    if case.devices == 1:
        return
    yield from _weights(schedule, shapes, len(case.rows), case.devices)
    if not schedule.keeps_replicas:
        yield from _outputs(case, shapes)
    yield from _gradients(case, schedule, shapes)


def _batch(case: Case, shapes: Shapes, *, local: bool) -> Iterator[Move]:
    """Yield the transfers of the inputs and the target of a batch to the devices.

    If `local`, the rows of the target move to their replicas. Otherwise the whole target moves to
    device 0, unless the devices are logical CPU devices, which read the host's memory.
    """
    on_device = case.inputs == "device"
    for device, count in enumerate(case.rows):
        if on_device and (case.traits.ranks or device == 0):
            continue  # the batch is there before the step
        size = count * (shapes.input_bytes + shapes.target_bytes * local)
        yield Move(Phase.SCATTER, 0 if on_device else HOST, device, size)
    if on_device:
        return
    if not local and case.device_kind != "cpu":  # logical CPU devices read the host's memory
        yield Move(Phase.SCATTER, HOST, 0, case.batch_size * shapes.target_bytes)


def _weights(schedule: Schedule, shapes: Shapes, count: int, devices: int) -> Iterator[Move]:
    """Yield the transfers of weights and buffers to the first `count` of `devices` devices.

    Replicas that update their weights themselves receive only the buffers. Under `sharded`, every
    device also receives the parts that other devices have updated.
    """
    sent = shapes.buffer_bytes + (0 if schedule.updates_everywhere else shapes.parameter_bytes)
    for device in range(1, count):
        yield Move(Phase.REPLICATE, 0, device, sent)
    if schedule is Schedule.SHARDED:
        yield from _exchanged(Phase.REPLICATE, shapes.trainable_bytes / devices, devices, devices)


def _outputs(case: Case, shapes: Shapes) -> Iterator[Move]:
    for device, rows in enumerate(case.rows[1:], start=1):
        yield Move(Phase.GATHER, device, 0, rows * shapes.output_bytes)
        yield Move(Phase.BACKWARD, 0, device, rows * shapes.output_bytes)


def _gradients(case: Case, schedule: Schedule, shapes: Shapes) -> Iterator[Move]:
    """Yield the transfers of the gradients to the devices that update weights.

    Device 0 receives all gradients. Under `allreduce`, every device does: on GPUs by a ring
    all-reduce. Under `sharded`, every device receives its part. Devices without rows of the batch
    receive gradients, but send them only in the collectives of GPUs.
    """
    collective = case.device_kind == "cuda"
    count, devices, each = len(case.rows), case.devices, shapes.trainable_bytes
    if not schedule.updates_everywhere:
        for device in range(1, count):
            yield Move(Phase.REDUCE, device, 0, each)
    elif schedule is Schedule.ALLREDUCE and collective:
        yield from _ring(devices, each)
    else:
        part = each / (devices if schedule is Schedule.SHARDED else 1)
        yield from _exchanged(Phase.REDUCE, part, devices if collective else count, devices)


def _ring(count: int, size: float) -> Iterator[Move]:
    """Yield the transfers of a ring all-reduce of `size` bytes between `count` devices."""
    for device in range(count if count > 1 else 0):
        yield Move(Phase.REDUCE, device, (device + 1) % count, 2 * (count - 1) / count * size)


def _exchanged(phase: Phase, each: float, sources: int, targets: int) -> Iterator[Move]:
    for source in range(sources):
        for target in range(targets):
            if source != target:
                yield Move(phase, source, target, each)
