"""Multi-tensor operations, which have only private names in torch; no other module uses these names."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_all(into: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
    """Copy each tensor of `source` into its counterpart, in one launch if all are on one device."""
    if into:
        torch._foreach_copy_(list(into), list(source), non_blocking=True)


def sum_all(into: Sequence[torch.Tensor], sources: Sequence[Sequence[torch.Tensor]]) -> None:
    """Write ((s0 + s1) + s2) + ... into each tensor, from its counterparts in all `sources`, on one device."""
    if into:
        torch._foreach_copy_(list(into), list(sources[0]))
        for source in sources[1:]:
            torch._foreach_add_(list(into), list(source))
