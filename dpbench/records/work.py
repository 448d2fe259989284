"""Work: the cost of a model on a device, the tasks of a step, and the bytes that a step moves.

Functions compute, from the sizes of tensors, how torch and dpbench's engine group them for
transfers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

from dpbench.records.case import Case, Phase

Size = TypeVar("Size", int, float)

COALESCED_BYTES = 10 * 2**20
"""The limit of the flat buffers in which torch.nn.parallel.comm copies tensors."""
DDP_SYNC_BYTES = 250 * 2**20
"""The limit of the messages in which DistributedDataParallel broadcasts weights and buffers."""
BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20
"""The bytes at which buckets of DistributedDataParallel are full: the others and the first.

Schedules with reduce=overlap use 25 MiB for every bucket.
"""
SLOT_BYTES = 64
"""The alignment of each tensor in a flat buffer."""


def chunks(sizes_bytes: Sequence[int], limit_bytes: int) -> list[list[int]]:
    """Split tensor sizes into consecutive groups of at most `limit_bytes`, like `take_tensors`.

    A tensor that is larger than the limit forms a group alone.
    """
    runs: list[list[int]] = [[]]
    for size in sizes_bytes:
        if runs[-1] and sum(runs[-1]) + size > limit_bytes:
            runs.append([])
        runs[-1].append(size)
    return [run for run in runs if run]


def buckets(
    sizes: Sequence[float], limit: float = BUCKET_BYTES, first: float | None = None
) -> list[range]:
    """Split tensors into consecutive buckets, and return the indices of each bucket's tensors.

    `sizes` are in bytes. A bucket is full when its size is at least `limit`; `first` is the limit
    of the first bucket, by default `limit`.
    """
    runs = []
    start = 0
    total = 0.0
    full = limit if first is None else first
    for i, size in enumerate(sizes):
        total += size
        if total >= full:
            runs.append(range(start, i + 1))
            start = i + 1
            total = 0.0
            full = limit
    return runs + ([range(start, len(sizes))] if start < len(sizes) else [])


def bucket_sizes(sizes: Sequence[Size]) -> list[list[Size]]:
    """Return the sizes of the gradients in each bucket of DistributedDataParallel.

    `sizes` are in bytes, in the order in which backward finishes the gradients.
    """
    return [[sizes[i] for i in run] for run in buckets(sizes, first=FIRST_BUCKET_BYTES)]


def owners(sizes: Sequence[int], devices: int) -> list[int]:
    """Return the index of the device that owns each tensor.

    In descending order of size, each tensor is assigned to the device with the fewest bytes.
    """
    load = [0] * devices
    owner = [0] * len(sizes)
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        owner[n] = load.index(min(load))
        load[owner[n]] += sizes[n]
    return owner


def flat_bytes(sizes_bytes: Sequence[int]) -> int:
    """Return the bytes of a flat buffer that holds all tensors."""
    return sum(-(-size // SLOT_BYTES) * SLOT_BYTES for size in sizes_bytes)


@dataclass(frozen=True)
class Cost:
    """The seconds of work on one device: a fixed part plus a part per sample, or `least_s`."""

    fixed_s: float = 0.0
    sample_s: float = 0.0
    least_s: float = 0.0

    def at(self, samples: float) -> float:
        """Return the seconds of the work for a number of samples."""
        return max(self.least_s, self.fixed_s + self.sample_s * samples)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The sizes, operation counts and costs of one model for training on one device.

    The FLOP and bytes of inputs, outputs, forward and backward are per sample. Fields named
    `*_launches` count the operations that the host submits to the device. `gradient_bytes` are the
    sizes of the parameters in the order in which backward finishes their gradients; empty if
    unknown. Fields of type `Cost` are for one kind of device and one precision; a cost of None is
    computed from FLOP and bytes.
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

    @property
    def gradient_sizes(self) -> tuple[float, ...]:
        """Return the bytes of the gradients in the order of backward; equal sizes if unknown."""
        count = max(1, self.parameter_tensors)
        return self.gradient_bytes or (self.parameter_bytes / count,) * count


@dataclass(frozen=True)
class Task:
    """One part of a step's work: its amount and unit, its resource, and the tasks it waits for.

    `after` and `overlap` are indices into the list of the step's tasks. The task starts when all
    tasks in `after` have ended and all tasks in `overlap` have started. Units are flop, bytes, s,
    and kinds of operations of the host: launches, modules, tensors, threads and wakes. A resource
    is one of these:

        device:i                    the stream of device i, which runs one kernel after the other
        host                        the main thread
        host:i                      the thread that serves device i
        gil                         the interpreter lock, shared by the threads of one process
        copy:a:b                    the link for a copy from a to b
        all_reduce:k                the k-th collective

    In a copy, a and b are indices of devices, or `host`. The tasks of a collective, one per device,
    start and end together; its kind is broadcast, reduce, all_reduce, reduce_scatter or all_gather.
    """

    phase: Phase
    device: int
    resource: str
    amount: float
    unit: str
    after: tuple[int, ...] = ()
    overlap: tuple[int, ...] = ()


FACT = "model"
"""The key of a trial's provenance for `Shapes`."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The sizes of a model's tensors in bytes: parameters and buffers in total, others per sample.

    `parameter_tensors` is the number of parameters. `trainable_bytes` are those of parameters with
    gradients.
    """

    parameter_tensors: int
    parameter_bytes: int
    trainable_bytes: int
    buffer_bytes: int
    input_bytes: float
    target_bytes: float
    output_bytes: float

    @classmethod
    def of(cls, provenance: Mapping[str, Any]) -> Self | None:
        """Return the sizes in a trial's provenance; None if any of them is missing."""
        stored = provenance.get(FACT) or {}
        names = [f.name for f in fields(cls)]
        return (
            cls(**{name: stored[name] for name in names})
            if all(name in stored for name in names)
            else None
        )


@dataclass(frozen=True)
class Move:
    """The bytes that a phase moves from device `source` to device `target`; -1 is the host."""

    phase: Phase
    source: int
    target: int
    bytes: float


def received(moves: Iterable[Move], device: int) -> float:
    """Return the bytes that `device` receives."""
    return sum(move.bytes for move in moves if move.target == device)


def sent(moves: Iterable[Move], device: int) -> float:
    """Return the bytes that `device` sends."""
    return sum(move.bytes for move in moves if move.source == device)


LINKS = "links"
"""The key of a trial's provenance for its `CopyTimes`."""


def times_links(case: Case) -> bool:
    """Return whether one process drives two or more GPUs of a case, and can time their links."""
    on_gpus = case.device_kind == "cuda" and case.placement == "spread"
    return on_gpus and case.devices > 1 and not case.traits.ranks


@dataclass(frozen=True, kw_only=True)
class CopyTimes:
    """The seconds of copies of `bytes` bytes from device `source` to `target`; -1 is the host.

    They were timed after the steps of a trial; each item of a trial is one pass over all links.
    """

    source: int
    target: int
    bytes: int
    seconds: tuple[float, ...]

    @classmethod
    def all_of(cls, provenance: Mapping[str, Any]) -> tuple[Self, ...]:
        """Return the copy times in a trial's provenance."""
        return tuple(
            cls(**{**one, "seconds": tuple(one["seconds"])}) for one in provenance.get(LINKS, ())
        )


DRAWS = "error_draws"
"""The key of a prediction's provenance for draws of the logarithm of its step time's error.

Draw i uses the same random numbers in all predictions, so errors that two steps share cancel in the
ratio of the steps.
"""


def middle_draws(draws: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest of the middle 80 % of random draws of one value."""
    ordered = sorted(draws)
    return ordered[int(0.1 * len(ordered))], ordered[int(0.9 * len(ordered)) - 1]
