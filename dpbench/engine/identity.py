"""Identity: the properties for which persistent state was built, and whether a training loop has changed any of them.

They are compared at the start of each step, so that a change takes effect, or raises an error, in that step. Values
that are written in place change none of these properties: `ReplicaWeights.versions` and `TrainStep.sync` handle those.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

_requires_grad = attrgetter("requires_grad")
_tensor_hooks = attrgetter("_backward_hooks")
_accumulate_hooks = attrgetter("_post_accumulate_grad_hooks")


class Identity:
    """The parameters' memory, shapes, gradient flags and hooks, and the optimizer's groups and hooks."""

    def __init__(self, parameters: Sequence[torch.Tensor], optimizer: Optimizer | None = None) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        self._memory = [p.detach() for p in parameters]
        self._wanted = list(map(_requires_grad, parameters))
        self._groups = [list(group["params"]) for group in optimizer.param_groups] if optimizer else []
        self.hooked = has_hooks(parameters)
        self.watched = optimizer is not None and is_watched(optimizer)

    def changed(self) -> bool:
        """Return whether one of the properties has changed."""
        return (
            not all(map(torch.Tensor.is_set_to, self._parameters, self._memory))
            or list(map(_requires_grad, self._parameters)) != self._wanted
            or has_hooks(self._parameters) != self.hooked
            or (self._optimizer is not None and self._stepped_otherwise(self._optimizer))
        )

    def _stepped_otherwise(self, optimizer: Optimizer) -> bool:
        groups = optimizer.param_groups
        return (
            is_watched(optimizer) != self.watched
            or len(groups) != len(self._groups)
            or not all(_same(group["params"], seen) for group, seen in zip(groups, self._groups, strict=True))
        )


def has_hooks(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether one of the parameters has a hook on its gradient."""
    return any(map(_tensor_hooks, parameters)) or any(map(_accumulate_hooks, parameters))


def is_watched(optimizer: Optimizer) -> bool:
    """Return whether a method of the optimizer is hooked or replaced.

    Such a hook or replacement must see the module's own parameters and gradients.

    A `step` that torch's learning rate schedulers have wrapped is ignored, because the wrapper only counts calls.
    """
    step: Any = optimizer.__dict__.get("step")
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or (step is not None and not getattr(step, "_wrapped_by_lr_sched", False))
        or "zero_grad" in optimizer.__dict__
    )


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether two lists contain the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


class Muted:
    """Removes parameters' hooks while a backward may reach the parameters directly, not through the replicas.

    A gradient that arrives directly is only a part of the whole gradient; hooks must be called once, with the whole.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
        found = (getattr(parameter, kind, None) for parameter in parameters for kind in kinds)
        self._hooks = [(hooks, dict(hooks)) for hooks in found if hooks]
        for hooks, _ in self._hooks:
            hooks.clear()  # in place: handles that remove hooks reference these dicts

    def restore(self) -> None:
        """Put the hooks back, ahead of those that were added in the meantime."""
        while self._hooks:
            hooks, taken = self._hooks.pop()
            hooks.update({**taken, **hooks})
