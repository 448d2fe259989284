"""Training: what a training step needs besides the batch, and its optimizer phase."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dpbench.engine.containers import first_tensor
from dpbench.engine.errors import Refused
from dpbench.engine.row_weights import apportion
from dpbench.hardware.device import Device
from dpbench.records import Mark


@dataclass(frozen=True, kw_only=True)
class Training:
    """A module, its loss, optimizer and devices, and the settings of `TrainStep`.

    `loss_fn(output, target)` returns a scalar. It may also be a pair `(sum_fn, weight_fn)`, whose
    quotient is the loss. `row_weights` divide the rows of a batch; None means equal chunks.
    """

    module: nn.Module
    loss_fn: Any
    optimizer: torch.optim.Optimizer
    devices: Sequence[Device]
    accumulate: int
    clip_norm: float | None
    scaler: torch.amp.GradScaler | None
    row_weights: Sequence[float] | None
    mark: Mark

    def chunk_sizes(self, inputs: Any) -> list[int] | None:
        """Return the number of rows of each device; None means equal chunks."""
        if self.row_weights is None:
            return None
        tensor = first_tensor(inputs)
        if tensor is None or not tensor.dim():
            return None
        return apportion(tensor.size(0), self.row_weights) or None

    @property
    def powers(self) -> bool:
        """Return whether the loss is scaled only by powers of two, or not at all."""
        return self.scaler is None and self.accumulate & (self.accumulate - 1) == 0

    def loss(self, output: Any, target: Any) -> torch.Tensor:
        """Return the loss of the whole batch."""
        if isinstance(self.loss_fn, tuple):
            sum_fn, weight_fn = self.loss_fn
            return sum_fn(output, target) / weight_fn(output, target)  # type: ignore[no-any-return]
        return self.loss_fn(output, target)  # type: ignore[no-any-return]

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss from which backward starts: one call's share, scaled by the scaler."""
        if self.accumulate > 1:
            loss = loss / self.accumulate
        return loss if self.scaler is None else self.scaler.scale(loss)

    def update(self) -> None:
        """Clip the gradients if `clip_norm` is given, and run the optimizer.

        A scaler first unscales the gradients; it skips the step if a gradient is infinite or NaN.
        """
        if self.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def check_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise Refused if the optimizer's `step` has an argument that must be given, as LBFGS has."""
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())
    if any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters[1:]):
        kind = type(optimizer).__name__
        raise Refused(
            f"{kind} evaluates the loss several times per step, through a closure, which TrainStep"
            " does not support; use another optimizer"
        )
