"""Recorder: a running model's operator calls, their work, and the lifetimes of its storages."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
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
"""Ops that start no kernel, besides views."""
SILENT = {torch.ops.prim.device.default, aten.detach.default}
"""Ops that are not recorded: they do no work, and hooks on saved tensors add more of them."""
PASSES = {
    aten.native_batch_norm: 1,
    aten.cudnn_batch_norm: 1,
    aten._batch_norm_with_update: 1,
    aten.native_batch_norm_backward: 2,
    aten.cudnn_batch_norm_backward: 2,
    aten.batch_norm_backward: 2,
}
"""The repeated reads of an op's first argument.

For example, BatchNorm reads its input for the statistics and again for the normalisation.
"""


@dataclass(frozen=True)
class Event:
    """The allocation or release of a storage; the size in bytes is negative for a release."""

    storage: int
    size_bytes: int


@dataclass(frozen=True)
class Op:
    """One operator call, with the allocations and releases until the next one, in order.

    `bytes` are those that the op's kernel reads and writes if it is not fused with others; 0
    without a kernel.
    """

    phase: Phase
    name: str
    flop: float
    bytes: float
    events: Sequence[Event]


class OpRecorder(TorchDispatchMode):
    """A mode that records the ops of a step by part, and the lifetimes of a device's storages."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._parts: dict[str, list[Op]] = {}
        self._phase: Phase | None = None
        self._ops: list[Op] = []
        # events of the latest op; finalizers append at any time
        self._events: list[Event] = []
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._forgotten: set[int] = set()
        self._numbers = itertools.count(1)

    @contextmanager
    def part(self, name: str, phase: Phase) -> Iterator[None]:
        """Record the ops of the body in the part `name` of the step; ignore those outside parts."""
        self._enter(name, phase)
        try:
            yield
        finally:
            self._enter("", None)

    def _enter(self, name: str, phase: Phase | None) -> None:
        self._phase = phase
        self._ops = self._parts.setdefault(name, [])
        self._events = []

    @property
    def at(self) -> int:
        """Return the number of ops that have been recorded in the current part of the step."""
        return len(self._ops)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._phase is not None and func not in SILENT:
            packet = func._overloadpacket
            flop = (
                flop_registry[packet](*args, **kwargs, out_val=result)
                if packet in flop_registry
                else 0
            )
            moved = _traffic(func, args, kwargs, result)
            self._events = []
            self._ops.append(Op(self._phase, str(packet), float(flop), float(moved), self._events))
        inputs = {id(tensor.untyped_storage()) for tensor in _strided((args, kwargs))}
        for tensor in _strided(result):
            if tensor.device == self._device and id(tensor.untyped_storage()) not in inputs:
                self.storage(tensor)
        return result

    def storage(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage; if it is new, record the allocation."""
        storage = dense(tensor)[0].untyped_storage()
        if storage not in self._known:
            number = self._known[storage] = next(self._numbers)
            if size := storage.nbytes():
                self._events.append(Event(number, size))
                weakref.finalize(storage, self._freed, number, size).atexit = False
        return self._known[storage]

    def _freed(self, number: int, size: int) -> None:
        self._events.append(Event(number, -size))

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remove the storages of these tensors from the record, because they are in host memory."""
        self._forgotten |= {self.storage(tensor) for tensor in tensors}

    def ops(self, *parts: str) -> Mapping[str, tuple[Op, ...]]:
        """Return the ops of these parts of the step, by part.

        Releases of storages that were allocated outside these parts are left out.
        """
        recorded = {part: self._parts.get(part, []) for part in parts}
        taken = {
            event.storage
            for ops in recorded.values()
            for op in ops
            for event in op.events
            if event.size_bytes > 0
        }
        taken -= self._forgotten
        return {
            part: tuple(
                replace(op, events=[event for event in op.events if event.storage in taken])
                for op in ops
            )
            for part, ops in recorded.items()
        }


FULL_PRECISION = {
    "__pow__",
    "__rpow__",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cosine_similarity",
    "cross_entropy",
    "cumprod",
    "cumsum",
    "dist",
    "exp",
    "expm1",
    "group_norm",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "log",
    "log10",
    "log1p",
    "log2",
    "log_softmax",
    "margin_ranking_loss",
    "mse_loss",
    "nll_loss",
    "norm",
    "normalize",
    "poisson_nll_loss",
    "pow",
    "prod",
    "reciprocal",
    "rsqrt",
    "smooth_l1_loss",
    "soft_margin_loss",
    "softmax",
    "softmin",
    "softplus",
    "sum",
    "triplet_margin_loss",
}
"""The functions that autocast computes in fp32 on GPUs (torch's documentation of `torch.amp`).

Autocast on the CPU computes most of them in 16 bits.
"""


class AsOnGpus(TorchFunctionMode):
    """A mode under which functions on CPU tensors call the operators that GPUs use.

    These save other tensors for backward. Dropout keeps a mask of one byte per element, and fused
    attention with dropout a seed instead of a mask. Autocast computes the functions of
    `FULL_PRECISION` in fp32.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return func(*args[:4], **{**kwargs, "dropout_p": 0.0, **_causal(args)})
        if torch.is_autocast_enabled("cpu") and getattr(func, "__name__", "") in FULL_PRECISION:
            args, kwargs = tree_map_only(torch.Tensor, _in_full, (args, kwargs))
        return func(*args, **kwargs)


def _dropout(
    x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if not training or not 0 < p < 1 or inplace:
        return F.dropout(x, p, training, inplace)
    return torch.native_dropout(x, p, True)[0]


def _causal(args: Sequence[Any]) -> dict[str, Any]:
    """Return `is_causal`, if attention was given it by position, as a keyword argument."""
    return {"is_causal": args[5]} if len(args) > 5 else {}


def _in_full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _traffic(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the bytes that an op's kernel reads and writes; 0 without a kernel."""
    packet = func._overloadpacket
    if func.is_view or packet in FREE:
        return 0
    read, returned = _touched((args, kwargs)), _touched(result)
    new = returned.keys() - read.keys()
    schema = func._schema.arguments
    arguments = [
        *zip(schema, args, strict=False),
        *((a, kwargs[a.name]) for a in schema if a.name in kwargs),
    ]
    changed = [
        v
        for argument, v in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    written = sum(_touched(changed).values())
    again = PASSES[packet] * sum(_touched(args[0]).values()) if packet in PASSES else 0
    return sum(read.values()) + sum(returned[storage] for storage in new) + written + again


def _touched(value: Any) -> dict[int, int]:
    """Return the bytes in each storage; the repeated elements of an expanded tensor count once."""
    return {
        id(tensor.untyped_storage()): min(tensor.nbytes, tensor.untyped_storage().nbytes())
        for tensor in _strided(value)
    }


def _strided(value: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, torch.Tensor):
            yield from dense(leaf)


def dense(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the tensor itself, or the values and indices of a sparse tensor."""
    return (tensor._values(), tensor._indices()) if tensor.layout == torch.sparse_coo else (tensor,)
