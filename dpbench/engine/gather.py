"""Gather: bring the replicas' outputs together on one device."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.function import Function

from dpbench.devices import Device
from dpbench.engine.containers import devices_of, parts_of, rebuilt
from dpbench.engine.devices import DeviceId, Devices, as_devices
from dpbench.records import Mark, Phase, no_mark


class Gather(Function):
    """Concatenate one tensor per device on the target; backward sends each device its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, target: Device, devices: Sequence[Device], dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the concatenation; scalars become a vector."""
        ctx.devices, ctx.dim = devices, dim
        ctx.scalars = dim == 0 and all(tensor.dim() == 0 for tensor in tensors)
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
        follows = target.torch_device.type != "cpu"  # the host orders nothing behind a copy that it did not wait for
        with target.guard():
            return torch.cat([tensor.to(target.torch_device, non_blocking=follows) for tensor in tensors], dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Return each device's part as a copy of its own, so that it is aligned as the forward was."""
        parts = gradient.split(ctx.sizes, ctx.dim)
        placed = [device.put(part) for device, part in zip(ctx.devices, parts, strict=True)]
        return None, None, None, *(part[0] if ctx.scalars else part for part in placed)


def gather(
    outputs: Sequence[Any],
    target: Device | DeviceId,
    devices: Devices | None = None,
    dim: int = 0,
    *,
    compat: bool = False,
    mark: Mark = no_mark,
) -> Any:
    """Concatenate `outputs[i]` of `devices[i]` along `dim` on `target`; without `devices`, from where they are.

    Tensors, None, tuples, lists, dicts and dataclass instances of them; anything else raises TypeError. Scalars
    become a vector, with torch's warning. Replicas that return unlike structures raise ValueError, and tensors that
    do not fit together RuntimeError. With `compat`, replica 0 decides the structure and texts become iterators'
    names, as in torch.
    """
    at = target_of(target)
    sources = devices_of(outputs) if devices is None else as_devices(devices)
    with mark(Phase.GATHER, at.index):
        if compat:
            return _gather_as_torch(outputs, at, sources, dim)
        return _gather(outputs, at, sources, dim, "the output")


def target_of(target: Device | DeviceId) -> Device:
    """Return the device to gather on; -1 is the host, as in torch, which calls that deprecated too."""
    if target == -1:
        warnings.warn('-1 for the CPU is deprecated; use "cpu"', FutureWarning, stacklevel=3)
        target = "cpu"
    (device,) = as_devices([target])
    return device


def _gather(outputs: Sequence[Any], target: Device, devices: Sequence[Device], dim: int, where: str) -> Any:
    """Gather one level of the structure; `where` is its name."""
    first = outputs[0]
    kinds = [torch.Tensor if isinstance(output, torch.Tensor) else type(output) for output in outputs]
    for replica, kind in enumerate(kinds):
        if kind is not kinds[0]:
            raise ValueError(
                f"replicas returned unlike structures: {where} is of type {kinds[0].__name__} from replica 0, but "
                f"{kind.__name__} from replica {replica}"
            )
    if kinds[0] is torch.Tensor:
        _check(outputs, devices, dim, where)
        return Gather.apply(target, devices, dim, *outputs)  # type: ignore[no-untyped-call]
    if first is None:
        return None
    rows = [parts for output in outputs if (parts := parts_of(output)) is not None]
    if not rows:
        raise TypeError(
            f"cannot gather {where} of type {kinds[0].__name__}: forward must return tensors, or tuples, lists, dicts "
            "or dataclass instances of them; return numbers as tensors"
        )
    for replica, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise ValueError(
                f"All {kinds[0].__name__}s must have the same number of keys, and the same ones: {where} has "
                f"{[*rows[0]]} from replica 0, but {[*row]} from replica {replica}"
            )
    return rebuilt(
        first, [_gather([row[key] for row in rows], target, devices, dim, f"{where}[{key!r}]") for key in rows[0]]
    )


def _check(tensors: Sequence[torch.Tensor], devices: Sequence[Device], dim: int, where: str) -> None:
    """Raise when tensors do not fit together, or were left on the host."""
    for replica, (tensor, device) in enumerate(zip(tensors, devices, strict=True)):
        if tensor.device.type == "cpu" != device.torch_device.type:
            raise TypeError(
                f"Gather function not implemented for CPU tensors: {where} of replica {replica} is on the CPU, its "
                f"inputs are on {device.name}; return it there"
            )
        expected, shape = list(tensors[0].shape), list(tensor.shape)
        if len(shape) == len(expected) and -len(shape) <= dim < len(shape):
            expected[dim] = shape[dim]
        if shape != expected:
            raise RuntimeError(
                f"Input tensor at index {replica} has invalid shape {shape}, but expected {expected}: {where} of the "
                f"replicas may differ along dim {dim} alone; pad to the same length (pad_packed_sequence takes "
                "total_length=)"
            )


def _gather_as_torch(outputs: Sequence[Any], target: Device, devices: Sequence[Device], dim: int) -> Any:
    """Gather one level as torch does: replica 0 decides, and whatever can be iterated over is a sequence."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return Gather.apply(target, devices, dim, *outputs)  # type: ignore[no-untyped-call]
    if first is None:
        return None
    if isinstance(first, dict):
        if any(len(output) != len(first) for output in outputs):
            raise ValueError("All dicts must have the same number of keys")
        items = {key: _gather_as_torch([output[key] for output in outputs], target, devices, dim) for key in first}
        return type(first)(items.items())
    together = partial(_gather_as_torch, target=target, devices=devices, dim=dim)
    columns = map(together, zip(*outputs, strict=True))
    return first._make(columns) if hasattr(first, "_fields") else type(first)(columns)
