"""Ranks: the training step of one rank, for strategies with one process per device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from dpbench.hardware.device import Device
from dpbench.records import Case, Mark, Phase, chunk_sizes
from dpbench.strategies import Forward, Updates, precision_of
from dpbench.strategies.single import put_all

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dpbench.models import Model


class RankStep:
    """The training step of one rank, which trains the module that `wrap` returns on this rank's rows of the batch.

    The rank's rows are split into up to `parts` micro-batches, whose gradients are added. All micro-batches but the
    last run inside the wrapper's `no_sync`.
    """

    def __init__(
        self, case: Case, model: Model, device: Device, mark: Mark, wrap: Callable[[nn.Module, Device], nn.Module],
        *, parts: int = 1,
    ) -> None:  # fmt: skip
        import torch
        import torch.distributed as dist

        self._case, self._model, self._device, self._mark = case, model, device, mark
        self._rank, self._world, self._parts = dist.get_rank(), dist.get_world_size(), parts
        if device.torch_device.type != "cpu":
            torch.accelerator.set_device_index(device.torch_device)  # otherwise all ranks open contexts on GPU 0
        self.wrapped: Any = wrap(model.module.to(device.torch_device), device)
        self._updates = Updates(case, model, self.wrapped.parameters())
        self.returned_s = 0.0
        """The time at which the last backward returned, in seconds on the clock of `time.perf_counter`."""

    def __call__(self, inputs: Any, target: Any) -> torch.Tensor:
        """Train on this rank's chunk, and return the loss; the arguments are the whole batch or already this chunk.

        The loss is scaled so that the mean of the ranks' gradients is the gradient of the global batch. If the model
        returns its own loss, the loss is the mean over this rank's micro-batches instead.
        """
        from dpbench.models import positional

        device, mark, i = self._device, self._mark, self._device.index
        with mark(Phase.OPTIMIZER, i):
            self._updates.clear()
        with mark(Phase.SCATTER, i):
            placed = put_all([rows_of(a, self._case, self._rank) for a in (*positional(inputs), target)], device)
            batches = self._micro_batches(placed)
        losses = []
        for number, (rows, (*arguments, wanted)) in enumerate(batches, start=1):
            # a model's own loss is a mean with an unknown divisor, so each forward pass has the same weight
            share = 1 / len(batches) if self._model.owns_loss else rows * self._world / self._case.batch_size
            with nullcontext() if number == len(batches) else self.wrapped.no_sync():
                losses.append(self._pass(arguments, wanted, share))
        self.returned_s = time.perf_counter()
        with mark(Phase.OPTIMIZER, i):
            self._updates.step()
        return losses[0] if len(losses) == 1 else sum(losses[1:], losses[0])

    def _pass(self, arguments: Sequence[Any], target: Any, scale: float) -> torch.Tensor:
        """Run forward and backward on one micro-batch, and return the loss, which is multiplied by `scale`."""
        mark, i = self._mark, self._device.index
        with precision_of(self._case):
            with mark(Phase.FORWARD, i):
                output = self.wrapped(*arguments)
            with mark(Phase.LOSS, i):
                loss = self._model.loss(output, target) * scale
        with mark(Phase.BACKWARD, i):
            self._updates.scaled(loss).backward()
        return loss.detach()

    def _micro_batches(self, placed: Sequence[Any]) -> list[tuple[int, tuple[Any, ...]]]:
        """Return (number of rows, values) for each micro-batch; the values are the arguments and, last, the target.

        `placed` has the same values with all rows of this rank.
        """
        rows = self._case.rows[self._rank]
        sizes = chunk_sizes(rows, self._parts)
        return list(zip(sizes, zip(*(split(value, sizes) for value in placed), strict=True), strict=True))


def forward_of_rank(
    case: Case, model: Model, device: Device, mark: Mark, wrap: Callable[[nn.Module, Device], nn.Module]
) -> Forward:
    """Return a function that runs the forward of the module from `wrap` on this rank's rows, and returns its output."""
    import torch
    import torch.distributed as dist

    if device.torch_device.type != "cpu":
        torch.accelerator.set_device_index(device.torch_device)
    wrapped, rank = wrap(model.module.to(device.torch_device), device), dist.get_rank()

    def forward(*inputs: Any) -> torch.Tensor:
        with mark(Phase.SCATTER, device.index):
            arguments = put_all([rows_of(value, case, rank) for value in inputs], device)
        with mark(Phase.FORWARD, device.index):
            output: torch.Tensor = wrapped(*arguments)
        return output

    return forward


def rows_of(value: Any, case: Case, rank: int) -> Any:
    """Return the structure `value` with only those rows of each tensor on which the rank `rank` trains.

    A tensor that already has the rank's number of rows is kept, because the rank has loaded only its own rows.
    """
    from dpbench.engine.containers import mapped

    mine = case.rows[rank]
    return mapped(value, lambda tensor: tensor if len(tensor) == mine else tensor.split(case.rows)[rank])


def split(value: Any, sizes: Sequence[int]) -> list[Any]:
    """Split each tensor of a structure along dimension 0 into parts of `sizes` rows; return one structure per part."""
    from dpbench.engine.containers import mapped

    def part(size: int, end: int) -> Any:
        return mapped(value, lambda tensor: tensor.narrow(0, end - size, size))

    return [part(size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
