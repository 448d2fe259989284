"""Replica weights: replicas that each device keeps, with leaf parameters, refreshed in place.

Only TrainStep can use them, because it runs the optimizer and therefore knows when the weights
change.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dpbench.engine.containers import same
from dpbench.engine.fast.cached import ReplicaCache
from dpbench.engine.fast.flat_storage import FlatWeights
from dpbench.engine.replicate import copies_of
from dpbench.hardware.device import Device
from dpbench.hardware.devices._many import copy_all
from dpbench.records import Mark, Phase, marked

ReplicaGradients = Sequence[Sequence[torch.Tensor | None]]
"""Gradients by replica and parameter; None stands for a parameter that the replica did not use."""


class ReplicaWeights:
    """One persistent replica per device; its weights are leaf tensors with gradients of their own.

    As in torch's replicas, weights are no `nn.Parameter`s, so that `replica.parameters()` is empty.

    Replica 0's parameters share the memory of the module's parameters; replica 0's buffers are
    those of the module. The module's own parameters (`originals`) take no part in forward, so that
    only reduced gradients reach their `.grad` and their hooks. The buffers of replicas 1, 2, ...
    are new tensors in every step.
    """

    def __init__(
        self, module: nn.Module, devices: Sequence[Device], flat: FlatWeights | None, mark: Mark
    ) -> None:
        self._devices = devices
        self._flat = flat
        self._mark = mark
        self._cache = ReplicaCache(module)
        self._cache.check_placed(devices[0])
        self.originals = list(self._cache.parameters)
        self.flats: list[list[torch.Tensor]] = [flat.buffers] if flat else [[] for _ in devices]
        self.parameters: list[list[torch.Tensor]] = [
            [_leaf(p, p.requires_grad) for p in self.originals]
        ]
        for device in devices[1:]:
            views: dict[int, torch.Tensor] = {}
            if flat:
                self.flats.append([device.put(buffer) for buffer in flat.buffers])
                views = flat.layout.views(self.flats[-1], self.originals)
            self.parameters.append(
                [
                    _leaf(views[i] if i in views else device.put(p.detach()), p.requires_grad)
                    for i, p in enumerate(self.originals)
                ]
            )
        held = set(flat.views) if flat else set()
        outside = [i for i in range(len(self.originals)) if i not in held]
        self._memory = [[p.data for p in parameters] for parameters in self.parameters]
        self._outside = [[memory[i] for i in outside] for memory in self._memory]
        # one count for all views of a buffer, and for a parameter and its twin in replica 0
        self._counted = [
            *self.originals,
            *(one for flats in self.flats[1:] for one in flats),
            *(parameters[i] for parameters in self.parameters[1:] for i in outside),
        ]

    def notice(self) -> bool:
        """Read a changed module again; return whether its parameter objects are the same."""
        if not self._cache.refresh():
            return True
        self._cache.check_placed(self._devices[0])
        return same(self._cache.parameters, self.originals)

    def modules(self, count: int) -> list[nn.Module]:
        """Return the first `count` replicas, with buffers copied from replica 0.

        `notice` must be called first.
        """
        root = self._devices[0]
        cache = self._cache
        with self._mark(Phase.REPLICATE, root.index):
            buffers = copies_of(cache.buffers, self._devices[:count], self._mark)
            # replica 0 must not write its buffers while others copy them
            for device in self._devices[1:count]:
                root.wait(device)
            order = [*cache.parameters, *cache.buffers]
            return cache.bind(
                order, [[*p, *b] for p, b in zip(self.parameters, buffers, strict=False)]
            )

    def refresh(self, i: int, *, flats: bool = True) -> None:
        """Copy replica 0's weights to replica i; without `flats`, only those in no flat buffer."""
        device, root = self._devices[i], self._devices[0]
        marks = marked(self._mark, Phase.REPLICATE, device.at_work([root]))
        with marks, device.guard(), torch.no_grad():
            device.wait(root)
            if flats:
                copy_all(self.flats[i], self.flats[0])
            copy_all(self._outside[i], self._outside[0])

    def gradients(self, count: int) -> list[list[torch.Tensor | None]]:
        """Return the gradients of the first `count` replicas; a missing gradient is None."""
        return [[p.grad for p in one] for one in self.parameters[:count]]

    def clear(self) -> None:
        """Drop the gradients of all replicas."""
        for one in self.parameters:
            for parameter in one:
                parameter.grad = None

    def versions(self) -> list[int]:
        """Return torch's counts of in-place writes to the weights of module and replicas."""
        return [one._version for one in self._counted]

    def undo_forward(self, count: int) -> None:
        """Undo what forwards did to the first `count` replicas' weights: as in torch, for one step.

        Remove the hooks that forwards have set, and return weights that they have moved (as the
        `flatten_parameters` of an RNN does on a GPU) to their memory, which updates write.
        """
        for weights, memory in zip(self.parameters[:count], self._memory, strict=False):
            for weight in weights:
                if weight._backward_hooks:
                    weight._backward_hooks.clear()
            if not all(map(torch.Tensor.is_set_to, weights, memory)):
                for weight, own in zip(weights, memory, strict=True):
                    weight.data = own

    def stale(self) -> list[int]:
        """Return the indices of parameters whose values differ between the module and a replica."""
        with torch.no_grad():
            return [
                n
                for n, original in enumerate(self.originals)
                if any(
                    not torch.equal(original, one[n].to(original.device))
                    for one in self.parameters[1:]
                )
            ]


def _leaf(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """Return a leaf tensor that shares memory and version counter with `tensor`."""
    return tensor.detach().requires_grad_(requires_grad)
