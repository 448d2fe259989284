"""The CUDA caching allocator, replayed: what a list of allocations makes a process reserve.

The rules and constants are those of PyTorch's `c10/cuda/CUDACachingAllocator.cpp` and `c10/core/AllocatorConfig.h`
with default settings: sizes are rounded up to 512 bytes; up to 1 MiB comes from segments of 2 MiB, up to 10 MiB from
segments of 20 MiB, more from a segment of its own, rounded to 2 MiB; the smallest free block that fits is taken and
split; freed neighbours are joined. Where the device is full, whole free segments are given back and it is tried again.

One stream: blocks that other streams still use, and so cannot be reused at once, are not modelled.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dpbench.predict.recorder import Op

KIB, MIB = 2**10, 2**20
ROUNDING_BYTES = 512
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB
SEGMENT_ROUNDING_BYTES = 2 * MIB


class OutOfDeviceMemory(RuntimeError):
    """A device whose memory does not hold what is asked of it."""


@dataclass(eq=False)
class MemoryBlock:
    """A part of a segment: taken, or free to be taken; it knows its neighbours in the segment."""

    segment: int
    offset: int
    size: int
    small: bool
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None
    free: bool = False
    asked: int = 0

    @property
    def key(self) -> tuple[int, int, int]:
        """Return the order of best fit: the smallest, then the first."""
        return self.size, self.segment, self.offset


@dataclass
class Allocator:
    """One device's allocator. `rounding_bytes` of 1 counts bytes as the ledger of emulated devices does.

    `capacity_bytes` is what the process may reserve; None for no end. `requested_bytes` sums what was asked for,
    `allocated_bytes` the blocks that were given for it, `reserved_bytes` the segments.
    """

    capacity_bytes: int | None = None
    rounding_bytes: int = ROUNDING_BYTES
    requested_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    segments: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    _made: int = 0
    _free: dict[bool, list[tuple[tuple[int, int, int], MemoryBlock]]] = field(
        default_factory=lambda: {True: [], False: []}
    )

    def take(self, size_bytes: int) -> MemoryBlock:
        """Return a block of at least so many bytes; raise OutOfDeviceMemory if the device has no room for it."""
        if size_bytes < 1:
            raise ValueError(f"a block has at least one byte, not {size_bytes}; empty tensors take no memory")
        size = -(-size_bytes // self.rounding_bytes) * self.rounding_bytes
        small = size <= SMALL_BYTES
        block = self._fitting(size, small) or self._segment(size, small)
        rest = block.size - size
        if rest >= self.rounding_bytes if small else rest > SMALL_BYTES:
            self._split(block, size)
        block.free, block.asked = False, size_bytes
        self.requested_bytes += size_bytes
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def give(self, block: MemoryBlock) -> None:
        """Take a block back, and join it with free neighbours."""
        self.requested_bytes -= block.asked
        self.allocated_bytes -= block.size
        block.free, block.asked = True, 0
        if block.after is not None and block.after.free:
            self._swallow(block, block.after)
        if block.before is not None and block.before.free:
            before = block.before
            self._remove(before)
            self._absorb(before, block)
            block = before
        bisect.insort(self._free[block.small], (block.key, block))

    def _fitting(self, size: int, small: bool) -> MemoryBlock | None:
        """Take the smallest free block that is large enough out of its pool."""
        pool = self._free[small]
        at = bisect.bisect_left(pool, ((size, -1, -1),))
        return pool.pop(at)[1] if at < len(pool) else None

    def _segment(self, size: int, small: bool) -> MemoryBlock:
        """Reserve a new segment, after giving free ones back if there is no room else."""
        length = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        if size >= OWN_SEGMENT_BYTES:
            length = -(-size // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES
        if self.capacity_bytes is not None and self.reserved_bytes + length > self.capacity_bytes:
            self._release()
            if self.reserved_bytes + length > self.capacity_bytes:
                raise OutOfDeviceMemory(
                    f"{size} bytes are asked for, {self.allocated_bytes} are allocated and {self.reserved_bytes} "
                    f"reserved of {self.capacity_bytes}"
                )
        self.reserved_bytes += length
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.segments += 1
        self._made += 1
        return MemoryBlock(self._made, 0, length, small)

    def _release(self) -> None:
        """Give back every segment that is one free block."""
        for small, pool in self._free.items():
            whole = [block for _, block in pool if block.before is None and block.after is None]
            self._free[small] = [entry for entry in pool if entry[1] not in whole]
            self.segments -= len(whole)
            self.reserved_bytes -= sum(block.size for block in whole)

    def _split(self, block: MemoryBlock, size: int) -> None:
        """Cut a block; the rest becomes free."""
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
        block.after, block.size = rest, size
        bisect.insort(self._free[rest.small], (rest.key, rest))

    def _swallow(self, block: MemoryBlock, after: MemoryBlock) -> None:
        self._remove(after)
        self._absorb(block, after)

    def _absorb(self, block: MemoryBlock, after: MemoryBlock) -> None:
        """Let a block reach to the end of the one after it."""
        block.size += after.size
        block.after = after.after
        if after.after is not None:
            after.after.before = block

    def _remove(self, block: MemoryBlock) -> None:
        """Take a free block out of its pool."""
        pool = self._free[block.small]
        pool.pop(bisect.bisect_left(pool, (block.key,)))


Names = dict[int, int]
"""A trace's storages -> the holdings on a tape that stand for them."""


@dataclass(frozen=True)
class MemoryChange:
    """One allocation (or, with `taken` False, its end) of a holding of one kind on a device."""

    device: int
    holding: int
    size_bytes: int
    kind: str
    stage: str
    taken: bool


@dataclass(frozen=True)
class Peak:
    """A device's most memory: as asked for, in the allocator's blocks, in its segments; and what it was, by kind.

    `kinds` and `stage` belong to the moment at which most was allocated.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    stage: str
    kinds: Mapping[str, int]


class Tape:
    """Changes in the order in which they happen."""

    def __init__(self) -> None:
        self.changes: list[MemoryChange] = []
        self.stage = "setup"
        self._live: dict[int, MemoryChange] = {}

    def take(self, device: int, size_bytes: int, kind: str) -> list[int]:
        """Hold one more tensor; return its holding in a list, and none for an empty tensor."""
        if not size_bytes:
            return []
        change = MemoryChange(device, len(self.changes), size_bytes, kind, self.stage, taken=True)
        self.changes.append(change)
        self._live[change.holding] = change
        return [change.holding]

    def take_all(self, device: int, sizes_bytes: Iterable[int], kind: str) -> list[int]:
        """Hold tensors of these sizes."""
        return [holding for size in sizes_bytes for holding in self.take(device, size, kind)]

    def give(self, holdings: Iterable[int]) -> None:
        """Let holdings go; those that are gone already stay so."""
        for holding in holdings:
            if change := self._live.pop(holding, None):
                self.changes.append(
                    MemoryChange(change.device, holding, change.size_bytes, change.kind, self.stage, taken=False)
                )

    def play(
        self, device: int, ops: Sequence[Op], names: Names, kind: str, kinds: Mapping[int | None, str] | None = None
    ) -> None:
        """Let a trace's ops take and give on a device; `kinds` are those of storages that differ from the part's.

        What the ops leave behind stays in `names`; what they give back without having taken it is not theirs.
        """
        kinds = kinds or {}
        for op in ops:
            for event in op.events:
                if event.size_bytes > 0:
                    taken = self.take(device, event.size_bytes, kinds.get(event.storage, kind))
                    names[event.storage] = taken[0]
                elif event.storage in names:
                    self.give([names.pop(event.storage)])


def replay(tape: Tape, device: int, *, capacity_bytes: int | None = None, rounding_bytes: int | None = None) -> Peak:
    """Return a device's peaks; raise OutOfDeviceMemory, naming stage and kind, where its memory is not enough."""
    allocator = Allocator(capacity_bytes) if rounding_bytes is None else Allocator(capacity_bytes, rounding_bytes)
    blocks: dict[int, MemoryBlock] = {}
    now: Counter[str] = Counter()
    requested, stage, kinds = 0, "", Counter[str]()
    for change in tape.changes:
        if change.device != device:
            continue
        if not change.taken:
            allocator.give(blocks.pop(change.holding))
            now[change.kind] -= change.size_bytes
            continue
        before = allocator.peak_allocated_bytes
        try:
            blocks[change.holding] = allocator.take(change.size_bytes)
        except OutOfDeviceMemory as error:
            error.add_note(f"on device {device} in {change.stage}, for {change.kind}")
            raise
        now[change.kind] += change.size_bytes
        requested = max(requested, allocator.requested_bytes)
        if allocator.peak_allocated_bytes > before:
            stage, kinds = change.stage, now.copy()
    return Peak(
        requested, allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, stage,
        {kind: size for kind, size in kinds.most_common() if size},
    )  # fmt: skip
