"""Persistent replicas: modules with leaf parameters of their own, whose memory stays and whose values are refreshed.

Only TrainStep can have them: it knows when the optimizer has changed the weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import nn

from dpbench.devices import Device
from dpbench.engine.broadcast import copies_of
from dpbench.engine.cached import Trees
from dpbench.engine.devices._many import copy_all
from dpbench.engine.storage import FlatWeights
from dpbench.records import Mark, Phase


class Persistent:
    """One kept replica a device; replica 0 has the module's own parameters and buffers."""

    def __init__(self, module: nn.Module, devices: Sequence[Device], flat: FlatWeights | None, mark: Mark) -> None:
        self._devices, self._flat, self._mark = devices, flat, mark
        self._trees = Trees(module)
        self._trees.refresh(devices[0])
        check_hooks(module)
        originals = self._trees.parameters
        self.parameters: list[list[torch.Tensor]] = [list(originals)]
        self.flats: list[list[torch.Tensor]] = [flat.buffers] if flat else [[] for _ in devices]
        for device in devices[1:]:
            views: dict[int, torch.Tensor] = {}
            if flat:
                self.flats.append([device.put(buffer) for buffer in flat.buffers])
                views = flat.layout.views(self.flats[-1], originals)
            with device.guard():
                self.parameters.append(
                    [
                        nn.Parameter(views[i] if i in views else device.put(p.detach()), p.requires_grad)
                        for i, p in enumerate(originals)
                    ]
                )
        held = set(flat.views) if flat else set()
        outside = [i for i in range(len(originals)) if i not in held]
        self._moved = [
            [*flats, *(parameters[i].data for i in outside)]
            for flats, parameters in zip(self.flats, self.parameters, strict=True)
        ]

    def modules(self, count: int) -> list[nn.Module]:
        """Return the first replicas, their buffers restarted from replica 0's."""
        root = self._devices[0]
        with self._mark(Phase.REPLICATE, root.index):
            if self._trees.refresh(root) and not all(
                a is b for a, b in zip(self._trees.parameters, self.parameters[0], strict=True)
            ):
                raise RuntimeError(
                    "the module has other parameters than when TrainStep was made, and the optimizer does not know "
                    "them: make a new TrainStep"
                )
            if self._flat:
                self._flat.adopt()
            buffers = copies_of(self._trees.buffers, self._devices[:count], self._mark)
            for device in self._devices[1:count]:  # replica 0 writes its buffers while others may still copy them
                root.wait(device)
            order = [*self._trees.parameters, *self._trees.buffers]
            return self._trees.bind(order, [[*p, *b] for p, b in zip(self.parameters, buffers, strict=False)])

    def refresh(self, i: int) -> None:
        """Copy replica 0's weights into replica i's, in one transfer a flat buffer."""
        device = self._devices[i]
        with self._mark(Phase.REPLICATE, device.index), device.guard(), torch.no_grad():
            device.wait(self._devices[0])
            copy_all(self._moved[i], self._moved[0])

    def gradients(self, count: int) -> list[list[torch.Tensor | None]]:
        """Return the first replicas' gradients, by parameter."""
        return [[p.grad for p in one] for one in self.parameters[:count]]

    def clear(self) -> None:
        """Drop all gradients."""
        for one in self.parameters:
            for parameter in one:
                parameter.grad = None

    def versions(self) -> list[int]:
        """Return what changes when somebody writes the module's weights by torch's own operations."""
        return [p._version for p in self.parameters[0]]


class Overlap:
    """Calls back as soon as a bucket's gradients are there on every replica, while backward still runs.

    Buckets go from the last parameters to the first, the order in which backward finishes them. What never fires
    (unused parameters), or fires again (checkpoints that re-enter autograd), is left to the end of the step.
    """

    def __init__(
        self, replicas: Persistent, buckets: Sequence[Sequence[int]], ready: Callable[[Sequence[int]], None]
    ) -> None:
        self._buckets, self._ready, self._lock = buckets, ready, threading.Lock()
        self._bucket_of = {number: b for b, bucket in enumerate(buckets) for number in bucket}
        self._expected, self._fired, self._again, self._done = 0, [0] * len(buckets), False, set[int]()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(number))
            for one in replicas.parameters
            for number, parameter in enumerate(one)
            if number in self._bucket_of
        ]

    def begin(self, count: int) -> None:
        """Expect gradients of so many replicas."""
        self._expected, self._fired, self._again = count, [0] * len(self._buckets), False
        self._done.clear()

    def rest(self) -> list[int]:
        """Stop, and return the numbers of the parameters whose buckets have not been called for, or too early."""
        self._expected = 0
        done = () if self._again else self._done
        return [number for b, bucket in enumerate(self._buckets) if b not in done for number in bucket]

    def _hook(self, number: int) -> Callable[[torch.Tensor], None]:
        bucket = self._bucket_of[number]
        size = len(self._buckets[bucket])

        def fired(_: torch.Tensor) -> None:
            with self._lock:
                self._fired[bucket] += 1
                full = self._fired[bucket] == self._expected * size
                self._again |= self._fired[bucket] > self._expected * size > 0
                if full:
                    self._done.add(bucket)
            if full:
                self._ready(self._buckets[bucket])

        return fired

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def check_hooks(module: nn.Module) -> None:
    """Refuse parameters with hooks: they are promised the reduced gradient, and would see one replica's."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"replicas=persistent needs parameters without hooks, and {name} has one; use schedule='cached'"
            )
