"""Containers: list the parts of nested dicts, sequences and dataclasses, and rebuild them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from dpbench.hardware.device import Device
from dpbench.hardware.devices import as_devices


def keys_of(value: Any) -> Collection[Any] | None:
    """Return the keys of a dict, indices of a list or tuple, or attributes of a dataclass instance.

    These attributes are the fields that the constructor sets, and all others that contain tensors.
    Return None for any other value.
    """
    if isinstance(value, dict):
        return value.keys()
    if isinstance(value, tuple | list):
        return range(len(value))
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
    if isinstance(value, dict):
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
    if isinstance(value, dict):  # a copy keeps a subclass's other state, such as a default factory
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
