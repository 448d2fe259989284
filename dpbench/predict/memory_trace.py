"""Tape: who takes and gives back how much memory on which device, in order; and its replay through an allocator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dpbench.predict.allocator import Allocator, Block, OutOfDeviceMemory
from dpbench.predict.recorder import Op

Names = dict[int, int]
"""A trace's storages -> the holdings on a tape that stand for them."""


@dataclass(frozen=True)
class Change:
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
        self.changes: list[Change] = []
        self.stage = "setup"
        self._live: dict[int, Change] = {}

    def take(self, device: int, size_bytes: int, kind: str) -> list[int]:
        """Hold one more tensor; return its holding in a list, and none for an empty tensor."""
        if not size_bytes:
            return []
        change = Change(device, len(self.changes), size_bytes, kind, self.stage, taken=True)
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
                    Change(change.device, holding, change.size_bytes, change.kind, self.stage, taken=False)
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

    def live(self, device: int) -> int:
        """Return the bytes that are held on a device now."""
        return sum(change.size_bytes for change in self._live.values() if change.device == device)


def replay(tape: Tape, device: int, *, capacity_bytes: int | None = None, rounding_bytes: int | None = None) -> Peak:
    """Return a device's peaks; raise OutOfDeviceMemory, naming stage and kind, where its memory is not enough."""
    allocator = Allocator(capacity_bytes) if rounding_bytes is None else Allocator(capacity_bytes, rounding_bytes)
    blocks: dict[int, Block] = {}
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
