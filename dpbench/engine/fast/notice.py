"""Notice: changes between two steps on which state that persists between them depends.

An `Identity` records properties of the parameters and the optimizer. It is compared at the start of
each step, so that a changed property takes effect, or raises an error, in that step. Writing values
into a parameter in place changes none of these properties; `ReplicaWeights.versions` and
`TrainStep.sync` handle these writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer, lr_scheduler
from torch.optim import optimizer as torch_optimizer

HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")  # since torch 2.10
_requires_grad = attrgetter("requires_grad", *(["grad_dtype"] if HAS_GRAD_DTYPE else []))
_tensor_hooks = attrgetter("_backward_hooks")
_accumulate_hooks = attrgetter("_post_accumulate_grad_hooks")
Hooks = dict[int, Any]
"""Hooks by the number that torch has given each of them."""


class Identity:
    """A record of parameters' memory and `requires_grad`, of the optimizer's groups and hooks."""

    def __init__(self, parameters: Sequence[torch.Tensor], optimizer: Optimizer) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._memory = [p.detach() for p in parameters]
        self._wanted = list(map(_requires_grad, parameters))
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self.watched = is_watched(optimizer)

    def changed(self) -> bool:
        """Return whether one of the recorded properties has changed."""
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
                _same(group["params"], seen)
                for group, seen in zip(groups, self._groups, strict=True)
            )
        )


class GradientHooks:
    """The hooks on parameters' gradients: on the tensors, and on the nodes that accumulate them.

    torch shows the hooks of a node only to a hook's handle, so the constructor adds and removes
    one. It keeps the nodes, because a parameter does not keep its node, and a new node would have
    other hooks. `release` drops them, because a node also keeps the parameter's shape.
    """

    @torch.inference_mode(mode=False)  # in which tensors have no nodes
    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._nodes = [get_gradient_edge(p).node for p in parameters if p.requires_grad]
        registers = [
            register for n in self._nodes for register in (n.register_hook, n.register_prehook)
        ]
        handles = [register(print) for register in registers]
        self._of_nodes: list[Any] = [handle.hooks_dict_ref() for handle in handles]
        for handle in handles:
            handle.remove()

    def __bool__(self) -> bool:
        tensors = self._parameters
        return (
            any(map(_tensor_hooks, tensors))
            or any(map(_accumulate_hooks, tensors))
            or any(self._of_nodes)
        )

    def dicts(self) -> list[Hooks]:
        """Return torch's own dicts of these hooks, without empty ones."""
        of_tensors = [
            kind(p) for p in self._parameters for kind in (_tensor_hooks, _accumulate_hooks)
        ]
        return [*filter(None, of_tensors), *filter(None, self._of_nodes)]

    def release(self) -> None:
        """Drop the nodes."""
        self._nodes, self._of_nodes = [], []


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
    )


def _only_counts(step: Any, kind: type[Optimizer]) -> bool:
    """Return whether `step` is a learning rate scheduler's wrapper that counts the calls.

    The attribute that torch's scheduler sets on it does not show this, because `functools.wraps`
    copies it to functions of the user.
    """
    of_torch = getattr(step, "__globals__", None) is vars(lr_scheduler)
    return of_torch and getattr(step, "__wrapped__", None) is kind.step


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


class Muted:
    """Hooks on parameters' gradients. The constructor removes them; `restore` puts them back.

    They are absent during a backward that may reach the parameters directly, without passing
    through the replicas. In such a backward a parameter gets only a part of its gradient, but hooks
    must be called once, with all of it.
    """

    def __init__(self, hooks_of_parameters: Sequence[Hooks]) -> None:
        self._hooks = [(hooks, dict(hooks)) for hooks in hooks_of_parameters]
        for hooks, _ in self._hooks:
            hooks.clear()  # in place: the handles that remove hooks reference these dicts

    def restore(self) -> None:
        """Put the hooks back, ahead of the hooks that were added in the meantime."""
        while self._hooks:
            hooks, taken = self._hooks.pop()
            hooks.update({**taken, **hooks})
