"""Broadcast: copies of tensors on every device, joined to the originals by a single autograd node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.function import Function

from dpbench.devices import Device
from dpbench.engine.reduce import reduce
from dpbench.records import Mark, Phase


class Broadcast(Function):
    """Copy tensors to every device; backward reduces all their gradients at once.

    Being one node for all parameters, its backward starts when the last replica's backward has ended: that is
    the border between the phases backward and reduce, and `on_reduce` is called there.
    """

    @staticmethod
    def forward(
        ctx: Any, devices: Sequence[Device], mark: Mark, on_reduce: Callable[[], None], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return device 0's tensors (the originals), then device 1's copies, and so on."""
        ctx.devices, ctx.mark, ctx.on_reduce, ctx.count = devices, mark, on_reduce, len(tensors)
        copies = copies_of(tensors, devices, mark)
        frozen = [t for one in copies for t, wants in zip(one, ctx.needs_input_grad[3:], strict=True) if not wants]
        ctx.mark_non_differentiable(*frozen)
        return tuple(tensor for one in copies for tensor in one)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Return the sums over the replicas; a parameter that no replica used gets zeros, as in torch."""
        ctx.on_reduce()
        each = [gradients[i : i + ctx.count] for i in range(0, len(gradients), ctx.count)]
        wanted = [i for i, wants in enumerate(ctx.needs_input_grad[3:]) if wants]
        sums = reduce([[one[i] for i in wanted] for one in each], ctx.devices, mark=ctx.mark)
        whole: list[Any] = [None] * ctx.count
        for i, total in zip(wanted, sums, strict=True):
            whole[i] = total
        return None, None, None, *whole


def copies_of(tensors: Sequence[torch.Tensor], devices: Sequence[Device], mark: Mark) -> list[list[torch.Tensor]]:
    """Return the tensors themselves for the first device and copies for the others."""
    root, *others = devices
    if tensors and root.can_collect(devices):
        with ExitStack() as stack:
            for device in devices:
                stack.enter_context(mark(Phase.REPLICATE, device.index))
            return root.broadcast(tensors, devices)
    copies = [list(tensors)]
    for device in others:
        with mark(Phase.REPLICATE, device.index):
            copies.append(device.clone(tensors))
    return copies
