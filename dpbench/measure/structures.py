"""Structures: take apart the output of a forward, and join the outputs of several forwards, without the engine.

Verification compares the engine's results with independent ones. It therefore takes containers apart and joins them
again with these functions, which share no code with the engine's gather.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch


def _parts(value: Any) -> list[tuple[Any, Any]]:
    """Return the parts of a container as pairs (name, part); an empty list for a value without parts."""
    if isinstance(value, Mapping):
        return list(value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value) if field.init]
    if isinstance(value, Iterable) and not isinstance(value, torch.Tensor | str | bytes | Set | Iterator):
        return list(enumerate(value))
    return []


def _made(value: Any, parts: Sequence[Any]) -> Any:
    """Return a container of the same type as `value`, with `parts` in place of the parts that `_parts` returns."""
    names = [name for name, _ in _parts(value)]
    if isinstance(value, MutableMapping):
        made = copy.copy(value)  # a subclass of dict may have another constructor
        for name, part in zip(names, parts, strict=True):
            made[name] = part  # a ModelOutput of transformers refuses `update`
        return made
    if isinstance(value, Mapping):
        return type(value)(zip(names, parts, strict=True))  # type: ignore[call-arg]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **dict(zip(names, parts, strict=True)))
    return value._make(parts) if hasattr(value, "_make") else type(value)(parts)


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the structure `value` with `change(tensor)` in place of each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    parts = _parts(value)
    return _made(value, [mapped(part, change) for _, part in parts]) if parts else value


def tensors_by_name(value: Any, name: str = "output") -> dict[str, torch.Tensor]:
    """Return the tensors of a structure by their place in it, such as `output['logits']` for the structure `output`."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    found: dict[str, torch.Tensor] = {}
    for key, part in _parts(value):
        found |= tensors_by_name(part, f"{name}[{key!r}]")
    return found


def all_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a structure in order."""
    return list(tensors_by_name(value).values())


def joined(values: Sequence[Any]) -> Any:
    """Return one structure in which each tensor has the rows of all `values`; 0-dim tensors become a vector.

    `values` have equal structures. A single value is returned unchanged. Parts that are not tensors come from the first
    of `values`.
    """
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat([value.reshape(1) if value.dim() == 0 else value for value in values])
    columns = zip(*([part for _, part in _parts(value)] for value in values), strict=True)
    parts = [joined(column) for column in columns]
    return _made(first, parts) if parts else first
