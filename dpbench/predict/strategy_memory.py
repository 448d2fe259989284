"""Strategy memory: each strategy's allocations on several devices, from traces of one device.

A tensor stays allocated for as long as a variable or an autograd graph keeps it alive in the code
of the strategies and the engine. Forward and backward come from traces with the rows of each
device. The loss of a gathered output comes from a trace with the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpbench.predict.allocator import Names, Tape, clear, gradients_of, settle
from dpbench.predict.recorder import Op
from dpbench.predict.trace import Trace
from dpbench.predict.work import COALESCED_BYTES, DDP_SYNC_BYTES, chunks, flat_bytes
from dpbench.records.schedule import Schedule
from dpbench.strategies import bucket_sizes


@dataclass(frozen=True)
class Shards:
    """The traces of the whole batch and of each replica's rows."""

    whole: Trace
    parts: tuple[Trace, ...]
    optimizer: Callable[[tuple[int, ...]], tuple[Sequence[Op], Sequence[Op]]]
    """Returns the ops of the first and of a later step for tensors of these sizes in bytes."""


STEPS = 3
"""The training steps of a replay.

The first creates the optimizer's state, the second starts with it, and the third repeats the
second.
"""


def single(tape: Tape, trace: Trace, *, keeps: bool) -> None:
    """Add the setup and the training steps of the strategy `single` to the tape.

    With `keeps`, the loop fills gradients with zeros instead of dropping them.
    """
    settle(tape, 0, trace)
    _train(tape, trace, 0, lambda step: None, keeps=keeps)


def _train(
    tape: Tape,
    trace: Trace,
    device: int,
    begin: Callable[[int], None],
    *,
    keeps: bool,
) -> None:
    """Add the steps of one device; `begin` adds what a wrapper does before the forward of each."""
    state: Names = {}
    gradients: list[int] = []
    for step in range(STEPS):
        gradients = clear(tape, gradients, keeps=keeps)
        batch = tape.take_all(device, [*trace.input_bytes, *trace.target_bytes])
        begin(step)
        names, gradients = _play_passes(tape, device, trace, gradients)
        tape.play(device, trace.optimizer if step else trace.optimizer_first, state)
        tape.give([*names.values(), *batch])


def _play_passes(tape: Tape, device: int, trace: Trace, kept: list[int]) -> tuple[Names, list[int]]:
    """Return the allocated storages, and the allocations of the gradients.

    To gradients `kept` from an earlier backward, each new gradient is added and then released.
    """
    names: Names = {}
    tape.play(device, trace.forward, names)
    tape.play(device, trace.loss, names)
    tape.play(device, trace.loss_backward, names)
    done = 0
    for number, at in zip(trace.ready, trace.ready_at, strict=True) if kept else ():
        tape.play(device, trace.backward[done:at], names)
        tape.give(gradients_of(trace, names, [number]))
        done = at
    tape.play(device, trace.backward[done:], names)
    return names, kept or gradients_of(trace, names)


def ddp(tape: Tape, trace: Trace, device: int, *, keeps: bool) -> None:
    """Add the setup and the training steps of one rank of DistributedDataParallel to the tape.

    `trace` has the rank's rows. With `keeps`, the loop fills gradients with zeros instead of
    dropping them.
    """
    settle(tape, device, trace)
    trainable = [
        size for size, wants in zip(trace.parameter_bytes, trace.trainable, strict=True) if wants
    ]
    for chunk in chunks([*trace.parameter_bytes, *trace.buffer_bytes], DDP_SYNC_BYTES):
        tape.give(tape.take(device, sum(chunk)))
    buckets = [sum(bucket) for bucket in bucket_sizes(trainable[::-1])]
    allocated_buckets = tape.take_all(device, buckets)

    def begin(step: int) -> None:
        if step == 1:  # DDP rebuilds its buckets in the order in which gradients became ready
            tape.give(allocated_buckets)
            tape.take_all(device, buckets)
        for chunk in chunks(trace.buffer_bytes, DDP_SYNC_BYTES):
            tape.give(tape.take(device, sum(chunk)))

    _train(tape, trace, device, begin, keeps=keeps)


class EngineMemory:
    """The allocations of training on several devices under one of the engine's schedules.

    `collective` is True if the devices are distinct GPUs. Collectives then copy weights and buffers
    and sum gradients, several tensors in one message, except for the gradients of replicas that
    persist. Each method adds one part of a step to the tape. `names` maps, for each device, the
    storages of its trace to their allocations.
    """

    def __init__(
        self,
        tape: Tape,
        shards: Shards,
        schedule: Schedule,
        *,
        collective: bool,
        keeps: bool,
    ) -> None:
        self._tape = tape
        self._shards = shards
        self._schedule = schedule
        self._collective = collective
        self._keeps = keeps
        self._devices = range(len(shards.parts))
        self._sizes = shards.whole.parameter_bytes
        self._trainable = [n for n, wants in enumerate(shards.whole.trainable) if wants]
        self._gradient_bytes = [self._sizes[n] for n in self._trainable]
        self._copies: list[int] = []
        self._gradients: list[int] = []
        self._state: list[Names] = [{} for _ in self._devices]
        self._kept = schedule.keeps_replicas

    def run(self) -> None:
        """Add the setup and the training steps to the tape."""
        self._setup()
        for step in range(STEPS):
            self._step(step)

    def _setup(self) -> None:
        """Kept replicas have parameters from the start, and their updates summed gradients."""
        tape = self._tape
        whole = self._shards.whole
        settle(tape, 0, whole)
        if not self._kept:
            return
        for i in self._devices[1:]:
            tape.take_all(i, self._sizes)
        if self._schedule.updates_everywhere:
            for i in self._owners():
                tape.take_all(i, self._summed())

    def _owners(self) -> range:
        return self._devices if self._schedule.updates_everywhere else self._devices[:1]

    def _summed(self) -> list[int]:
        """Return the sizes of the tensors into which a device that updates weights sums gradients.

        Under `sharded`, a collective works on the whole flat buffer, of which a device keeps its
        part.
        """
        if self._schedule is not Schedule.SHARDED or not self._collective:
            return self._stepped()
        return [flat_bytes(self._gradient_bytes)]

    def _stepped(self) -> list[int]:
        """Return the sizes of the tensors that the optimizer of one device steps."""
        if self._schedule is not Schedule.SHARDED:
            return self._gradient_bytes
        return [-(-flat_bytes(self._gradient_bytes) // len(self._devices))]

    def _step(self, step: int) -> None:
        tape = self._tape
        parts = self._shards.parts
        tape.give(self._gradients)
        batch = [h for i, trace in enumerate(parts) for h in tape.take_all(i, trace.input_bytes)]
        if self._kept:
            batch += [h for i, t in enumerate(parts) for h in tape.take_all(i, t.target_bytes)]
        self._replicate()
        names: list[Names] = [{} for _ in parts]
        self._gradients = []
        for i, trace in enumerate(parts):
            tape.play(i, trace.forward, names[i])
        whole: Names = {}
        gathered: list[int] = []
        if self._kept:
            self._local_loss(names, first=step == 0)
        else:
            gathered = self._gather()
            batch += tape.take_all(0, self._shards.whole.target_bytes)
            tape.play(0, self._shards.whole.loss, whole)
            self._hand_out(whole, names)
        for i, trace in enumerate(parts):
            tape.play(i, trace.backward, names[i])
        if not self._kept:
            self._sum(self._of_replicas(names, self._trainable))
            if self._schedule is not Schedule.CACHED:
                tape.give(self._copies)
        losses = [whole.pop(number) for number in self._shards.whole.losses if number in whole]
        replica_gradients = self._of_replicas(names)
        tape.give(
            [*batch, *gathered, *whole.values(), *(h for each in names for h in each.values())]
        )
        if self._schedule is Schedule.LOCAL:
            self._sum(replica_gradients)
            replica_gradients = []
        elif self._kept:
            self._collect()
        self._optimize(step)
        tape.give([*replica_gradients, *losses])

    def _of_replicas(self, names: Sequence[Names], numbers: list[int] | None = None) -> list[int]:
        """Remove the replicas' gradients from `names`, and return their allocations."""
        return [
            holding
            for trace, held in zip(self._shards.parts, names, strict=True)
            for holding in gradients_of(trace, held, numbers)
        ]

    def _replicate(self) -> None:
        tape = self._tape
        whole = self._shards.whole
        former = self._copies
        self._copies = []
        if not self._kept:
            self._broadcast(self._sizes)
        self._broadcast(whole.buffer_bytes)
        tape.give(former)

    def _broadcast(self, sizes: Sequence[int]) -> None:
        """Copy device 0's tensors of these sizes in bytes to all other devices.

        A collective copies several tensors in one message; without collectives, they are copied one
        by one.
        """
        tape = self._tape
        others = self._devices[1:]
        if not self._collective:
            for i in others:
                self._copies += tape.take_all(i, sizes)
        elif others:
            for chunk in chunks(sizes, COALESCED_BYTES):
                joined = tape.take(0, sum(chunk)) if len(chunk) > 1 else []
                for i in others:
                    self._copies += tape.take(i, sum(chunk))
                tape.give(joined)

    def _gather(self) -> list[int]:
        """Return the allocations of the concatenated outputs; none for a single device."""
        tape = self._tape
        whole = self._shards.whole
        parts = self._shards.parts
        if len(parts) == 1:
            return []
        gathered: list[int] = []
        for j, size in enumerate(whole.output_bytes):
            moved = [h for trace in parts[1:] for h in tape.take(0, trace.output_bytes[j])]
            gathered += tape.take(0, size)
            tape.give(moved)
        return gathered

    def _hand_out(self, whole: Names, names: Sequence[Names]) -> None:
        """Add the backward of the gathered output's loss, and the scatter of its gradient."""
        tape = self._tape
        parts = self._shards.parts
        tape.play(0, self._shards.whole.loss_backward, whole)
        for j, number in enumerate(self._shards.whole.output_gradients):
            if number is None:
                continue
            for i, trace in enumerate(parts):
                replica_number = trace.output_gradients[j]
                if len(parts) == 1:
                    names[i][replica_number or 0] = whole.pop(number)
                elif taken := tape.take(i, trace.output_bytes[j]):
                    names[i][replica_number or 0] = taken[0]
            tape.give([whole.pop(number, -1)])

    def _local_loss(self, names: Sequence[Names], *, first: bool) -> None:
        """Add the replicas' losses and their backward.

        In the first step, the engine also compares their sum with the loss of the whole batch.
        """
        tape = self._tape
        parts = self._shards.parts
        for i, trace in enumerate(parts):
            tape.play(i, trace.loss, names[i])
        if first:
            check = self._gather()
            rest: Names = {}
            check += tape.take_all(0, self._shards.whole.target_bytes)
            tape.play(0, self._shards.whole.loss, rest)
            tape.give([*rest.values(), *check])
        for i, trace in enumerate(parts):
            tape.give(names[i].pop(number, -1) for number in trace.outputs)
            tape.play(i, trace.loss_backward, names[i])

    def _sum(self, replica_gradients: list[int]) -> None:
        """Sum gradients into new tensors on device 0, and release those of the replicas."""
        tape = self._tape
        count = len(self._devices)
        if count == 1:
            self._gradients += replica_gradients
            return
        unused = [
            self._sizes[n] for n in self._trainable if self._shards.whole.gradients[n] is None
        ]
        for i in self._devices:
            replica_gradients += tape.take_all(i, unused)
        if self._collective:
            for chunk in chunks(self._gradient_bytes, COALESCED_BYTES):
                joined = self._devices if len(chunk) > 1 else ()
                flats = [h for i in joined for h in tape.take(i, sum(chunk))]
                self._gradients += tape.take(0, sum(chunk))
                tape.give(flats)
        else:
            for size in self._gradient_bytes:
                here = tape.take(0, size)
                self._gradients += tape.take(0, size)
                for _ in range(count - 2):
                    # the next gradient arrives before the previous one is freed
                    there = tape.take(0, size)
                    tape.give(here)
                    here = there
                tape.give(here)
        tape.give(replica_gradients)

    def _collect(self) -> None:
        """Add other devices' gradients to the persistent sums, one tensor at a time.

        If every device updates weights, collectives exchange the gradients in place.
        """
        tape = self._tape
        if self._collective and self._schedule.updates_everywhere:
            return
        for i in self._owners():
            for size in self._stepped():
                tape.give([h for _ in self._devices[1:] for h in tape.take(i, size)])

    def _optimize(self, step: int) -> None:
        for i in self._owners():
            first, later = self._shards.optimizer(tuple(self._stepped()))
            self._tape.play(i, later if step else first, self._state[i])
