"""Targets: put a batch's target where the loss is computed, or cut it as the inputs are cut."""

from __future__ import annotations

from typing import Any

import torch

from dpbench.engine.containers import device_of, mapped, tensors_in
from dpbench.hardware.device import Device
from dpbench.records import Mark, Phase


def same_rows(inputs: Any, target: Any) -> bool:
    """Return whether every tensor of the target has as many rows as the inputs."""
    tensors = [target] if isinstance(target, torch.Tensor) else tensors_in(target)
    rows = max((tensor.size(0) for tensor in tensors_in(inputs) if tensor.dim()), default=0)
    return all(
        tensor.dim() and tensor.layout is torch.strided and tensor.size(0) == rows
        for tensor in tensors
    )


def checked_target(target: Any, root: Device) -> Any:
    """Return the target; raise RuntimeError if it is on an accelerator other than `root`."""
    where = device_of(target)
    if where is not None and where.type != "cpu" and where != root.torch_device:
        raise _wrong_target(where, root.torch_device)
    return target


def place_target(target: Any, output: Any, root: Device, mark: Mark) -> Any:
    """Return the target on the device of the output; without tensors there, leave it unchanged.

    A copy from the host belongs to the phase scatter. Raises RuntimeError for a target on another
    accelerator.
    """
    device = device_of(output)
    if isinstance(target, torch.Tensor) and target.device == device:
        return target

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        if device is None or tensor.device == device:
            return tensor
        if tensor.device.type != "cpu":
            raise _wrong_target(tensor.device, device)
        with mark(Phase.SCATTER, root.index):
            return tensor.to(device, non_blocking=True)

    return mapped(target, placed)


def _wrong_target(where: torch.device, device: torch.device) -> RuntimeError:
    return RuntimeError(
        f"the target is on {where} but the output, and therefore the loss, is on {device}"
        f" (device_ids[0]); move it first: target.to('{device}')"
    )
