"""NCCL and torch's coalesced broadcast on simulated GPUs.

They compute on the host, and queue collectives by the rules of `Detector.collective`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.cuda import nccl
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:  # machine imports this module
    from tests.races.machine import Detector


def collectives(detector: Detector) -> dict[str, Any]:
    """Return the functions of torch.cuda.nccl by name.

    They compute on the host and queue collectives.
    """

    def summed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        with _disable_current_modes():
            return torch.stack([*tensors]).sum(0)

    def write(target: torch.Tensor, value: torch.Tensor) -> None:
        with _disable_current_modes():
            target.copy_(value)

    def reduce(
        inputs: Any, output: Any = None, root: int = 0, op: int = 0, streams: Any = None, **_: Any
    ) -> None:
        target = inputs[root] if output is None else output
        write(target, summed(inputs))
        detector.collective(
            inputs, streams, [[target] if i == root else [] for i in range(len(inputs))], root=None
        )

    def all_reduce(inputs: Any, outputs: Any = None, op: int = 0, streams: Any = None) -> None:
        total = summed(inputs)
        for target in outputs or inputs:
            write(target, total)
        detector.collective(inputs, streams, [[target] for target in outputs or inputs], root=None)

    def reduce_scatter(inputs: Any, outputs: Any, op: int = 0, streams: Any = None) -> None:
        for target, part in zip(outputs, summed(inputs).chunk(len(inputs)), strict=True):
            write(target, part)
        detector.collective(inputs, streams, [[target] for target in outputs], root=None)

    def all_gather(inputs: Any, outputs: Any, streams: Any = None) -> None:
        with _disable_current_modes():
            whole = torch.cat([*inputs])
        for target in outputs:
            write(target, whole)
        others = [
            [part for j, part in enumerate(target.chunk(len(inputs))) if j != i]
            for i, target in enumerate(outputs)
        ]
        detector.collective(inputs, streams, others, root=None)

    def broadcast(inputs: Any, root: int = 0, streams: Any = None, **_: Any) -> None:
        for target in inputs:
            write(target, inputs[root])
        detector.collective(
            inputs, streams, [[] if i == root else [t] for i, t in enumerate(inputs)], root=root
        )

    return {
        "is_available": lambda tensors: detector.has_nccl,
        "reduce": reduce,
        "all_reduce": all_reduce,
        "reduce_scatter": reduce_scatter,
        "all_gather": all_gather,
        "broadcast": broadcast,
    }


def coalesced_broadcast(detector: Detector) -> Any:
    """Return torch's coalesced broadcast.

    It makes a flat buffer of the root, a broadcast of it, and views of each copy.
    """

    def broadcast(
        tensors: Sequence[torch.Tensor], ordinals: Sequence[int], size: int
    ) -> list[list[torch.Tensor]]:
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        copies = [flat]
        for ordinal in ordinals[1:]:
            if detector.has_nccl:
                copies.append(torch.empty(flat.shape, dtype=flat.dtype, device=f"cuda:{ordinal}"))
            else:
                copies.append(flat.to(f"cuda:{ordinal}", non_blocking=True))
        if detector.has_nccl:
            nccl.broadcast(copies)
        sizes = [tensor.numel() for tensor in tensors]
        return [
            (
                [*tensors]
                if i == 0
                else [p.view(t.shape).data for p, t in zip(copy.split(sizes), tensors, strict=True)]
            )
            for i, copy in enumerate(copies)
        ]

    return broadcast
