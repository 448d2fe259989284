"""Ranks: the training step of one rank, for strategies with one process per device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dpbench.hardware.device import Device
from dpbench.records import Case, Mark, Phase
from dpbench.strategies import optimizer_of, precision_of
from dpbench.strategies.single import put_all

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dpbench.models import Model


class RankStep:
    """The training step of one rank, which trains the module that `wrap` returns on this rank's rows of the batch."""

    def __init__(
        self, case: Case, model: Model, device: Device, mark: Mark, wrap: Callable[[nn.Module, Device], nn.Module]
    ) -> None:
        import torch
        import torch.distributed as dist

        self._case, self._model, self._device, self._mark = case, model, device, mark
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        if device.torch_device.type != "cpu":
            torch.accelerator.set_device_index(device.torch_device)  # otherwise all ranks open contexts on GPU 0
        self.wrapped: Any = wrap(model.module.to(device.torch_device), device)
        self._optimizer = optimizer_of(case)(self.wrapped.parameters())
        self.returned_s = 0.0
        """The time at which the last backward returned, in seconds on the clock of `time.perf_counter`."""

    def __call__(self, inputs: Any, target: Any) -> torch.Tensor:
        """Train on this rank's chunk of the batch and return the loss.

        The loss is scaled so that the mean of the ranks' gradients is the gradient of the global batch.
        """
        from dpbench.models import positional

        device, mark, i = self._device, self._mark, self._device.index
        with mark(Phase.OPTIMIZER, i):
            self._optimizer.zero_grad(set_to_none=True)
        with mark(Phase.SCATTER, i):
            mine, total = self._chunk(target)
            *arguments, placed = put_all([*(self._chunk(a)[0] for a in positional(inputs)), mine], device)
        with precision_of(self._case):
            with mark(Phase.FORWARD, i):
                output = self.wrapped(*arguments)
            with mark(Phase.LOSS, i):
                loss = self._model.loss(output, placed) * (len(mine) * self._world / total)
        with mark(Phase.BACKWARD, i):
            loss.backward()
        self.returned_s = time.perf_counter()
        with mark(Phase.OPTIMIZER, i):
            self._optimizer.step()
        return loss.detach()

    def _chunk(self, value: Any) -> tuple[Any, int]:
        """Return this rank's rows of a tensor and the number of rows of the whole tensor.

        Return (value, 1) if `value` is not a tensor.
        """
        import torch

        if not isinstance(value, torch.Tensor):
            return value, 1
        return value.chunk(self._case.devices)[self._rank], len(value)
