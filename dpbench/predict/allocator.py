"""Allocator: a model of the CUDA caching allocator, which computes the reserved memory.

The rules and constants are those of PyTorch's `c10/cuda/CUDACachingAllocator.cpp` and
`c10/core/AllocatorConfig.h` with default settings:

- Sizes are rounded up to multiples of 512 bytes.
- Blocks of up to 1 MiB come from segments of 2 MiB, blocks below 10 MiB from segments of 20 MiB. A
  larger block has its own segment, rounded up to a multiple of 2 MiB.
- The smallest free block that fits is taken. Its rest is split off, unless the segment is larger
  than 2 MiB and the rest is at most 1 MiB. A freed block is merged with free neighbours.
- When the device is full, all segments that are completely free are released before a second
  attempt.

The model has a single stream, so it needs no rule for freed blocks that another stream still uses.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dpbench.predict.recorder import Op

if TYPE_CHECKING:  # a trace loads torch
    from dpbench.predict.trace import Trace

KIB, MIB = 2**10, 2**20
ROUNDING_BYTES = 512
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB
SEGMENT_ROUNDING_BYTES = 2 * MIB


class OutOfDeviceMemory(RuntimeError):
    """An allocation does not fit in the memory of a device."""


@dataclass(eq=False)
class MemoryBlock:
    """A part of a segment, in use or free, with links to its two neighbours in the segment.

    `offset` and `size` are in bytes. `small` marks blocks of segments for up to 1 MiB.
    """

    segment: int
    offset: int
    size: int
    small: bool
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None
    free: bool = False


def _order(block: MemoryBlock) -> tuple[int, int, int]:
    """Return the sort key for best fit: size, then position."""
    return block.size, block.segment, block.offset


@dataclass
class Allocator:
    """The allocator of one device.

    `capacity_bytes` limits the reserved memory. Sizes are rounded up to multiples of
    `rounding_bytes`; with 1 they are exact, as on emulated devices.
    """

    capacity_bytes: int | None = None
    rounding_bytes: int = ROUNDING_BYTES
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    _made: int = 0
    _free: dict[bool, list[MemoryBlock]] = field(default_factory=lambda: {True: [], False: []})

    def take(self, size_bytes: int) -> MemoryBlock:
        """Allocate a block of at least `size_bytes` and return it.

        Raises OutOfDeviceMemory if the device is full.
        """
        if size_bytes < 1:
            raise ValueError(
                f"cannot allocate {size_bytes} bytes: a block needs at least 1 byte; do not"
                " allocate memory for empty tensors"
            )
        size = -(-size_bytes // self.rounding_bytes) * self.rounding_bytes
        small = size <= SMALL_BYTES
        block = self._fitting(size, small) or self._segment(size, small)
        rest = block.size - size
        if rest >= self.rounding_bytes if small else rest > SMALL_BYTES:
            self._split(block, size)
        block.free = False
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def give(self, block: MemoryBlock) -> None:
        """Free a block and merge it with its free neighbours in the segment."""
        self.allocated_bytes -= block.size
        block.free = True
        if block.after is not None and block.after.free:
            self._remove(block.after)
            self._absorb(block, block.after)
        if block.before is not None and block.before.free:
            self._remove(block.before)
            self._absorb(block.before, block)
            block = block.before
        self._add(block)

    def _fitting(self, size: int, small: bool) -> MemoryBlock | None:
        pool = self._free[small]
        at = bisect.bisect_left(pool, (size, -1, -1), key=_order)
        return pool.pop(at) if at < len(pool) else None

    def _segment(self, size: int, small: bool) -> MemoryBlock:
        """Raises OutOfDeviceMemory if the device is full after all free segments are released."""
        length = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        if size >= OWN_SEGMENT_BYTES:
            length = -(-size // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES
        if self.capacity_bytes is not None and self.reserved_bytes + length > self.capacity_bytes:
            self._release()
            if self.reserved_bytes + length > self.capacity_bytes:
                raise OutOfDeviceMemory(
                    f"cannot allocate {size} bytes: of the {self.capacity_bytes} bytes that the"
                    f" process may reserve on the device, {self.reserved_bytes} are already"
                    f" reserved, and {self.allocated_bytes} of these are allocated; reduce the"
                    " batch size"
                )
        self.reserved_bytes += length
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self._made += 1
        return MemoryBlock(self._made, 0, length, small)

    def _release(self) -> None:
        for small, pool in self._free.items():
            whole = [block for block in pool if block.before is None and block.after is None]
            self._free[small] = [block for block in pool if block not in whole]
            self.reserved_bytes -= sum(block.size for block in whole)

    def _split(self, block: MemoryBlock, size: int) -> None:
        rest = MemoryBlock(
            block.segment,
            block.offset + size,
            block.size - size,
            block.small,
            before=block,
            after=block.after,
            free=True,
        )
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        block.size = size
        self._add(rest)

    def _absorb(self, block: MemoryBlock, after: MemoryBlock) -> None:
        block.size += after.size
        block.after = after.after
        if after.after is not None:
            after.after.before = block

    def _add(self, block: MemoryBlock) -> None:
        bisect.insort(self._free[block.small], block, key=_order)

    def _remove(self, block: MemoryBlock) -> None:
        self._free[block.small].remove(block)


Names = dict[int, int]
"""The number of each storage's allocation on a `Tape`, by the number of the storage in a trace."""


@dataclass(frozen=True)
class MemoryChange:
    """An allocation on a device, or the release of an allocation if `taken` is False.

    `holding` is the number of the allocation.
    """

    device: int
    holding: int
    size_bytes: int
    taken: bool


@dataclass(frozen=True)
class Peak:
    """The peak memory of one device in bytes, in blocks and in segments."""

    allocated_bytes: int
    reserved_bytes: int


class Tape:
    """The allocations and releases on several devices, in chronological order.

    A release has the number of its allocation.
    """

    def __init__(self) -> None:
        self.changes: list[MemoryChange] = []
        self._live: dict[int, MemoryChange] = {}

    def take(self, device: int, size_bytes: int) -> list[int]:
        """Add the allocation of a tensor, unless it is empty, and return its number in a list."""
        if not size_bytes:
            return []
        change = MemoryChange(device, len(self.changes), size_bytes, taken=True)
        self.changes.append(change)
        self._live[change.holding] = change
        return [change.holding]

    def take_all(self, device: int, sizes_bytes: Iterable[int]) -> list[int]:
        """Add the allocations of all tensors that are not empty, and return their numbers."""
        return [holding for size in sizes_bytes for holding in self.take(device, size)]

    def give(self, holdings: Iterable[int]) -> None:
        """Release the allocations with these numbers, except those already released."""
        for holding in holdings:
            if change := self._live.pop(holding, None):
                self.changes.append(replace(change, taken=False))

    def play(self, device: int, ops: Sequence[Op], names: Names) -> None:
        """Add the allocations and releases of a trace's ops on a device, and update `names`.

        The release of a storage that is not in `names` is ignored.
        """
        for op in ops:
            for event in op.events:
                if event.size_bytes > 0:
                    names[event.storage] = self.take(device, event.size_bytes)[0]
                elif event.storage in names:
                    self.give([names.pop(event.storage)])


def replay(
    tape: Tape,
    device: int,
    *,
    capacity_bytes: int | None = None,
    rounding_bytes: int = ROUNDING_BYTES,
) -> Peak:
    """Return the memory peaks of one device.

    Sizes are rounded up to multiples of `rounding_bytes`. Raises OutOfDeviceMemory if more than
    `capacity_bytes` would be reserved.
    """
    allocator = Allocator(capacity_bytes, rounding_bytes)
    blocks: dict[int, MemoryBlock] = {}
    for change in tape.changes:
        if change.device == device:
            if change.taken:
                blocks[change.holding] = allocator.take(change.size_bytes)
            else:
                allocator.give(blocks.pop(change.holding))
    return Peak(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)


def settle(tape: Tape, device: int, trace: Trace) -> None:
    """Add the allocations of the module's parameters and buffers."""
    tape.take_all(device, [*trace.parameter_bytes, *trace.buffer_bytes])


def gradients_of(trace: Trace, names: Names, numbers: Sequence[int] | None = None) -> list[int]:
    """Remove gradients from `names`, and return the numbers of their allocations.

    `numbers` are the indices of the parameters in the module; None means all.
    """
    wanted = trace.gradients if numbers is None else [trace.gradients[n] for n in numbers]
    return [names.pop(storage) for storage in wanted if storage is not None and storage in names]


def clear(tape: Tape, gradients: list[int], *, keeps: bool) -> list[int]:
    """Add `zero_grad`, and return the numbers of the gradients that stay allocated.

    With `keeps`, `zero_grad` fills the gradients with zeros instead of releasing them.
    """
    tape.give([] if keeps else gradients)
    return gradients if keeps else []
