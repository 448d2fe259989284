"""Containers: list, compare and rebuild the parts of nested dicts, sequences and dataclasses."""

from __future__ import annotations

import copy
import types
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from operator import is_
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from dpbench.hardware.device import Device
from dpbench.hardware.devices import as_devices

Read = TypeVar("Read")
DICTS = (dict, UserDict)
"""A UserDict, such as what tokenizers of the library transformers return, is a dict to its users"""


def keys_of(value: Any) -> Collection[Any] | None:
    """Return the keys of a dict, indices of a list or tuple, or attributes of a dataclass instance.

    A `collections.UserDict` counts as a dict. The attributes are the fields that the constructor
    sets, and all others that contain tensors. Return None for any other value.
    """
    if isinstance(value, tuple | list):  # the question about UserDict takes longer
        return range(len(value))
    if isinstance(value, DICTS):
        return value.keys()
    if is_dataclass(value) and not isinstance(value, type):
        return _attributes_of(value)
    return None


def _attributes_of(value: Any) -> tuple[str, ...]:
    given = [field.name for field in fields(value) if field.init]
    others = dict.fromkeys(
        [*(field.name for field in fields(value)), *getattr(value, "__dict__", ())]
    )
    with_tensors = [
        name
        for name in others
        if name not in given and first_tensor(getattr(value, name, None)) is not None
    ]
    return (*given, *with_tensors)


def parts_of(value: Any, keys: Iterable[Any]) -> list[Any]:
    """Return the parts of a container in the order of `keys`, the result of `keys_of(value)`."""
    if isinstance(value, tuple | list):
        return list(value)
    if isinstance(value, DICTS):
        return [value[key] for key in keys]
    return [getattr(value, key) for key in keys]


def rebuilt(value: Any, parts: Sequence[Any]) -> Any:
    """Return a container like `value`, with `parts` in the order of `keys_of(value)`.

    No constructor of a dict or dataclass runs: it would compute from one part what was computed
    from all of them.
    """
    if isinstance(value, tuple | list):
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    if type(value) is dict:
        return dict(zip(value, parts, strict=True))
    if isinstance(value, DICTS):  # a copy keeps a subclass's other state, such as a default factory
        new = copy.copy(value)
        for key, part in zip(value, parts, strict=True):
            new[key] = part
        return new
    new = copy.copy(value)
    for name, part in zip(keys_of(value) or (), parts, strict=True):
        object.__setattr__(new, name, part)  # a frozen dataclass allows no other way
    return new


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return all tensors of a nested structure, in order.

    Raises TypeError for a PackedSequence, which cannot be split.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, PackedSequence):
        raise TypeError(
            "cannot scatter a PackedSequence, because its rows are interleaved; pass the padded"
            " batch and the lengths, and call pack_padded_sequence in forward (and"
            " pad_packed_sequence with total_length=)"
        )
    return [tensor for part in parts_of(value, keys_of(value) or ()) for tensor in tensors_in(part)]


def mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return a copy of a nested structure in which `change(tensor)` replaces each tensor.

    If `change` returns every tensor unchanged, the structure itself is returned.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    keys = keys_of(value)
    if not keys:
        return value
    before = parts_of(value, keys)
    after = [mapped(part, change) for part in before]
    return (
        value if all(a is b for a, b in zip(after, before, strict=True)) else rebuilt(value, after)
    )


def first_tensor(value: Any) -> torch.Tensor | None:
    """Return the first tensor of a nested structure, or None if there is none."""
    if isinstance(value, torch.Tensor):
        return value
    parts = parts_of(value, keys_of(value) or ())
    return next((tensor for part in parts if (tensor := first_tensor(part)) is not None), None)


def unreachable(value: Any) -> Any:
    """Return the first object of a nested structure that holds tensors or arrays, or None.

    No container leads to these tensors, so that the engine can neither cut nor move them.
    """
    keys = keys_of(value)
    if keys is None:
        return value if _holds_rows(value, set()) else None
    found = (unreachable(part) for part in parts_of(value, keys))
    return next((one for one in found if one is not None), None)


_NO_BATCH = (
    *(str, bytes, bytearray, memoryview, range),
    *(nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType),
)
"""Values without tensors, and values whose tensors are no part of a batch."""


def _holds_rows(value: Any, seen: set[int]) -> bool:
    """Return whether an object refers to a tensor or array that has rows."""
    if id(value) in seen or isinstance(value, _NO_BATCH):
        return False
    seen.add(id(value))
    if isinstance(value, torch.Tensor) or hasattr(type(value), "__array__"):
        return bool(getattr(value, "shape", ()))
    parts: list[Any] = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        parts += [getattr(value, name, None) for name in names]
    if isinstance(value, Mapping):
        parts += value.values()
    elif isinstance(value, Sequence | Set):
        parts += value
    return any(_holds_rows(part, seen) for part in parts)


def device_of(value: Any) -> torch.device | None:
    """Return the device of the first tensor of a nested structure, or None if there is none."""
    tensor = first_tensor(value)
    return None if tensor is None else tensor.device


def devices_of(values: Sequence[Any]) -> list[Device]:
    """Return, for each value, the device of its first tensor.

    A value without tensors gets the first device found among the other values, or the CPU.
    """
    places = [device_of(value) for value in values]
    anywhere = next((place for place in places if place is not None), torch.device("cpu"))
    return as_devices([place or anywhere for place in places])


ATTEMPTS = 1000
"""How often `whole` reads what other threads write, before it gives up."""


def whole(read: Callable[[], Read]) -> Read:
    """Return `read()`, which reads containers that another caller's forward may write meanwhile.

    Without Python's interpreter lock, a dict, set or deque may change its size within one call of
    `list`, which then raises RuntimeError: `read` is called again.
    """
    for _ in range(ATTEMPTS):
        try:
            return read()
        except RuntimeError:  # the size has changed
            continue
    return read()


def same(values: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether two lists have the same objects, or equal integers and strings, in order.

    Other equal objects may differ: 0.0 from -0.0, a tensor from one of another dtype, a list from
    another that the user's code changes later.
    """
    if len(values) != len(others):
        return False
    return all(map(is_, values, others)) or all(
        value is other
        or (type(value) is type(other) and type(value) in (int, str) and value == other)
        for value, other in zip(values, others, strict=True)
    )
