"""Multi-tensor operations, which torch provides only under private names, used only here."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_all(into: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
    """Copy each `source[i]` into `into[i]`, in one kernel launch if all are on one device."""
    if into:
        torch._foreach_copy_(list(into), list(source), non_blocking=True)


def sum_all(into: Sequence[torch.Tensor], sources: Sequence[Sequence[torch.Tensor]]) -> None:
    """Write `sources[0][i] + sources[1][i] + ...`, added from left to right, into each `into[i]`.

    All tensors must be on one device.
    """
    if into:
        torch._foreach_copy_(list(into), list(sources[0]))
        for source in sources[1:]:
            torch._foreach_add_(list(into), list(source))
