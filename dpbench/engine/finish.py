"""Finish: what stands between a whole gradient and new weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def finish(
    optimizer: torch.optim.Optimizer,
    module: nn.Module,
    clip_norm: float | None,
    scaler: torch.amp.GradScaler | None,
    stepper: Any,
) -> None:
    """Unscale, clip, and step unless the gradients overflow."""
    if clip_norm is not None:
        if scaler is not None:
            scaler.unscale_(stepper)
        nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
    if scaler is None:
        stepper.step()
    else:
        scaler.step(stepper)
        scaler.update()
