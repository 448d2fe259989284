"""Ranks: the training step of one rank, for strategies with one process per device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dpbench.hardware.device import Device
from dpbench.records import Case, Mark, Phase
from dpbench.records.arguments import call
from dpbench.strategies import Forward, Step, Updates, precision_of, put_all, rows_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dpbench.models import Model


class RankStep(Step):
    """The training step of one rank, on this rank's rows of the batch.

    `wrap` moves the model's module to the device, and returns the module to train.
    """

    def __init__(
        self,
        case: Case,
        model: Model,
        device: Device,
        mark: Mark,
        wrap: Callable[[nn.Module, Device], nn.Module],
    ) -> None:
        import torch.distributed as dist

        self.case, self.model, self.device, self.mark = case, model, device, mark
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        _make_current(device)
        self.wrapped: Any = wrap(model.module, device)
        self.updates = Updates(case, model, self.wrapped.parameters())
        self.returned_s = 0.0
        """The time at which the last backward returned, on the clock of `time.perf_counter`."""

    def __call__(self, inputs: Any, target: Any) -> torch.Tensor:
        """Train on this rank's chunk, given the whole batch or the chunk, and return the loss."""
        with self.mark(Phase.OPTIMIZER, self.device.index):
            self.updates.clear()
        with self.mark(Phase.SCATTER, self.device.index):
            rows = [rows_of(value, self.case, self.rank) for value in (inputs, target)]
            inputs, target = put_all(rows, self.device)
        loss = self.backward(inputs, target)
        self.returned_s = time.perf_counter()
        with self.mark(Phase.OPTIMIZER, self.device.index):
            self.updates.step()
        return loss

    def backward(self, inputs: Any, target: Any) -> torch.Tensor:
        """Compute the gradients of this rank's rows, and return the loss.

        A subclass may use several passes.
        """
        return self.forward_backward(inputs, target, self.share(self.case.rows[self.rank]))

    def share(self, rows: int, passes: int = 1) -> float:
        """Return the factor of the loss of `rows` rows, in one of the step's `passes` passes.

        It makes the mean of the ranks' gradients the gradient of the global batch. A loss that a
        model returns itself is a mean with an unknown divisor; each pass then has the same weight.
        """
        return 1 / passes if self.model.owns_loss else rows * self.world / self.case.batch_size

    def forward_backward(self, inputs: Any, target: Any, share: float) -> torch.Tensor:
        """Run forward and backward on some rows, and return the loss times `share`."""
        mark, i = self.mark, self.device.index
        with precision_of(self.case):
            with mark(Phase.FORWARD, i):
                output = call(self.wrapped, inputs)
            with mark(Phase.LOSS, i):
                loss = self.model.loss(output, target) * share
        with mark(Phase.BACKWARD, i):
            self.updates.scaled(loss).backward()
        return loss.detach()


def _make_current(device: Device) -> None:
    """Without this call, all ranks open contexts on GPU 0."""
    import torch

    if device.torch_device.type != "cpu":
        torch.accelerator.set_device_index(device.torch_device)


def forward_of_rank(
    case: Case,
    model: Model,
    device: Device,
    mark: Mark,
    wrap: Callable[[nn.Module, Device], nn.Module],
) -> Forward:
    """Return a function that runs the forward of the module from `wrap` on this rank's rows."""
    import torch.distributed as dist

    _make_current(device)
    wrapped = wrap(model.module, device)
    rank = dist.get_rank()

    def forward(*inputs: Any, **named: Any) -> torch.Tensor:
        with mark(Phase.SCATTER, device.index):
            arguments, named = put_all(rows_of([inputs, named], case, rank), device)
        with mark(Phase.FORWARD, device.index):
            output: torch.Tensor = wrapped(*arguments, **named)
        return output

    return forward
