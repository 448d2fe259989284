"""Scatter: split every tensor of a structure over the devices; share everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import Function

from dpbench.devices import Device
from dpbench.engine.devices import Devices, as_devices
from dpbench.records import Mark, Phase, no_mark


class Scatter(Function):
    """Copy the chunks of one tensor to the devices; backward concatenates their gradients where it came from."""

    @staticmethod
    def forward(
        ctx: Any, devices: Sequence[Device], dim: int, mark: Mark, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return one fresh chunk a device; fewer than devices when the tensor is short."""
        ctx.dim, ctx.home = dim, tensor.device
        pieces = []
        for device, chunk in zip(devices, tensor.chunk(len(devices), dim), strict=False):
            with mark(Phase.SCATTER, device.index):
                pieces.append(device.put(chunk))
        return tuple(pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Return the whole tensor's gradient."""
        whole = torch.cat([gradient.to(ctx.home) for gradient in gradients], ctx.dim)
        return None, None, None, whole


def scatter(value: Any, devices: Devices, dim: int = 0, *, mark: Mark = no_mark) -> list[Any]:
    """Split `value` into one piece per device, or fewer where its tensors yield fewer chunks.

    Tensors are cut along `dim` by `torch.chunk` and copied; tuples, namedtuples, lists and dicts are rebuilt
    around the pieces; everything else is shared by all. Raises ValueError when tensors disagree on their
    length, where torch would drop rows, or pair wrong ones, in silence; one row per piece is a length that fits.
    """
    devices = as_devices(devices)
    lengths = {_length(tensor, dim) for tensor in _tensors(value)}
    counts = {_chunks(length, len(devices)) for length in lengths}
    pieces = max(counts, default=len(devices))
    if len(counts) > 1 or len(lengths - {pieces}) > 1:
        raise ValueError(
            f"cannot scatter over {len(devices)} devices: tensors of length {sorted(lengths)} along dim {dim} "
            f"make {sorted(counts)} chunks; give all the same batch size, or pass the odd one inside an object"
        )
    return _split(value, devices, pieces, dim, mark)


def _split(value: Any, devices: Sequence[Device], pieces: int, dim: int, mark: Mark) -> list[Any]:
    """Return `value` in so many pieces."""
    if isinstance(value, torch.Tensor):
        return list(Scatter.apply(devices, dim, mark, value))  # type: ignore[no-untyped-call]
    if not isinstance(value, tuple | list | dict) or not value:
        return [value] * pieces
    parts = value.items() if isinstance(value, dict) else value
    rows = zip(*(_split(part, devices, pieces, dim, mark) for part in parts), strict=True)
    if hasattr(value, "_fields"):  # a namedtuple
        return [type(value)(*row) for row in rows]
    return [type(value)(row) for row in rows]


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return all tensors that scatter would cut."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in _tensors(part)]
    return []


def _length(tensor: torch.Tensor, dim: int) -> int:
    """Return the extent to cut; a scalar tensor has none."""
    if tensor.dim() == 0:
        raise RuntimeError(
            "chunk expects at least a 1-dimensional tensor: scatter got a 0-dim tensor; pass a Python number to "
            "share it, or expand it to the batch"
        )
    return tensor.size(dim)


def _chunks(length: int, devices: int) -> int:
    """Return how many pieces `torch.chunk` makes: pieces of ceil(length / devices), as many as that takes."""
    if length == 0:
        return devices
    piece = -(-length // devices)
    return -(-length // piece)
