"""The reads and writes of each memory block by the streams, and the races among them.

A race is a pair of accesses of the same bytes, at least one of which writes, that nothing orders.
The memory follows torch's caching allocator (docs: "CUDA semantics", "Memory management";
c10/cuda/CUDACachingAllocator.cpp):

- A block belongs to the stream on which it was allocated. To allocate it counts as a write of that
  stream, because the stream's earlier work may still use the memory for another tensor.
- Freed memory is given to the next allocation on its stream at once, without waiting for other
  streams. Which of the freed blocks that is depends on sizes, splits and merges; here the next
  allocation takes all of them.
- A block with `record_stream` is not reused before the host has seen the work of the recorded
  stream end, so its reuse is ordered after all that this stream had queued when the block was
  freed. Its other accesses are still checked.
- The host's memory is reused in the host's order, so freed host tensors are not checked.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

from tests.races.clocks import HOST, Clock, Machine, Stream

HERE = str(Path(__file__).parent)
TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Access:
    """A read or write of the bytes [start, stop) of a storage.

    Operation number `time` of `stream` made it, at `where`.
    """

    start: int
    stop: int
    stream: Stream
    time: int
    writes: bool
    work: str
    where: str

    def __str__(self) -> str:
        return (
            f"{self.work} {'writes' if self.writes else 'reads'} it on {self.stream} at"
            f" {self.where}"
        )


@dataclass(frozen=True)
class Race:
    """Two accesses of a tensor, named `tensor` in the message, that nothing orders."""

    tensor: str
    first: Access
    second: Access

    def __str__(self) -> str:
        return f"race on {self.tensor}: {self.first}; {self.second}; nothing orders them"


@dataclass
class Block:
    """One storage's memory: its GPU (or HOST), allocating stream, and last accesses."""

    ordinal: int
    owner: Stream
    label: str
    accesses: dict[tuple[int, int, Stream, bool], Access] = field(default_factory=dict)
    borrowers: set[Stream] = field(default_factory=set)


class Recorder:
    """The accesses of all storages of a machine.

    `races` are those that were found, each pair of places once.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.races: list[Race] = []
        self.names: dict[int, str] = {}
        self._blocks: dict[int, Block] = {}
        self._freed: dict[Stream, list[tuple[Block, Clock]]] = {}
        self._places: set[tuple[str, str]] = set()
        self._lock = threading.RLock()  # reentrant: a finalizer may run within any method

    def ordinal_of(self, tensor: torch.Tensor) -> int:
        """Return the number of the GPU that a tensor is on, or HOST."""
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        return HOST if block is None else block.ordinal

    def owner_of(self, tensor: torch.Tensor) -> Stream | None:
        """Return the stream that allocated a tensor's memory; None for memory of the host."""
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        return None if block is None else block.owner

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Let messages call a tensor's memory `name`."""
        self.block(tensor).label = f"{name} {tuple(tensor.shape)}"

    def allocate(self, tensor: torch.Tensor, stream: Stream, work: str) -> None:
        """Register a new tensor in memory that `stream` allocates.

        A known storage is left unchanged.
        """
        storage = tensor.untyped_storage()
        with self._lock:
            if stream.ordinal == HOST or storage._cdata in self._blocks:
                return
            where = place()
            block = Block(
                stream.ordinal,
                stream,
                f"the tensor {tuple(tensor.shape)} that {work} made at {where}",
            )
            self._blocks[storage._cdata] = block
            weakref.finalize(storage, self._free, storage._cdata).atexit = False
            access = Access(
                0, storage.nbytes(), stream, stream.tick(), True, f"the allocation by {work}", where
            )
            for freed, clock in self._freed.pop(stream, []):
                for old in freed.accesses.values():
                    if not ordered(old, clock) and self._conflict(old, access, stream.clock):
                        self._report(f"{freed.label}, whose memory is reused", old, access)
            block.accesses[0, access.stop, stream, True] = access

    def block(self, tensor: torch.Tensor) -> Block:
        """Return the memory of a tensor; a storage that no GPU allocated is one of the host."""
        storage = tensor.untyped_storage()
        with self._lock:
            key = storage._cdata
            if key not in self._blocks:
                self._blocks[key] = Block(
                    HOST, self.machine.host, f"the host's tensor {tuple(tensor.shape)}"
                )
                weakref.finalize(storage, self._free, key).atexit = False
            return self._blocks[key]

    def borrow(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep a freed tensor's memory from reuse until `stream` is done: `record_stream`."""
        block = self.block(tensor)
        if stream is not block.owner:
            block.borrowers.add(stream)

    def access(self, tensor: torch.Tensor, stream: Stream, *, writes: bool, work: str) -> None:
        """Record that the operation that `stream` queued last reads or writes a tensor.

        Report the races with it.
        """
        if not tensor.numel():
            return
        size = tensor.element_size()
        start = tensor.storage_offset() * size
        extent = (
            sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        )
        access = Access(
            start, start + extent * size, stream, stream.clock[stream], writes, work, place()
        )
        with self._lock:
            block = self.block(tensor)
            covered = []
            for key, old in block.accesses.items():
                if old.start >= access.stop or access.start >= old.stop:
                    continue
                if self._conflict(old, access, stream.clock):
                    self._report(block.label, old, access)
                elif (
                    writes
                    and access.start <= old.start
                    and old.stop <= access.stop
                    and ordered(old, stream.clock)
                ):
                    covered.append(key)
            for key in covered:
                del block.accesses[key]
            block.accesses[access.start, access.stop, stream, writes] = access

    @staticmethod
    def _conflict(old: Access, new: Access, clock: Clock) -> bool:
        return (old.writes or new.writes) and not ordered(old, clock)

    def _report(self, label: str, old: Access, new: Access) -> None:
        places = (str(old.where), str(new.where))
        if places not in self._places:
            self._places.add(places)
            self.races.append(Race(label, old, new))

    def _free(self, key: int) -> None:
        """Give a freed storage's memory to the next allocation on its stream."""
        with self._lock:
            block = self._blocks.pop(key)
            if block.ordinal == HOST:
                return
            clock: Clock = {}
            for stream in block.borrowers:
                for other, count in stream.clock.items():
                    clock[other] = max(clock.get(other, 0), count)
            self._freed.setdefault(block.owner, []).append((block, clock))


def ordered(old: Access, clock: Clock) -> bool:
    """Return whether work with this clock starts after an access has ended."""
    return old.time <= clock.get(old.stream, 0)


def place() -> str:
    """Return the calling thread's innermost line outside torch and this package: FILE:LINE."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if file := _outside(frame.f_code.co_filename):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


@functools.cache
def _outside(name: str) -> str:
    """Return the last two parts of a file's path.

    "" for a file of torch, of Python or of this package.
    """
    inside = name.startswith((HERE, TORCH, "<")) or "/python3" in name
    return "" if inside else "/".join(Path(name).parts[-2:])
