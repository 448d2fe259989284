"""Local loss: each device computes the loss over its own rows, and runs its own backward."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dpbench.engine.errors import call_on
from dpbench.engine.fast.losses import Summed
from dpbench.engine.turn import Turn
from dpbench.hardware.device import Device
from dpbench.records import Mark, Phase, marked

_LOW = (torch.float16, torch.bfloat16)


def check(loss: Callable[..., torch.Tensor], parts: torch.Tensor, output: Any, target: Any) -> bool:
    """Compare `parts`, the loss computed from the replicas' sums, with `loss(output, target)`.

    Return whether they could be compared: the loss of the whole batch must be finite. Raises
    ValueError if they differ by more than rounding.
    """
    with torch.no_grad():
        whole = float(loss(output, target))
    summed = float(parts)
    if not math.isfinite(whole):
        return False
    half = isinstance(output, torch.Tensor) and output.dtype in _LOW
    if not abs(summed - whole) <= (3e-2 if half else 1e-3) * max(abs(whole), 1e-3):
        raise ValueError(
            f"the loss from the replicas' sums is {summed:.6g}, but the loss of the"
            f" whole batch is {whole:.6g}, so sum_fn or weight_fn is not a sum over rows; pass"
            " another pair (sum_fn, weight_fn), or use the schedule cached"
        )
    return True


class LocalLoss:
    """The loss of one step; each replica computes its part, the loss over its own rows.

    Without `weight`, call `forward` for each replica, `meet` once, then `backward` for each
    replica. With `weight`, the number by which the loss summed over all rows is divided, call
    `alone` for each replica, then `add` once. In both cases the attribute `loss` is then the loss
    of the batch.

    `pieces` are pairs of forward's positional and keyword arguments, and the target. `scale` is
    applied to the loss from which backward starts.
    `turn` says when each forward, with its loss, may begin.
    If the rows of a replica's output and target do not correspond one to one, `meet` sets `split`
    to False. The loss must then be computed over the gathered `outputs`.
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
        turn: Turn,
        weight: int | None = None,
    ) -> None:
        self._summed = summed
        self._pieces = pieces
        self._replicas = replicas
        self._devices = devices
        self._mark = mark
        self._scale = scale
        self._turn = turn
        self.outputs: list[Any] = [None] * len(pieces)
        self._totals: list[Any] = [None] * len(pieces)
        self._weights: list[Any] = [None] * len(pieces)
        self._weight: Any = weight
        self._divisors: dict[int, Any] = dict.fromkeys(range(len(pieces)), weight)
        self.split = weight is not None
        self.loss = torch.empty(0)

    def forward(self, i: int) -> None:
        """Run replica i, and compute the sum of the loss over the replica's rows."""
        (arguments, keywords), target = self._pieces[i]
        device = self._devices[i]
        mark = self._mark
        with self._turn.of(i):
            with mark(Phase.FORWARD, device.index):
                self.outputs[i] = call_on(device, self._replicas[i], arguments, keywords)
            # torch's own losses, whose divisor may be known, raise an error for rows that differ
            if not self.split and not self._summed.splits(self.outputs[i], target):
                return
            with mark(Phase.LOSS, device.index):
                self._totals[i] = self._summed.total(self.outputs[i], target)
                if not self.split:
                    self._weights[i] = self._summed.weight(self.outputs[i], target)

    def meet(self) -> None:
        """Add the replicas' parts of the loss on the first device; the result is `loss`.

        If a part is missing, because its rows do not correspond, only set `split` to False.
        """
        self.split = all(total is not None for total in self._totals)
        if not self.split:
            return
        root = self._devices[0]
        tensors = [one for one in self._weights if isinstance(one, torch.Tensor)]
        if any(one.requires_grad for one in tensors):
            raise ValueError(
                "the result of weight_fn requires gradients, which replicas cannot compute"
                " separately; detach this result in weight_fn, or use the schedule cached"
            )
        for device in self._devices[1:]:  # replicas that share a GPU have separate streams
            root.wait(device)
        root.borrow([*self._totals, *tensors])
        with self._mark(Phase.LOSS, root.index), torch.no_grad():
            if self._weights[0] is not None:
                self._weight = _sum(self._weights, root)
            self.loss = self._added()
        self._hand_out()

    def _hand_out(self) -> None:
        """Give every device the divisor of the loss.

        A copy that the threads of the other devices made would wait for the part of the first
        device's backward that is queued by then.
        """
        root = self._devices[0]
        self._divisors = dict.fromkeys(self._divisors, self._weight)
        if not isinstance(self._weight, torch.Tensor):
            return
        for i, device in enumerate(self._devices[1:], start=1):
            device.wait(root)
            device.borrow([self._weight])
            if self._weight.device != device.torch_device:
                marks = marked(self._mark, Phase.LOSS, device.at_work([root]))
                with marks, device.guard():
                    self._divisors[i] = _here(self._weight, device)

    def backward(self, i: int) -> None:
        """Run replica i's backward; call this in the thread that ran the replica's forward."""
        if not self.split:
            return
        device = self._devices[i]
        total = self._totals[i]
        self._totals[i] = total.detach()  # so that the graph is freed here, on all devices at once
        with self._mark(Phase.LOSS, device.index):
            scaled = self._scale(_divided(total, self._divisors.pop(i)))
        with self._mark(Phase.BACKWARD, device.index):
            scaled.backward()

    def alone(self, i: int) -> None:
        """Run replica i's forward and backward; `weight` must be known."""
        self.forward(i)
        self.outputs[i] = None  # free its memory for backward
        self.backward(i)

    def add(self) -> None:
        """Add the replicas' parts of the loss on the first device, after backward, in no phase."""
        with torch.no_grad():
            self.loss = self._added()

    def _added(self) -> torch.Tensor:
        """Return the loss of the batch: in fp32, because a sum of many rows rounds in bf16."""
        dtype = self._totals[0].dtype
        totals = [total.float() if dtype in _LOW else total for total in self._totals]
        loss: torch.Tensor = _divided(_sum(totals, self._devices[0]), self._weight)
        return loss.to(dtype) if dtype in _LOW else loss


def _here(value: Any, device: Device) -> Any:
    if not isinstance(value, torch.Tensor) or value.device == device.torch_device:
        return value
    return value.to(device.torch_device, non_blocking=True)


def _sum(values: Sequence[Any], device: Device) -> Any:
    """Return the sum of numbers or tensors on a device, added in order.

    Python's `sum` is not used, because it would also add 0.
    """
    return functools.reduce(operator.add, [_here(value, device) for value in values])


def _divided(total: Any, weight: Any) -> Any:
    return total if weight is None else total / weight
