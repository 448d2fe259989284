"""Reduce: add the replicas' gradients on the first device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dpbench.hardware.device import Device
from dpbench.hardware.devices import Devices, as_devices
from dpbench.records import Mark, Phase, marked, no_mark

Gradients = Sequence[Sequence[torch.Tensor]]
"""Gradients by replica and parameter: `gradients[i][n]` is that of parameter n on device i."""


def reduce(gradients: Gradients, devices: Devices, *, mark: Mark = no_mark) -> list[torch.Tensor]:
    """Return the sums of `gradients[replica][parameter]` over the replicas, on `devices[0]`.

    There are two paths. On distinct GPUs, in the usual backward, NCCL adds the gradients and
    chooses the order. Everywhere else, and in a backward with `create_graph=True`, because autograd
    records no collective, the order is ((g0 + g1) + g2) + ..., and the sums are bitwise
    reproducible. A sum is sparse if all its gradients are.
    """
    devices = as_devices(devices)
    root = devices[0]
    with marked(mark, Phase.REDUCE, root.at_work(devices)):
        if root.can_collect(devices) and not torch.is_grad_enabled():
            return root.reduce_add(gradients, devices)
        for device, one in zip(devices, gradients, strict=True):
            root.wait(device)
            root.borrow(one)
        with root.guard():
            return [_sum(parts, root) for parts in zip(*gradients, strict=True)]


def _sum(parts: Sequence[torch.Tensor], root: Device) -> torch.Tensor:
    """Return the sum of one parameter's gradients on `root`, added in order."""
    home = root.torch_device
    total = parts[0]
    for replica, part in enumerate(parts[1:], start=1):
        here = part if part.device == home else part.to(home, non_blocking=True)
        if total.is_sparse and not here.is_sparse:
            total = here + total  # torch cannot add a dense tensor to a sparse one
        elif replica == 1:
            total = total + here  # a new tensor: replica 0 keeps its gradient
        else:
            total.add_(here)
    return total
