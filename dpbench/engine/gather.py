"""Gather: concatenate the replicas' outputs on one device."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

import torch
from torch.autograd.function import Function

from dpbench.engine.containers import devices_of, keys_of, parts_of, rebuilt
from dpbench.hardware.device import Device
from dpbench.hardware.devices import DeviceId, Devices, as_devices
from dpbench.records import Mark, Phase, marked, no_mark


class Gather(Function):
    """An autograd function that concatenates tensors on one device."""

    @staticmethod
    def forward(
        ctx: Any, target: Device, devices: Sequence[Device], dim: int, *tensors: torch.Tensor
    ) -> torch.Tensor:
        """Return the tensors concatenated along `dim` on the target; scalars become a vector."""
        ctx.dim = dim
        ctx.homes = [tensor.device for tensor in tensors]
        ctx.scalars = dim == 0 and all(tensor.dim() == 0 for tensor in tensors)
        if ctx.scalars:
            warnings.warn(
                "Was asked to gather along dimension 0, but all input tensors were scalars; will"
                " instead unsqueeze and return a vector.",
                stacklevel=4,
            )
            tensors = tuple(tensor.view(1) for tensor in tensors)
        ctx.sizes = [tensor.size(dim) for tensor in tensors]
        for device in devices:
            target.wait(device)
        target.borrow(tensors)
        # the host would read non-blocking copies before they are done
        follows = target.torch_device.type != "cpu"
        with target.guard():
            return torch.cat(
                [tensor.to(target.torch_device, non_blocking=follows) for tensor in tensors], dim
            )

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Return each device's part of the gradient, as a copy: a slice may be unaligned.

        The copies are made on the current streams, for which autograd makes other streams wait.
        """
        parts = gradient.split(ctx.sizes, ctx.dim)
        # the host would read non-blocking copies before they are done
        placed = [
            part.to(home, non_blocking=home.type != "cpu", copy=True)
            for home, part in zip(ctx.homes, parts, strict=True)
        ]
        return None, None, None, *(part[0] if ctx.scalars else part for part in placed)


def gather(
    outputs: Sequence[Any],
    target: Device | DeviceId,
    devices: Devices | None = None,
    dim: int = 0,
    *,
    mark: Mark = no_mark,
) -> Any:
    """Return the replicas' outputs, concatenated along `dim` on the device `target`.

    `outputs[i]` is the output of the replica on `devices[i]`; without `devices`, the outputs' own
    devices are used. Outputs are tensors, None, or tuples, lists, dicts and dataclass instances of
    them. An object of any other type that yields its parts when iterated, such as a cache of the
    library transformers, is built again from the gathered parts, as in torch:
    `type(output)(parts)`. A number, a string, a set or an object that cannot be iterated raises
    TypeError. Scalars become a vector, with torch's warning. Raises ValueError when replicas return
    different structures, and RuntimeError when the shapes of tensors do not match.
    """
    if not outputs:
        raise ValueError("gather needs at least one replica's output, got none")
    destination = target_of(target)
    sources = devices_of(outputs) if devices is None else as_devices(devices)
    with marked(mark, Phase.GATHER, destination.at_work(sources)):
        return _gather(outputs, destination, sources, dim, ())


def target_of(target: Device | DeviceId) -> Device:
    """Return the device on which to gather; -1 means the host, with torch's deprecation warning."""
    if target == -1:
        warnings.warn(
            '-1 as the device to gather on is deprecated; use "cpu"', FutureWarning, stacklevel=3
        )
        target = "cpu"
    (device,) = as_devices([target])
    return device


def _gather(
    outputs: Sequence[Any],
    target: Device,
    devices: Sequence[Device],
    dim: int,
    path: tuple[Any, ...],
) -> Any:
    """Gather corresponding parts of the outputs; `path` has the keys that lead to them."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        if first.is_nested:
            raise TypeError(
                f"cannot gather {_named(path)}, because it is a nested tensor, whose offsets cannot"
                " be joined; return a dense tensor from forward, such as a padded tensor"
            )
        shape = first.shape
        for output, device in zip(outputs, devices, strict=True):  # the full checks below are slow
            if (
                type(output) is not type(first)
                or output.shape != shape
                or output.device != device.torch_device
            ):
                _check_kinds(outputs, path)
                _check_tensors(outputs, devices, dim, path)
        return Gather.apply(target, devices, dim, *outputs)  # type: ignore[no-untyped-call]
    keys = keys_of(first)
    for output in outputs[1:]:
        if type(output) is not type(first) or keys_of(output) != keys:
            _check_kinds(outputs, path)
    if first is None:
        return None
    if keys is None:
        return _gather_parts(outputs, target, devices, dim, path)
    rows = [parts_of(output, keys) for output in outputs]
    columns = zip(keys, zip(*rows, strict=True), strict=True)
    return rebuilt(
        first, [_gather(column, target, devices, dim, (*path, key)) for key, column in columns]
    )


def _gather_parts(
    outputs: Sequence[Any],
    target: Device,
    devices: Sequence[Device],
    dim: int,
    path: tuple[Any, ...],
) -> Any:
    """Iterate the replicas' objects, gather their parts, and make a new object from the results.

    Raises TypeError if the objects cannot be iterated in a fixed order, and ValueError if their
    lengths differ.
    """
    kind = type(outputs[0])
    if not isinstance(outputs[0], Iterable) or isinstance(outputs[0], str | bytes | Set | Iterator):
        raise TypeError(
            f"cannot gather {_named(path)} of type {kind.__name__}: forward must return tensors, or"
            " tuples, lists, dicts or dataclass instances of them; return numbers as tensors"
        )
    rows = [list(output) for output in outputs]
    for replica, parts in enumerate(rows):
        if len(parts) != len(rows[0]):
            raise ValueError(
                f"replicas returned different structures: {_named(path)} of type {kind.__name__}"
                f" has length {len(rows[0])} on replica 0, but {len(parts)} on replica {replica}"
            )
    columns = enumerate(zip(*rows, strict=True))
    return kind(
        [_gather(column, target, devices, dim, (*path, number)) for number, column in columns]
    )


def _check_kinds(outputs: Sequence[Any], path: tuple[Any, ...]) -> None:
    kinds = [
        torch.Tensor if isinstance(output, torch.Tensor) else type(output) for output in outputs
    ]
    keys = [list(keys_of(output) or ()) for output in outputs]
    for replica, kind in enumerate(kinds):
        if kind is not kinds[0]:
            raise ValueError(
                f"replicas returned different structures: {_named(path)} has type"
                f" {kinds[0].__name__} on replica 0, but {kind.__name__} on replica {replica}"
            )
        if set(keys[replica]) != set(keys[0]):
            raise ValueError(
                f"All {kind.__name__}s must have the same number of keys, and the same keys:"
                f" {_named(path)} has {keys[0]} on replica 0, but {keys[replica]} on replica"
                f" {replica}"
            )


def _check_tensors(
    tensors: Sequence[torch.Tensor], devices: Sequence[Device], dim: int, path: tuple[Any, ...]
) -> None:
    for replica, (tensor, device) in enumerate(zip(tensors, devices, strict=True)):
        if tensor.device.type == "cpu" != device.torch_device.type:
            raise TypeError(
                f"Gather function not implemented for CPU tensors: {_named(path)} of replica"
                f" {replica} is on the CPU, but the replica's inputs are on {device.name}; return"
                " the output on that device"
            )
        expected, shape = list(tensors[0].shape), list(tensor.shape)
        if len(shape) == len(expected) and -len(shape) <= dim < len(shape):
            expected[dim] = shape[dim]
        if shape != expected:
            raise RuntimeError(
                f"Input tensor at index {replica} has invalid shape {shape}, but expected"
                f" {expected}: the shape of {_named(path)} may differ between replicas only along"
                f" dim {dim}; pad the outputs to the same length (with pad_packed_sequence, set"
                " total_length=)"
            )


def _named(path: tuple[Any, ...]) -> str:
    return "the output" + "".join(f"[{key!r}]" for key in path)
