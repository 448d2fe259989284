"""Reference: the gradients and buffers of a correct step, computed without the engine.

The chunked reference runs one deep copy of the module per chunk of the batch, one after the other
on one device, and adds the gradients of the copies in the order of the chunks. Its functions that
take outputs apart and join them share no code with the engine's gather, because verification
compares the results of both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from dpbench.models import copied
from dpbench.records.arguments import call
from dpbench.strategies import Split


def _parts(value: Any) -> list[tuple[Any, Any]]:
    """Return the (name, part) pairs of a container; none for a value without parts."""
    if isinstance(value, Mapping):
        return list(value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value) if field.init]
    if isinstance(value, Iterable) and not isinstance(
        value, torch.Tensor | str | bytes | Set | Iterator
    ):
        return list(enumerate(value))
    return []


def _made(value: Any, parts: Sequence[Any]) -> Any:
    """Return a container of the type of `value` with other `parts` (see `_parts`)."""
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
    """Return the tensors of a structure by their place in it, such as `output['logits']`."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    tensors: dict[str, torch.Tensor] = {}
    for key, part in _parts(value):
        tensors |= tensors_by_name(part, f"{name}[{key!r}]")
    return tensors


def all_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a structure in order."""
    return list(tensors_by_name(value).values())


def joined(values: Sequence[Any]) -> Any:
    """Return one structure in which each tensor has the rows of all `values`.

    0-dim tensors become a vector. `values` have equal structures; a single value is returned
    unchanged. Parts that are not tensors come from the first of `values`.
    """
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat([value.reshape(1) if value.dim() == 0 else value for value in values])
    columns = zip(*([part for _, part in _parts(value)] for value in values), strict=True)
    parts = [joined(column) for column in columns]
    return _made(first, parts) if parts else first


def chunked(
    module: nn.Module,
    loss: Callable[..., torch.Tensor],
    inputs: Any,
    target: Any,
    split: Split,
    device: torch.device,
    *,
    scale: float = 1.0,
) -> nn.Module:
    """Return `module` with the gradients and buffers of a correct step: the chunked reference.

    `module` is moved to `device`. `inputs` and `target` are one batch, which is split into one
    chunk for each number of samples in `split.rows`. The loss is multiplied by `scale` for
    backward, and the gradients are divided by it.
    """
    module = module.to(device)
    columns = in_chunks(inputs, split.rows, device)
    copies = [copied(module) for _ in columns]
    outputs = [call(one, rows) for one, rows in zip(copies, columns, strict=True)]
    ends: list[list[torch.Tensor]] = [[] for _ in columns]
    cut = [
        mapped(output, partial(_cut, into=into)) for output, into in zip(outputs, ends, strict=True)
    ]
    (loss(joined(cut), mapped(target, lambda tensor: tensor.to(device))) * scale).backward()
    for output, into in zip(outputs, ends, strict=True):
        used = [
            (t, end.grad.clone())
            for t, end in zip(all_tensors(output), into, strict=True)
            if end.grad is not None
        ]
        torch.autograd.backward([tensor for tensor, _ in used], [gradient for _, gradient in used])
    _collect(module, copies, scale)
    return module


def averaged(
    module: nn.Module,
    loss: Callable[..., torch.Tensor],
    inputs: Any,
    target: Any,
    split: Split,
    device: torch.device,
    *,
    scale: float = 1.0,
) -> nn.Module:
    """Return `module` with the mean of the gradients of the chunks' own losses, weighted by rows.

    This is what DistributedDataParallel computes, whose ranks each have a loss. It differs from the
    gradient of the whole batch if the loss is not a mean over samples, for example if it averages
    over the items that a mask leaves. The arguments are those of `chunked`.
    """
    module = module.to(device)
    rows = split.rows
    columns = zip(
        rows,
        in_chunks(inputs, rows, device),
        in_chunks(target, rows, device),
        strict=True,
    )
    copies = []
    for count, given, wanted in columns:
        copies.append(copied(module))
        (loss(call(copies[-1], given), wanted) * (count / sum(rows) * scale)).backward()
    _collect(module, copies, scale)
    return module


def _collect(module: nn.Module, copies: Sequence[nn.Module], scale: float) -> None:
    """Give `module` the copies' summed gradients over `scale`, and the first copy's buffers."""
    for name, parameter in module.named_parameters():
        parts = [one.get_parameter(name).grad for one in copies]
        total = _ordered_sum([p for p in parts if p is not None])
        parameter.grad = total if total is None or scale == 1 else total / scale
    for name, buffer in module.named_buffers():
        buffer.copy_(copies[0].get_buffer(name))


def in_chunks(value: Any, rows: Sequence[int], device: torch.device) -> list[Any]:
    """Split a structure's tensors into consecutive chunks; return one structure per chunk.

    `rows` has the number of rows of each chunk. The tensors of the result are copies on `device`.
    """
    ranges = [slice(end - count, end) for count, end in zip(rows, accumulate(rows), strict=True)]
    return [mapped(value, partial(_piece, rows=one, device=device)) for one in ranges]


def _piece(tensor: torch.Tensor, rows: slice, device: torch.device) -> torch.Tensor:
    return tensor[rows].to(device, copy=True)


def _cut(tensor: torch.Tensor, into: list[torch.Tensor]) -> torch.Tensor:
    """Return the tensor without its autograd history, and append the returned tensor to `into`.

    The caller reads it from `into`, because the container into which it is put, such as a cache,
    may store a copy of it.
    """
    end = tensor.detach().requires_grad_(tensor.requires_grad)
    into.append(end)
    return end


def _ordered_sum(parts: list[torch.Tensor]) -> torch.Tensor | None:
    """Return the sum of `parts`, added in this order; None if there are none."""
    if not parts:
        return None
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total
