"""Many tensors at once: the multi-tensor copy, which has no public name in torch, is used here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_all(into: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
    """Copy each tensor of `source` into its counterpart, in one launch where all share a device."""
    if into:
        torch._foreach_copy_(list(into), list(source), non_blocking=True)
