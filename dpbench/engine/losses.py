"""Losses: one number over the gathered batch, or sums that each replica takes of its own rows."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dpbench.devices import Device

Function = Callable[..., Any]
IGNORED = -100
"""The class number that torch's losses leave out unless told otherwise."""


class Loss:
    """A loss as a whole, and as a sum over rows with the weight to divide the total by, where it has one.

    `loss_fn(output, target)` returns the mean (or sum) over the batch. It has a sum if it takes `reduction=`, if it is
    a module with the attribute `reduction` and no parameters, as torch's losses are, or if it is a pair
    `(sum_fn, weight_fn)` of functions of output and target, whose quotient is then the loss.
    """

    def __init__(self, loss_fn: Any) -> None:
        self._pair = loss_fn if isinstance(loss_fn, tuple) else None
        self._function = None if self._pair else loss_fn
        self._reduction = "sum" if self._pair else _reduction(loss_fn)
        self._placed: dict[str, Function] = {}
        self._per_row: dict[Any, float] = {}

    @property
    def has_sum(self) -> bool:
        """Tell whether replicas can take their own part of the loss."""
        return self._reduction in ("mean", "sum")

    def whole(self, output: Any, target: Any) -> torch.Tensor:
        """Return the loss of the whole batch."""
        if self._pair:
            return self._pair[0](output, target) / self._pair[1](output, target)  # type: ignore[no-any-return]
        assert self._function is not None
        return self._function(output, target)  # type: ignore[no-any-return]

    def total(self, output: Any, target: Any, device: Device) -> torch.Tensor:
        """Return the sum over the rows that `device` holds."""
        if self._pair:
            return self._pair[0](output, target)  # type: ignore[no-any-return]
        return self._on(device, "sum")(output, target)  # type: ignore[no-any-return]

    def weight(self, output: Any, target: Any, device: Device) -> Any:
        """Return what the rows count: all replicas' weights add up to the divisor of all sums; 1 for none."""
        if self._pair:
            return self._pair[1](output, target)
        if self._reduction == "sum":
            return None
        if not target.is_floating_point() and target.dim() == output.dim() - 1:
            return self._classes(target, device)
        shape = (output.shape[1:], target.shape[1:])
        if shape not in self._per_row:
            with torch.no_grad():
                each = self._on(device, "none")(output.detach(), target)
            self._per_row[shape] = each.numel() / max(output.shape[0], 1)
        return self._per_row[shape] * output.shape[0]

    def _classes(self, target: torch.Tensor, device: Device) -> Any:
        """Count the rows of a target of class numbers, by their classes' weights if the loss has such."""
        counted = target != getattr(self._function, "ignore_index", IGNORED)
        weights = getattr(self._on(device, "sum"), "weight", None)
        if isinstance(weights, torch.Tensor):
            return weights[target[counted]].sum()
        return int(counted.sum()) if target.device.type == "cpu" else counted.sum()

    def _on(self, device: Device, reduction: str) -> Function:
        """Return the loss with another reduction, its tensors on `device`."""
        key = f"{device.name} {reduction}"
        if key not in self._placed:
            if isinstance(self._function, nn.Module):
                module: Any = copy.deepcopy(self._function).to(device.torch_device)
                module.reduction = reduction
                self._placed[key] = module
            else:
                function: Any = self._function
                self._placed[key] = lambda output, target: function(output, target, reduction=reduction)
        return self._placed[key]


def _reduction(loss_fn: Any) -> str:
    """Return how a loss reduces ("mean", "sum"), or "" where it cannot be made to sum instead."""
    if isinstance(loss_fn, nn.Module):
        learns = any(True for _ in loss_fn.parameters())
        return "" if learns else str(getattr(loss_fn, "reduction", ""))
    try:
        parameter = inspect.signature(loss_fn).parameters.get("reduction")
    except (TypeError, ValueError):
        return ""
    return str(parameter.default) if parameter else ""


def check(loss: Loss, parts: torch.Tensor, output: Any, target: Any) -> None:
    """Raise ValueError unless the replicas' `parts` make the loss of the whole batch: some losses couple rows."""
    with torch.no_grad():
        whole = float(loss.whole(output, target))
    mine = float(parts)
    half = isinstance(output, torch.Tensor) and output.dtype in (torch.float16, torch.bfloat16)
    if not abs(mine - whole) <= (3e-2 if half else 1e-3) * max(abs(whole), 1e-3) and not math.isnan(whole):
        raise ValueError(
            f"loss=local: the replicas' sums make {mine:.6g}, but the loss of the whole batch is {whole:.6g}: it is no "
            "sum over rows; give a pair (sum_fn, weight_fn), or use a schedule with loss=gathered"
        )
