"""Reduce: sum the replicas' gradients on one device, in replica order, so that the result is bitwise reproducible."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dpbench.hardware.device import Device
from dpbench.hardware.devices import Devices, as_devices
from dpbench.records import Mark, Phase, no_mark


def reduce(
    gradients: Sequence[Sequence[torch.Tensor]],
    devices: Devices,
    *,
    comm_dtype: torch.dtype | None = None,
    mark: Mark = no_mark,
) -> list[torch.Tensor]:
    """Return the sums of `gradients[replica][parameter]` over the replicas, on `devices[0]`.

    The order is ((g0 + g1) + g2) + ...; distinct GPUs use torch's coalesced reduction, which chooses the order itself.
    With `comm_dtype` every gradient is rounded to that dtype for the transfer.
    """
    devices = as_devices(devices)
    root = devices[0]
    with mark(Phase.REDUCE, root.index):
        # a collective builds no graph, so second derivatives need the plain additions
        if root.can_collect(devices) and not torch.is_grad_enabled() and comm_dtype is None:
            return root.reduce_add(gradients, devices)
        for device, one in zip(devices, gradients, strict=True):
            root.wait(device)
            root.borrow(one)
        with root.guard():
            return [_sum(parts, root, comm_dtype) for parts in zip(*gradients, strict=True)]


def _sum(parts: Sequence[torch.Tensor], root: Device, comm_dtype: torch.dtype | None) -> torch.Tensor:
    """Return the sum of `parts` in order; a single gradient is returned unchanged, and sparse parts stay sparse."""
    total = arrive(parts[0], root, comm_dtype) if len(parts) > 1 else parts[0]
    for number, part in enumerate(parts[1:]):
        here = arrive(part, root, comm_dtype)
        if total.is_sparse and not here.is_sparse:  # torch cannot add a dense tensor to a sparse one
            total = here + total
        else:
            total = total + here if number == 0 else total.add_(here)
    return total


def arrive(part: torch.Tensor, root: Device, comm_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a gradient on `root`, rounded to `comm_dtype` for the transfer if one is given."""
    home = root.torch_device
    if comm_dtype is None or not part.is_floating_point():
        return part if part.device == home else part.to(home, non_blocking=True)  # cheaper than `to`
    return part.to(comm_dtype).to(home, non_blocking=True).to(part.dtype)
