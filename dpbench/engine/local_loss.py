"""Local loss: one step's loss taken by parts, each replica's over its rows, divided by the weight of all rows."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dpbench.engine.cuda_graphs import Recorded
from dpbench.engine.losses import Summed
from dpbench.hardware.device import Device
from dpbench.records import Mark, Phase


class LocalLoss:
    """The replicas' parts: `forward` for each replica, `meet` once, then `backward` for each, or `joint` for all.

    With the `weight` of all rows known, replicas need not meet: `alone` for each, then `add` once.

    `pieces` are (inputs, target) pairs; `scale` is applied to the loss that backward starts from. With `recorded`
    graphs a replica's work is replayed. Where rows of output and target do not meet one to one, `split` is False after
    `meet`, and the outputs wait for a loss over the gathered batch.
    """

    def __init__(
        self,
        summed: Summed,
        pieces: Sequence[tuple[Any, Any]],
        replicas: Sequence[nn.Module],
        devices: Sequence[Device],
        mark: Mark,
        *,
        scale: Callable[[torch.Tensor], torch.Tensor],
        recorded: Sequence[Recorded] | None,
        weight: int | None = None,
    ) -> None:
        self._summed, self._pieces, self._replicas, self._devices = summed, pieces, replicas, devices
        self._mark, self._scale, self._recorded = mark, scale, recorded
        self.outputs: list[Any] = [None] * len(pieces)
        self._totals: list[Any] = [None] * len(pieces)
        self._weights: list[Any] = [None] * len(pieces)
        self._weight: Any = weight
        self.split = weight is not None
        self.loss = torch.empty(0)

    def forward(self, i: int) -> None:
        """Run replica i, and take the loss of its rows."""
        (inputs, target), device, mark = self._pieces[i], self._devices[i], self._mark
        with mark(Phase.FORWARD, device.index):
            if self._recorded:
                self.outputs[i], total = self._recorded[i].forward(self._pieces[i])
            else:
                self.outputs[i], total = self._replicas[i](*inputs), None
        if not self._summed.splits(self.outputs[i], target):
            return
        with mark(Phase.LOSS, device.index):
            self._totals[i] = self._summed.total(self.outputs[i], target) if total is None else total
            self._weights[i] = self._summed.weight(self.outputs[i], target)

    def meet(self) -> None:
        """Add up the parts on the first device."""
        self.split = all(total is not None for total in self._totals)
        if not self.split:
            return
        root = self._devices[0]
        tensors = [one for one in self._weights if isinstance(one, torch.Tensor)]
        if any(one.requires_grad for one in tensors):
            raise ValueError(
                "loss=local: the weight of a pair (sum_fn, weight_fn) depends on the output, and replicas cannot "
                "follow its gradient; detach it, or use a schedule with loss=gathered"
            )
        for device in self._devices[1:]:  # replicas that share a GPU have streams of their own
            root.wait(device)
        root.borrow([*self._totals, *tensors])
        with self._mark(Phase.LOSS, root.index), torch.no_grad():
            if self._weights[0] is not None:
                self._weight = _sum(self._weights, root)
            self.loss = _divided(_sum(self._totals, root), self._weight)

    def backward(self, i: int) -> None:
        """Run replica i's backward, in the thread that ran its forward."""
        if not self.split:
            return
        device, total = self._devices[i], self._totals[i]
        if self._recorded:
            total = total.detach().requires_grad_()
        if isinstance(self._weight, torch.Tensor):
            device.wait(self._devices[0])
            device.borrow([self._weight])
        with self._mark(Phase.LOSS, device.index):
            scaled = self._scale(_divided(total, _here(self._weight, device)))
        with self._mark(Phase.BACKWARD, device.index):
            scaled.backward()
            if self._recorded:
                self._recorded[i].backward(total.grad, owned=len(self._pieces) == 1)

    def alone(self, i: int) -> None:
        """Run replica i forward and backward, with the weight that is known."""
        (inputs, target), device, mark = self._pieces[i], self._devices[i], self._mark
        with mark(Phase.FORWARD, device.index):
            output = self._replicas[i](*inputs)
        with mark(Phase.LOSS, device.index):
            self._totals[i] = self._summed.total(output, target)
        del output
        self.backward(i)

    def add(self) -> None:
        """Add up the parts on the first device, after the backwards: no phase waits for it."""
        with torch.no_grad():
            self.loss = _divided(_sum(self._totals, self._devices[0]), self._weight)

    def joint(self) -> torch.Tensor:
        """Return what one backward through all replicas starts from."""
        root = self._devices[0]
        with self._mark(Phase.LOSS, root.index):
            return self._scale(_divided(_sum(self._totals, root), self._weight))


def _here(value: Any, device: Device) -> Any:
    """Return a number or tensor on a device."""
    if not isinstance(value, torch.Tensor) or value.device == device.torch_device:
        return value
    return value.to(device.torch_device, non_blocking=True)


def _sum(values: Sequence[Any], device: Device) -> Any:
    """Add up numbers or tensors on a device, in order; `sum` would begin with an operation on 0."""
    return functools.reduce(operator.add, [_here(value, device) for value in values])


def _divided(total: Any, weight: Any) -> Any:
    return total if weight is None else total / weight
