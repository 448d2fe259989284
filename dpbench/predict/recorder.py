"""Recorder: every operator call while a model runs, its work, and the life of every storage it makes on one device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from dpbench.records import Phase

aten = torch.ops.aten
FREE = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.lift_fresh,
    aten._unsafe_view,
}
"""Ops that start no kernel, beside all views."""
SILENT = {torch.ops.prim.device.default, aten.detach.default}
"""What is not written down: no work, and as often as torch pleases (hooks on saved tensors add some)."""
PASSES = {
    aten.native_batch_norm: 1, aten.cudnn_batch_norm: 1, aten._batch_norm_with_update: 1,
    aten.native_batch_norm_backward: 2, aten.cudnn_batch_norm_backward: 2, aten.batch_norm_backward: 2,
}  # fmt: skip
"""How often more than once an op reads its first argument: BatchNorm takes statistics before it normalises."""


@dataclass(frozen=True)
class Event:
    """A storage (by number) taken, of so many bytes, or given back: then minus as many."""

    storage: int
    size_bytes: int


@dataclass(frozen=True)
class Op:
    """One operator call: its work, what it takes, and what was given back before the next one.

    `bytes` are read and written by a kernel that keeps nothing in registers between calls.
    """

    phase: Phase
    name: str
    flop: float
    bytes: float
    events: tuple[Event, ...]


class OpRecorder(TorchDispatchMode):
    """Writes down every op of a part, and the life of every storage that ops make on one device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._parts: dict[str, list[tuple[Any, ...]]] = {}
        self._phase: Phase | None = None
        self._ops: list[tuple[Any, ...]] = []
        self._events: list[tuple[int, int]] = []  # of the op that ran last; a finalizer may add to it at any time
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._sizes: dict[int, int] = {}
        self._forgotten: set[int] = set()
        self._count = 0

    def part(self, name: str, phase: Phase) -> OpPart:
        """Return the context in which ops belong to a part of the step."""
        return OpPart(self, name, phase)

    def enter(self, name: str, phase: Phase | None) -> None:
        """Let the ops from now on belong to a part, or with None to nothing."""
        self._phase, self._ops, self._events = phase, self._parts.setdefault(name, []), []

    @property
    def at(self) -> int:
        """Return how many ops the present part has had."""
        return len(self._ops)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._phase is not None and func not in SILENT:
            packet = func._overloadpacket
            flop = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
            moved = _traffic(func, args, kwargs, result)
            self._events = []
            self._ops.append((self._phase, str(packet), float(flop), float(moved), self._events))
        given = {id(tensor.untyped_storage()) for tensor in _strided((args, kwargs))}
        for tensor in _strided(result):
            if tensor.device == self._device and id(tensor.untyped_storage()) not in given:
                self.storage(tensor)
        return result

    def storage(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage; count it from now on if it is new."""
        storage = dense(tensor)[0].untyped_storage()
        if storage not in self._known:
            self._count += 1
            number, size = self._count, storage.nbytes()
            self._known[storage], self._sizes[number] = number, size
            if size:
                self._events.append((number, size))
                weakref.finalize(storage, self._freed, number, size).atexit = False
        return self._known[storage]

    def _freed(self, number: int, size: int) -> None:
        self._events.append((number, -size))

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave the storages of tensors out of the trace: they are the host's."""
        self._forgotten |= {self.storage(tensor) for tensor in tensors}

    def ops(self, *parts: str) -> Mapping[str, tuple[Op, ...]]:
        """Return these parts' ops; what is given back in them without having been taken there is left out."""
        rows = {part: self._parts.get(part, []) for part in parts}
        taken = {number for ops in rows.values() for *_, events in ops for number, size in events if size > 0}
        taken -= self._forgotten
        return {
            part: tuple(
                Op(phase, name, flop, moved, tuple(Event(*event) for event in events if event[0] in taken))
                for phase, name, flop, moved, events in ops
            )
            for part, ops in rows.items()
        }


class OpPart:
    """The context of one part of the step."""

    def __init__(self, recorder: OpRecorder, name: str, phase: Phase) -> None:
        self._recorder, self._name, self._phase = recorder, name, phase

    def __enter__(self) -> None:
        self._recorder.enter(self._name, self._phase)

    def __exit__(self, *error: object) -> None:
        self._recorder.enter("", None)


def _traffic(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the bytes that an op's kernel reads and writes; 0 where there is no kernel."""
    packet = func._overloadpacket
    if func.is_view or packet in FREE:
        return 0
    read = {id(t.untyped_storage()): _touched(t) for t in _strided((args, kwargs))}
    new = {id(t.untyped_storage()): _touched(t) for t in _strided(result) if id(t.untyped_storage()) not in read}
    schema = func._schema.arguments
    given = [*zip(schema, args, strict=False), *((a, kwargs[a.name]) for a in schema if a.name in kwargs)]
    changed = [v for argument, v in given if argument.alias_info is not None and argument.alias_info.is_write]
    written = {id(t.untyped_storage()): _touched(t) for t in _strided(changed)}
    again = PASSES.get(packet, 0) * _touched(args[0]) if packet in PASSES else 0
    return sum(read.values()) + sum(new.values()) + sum(written.values()) + again


def _touched(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements, once each where it is expanded."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _strided(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a structure, sparse ones by their parts."""
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, torch.Tensor):
            yield from dense(leaf)


def dense(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the tensors that have a storage: this one, or a sparse one's values and indices."""
    return (tensor._values(), tensor._indices()) if tensor.layout == torch.sparse_coo else (tensor,)
