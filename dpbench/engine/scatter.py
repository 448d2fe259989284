"""Scatter: split every tensor of a structure over the devices; all pieces share other values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import Function

from dpbench.engine.containers import DICTS, keys_of, parts_of, rebuilt, tensors_in, unreachable
from dpbench.hardware.device import Device
from dpbench.hardware.devices import Devices, as_devices
from dpbench.records import Mark, Phase, marked, no_mark
from dpbench.records.words import count, without_rows


class Scatter(Function):
    """An autograd function that copies a tensor's chunks to the devices."""

    @staticmethod
    def forward(
        ctx: Any,
        devices: Sequence[Device],
        sizes: Sequence[int] | None,
        dim: int,
        mark: Mark,
        tensor: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return one new chunk per device, or fewer chunks than devices if the tensor is short."""
        ctx.dim = dim
        ctx.home = tensor.device
        chunks = tensor.chunk(len(devices), dim) if sizes is None else tensor.split(sizes, dim)
        sources = [device for device in devices if device.torch_device == tensor.device][:1]
        pieces = []
        for device, chunk in zip(devices, chunks, strict=False):
            with marked(mark, Phase.SCATTER, device.at_work(sources)):
                pieces.append(device.put(chunk))
        return tuple(pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient of the whole tensor, and None for each other argument."""
        whole = torch.cat([gradient.to(ctx.home) for gradient in gradients], ctx.dim)
        return None, None, None, None, whole


def scatter(
    value: Any,
    devices: Devices,
    dim: int = 0,
    *,
    chunk_sizes: Sequence[int] | None = None,
    say: Callable[[str], object] = warnings.warn,
    mark: Mark = no_mark,
) -> list[Any]:
    """Split `value` into one piece per device, or fewer if its tensors yield fewer chunks.

    Tensors are cut along `dim` by `torch.chunk`, or into `chunk_sizes` rows, and copied to the
    devices. Each piece gets its own copy of every tuple, list and dict, and of every dataclass
    instance that contains tensors. All other values are shared by all pieces. Without
    `chunk_sizes`, a tensor with exactly one row per piece is accepted together with tensors of
    another length; `say` is then called with a sentence about it. In all other cases, tensors of
    different lengths raise ValueError, because torch would silently drop rows or pair the wrong
    ones. Raises RuntimeError for 0-dimensional tensors, and TypeError for PackedSequences, sparse
    tensors, and nested tensors that require gradients. Also raises TypeError if several devices
    would each get all rows: nothing can be split, but an object holds tensors or arrays.
    """
    devices = as_devices(devices)
    if not devices:
        raise ValueError("scatter needs at least one device, got none")
    lengths = {_length(tensor, dim) for tensor in tensors_in(value)}
    if not lengths and len(devices) > 1 and (whole := unreachable(value)) is not None:
        raise TypeError(f"cannot scatter a {without_rows(type(whole).__name__)}")
    if chunk_sizes is None:
        pieces = _agreed(lengths, len(devices), dim)
        if len(lengths) > 1:
            say(_one_row_each(lengths, pieces))
    else:
        pieces = _checked(chunk_sizes, lengths, len(devices), dim)
    return _split(value, devices, pieces, chunk_sizes, dim, mark)


def _split(
    value: Any,
    devices: Sequence[Device],
    pieces: int,
    sizes: Sequence[int] | None,
    dim: int,
    mark: Mark,
) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return list(Scatter.apply(devices, sizes, dim, mark, value))  # type: ignore[no-untyped-call]
    keys = keys_of(value)
    if not keys or not (isinstance(value, (tuple, list, *DICTS)) or tensors_in(value)):
        return [value] * pieces
    rows = zip(
        *(_split(part, devices, pieces, sizes, dim, mark) for part in parts_of(value, keys)),
        strict=True,
    )
    return [*rows] if type(value) is tuple else [rebuilt(value, row) for row in rows]


def _length(tensor: torch.Tensor, dim: int) -> int:
    """Raise RuntimeError or TypeError if the tensor cannot be scattered."""
    if tensor.dim() == 0:
        raise RuntimeError(
            "chunk expects at least a 1-dimensional tensor, but scatter got a 0-dimensional tensor;"
            " pass a Python number, which all replicas share, or expand the tensor to one element"
            " per row of the batch"
        )
    if tensor.layout not in (torch.strided, torch.jagged):
        raise TypeError(
            f"cannot scatter a tensor of layout {tensor.layout}; pass a dense tensor, or pass the"
            " tensor's components and build the tensor in forward"
        )
    if tensor.is_nested and tensor.requires_grad:
        raise TypeError(
            "cannot scatter a nested tensor that requires gradients, because torch cannot join the"
            " gradients of its pieces; pass a padded tensor and the lengths"
        )
    return tensor.size(dim)


def _agreed(lengths: set[int], devices: int, dim: int) -> int:
    """Return the number of pieces into which all tensors, of these lengths along `dim`, are cut.

    Raises ValueError if the numbers of pieces or the lengths differ. A tensor with exactly one row
    per piece may differ in length from the others.
    """
    # as torch.chunk: ceil(length / devices) rows each; length 0 gives one empty chunk per device
    counts = {-(-length // -(-length // devices)) if length else devices for length in lengths}
    pieces = max(counts, default=devices)
    if len(counts) > 1 or len(lengths - {pieces}) > 1:
        raise ValueError(
            f"cannot scatter tensors of different lengths along dim {dim} ({sorted(lengths)}) over"
            f" {count(devices, 'device')}, because their rows do not correspond; give all tensors"
            " the same batch size; to share a tensor instead of splitting it, wrap it in an object"
            " of a class that you define"
        )
    return pieces


def _one_row_each(lengths: set[int], pieces: int) -> str:
    (rows,) = lengths - {pieces}
    return (
        f"a tensor of length {pieces} was cut beside tensors of length {rows}, so that each replica"
        " got one row of it; to share a tensor instead, such as class weights, wrap it in an object"
        " of a class that you define"
    )


def _checked(sizes: Sequence[int], lengths: set[int], devices: int, dim: int) -> int:
    if not 0 < len(sizes) <= devices or any(
        not isinstance(size, int) or size < 1 for size in sizes
    ):
        raise ValueError(
            "chunk_sizes must be positive integers, at most one per device, for"
            f" {count(devices, 'device')}; got {[*sizes]}"
        )
    if lengths - {sum(sizes)}:
        raise ValueError(
            f"chunk_sizes {[*sizes]} sum to {sum(sizes)}, but there are tensors of lengths"
            f" {sorted(lengths)} along dim {dim}; the sizes must sum to the length of every tensor"
        )
    return len(sizes)
