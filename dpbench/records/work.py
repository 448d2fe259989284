"""Work: the cost of a model on a device, a step as a graph of tasks for predictions, and the bytes that a step moves.

The functions for buckets compute, from the sizes of tensors, how torch and the engine join them into messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

from dpbench.records.case import Phase

Size = TypeVar("Size", int, float)

COALESCED_BYTES = 10 * 2**20
"""The size limit of the flat buffers in which torch.nn.parallel.comm copies tensors."""
DDP_SYNC_BYTES = 250 * 2**20
"""The size limit of the buffers in which DistributedDataParallel broadcasts weights and buffers."""
BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * 2**20, 2**20
"""The size of DistributedDataParallel's buckets, and of its first bucket.

The engine's `overlap` uses 25 MiB for every bucket.
"""
SLOT_BYTES = 64
"""The alignment of parameters in a flat buffer."""


def chunks(sizes_bytes: Sequence[int], limit_bytes: int) -> list[list[int]]:
    """Return the sizes in consecutive runs of at most `limit_bytes`, as torch's `take_tensors` forms them.

    A single tensor above the limit is a run by itself.
    """
    runs: list[list[int]] = [[]]
    for size in sizes_bytes:
        if runs[-1] and sum(runs[-1]) + size > limit_bytes:
            runs.append([])
        runs[-1].append(size)
    return [run for run in runs if run]


def buckets(sizes: Sequence[float], limit: float = BUCKET_BYTES, first: float | None = None) -> list[range]:
    """Return consecutive runs of indices; a run ends with the element at which the sum of its sizes reaches `limit`.

    `first` is the limit of the first run, by default `limit`.
    """
    runs, start, total, full = [], 0, 0.0, limit if first is None else first
    for i, size in enumerate(sizes):
        total += size
        if total >= full:
            runs.append(range(start, i + 1))
            start, total, full = i + 1, 0.0, limit
    return runs + ([range(start, len(sizes))] if start < len(sizes) else [])


def bucket_sizes(sizes: Sequence[Size]) -> list[list[Size]]:
    """Return the gradients' sizes by bucket of DistributedDataParallel; `sizes` is in the order of readiness."""
    return [[sizes[i] for i in run] for run in buckets(sizes, first=FIRST_BUCKET_BYTES)]


def owners(sizes: Sequence[int], devices: int) -> list[int]:
    """Return the owner of each tensor: the largest is assigned first, each to the device with the smallest load."""
    load, owner = [0] * devices, [0] * len(sizes)
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        owner[n] = load.index(min(load))
        load[owner[n]] += sizes[n]
    return owner


def flat_bytes(sizes_bytes: Sequence[int]) -> int:
    """Return the size of a flat buffer that holds all tensors, each aligned to `SLOT_BYTES`."""
    return sum(-(-size // SLOT_BYTES) * SLOT_BYTES for size in sizes_bytes)


@dataclass(frozen=True)
class Cost:
    """The duration of work on one device, in seconds: a fixed part, a part per sample, and a lower bound."""

    fixed_s: float = 0.0
    sample_s: float = 0.0
    least_s: float = 0.0

    def at(self, samples: float) -> float:
        """Return the duration in seconds of the work on a number of samples."""
        return max(self.least_s, self.fixed_s + self.sample_s * samples)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The cost of one model on one device; values that are proportional to the batch are per sample.

    Counts describe the model alone. Costs in seconds apply to one device and precision; those that are None are
    computed from FLOP and bytes. Fields named `*_launches` count the operations that the host submits to the device.
    `gradient_bytes` are the sizes of the parameters in the order in which backward finishes their gradients, empty if
    the order is unknown.
    """

    model: str
    parameter_tensors: int
    parameter_bytes: int
    buffer_bytes: int
    input_bytes: float
    output_bytes: float
    forward_flop: float
    backward_flop: float
    buffer_tensors: int = 0
    modules: int = 0
    forward_launches: int = 0
    backward_launches: int = 0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    gradient_bytes: tuple[int, ...] = ()
    source: str = "traced"  # "measured" | "traced" | "counted" | "given"
    forward: Cost | None = None
    loss: Cost | None = None
    backward: Cost | None = None
    optimizer: Cost | None = None
    rest: Cost | None = None
    """The cost of the rest of a step on the host: copies of the batch, and time that no phase covers."""

    @property
    def gradient_sizes(self) -> tuple[float, ...]:
        """Return the bytes of the gradients in the order in which backward finishes them.

        If the order is unknown, return equal sizes.
        """
        count = max(1, self.parameter_tensors)
        return self.gradient_bytes or (self.parameter_bytes / count,) * count


@dataclass(frozen=True)
class Task:
    """One part of a step's work: the amount with its unit, the resource that does it, and the tasks that it waits for.

    `after` and `overlap` are indices into the list of tasks. The task waits for the end of those in `after`, and for
    the start of those in `overlap`, with which it may run concurrently. Units are flop, bytes, s, and the counts of
    the host's operations: launches, modules, tensors, threads, wakes. Resources:

        device:i                    the stream of device i: kernels, one after the other
        host, host:i                the main thread; the thread that serves device i
        gil                         the interpreter, shared by the threads of one process
        copy:a:b                    a copy from a to b, each a device's index or `host`
        all_reduce:k ...            the k-th collective; its tasks (one per device) begin and end together. Kinds:
                                    broadcast, reduce, all_reduce, reduce_scatter, all_gather
    """

    phase: Phase
    device: int
    resource: str
    amount: float
    unit: str
    after: tuple[int, ...] = ()
    overlap: tuple[int, ...] = ()


FACT = "model"
"""The key of a trial's provenance under which the worker stores the values of `Shapes`."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The bytes of a model's tensors: parameters and buffers in total; inputs, target and output per sample."""

    parameter_tensors: int
    parameter_bytes: int
    trainable_bytes: int
    buffer_bytes: int
    input_bytes: float
    target_bytes: float
    output_bytes: float

    @classmethod
    def of(cls, provenance: Mapping[str, Any]) -> Self | None:
        """Return the shapes that a worker stored; None if any of them is missing."""
        found = provenance.get(FACT) or {}
        names = [f.name for f in fields(cls)]
        return cls(**{name: found[name] for name in names}) if all(name in found for name in names) else None


@dataclass(frozen=True)
class Move:
    """The bytes that one phase of one step moves from one device to another (-1: the host)."""

    phase: Phase
    source: int
    target: int
    bytes: float


def received(moves: Iterable[Move], device: int) -> float:
    """Return the bytes that a device receives."""
    return sum(move.bytes for move in moves if move.target == device)


def sent(moves: Iterable[Move], device: int) -> float:
    """Return the bytes that a device sends."""
    return sum(move.bytes for move in moves if move.source == device)
