"""Reduce: add the replicas' gradients on the first device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dpbench.hardware.devices import Devices, as_devices
from dpbench.hardware.devices._many import add_all
from dpbench.records import Mark, Phase, no_mark

Gradients = Sequence[Sequence[torch.Tensor]]
"""Gradients by replica and parameter: `gradients[i][n]` is that of parameter n on device i."""


def reduce(gradients: Gradients, devices: Devices, *, mark: Mark = no_mark) -> list[torch.Tensor]:
    """Return the sums of `gradients[replica][parameter]` over the replicas, on `devices[0]`.

    The order of additions is ((g0 + g1) + g2) + ..., so that the sums are bitwise reproducible. On
    distinct GPUs, torch's coalesced reduction by NCCL chooses the order, unless grad mode is
    enabled (as in a backward with `create_graph=True`), because autograd records no collective. A
    sum is sparse if all its gradients are.
    """
    devices = as_devices(devices)
    root = devices[0]
    home = root.torch_device
    with mark(Phase.REDUCE, root.index):
        if root.can_collect(devices) and not torch.is_grad_enabled():
            return root.reduce_add(gradients, devices)
        for device, one in zip(devices, gradients, strict=True):
            root.wait(device)
            root.borrow(one)
        with root.guard():
            sums = list(gradients[0])
            for number, others in enumerate(gradients[1:]):
                here = [g if g.device == home else g.to(home, non_blocking=True) for g in others]
                sums = _added(sums, here, in_place=number > 0)
            return sums


def _added(
    sums: Sequence[torch.Tensor], others: Sequence[torch.Tensor], *, in_place: bool
) -> list[torch.Tensor]:
    if not any(total.is_sparse for total in sums):
        return add_all(sums, others, in_place=in_place)
    # torch cannot add a dense tensor to a sparse one
    return [
        other + total if total.is_sparse and not other.is_sparse else total + other
        for total, other in zip(sums, others, strict=True)
    ]
