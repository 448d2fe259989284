"""Gather: bring the replicas' outputs together on one device."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import Function

from dpbench.devices import Device
from dpbench.engine.devices import DeviceId, Devices, as_devices
from dpbench.records import Mark, Phase, no_mark


class Gather(Function):
    """Concatenate one tensor per device on the target; backward sends each device its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, target: Device, devices: Sequence[Device], dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the concatenation; scalars become a vector."""
        ctx.devices, ctx.dim = devices, dim
        ctx.scalars = all(tensor.dim() == 0 for tensor in tensors)
        if ctx.scalars:
            warnings.warn(
                "Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze "
                "and return a vector.",
                stacklevel=4,
            )
            tensors = tuple(tensor.view(1) for tensor in tensors)
        ctx.sizes = [tensor.size(dim) for tensor in tensors]
        for device in devices:
            target.wait(device)
        target.borrow(tensors)
        with target.guard():
            return torch.cat([tensor.to(target.torch_device, non_blocking=True) for tensor in tensors], dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Return each device's part as a copy of its own, so that it is aligned as the forward was."""
        parts = gradient.split(ctx.sizes, ctx.dim)
        placed = [device.put(part) for device, part in zip(ctx.devices, parts, strict=True)]
        return None, None, None, *(part[0] if ctx.scalars else part for part in placed)


def gather(
    outputs: Sequence[Any], target: Device | DeviceId, devices: Devices, dim: int = 0, *, mark: Mark = no_mark
) -> Any:
    """Concatenate `outputs[i]` of `devices[i]` along `dim` on `target`.

    Replica 0 decides the structure: tensors, None, dicts, namedtuples, tuples and lists; anything else raises
    TypeError. Scalars become a vector, with torch's warning.
    """
    (at,), sources = as_devices([target]), as_devices(devices)
    with mark(Phase.GATHER, at.index):
        return _gather(outputs, at, sources, dim)


def _gather(outputs: Sequence[Any], target: Device, devices: Sequence[Device], dim: int) -> Any:
    """Gather one level of the structure."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return Gather.apply(target, devices, dim, *outputs)  # type: ignore[no-untyped-call]
    if first is None:
        return None
    if isinstance(first, dict):
        if any(len(output) != len(first) for output in outputs):
            raise ValueError("All dicts must have the same number of keys")
        return type(first)((key, _gather([o[key] for o in outputs], target, devices, dim)) for key in first)
    if isinstance(first, tuple | list):
        columns = [_gather(column, target, devices, dim) for column in zip(*outputs, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    raise TypeError(
        f"cannot gather outputs of type {type(first).__name__}: forward must return tensors, or tuples, lists or "
        "dicts of them; return numbers as tensors"
    )
