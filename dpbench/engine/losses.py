"""Losses: computed over the gathered batch, or as sums over each replica's own rows.

A replica can compute its part of the loss only if the divisor of the mean is known: for torch's own
losses, whose divisors are defined in this file, and for a pair of functions `(sum_fn, weight_fn)`.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as module_hooks

from dpbench.engine.errors import call_on
from dpbench.hardware.device import Device
from dpbench.records import Mark, Phase

Function = Callable[..., Any]
Divisor = Callable[[torch.Tensor, torch.Tensor, Mapping[str, Any]], Any]
"""From output, target and the loss's keywords: what the given rows add to the mean's divisor."""


def _elements(output: torch.Tensor, target: torch.Tensor, keywords: Mapping[str, Any]) -> int:
    """Return the number of elements after output and target are broadcast."""
    if output.shape == target.shape:
        return output.numel()
    return math.prod(torch.broadcast_shapes(output.shape, target.shape))


def _classes(output: torch.Tensor, target: torch.Tensor, keywords: Mapping[str, Any]) -> Any:
    """Return the number of targets that are not ignored, or the sum of their class weights."""
    # for class probabilities, ignore_index and weight do not affect the divisor
    if target.is_floating_point():
        return output.numel() // output.shape[1]
    counted = target != keywords.get("ignore_index", -100)
    weight = keywords.get("weight")
    if weight is not None:
        return weight[target[counted]].sum()
    return int(counted.sum()) if target.device.type == "cpu" else counted.sum()


class Bits(Enum):
    """How closely gradients summed over the replicas agree with those of the whole batch's loss."""

    SAME = "the same bits"
    SAME_UNSCALED = "the same bits if the loss is scaled by powers of two only"
    ROUNDED = "equal within rounding"


@dataclass(frozen=True)
class DivisorRule:
    """The rule that turns one of torch's losses into a sum over rows and a divisor.

    `settings` are the names of the keywords of `function`, the loss. `divisor` returns the divisor
    of the mean. `bits` is the accuracy of the gradients if each replica computes the loss over its
    own rows.
    """

    function: Function
    settings: tuple[str, ...]
    divisor: Divisor
    bits: Bits = Bits.ROUNDED

    def splits(self, output: torch.Tensor, target: torch.Tensor) -> bool:
        """Return whether the rows of output and target correspond one to one, without broadcasting.

        For a classification loss an output with one dimension is a single row.
        """
        if target.shape[:1] != output.shape[:1]:
            return False
        if self.divisor is _classes:
            return output.dim() > 1 and target.dim() in (output.dim(), output.dim() - 1)
        return target.dim() == output.dim()


_RULES = {
    nn.CrossEntropyLoss: DivisorRule(
        F.cross_entropy, ("weight", "ignore_index", "label_smoothing"), _classes, Bits.SAME
    ),
    nn.NLLLoss: DivisorRule(F.nll_loss, ("weight", "ignore_index"), _classes, Bits.SAME),
    nn.MSELoss: DivisorRule(F.mse_loss, (), _elements, Bits.SAME_UNSCALED),
    nn.L1Loss: DivisorRule(F.l1_loss, (), _elements, Bits.SAME),
    nn.SmoothL1Loss: DivisorRule(F.smooth_l1_loss, ("beta",), _elements),
    nn.HuberLoss: DivisorRule(F.huber_loss, ("delta",), _elements),
    nn.BCELoss: DivisorRule(F.binary_cross_entropy, ("weight",), _elements),
    nn.BCEWithLogitsLoss: DivisorRule(
        F.binary_cross_entropy_with_logits, ("weight", "pos_weight"), _elements
    ),
}
"""The rule of each loss module.

tests/engine/fast/test_losses.py measures `bits` at many sizes and scales.
"""
_BY_FUNCTION = {rule.function: rule for rule in _RULES.values()}
_ROUNDING = ("weight", "pos_weight", "label_smoothing")
"""Settings that make a loss `ROUNDED`: the divisor is no count, or the terms' divisors differ."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)


@dataclass(frozen=True)
class Summed:
    """A loss that each replica can compute over its own rows, with the present settings.

    `sum_fn(output, target)` returns the sum over the rows. `weight_fn(output, target)` returns what
    these rows add to the divisor; it is None if the loss has no divisor. `rule` is the rule by
    which both functions were made from one of torch's losses; it is None if the user gave the
    functions as a pair. `weights` are tensors by which an elementwise loss multiplies its elements.
    """

    sum_fn: Function
    weight_fn: Function | None
    bits: Bits
    rule: DivisorRule | None = None
    weights: Sequence[torch.Tensor] = ()

    def keeps_bits(self, *, powers: bool) -> bool:
        """Return whether the summed gradients are bitwise equal to those of the whole batch.

        `powers` is as in `TrainingSetup`.
        """
        return self.bits is Bits.SAME or (powers and self.bits is Bits.SAME_UNSCALED)

    def splits(self, output: Any, target: Any) -> bool:
        """Return whether each row's loss can be computed separately, as for any pair."""
        if self.rule is None:
            return True
        tensors = isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)
        return (
            tensors
            and self.rule.splits(output, target)
            and all(weight.dim() < output.dim() or weight.size(0) == 1 for weight in self.weights)
        )

    def weight_of(self, target: Any) -> int | None:
        """Return the divisor for all rows if it is known before the outputs exist, or None.

        It is known for class indices on the host that are only counted. The caller need not check
        that the rows of output and target correspond, because torch's classification losses raise
        an error if they do not.
        """
        if self.weight_fn is None or self.rule is None or self.rule.divisor is not _classes:
            return None
        if target.is_floating_point() or target.device.type != "cpu" or not target.dim():
            return None
        found = self.weight_fn(None, target)
        return found if isinstance(found, int) else None

    def total(self, output: Any, target: Any) -> torch.Tensor:
        """Return the sum of the loss over the rows of one replica."""
        return self.sum_fn(output, target)  # type: ignore[no-any-return]

    def weight(self, output: Any, target: Any) -> Any:
        """Return what one replica's rows add to the divisor; None if the loss has none.

        The loss of the batch is the sum of all totals, divided by the sum of these values.
        """
        return None if self.weight_fn is None else self.weight_fn(output, target)


class Loss:
    """A loss function, and its form as a sum over rows if the divisor of its mean is known.

    `loss_fn` is a function of output and target that returns the mean or sum over the batch, or a
    pair of functions `(sum_fn, weight_fn)`, whose quotient is the loss. The settings of a loss
    module are read again in every step.
    """

    def __init__(self, loss_fn: Any) -> None:
        self.loss_fn = loss_fn
        self.pair = loss_fn if isinstance(loss_fn, tuple) else None
        # a plain function has no settings that could change
        self._fixed = self._summed() if isinstance(loss_fn, FunctionType) else None

    def whole(self, output: Any, target: Any) -> torch.Tensor:
        """Return the loss of the whole batch, computed by one call."""
        if self.pair:
            return self.pair[0](output, target) / self.pair[1](output, target)  # type: ignore[no-any-return]
        return self.loss_fn(output, target)  # type: ignore[no-any-return]

    def summed(self) -> Summed | None:
        """Return the loss as a sum over rows, or None if it has no such form."""
        return self._fixed or self._summed()

    def _summed(self) -> Summed | None:
        if self.pair:
            sum_fn, weight_fn = self.pair
            return Summed(sum_fn, weight_fn, Bits.SAME)
        settings = _settings(self.loss_fn)
        if settings is None:
            return None
        rule, keywords = settings
        reduction = keywords.pop("reduction", "mean")
        if reduction not in ("mean", "sum"):
            return None
        rounding = any(
            isinstance(value := keywords.get(name), torch.Tensor) or value for name in _ROUNDING
        )
        tensors = [value for value in keywords.values() if isinstance(value, torch.Tensor)]
        return Summed(
            functools.partial(_on_device, rule.function, keywords),
            functools.partial(_weigh, rule.divisor, keywords) if reduction == "mean" else None,
            Bits.ROUNDED if rounding else rule.bits,
            rule,
            tensors if rule.divisor is _elements else (),
        )


def _settings(loss_fn: Any) -> tuple[DivisorRule, dict[str, Any]] | None:
    """Return the rule and the current settings, by name, of one of torch's losses without hooks."""
    if isinstance(loss_fn, functools.partial):
        rule = _BY_FUNCTION.get(loss_fn.func) if not loss_fn.args else None
        allowed = {"reduction", *(rule.settings if rule else ())}
        return (
            (rule, dict(loss_fn.keywords))
            if rule and allowed.issuperset(loss_fn.keywords)
            else None
        )
    if isinstance(loss_fn, nn.Module):
        rule = _RULES.get(type(loss_fn))
        hooked = any(getattr(loss_fn, name) for name in _HOOKS) or any(
            getattr(module_hooks, n) for n in _GLOBAL_HOOKS
        )
        if rule is None or hooked or "forward" in loss_fn.__dict__:
            return None
        return rule, {name: getattr(loss_fn, name) for name in ("reduction", *rule.settings)}
    try:
        rule = _BY_FUNCTION.get(loss_fn)
    except TypeError:  # a callable object that cannot be hashed
        return None
    return (rule, {}) if rule else None


def _placed(keywords: Mapping[str, Any], output: torch.Tensor | None) -> Mapping[str, Any]:
    """Return the keywords with their tensors on the output's device."""
    if not keywords or output is None:
        return keywords
    return {
        name: (
            value.to(output.device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        )
        for name, value in keywords.items()
    }


def _on_device(function: Function, keywords: Mapping[str, Any], output: Any, target: Any) -> Any:
    return function(output, target, reduction="sum", **_placed(keywords, output))


def _weigh(divisor: Divisor, keywords: Mapping[str, Any], output: Any, target: Any) -> Any:
    return divisor(output, target, _placed(keywords, output))


def check(loss: Loss, parts: torch.Tensor, output: Any, target: Any) -> bool:
    """Compare `parts`, the loss computed from the replicas' sums, with the loss of the whole batch.

    Return whether they could be compared: the loss of the whole batch must be finite. Raises
    ValueError if they differ by more than rounding.
    """
    with torch.no_grad():
        whole = float(loss.whole(output, target))
    summed = float(parts)
    if not math.isfinite(whole):
        return False
    half = isinstance(output, torch.Tensor) and output.dtype in (torch.float16, torch.bfloat16)
    if not abs(summed - whole) <= (3e-2 if half else 1e-3) * max(abs(whole), 1e-3):
        raise ValueError(
            f"loss=local: the loss from the replicas' sums is {summed:.6g}, but the loss of the"
            f" whole batch is {whole:.6g}, so sum_fn or weight_fn is not a sum over rows; pass"
            " another pair (sum_fn, weight_fn), or use a schedule with loss=gathered"
        )
    return True


class LocalLoss:
    """The loss of one step; each replica computes its part, the loss over its own rows.

    Without `weight`, call `forward` for each replica, `meet` once, then `backward` for each replica
    or `joint` once. With `weight`, the number by which the loss summed over all rows is divided,
    call `alone` for each replica, then `add` once. In both cases the attribute `loss` is then the
    loss of the batch.

    `pieces` are (inputs, target) pairs. `scale` is applied to the loss from which backward starts.
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
        weight: int | None = None,
    ) -> None:
        self._summed = summed
        self._pieces = pieces
        self._replicas = replicas
        self._devices = devices
        self._mark = mark
        self._scale = scale
        self.outputs: list[Any] = [None] * len(pieces)
        self._totals: list[Any] = [None] * len(pieces)
        self._weights: list[Any] = [None] * len(pieces)
        self._weight: Any = weight
        self.split = weight is not None
        self.loss = torch.empty(0)

    def forward(self, i: int) -> None:
        """Run replica i, and compute the sum of the loss over the replica's rows."""
        inputs, target = self._pieces[i]
        device = self._devices[i]
        mark = self._mark
        with mark(Phase.FORWARD, device.index):
            self.outputs[i] = call_on(device, self._replicas[i], inputs, {})
        if not self._summed.splits(self.outputs[i], target):
            return
        with mark(Phase.LOSS, device.index):
            self._totals[i] = self._summed.total(self.outputs[i], target)
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
                "loss=local: the result of weight_fn requires gradients, which replicas cannot"
                " compute separately; detach this result in weight_fn, or use a schedule with"
                " loss=gathered"
            )
        for device in self._devices[1:]:  # replicas that share a GPU have separate streams
            root.wait(device)
        root.borrow([*self._totals, *tensors])
        with self._mark(Phase.LOSS, root.index), torch.no_grad():
            if self._weights[0] is not None:
                self._weight = _sum(self._weights, root)
            self.loss = _divided(_sum(self._totals, root), self._weight)

    def backward(self, i: int) -> None:
        """Run replica i's backward; call this in the thread that ran the replica's forward."""
        if not self.split:
            return
        device = self._devices[i]
        total = self._totals[i]
        if isinstance(self._weight, torch.Tensor):
            device.wait(self._devices[0])
            device.borrow([self._weight])
        with self._mark(Phase.LOSS, device.index):
            scaled = self._scale(_divided(total, _here(self._weight, device)))
        with self._mark(Phase.BACKWARD, device.index):
            scaled.backward()

    def alone(self, i: int) -> None:
        """Run replica i's forward and backward; `weight` must be known."""
        inputs, target = self._pieces[i]
        device = self._devices[i]
        mark = self._mark
        with mark(Phase.FORWARD, device.index):
            output = call_on(device, self._replicas[i], inputs, {})
        with mark(Phase.LOSS, device.index):
            self._totals[i] = self._summed.total(output, target)
        del output
        self.backward(i)

    def add(self) -> None:
        """Add the replicas' parts of the loss on the first device, after backward, in no phase."""
        with torch.no_grad():
            self.loss = _divided(_sum(self._totals, self._devices[0]), self._weight)

    def joint(self) -> torch.Tensor:
        """Return the scaled loss of the batch, for one backward through all replicas."""
        root = self._devices[0]
        with self._mark(Phase.LOSS, root.index):
            return self._scale(_divided(_sum(self._totals, root), self._weight))


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
