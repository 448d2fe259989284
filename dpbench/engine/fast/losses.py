"""Losses as sums over rows, so that each replica can compute its part of the batch's loss.

It can only if the divisor of the mean is known: for torch's own losses, whose divisors are defined
in this file, and for a pair of functions `(sum_fn, weight_fn)`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dpbench.engine.replicate import GLOBAL_HOOKS

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
"""The rule of each loss module; test_losses.py measures `bits` at many sizes and scales."""
_BY_FUNCTION = {rule.function: rule for rule in _RULES.values()}
_ROUNDING = ("weight", "pos_weight", "label_smoothing")
"""Settings that make a loss `ROUNDED`: the divisor is no count, or the terms' divisors differ."""
ROUNDED = (
    "the loss is computed over the gathered batch, because summing the replicas' losses could"
    " change the last bit of the gradients"
)
"""Why a selected schedule computes the loss of the whole batch."""


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

        `powers` is True if the loss is scaled only by powers of two, or not at all.
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


def summed_form(loss_fn: Any) -> Summed | None:
    """Return a loss as a sum over rows, with its present settings; None if it has no such form.

    `loss_fn` is a function of output and target that returns the mean or sum over the batch, or a
    pair of functions `(sum_fn, weight_fn)`, whose quotient is the loss.
    """
    if isinstance(loss_fn, tuple):
        sum_fn, weight_fn = loss_fn
        return Summed(sum_fn, weight_fn, Bits.SAME)
    settings = _settings(loss_fn)
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
        if rule is None or "forward" in loss_fn.__dict__:
            return None
        if any(GLOBAL_HOOKS.values()) or any(getattr(loss_fn, name) for name in GLOBAL_HOOKS):
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
