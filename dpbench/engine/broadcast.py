"""Broadcast: copies of tensors on every device, joined to the originals by a single autograd node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.function import Function

from dpbench.engine.reduce import reduce
from dpbench.hardware.device import Device
from dpbench.records import Mark, Phase

Copier = Callable[[Sequence[torch.Tensor], Sequence[Device], Mark], list[list[torch.Tensor]]]
"""How tensors get to all devices: one list a device, the first device's being the tensors themselves."""

BUCKET_BYTES = 25 * 2**20
"""How much is reduced at a time where the reduction overlaps with backward: what DistributedDataParallel takes."""
FIRST = 2**63 - 1
"""The sequence number of a node that autograd runs as soon as it can; older nodes wait for all younger ones."""


def broadcast(
    tensors: Sequence[torch.Tensor],
    devices: Sequence[Device],
    *,
    copier: Copier,
    overlap: bool,
    comm_dtype: torch.dtype | None,
    mark: Mark,
    on_reduce: Callable[[], None],
) -> list[list[torch.Tensor]]:
    """Return each device's copies, from one node, or with `overlap` from one a bucket, reduced when it is full."""
    each: list[list[torch.Tensor]] = [[] for _ in devices]
    for bucket in buckets_of(tensors) if overlap else [range(len(tensors))]:
        part = [tensors[i] for i in bucket]
        flat = Broadcast.apply(devices, mark, on_reduce, copier, comm_dtype, *part) if part else ()  # type: ignore[no-untyped-call]
        if overlap:
            node = next((tensor.grad_fn for tensor in flat if tensor.grad_fn is not None), None)
            if node is not None:
                node._set_sequence_nr(FIRST)
        for i, copies in enumerate(each):
            copies.extend(flat[i * len(part) : (i + 1) * len(part)])
    return each


def buckets_of(tensors: Sequence[torch.Tensor], limit: int = BUCKET_BYTES) -> list[range]:
    """Cut the tensors, in order, into runs of about `limit` bytes."""
    runs, start, size = [], 0, 0
    for i, tensor in enumerate(tensors):
        size += tensor.nbytes
        if size >= limit:
            runs.append(range(start, i + 1))
            start, size = i + 1, 0
    return runs + ([range(start, len(tensors))] if start < len(tensors) else [])


class Broadcast(Function):
    """Copy tensors to every device; backward reduces all their gradients at once.

    Being one node for all parameters, its backward starts when the last replica's backward has ended: that is
    the border between the phases backward and reduce, and `on_reduce` is called there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        devices: Sequence[Device],
        mark: Mark,
        on_reduce: Callable[[], None],
        copier: Copier,
        comm_dtype: torch.dtype | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return device 0's tensors (the originals), then device 1's copies, and so on."""
        ctx.devices, ctx.mark, ctx.on_reduce, ctx.count = devices, mark, on_reduce, len(tensors)
        ctx.comm_dtype = comm_dtype
        copies = copier(tensors, devices, mark)
        frozen = [t for one in copies for t, wants in zip(one, ctx.needs_input_grad[5:], strict=True) if not wants]
        ctx.mark_non_differentiable(*frozen)
        return tuple(tensor for one in copies for tensor in one)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Return the sums over the replicas; a parameter that no replica used gets zeros, as in torch."""
        ctx.on_reduce()
        each = [gradients[i : i + ctx.count] for i in range(0, len(gradients), ctx.count)]
        wanted = [i for i, wants in enumerate(ctx.needs_input_grad[5:]) if wants]
        sums = reduce([[one[i] for i in wanted] for one in each], ctx.devices, comm_dtype=ctx.comm_dtype, mark=ctx.mark)
        whole: list[Any] = [None] * ctx.count
        for i, total in zip(wanted, sums, strict=True):
            whole[i] = total
        return None, None, None, None, None, *whole


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
