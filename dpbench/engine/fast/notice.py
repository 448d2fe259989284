"""Notice: changes between two steps on which state that persists between them depends.

A `Snapshot` has properties of the parameters and the optimizer. It is compared at the start of each
step, so that a changed property takes effect, or raises an error, in that step. Writing values into
a parameter in place changes none of these properties; `ReplicaWeights.versions` and
`TrainStep.sync` handle these writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim import optimizer as torch_optimizer

from dpbench.engine.containers import same

HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")  # since torch 2.10
_requires_grad = attrgetter("requires_grad", *(["grad_dtype"] if HAS_GRAD_DTYPE else []))


class Snapshot:
    """Parameters' memory and `requires_grad`, and the optimizer's groups and hooks, at one time."""

    def __init__(self, parameters: Sequence[torch.Tensor], optimizer: Optimizer) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._memory = [p.detach() for p in parameters]
        self._wanted = list(map(_requires_grad, parameters))
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self.watched = is_watched(optimizer)

    def changed(self) -> bool:
        """Return whether one of these properties has changed."""
        return (
            not all(map(torch.Tensor.is_set_to, self._parameters, self._memory))
            or list(map(_requires_grad, self._parameters)) != self._wanted
            or self._stepped_otherwise()
        )

    def _stepped_otherwise(self) -> bool:
        groups = self._optimizer.param_groups
        return (
            is_watched(self._optimizer) != self.watched
            or len(groups) != len(self._groups)
            or not all(
                same(group["params"], before)
                for group, before in zip(groups, self._groups, strict=True)
            )
        )


def is_watched(optimizer: Optimizer) -> bool:
    """Return whether the optimizer has a hook, or a replaced `step` or `zero_grad`.

    A hook or replaced method expects the module's own parameters and gradients. A `step` that one
    of torch's learning rate schedulers has wrapped is not a replaced one: the wrapper only counts
    the calls.
    """
    step: Any = optimizer.__dict__.get("step")
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or (step is not None and not _only_counts(step, type(optimizer)))
        or "zero_grad" in optimizer.__dict__
        or type(optimizer).zero_grad is not Optimizer.zero_grad
    )


def _only_counts(step: Any, kind: type[Optimizer]) -> bool:
    """Return whether `step` is a learning rate scheduler's wrapper that counts the calls.

    The attribute that torch's scheduler sets on it does not show this, because `functools.wraps`
    copies it to functions of the user.
    """
    of_torch = getattr(step, "__globals__", None) is vars(lr_scheduler)
    return of_torch and getattr(step, "__wrapped__", None) is kind.step
