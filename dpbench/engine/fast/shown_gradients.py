"""Shown gradients: `.grad` of the module's parameters after a step, for the training loop.

They are views of the memory into which the next step writes its sums.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

import torch

HELD = 2
"""The reference count of a tensor to which only a list and the call of `sys.getrefcount` refer.

A loop that keeps a gradient beyond the next step is rare, and a copy in every step would cost as
much as the sum.
"""


class ShownGradients:
    """The reduced gradients of the parameters with the indices `stepped`: `show` and `hide` them.

    `complete` has those that are complete in one tensor on device 0 (or, for logical CPU devices,
    on the host), by parameter index. The `.grad` of other parameters is None.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        stepped: Iterable[int],
        complete: Mapping[int, torch.Tensor],
    ) -> None:
        stepped = list(stepped)
        self._with = [parameters[n] for n in stepped if n in complete]
        self._without = [parameters[n] for n in stepped if n not in complete]
        self._views = [complete[n] for n in stepped if n in complete]
        self._shown: list[torch.Tensor] = []

    def show(self) -> None:
        """After a step, set the `.grad` of the module's parameters to the reduced gradients."""
        # `hide` or `module.to()` may have given earlier gradients other memory
        if not self._shown or not all(map(torch.Tensor.is_set_to, self._shown, self._views)):
            self._shown = [view.detach() for view in self._views]
        for parameter, gradient in zip(self._with, self._shown, strict=True):
            parameter.grad = gradient
        for parameter in self._without:
            parameter.grad = None

    def hide(self) -> None:
        """Before a step, move gradients that the user's code references to separate memory."""
        shown = self._shown
        for i in range(len(shown)):  # by index: a loop variable would be one more reference
            if sys.getrefcount(shown[i]) > HELD:
                shown[i].data = shown[i].clone()
