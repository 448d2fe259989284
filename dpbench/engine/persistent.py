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
    """One kept replica a device; replica 0 has the module's own parameters and buffers.

    The others' buffers are new in every step, or, `fixed`, written where they are. `version` counts the module's
    changes.
    """

    def __init__(
        self, module: nn.Module, devices: Sequence[Device], flat: FlatWeights | None, mark: Mark, *, fixed: bool = False
    ) -> None:
        self._devices, self._flat, self._mark, self._fixed = devices, flat, mark, fixed
        self.version = 0
        self.buffers: list[list[torch.Tensor]] = []
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
        self._outside = [[parameters[i].data for i in outside] for parameters in self.parameters]

    def modules(self, count: int) -> list[nn.Module]:
        """Return the first replicas, their buffers restarted from replica 0's."""
        root = self._devices[0]
        with self._mark(Phase.REPLICATE, root.index):
            changed = self._trees.refresh(root)
            self.version += changed
            if changed and not _same(self._trees.parameters, self.parameters[0]):
                raise RuntimeError(
                    "the module has other parameters than when TrainStep was made, and the optimizer does not know "
                    "them: make a new TrainStep"
                )
            if self._flat:
                self._flat.adopt()
            self._copy_buffers(count, anew=changed)
            for device in self._devices[1:count]:  # replica 0 writes its buffers while others may still copy them
                root.wait(device)
            order = [*self._trees.parameters, *self._trees.buffers]
            return self._trees.bind(
                order, [[*p, *b] for p, b in zip(self.parameters, self.buffers[:count], strict=False)]
            )

    def _copy_buffers(self, count: int, *, anew: bool) -> None:
        """Bring replica 0's buffers to the others."""
        originals = self._trees.buffers
        if not self._fixed:
            self.buffers = copies_of(originals, self._devices[:count], self._mark)
        elif anew or not self.buffers or not _same(originals, self.buffers[0]):
            self.buffers = copies_of(originals, self._devices, self._mark)
        else:
            for device, own in zip(self._devices[1:count], self.buffers[1:count], strict=True):
                with self._mark(Phase.REPLICATE, device.index), device.guard(), torch.no_grad():
                    device.wait(self._devices[0])
                    copy_all(own, originals)

    def refresh(self, i: int, *, flats: bool = True) -> None:
        """Copy replica 0's weights into replica i's, in one transfer a flat buffer, or what is outside of those."""
        device = self._devices[i]
        with self._mark(Phase.REPLICATE, device.index), device.guard(), torch.no_grad():
            device.wait(self._devices[0])
            if flats:
                copy_all(self.flats[i], self.flats[0])
            copy_all(self._outside[i], self._outside[0])

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

    Buckets go from the last parameters to the first, the order in which backward finishes them. `staged` is called
    with each replica's number when its own are there, in the thread that made them; `ready` after the last of these.
    What never fires (unused parameters), or fires again (checkpoints that re-enter autograd), is left to the end of
    the step.
    """

    def __init__(
        self,
        replicas: Persistent,
        buckets: Sequence[Sequence[int]],
        ready: Callable[[Sequence[int]], None],
        staged: Callable[[int, Sequence[int]], None],
    ) -> None:
        self._buckets, self._ready, self._staged, self._lock = buckets, ready, staged, threading.Lock()
        self._bucket_of = {number: b for b, bucket in enumerate(buckets) for number in bucket}
        self._replicas = len(replicas.parameters)
        self.begin(0)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(i, self._bucket_of[number]))
            for i, one in enumerate(replicas.parameters)
            for number, parameter in enumerate(one)
            if number in self._bucket_of
        ]

    def begin(self, count: int) -> None:
        """Expect gradients of so many replicas."""
        self._expected, self._again, self._done = count, False, set[int]()
        self._fired = [[0] * len(self._buckets) for _ in range(self._replicas)]
        self._complete = [0] * len(self._buckets)

    def rest(self) -> list[int]:
        """Stop, and return the numbers of the parameters whose buckets have not been called for, or too early."""
        self._expected = 0
        done = () if self._again else self._done
        return [number for b, bucket in enumerate(self._buckets) if b not in done for number in bucket]

    def _hook(self, i: int, b: int) -> Callable[[torch.Tensor], None]:
        bucket = self._buckets[b]

        def fired(_: torch.Tensor) -> None:
            with self._lock:
                if not self._expected:
                    return
                self._fired[i][b] += 1
                whole = self._fired[i][b] == len(bucket)
                self._again |= self._fired[i][b] > len(bucket)
            if not whole:
                return
            self._staged(i, bucket)
            with self._lock:
                self._complete[b] += 1
                full = self._complete[b] == self._expected
                if full:
                    self._done.add(b)
            if full:
                self._ready(bucket)

        return fired

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Tell whether two lists hold the same objects."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def check_hooks(module: nn.Module) -> None:
    """Refuse parameters with hooks: they are promised the reduced gradient, and would see one replica's."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"replicas=persistent needs parameters without hooks, and {name} has one; use schedule='cached'"
            )
