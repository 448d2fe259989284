"""Parameter gradients: the `.grad` of a module's own parameters, and hooks on it, in a step.

Kept replicas have gradients of their own, which are summed after backward. During backward, the
parameters themselves therefore have neither gradients nor hooks: what reaches them then came on
other ways than through the replicas, for example by a penalty on `module.parameters()` in the loss,
and is only a part of the gradient. Hooks must be called once, with all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

_tensor_hooks = attrgetter("_backward_hooks")
_accumulate_hooks = attrgetter("_post_accumulate_grad_hooks")
Hooks = dict[int, Any]
"""Hooks by the number that torch has given each of them."""


class ParameterGradients:
    """The gradients of parameters: `set_aside` before backward, then `accumulate` or `restore`."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._hooks = GradientHooks(parameters)
        self._removed = RemovedHooks()
        self._before: list[torch.Tensor | None] = []

    @property
    def hooked(self) -> bool:
        """Return whether there are hooks on the gradients."""
        return bool(self._hooks)

    def set_aside(self) -> None:
        """Remove the gradients of earlier calls, and the hooks."""
        self._removed.restore()  # an interrupt may have ended `restore`
        self._before = [p.grad for p in self._parameters]
        set_gradients(self._parameters, [None] * len(self._before))
        self._removed.remove(self._hooks.dicts() if self._hooks else [])

    def restore(self) -> None:
        """After a failed call, put back what `set_aside` has removed."""
        if self._before:
            self._removed.restore()
            set_gradients(self._parameters, self._before)
            self._before = []

    def accumulate(self, sums: Mapping[int, torch.Tensor]) -> None:
        """Add each sum to the gradient of its parameter, given by index, as autograd would.

        What has reached the parameters on other ways is a part of the gradient. That of earlier
        calls is added last, as in an ordinary loop.
        """
        self._removed.restore()
        hooked: list[tuple[torch.Tensor, torch.Tensor]] = []
        watching = bool(self._hooks)
        for n, parameter in enumerate(self._parameters):
            gradient = sums.get(n)
            outside = parameter.grad
            if outside is not None:
                gradient = outside if gradient is None else outside + gradient
            parameter.grad = self._before[n] if self._before else None
            if gradient is None:
                continue
            if watching and parameter.requires_grad:
                hooked.append((parameter, gradient))
            else:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        if hooked:
            # torch calls no hook on several gradients in a backward whose only root is a leaf: this
            # empty tensor is another root
            empty = torch.zeros(0, device=hooked[0][0].device, requires_grad=True)
            hooked.append((empty, empty.detach()))
            # in one backward: a hook on several parameters waits for all of their gradients
            torch.autograd.backward(
                [parameter for parameter, _ in hooked], [gradient for _, gradient in hooked]
            )
        self._before = []

    def release(self) -> None:
        """Drop what keeps the parameters' autograd nodes."""
        self._hooks.release()


def set_gradients(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> None:
    """Set the `.grad` of each parameter."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


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


class RemovedHooks:
    """Hooks on parameters' gradients that `remove` removes, and `restore` puts back.

    An interrupt may end either at any instruction, so hooks are always in torch's dict or here.
    """

    def __init__(self) -> None:
        self._taken: list[tuple[Hooks, Hooks]] = []

    def remove(self, hooks_of_parameters: Sequence[Hooks]) -> None:
        """Remove the hooks in these dicts of torch's."""
        self._taken = [(hooks, dict(hooks)) for hooks in hooks_of_parameters]
        for hooks, _ in self._taken:
            hooks.clear()  # in place: the handles that remove hooks reference these dicts

    def restore(self) -> None:
        """Put the hooks back, ahead of the hooks that were added in the meantime."""
        for hooks, taken in self._taken:
            taken.update(hooks)
            hooks.clear()
            hooks.update(taken)
        self._taken = []
