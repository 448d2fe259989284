"""Reduce: add the replicas' gradients onto one device, in replica order, so that the bits repeat."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dpbench.devices import Device
from dpbench.engine.devices import Devices, as_devices
from dpbench.records import Mark, Phase, no_mark


def reduce(
    gradients: Sequence[Sequence[torch.Tensor]], devices: Devices, *, mark: Mark = no_mark
) -> list[torch.Tensor]:
    """Sum `gradients[replica][parameter]` over the replicas onto `devices[0]`.

    The order is ((g0 + g1) + g2) + ...; distinct GPUs use torch's coalesced reduction, whose order is its own.
    """
    devices = as_devices(devices)
    root = devices[0]
    with mark(Phase.REDUCE, root.index):
        # a collective has no graph: second derivatives take the plain adds
        if root.can_collect(devices) and not torch.is_grad_enabled():
            return root.reduce_add(gradients, devices)
        for device, one in zip(devices, gradients, strict=True):
            root.wait(device)
            root.borrow(one)
        with root.guard():
            return [_sum(parts, root) for parts in zip(*gradients, strict=True)]


def _sum(parts: Sequence[torch.Tensor], root: Device) -> torch.Tensor:
    """Add in order; a single gradient passes through."""
    total = parts[0]
    for number, part in enumerate(parts[1:]):
        here = part.to(root.torch_device, non_blocking=True)
        total = total + here if number == 0 else total.add_(here)
    return total
