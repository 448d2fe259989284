"""Work: the cost of a model on a device, the tasks of a step, and how torch groups tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from dpbench.records import Phase

Size = TypeVar("Size", int, float)

COALESCED_BYTES = 10 * 2**20
"""The limit of the flat buffers in which torch.nn.parallel.comm copies tensors."""
DDP_SYNC_BYTES = 250 * 2**20
"""The limit of the messages in which DistributedDataParallel broadcasts weights and buffers."""
BUCKET_BYTES = 25 * 2**20
"""The bytes at which a bucket of gradients is full, as in DistributedDataParallel."""
FIRST_BUCKET_BYTES = 2**20
"""The bytes at which DistributedDataParallel's first bucket of gradients is full."""
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


def bucket_sizes(sizes: Sequence[Size]) -> list[list[Size]]:
    """Return the sizes of the gradients in each bucket of DistributedDataParallel.

    `sizes` are in bytes, in the order in which backward finishes the gradients.
    """
    runs: list[list[Size]] = [[]]
    total, full = 0.0, FIRST_BUCKET_BYTES
    for size in sizes:
        runs[-1].append(size)
        total += size
        if total >= full:
            runs.append([])
            total, full = 0.0, BUCKET_BYTES
    return [run for run in runs if run]


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
    forward_flop: float = 0.0
    backward_flop: float = 0.0
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
    tasks in `after` have ended and all tasks in `overlap` have started. Units are bytes, share (of
    the kernels of a device's forward or backward), and kinds of operations of the host: launches,
    modules, tensors, threads and wakes. A resource is one of these:

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
