"""Replicas of a TrainStep: copied through autograd in every step, or persistent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import nn

from dpbench.engine.collectives import Copier, Overlapping, copies_of
from dpbench.engine.flat_storage import FlatWeights
from dpbench.engine.legal import Identity
from dpbench.engine.optimizer_state import finish, groups_of
from dpbench.engine.persistent_step import PersistentReplicas
from dpbench.engine.replicate import ReplicaCache, check_placement, replicate, unique
from dpbench.engine.workers import Workers
from dpbench.hardware.device import Device
from dpbench.records import Mark, Phase
from dpbench.engine._switches import Switches


@torch.inference_mode(mode=False)  # training and in-place writes need ordinary tensors
def flat_weights(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    schedule: Switches,
    root: Device,
    shares: int = 1,
) -> FlatWeights | None:
    """Move the module's trainable parameters into flat buffers and return the buffers.

    Return None unless the schedule has storage=flat. There is one buffer per optimizer group and
    dtype. Parameters that the optimizer does not step form a further group. Each buffer can be cut
    into `shares` equal parts.
    """
    if schedule.storage != "flat":
        return None
    check_placement(module, root)
    parameters = unique(module.parameters())
    groups = [group.parameters for group in groups_of(optimizer, parameters)] if optimizer else []
    taken = {number for group in groups for number in group}
    rest = [n for n, p in enumerate(parameters) if p.requires_grad and n not in taken]
    return FlatWeights(parameters, [*groups, rest], root, shares)


def flat_copier(flat: FlatWeights) -> Copier:
    """Return a copier that copies each flat buffer at once, and other tensors separately."""
    number = {id(parameter): n for n, parameter in enumerate(flat.parameters)}

    def copier(
        tensors: Sequence[torch.Tensor], devices: Sequence[Device], mark: Mark
    ) -> list[list[torch.Tensor]]:
        copies = [list(tensors)]
        held = [number.get(id(tensor), -1) in flat.views for tensor in tensors]
        for device in devices[1:]:
            with mark(Phase.REPLICATE, device.index):
                views = flat.copies(device)
                others = iter(
                    device.clone([t for t, inside in zip(tensors, held, strict=True) if not inside])
                )
                copies.append(
                    [
                        views[number[id(t)]].data if inside else next(others)
                        for t, inside in zip(tensors, held, strict=True)
                    ]
                )
        return copies

    return copier


class CachePerThread(threading.local):
    """A cache per calling thread: threads do not share what a forward stores in a replica."""

    def __init__(self, module: nn.Module) -> None:
        self.cache = ReplicaCache(module)


Maker = Callable[[Sequence[Device], bool, Mark, Callable[[], None]], list[nn.Module]]


def maker(
    module: nn.Module, schedule: Switches, flat: FlatWeights | None, overlapping: Overlapping
) -> Maker:
    """Return a function that replicates the module through autograd, as the schedule says.

    `flat` has the buffers that hold the module's parameters; None means separate storage.
    """
    caches = CachePerThread(module) if schedule.replicas == "cached" else None
    copier = flat_copier(flat) if flat else copies_of

    def make(
        devices: Sequence[Device], detach: bool, mark: Mark, on_reduce: Callable[[], None]
    ) -> list[nn.Module]:
        overlap = schedule.reduce == "overlap"
        if overlap and not detach:
            overlap = overlapping.begin(devices, together=devices[0].can_collect(devices))
        return replicate(
            module,
            list(devices),
            detach=detach,
            copier=copier,
            cache=caches.cache if caches else None,
            overlap=overlap,
            mark=mark,
            # with overlap, the first reduction does not mark the end of backward
            on_reduce=(lambda: None) if overlap else on_reduce,
        )

    return make


class Autograd:
    """Replicas whose gradients backward adds to those of the module's parameters."""

    unusual = ""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        devices: Sequence[Device],
        make: Maker,
        overlapping: Overlapping,
        flat: FlatWeights | None,
        mark: Mark,
    ) -> None:
        self._module = module
        self._optimizer = optimizer
        self._devices = devices
        self._mark = mark
        self._make = make
        self.overlapping = overlapping
        self._flat = flat
        self._identity = Identity(flat.parameters, optimizer) if flat else None

    def changed(self) -> bool:
        """Return whether a parameter's memory or hooks, or the optimizer, have changed.

        False without flat buffers.
        """
        return self._identity is not None and self._identity.changed()

    def stale(self) -> list[int]:
        """Return an empty list, because every step copies the weights to the replicas."""
        return []

    def abandon(self) -> None:
        """Do nothing: a failed backward leaves each `.grad` as in an ordinary loop."""

    def modules(
        self, count: int, workers: Workers, on_reduce: Callable[[], None] = lambda: None
    ) -> list[nn.Module]:
        """Return the first `count` replicas; with a single device, the module itself."""
        if len(self._devices) == 1:
            check_placement(self._module, self._devices[0])
            return [self._module]
        return self._make(self._devices[:count], False, self._mark, on_reduce)

    def clear(self) -> None:
        """Drop the gradients of the parameters that the optimizer steps."""
        self._optimizer.zero_grad(set_to_none=True)

    def reduce(self, workers: Workers) -> None:
        """Do nothing, because autograd has reduced the gradients during backward."""

    def update(
        self, workers: Workers, clip_norm: float | None, scaler: torch.amp.GradScaler | None
    ) -> None:
        """Run the optimizer on the first device, after clipping and unscaling if requested."""
        with self._mark(Phase.OPTIMIZER, self._devices[0].index):
            finish(self._optimizer, self._module, clip_norm, scaler, self._optimizer)

    def sync(self) -> None:
        """Do nothing, because every step copies the weights to the replicas."""

    def close(self) -> None:
        """Move the parameters out of the flat buffers, if there are any."""
        if self._flat:
            self._flat.release()


@torch.inference_mode(mode=False)
def replicas_of(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    devices: Sequence[Device],
    schedule: Switches,
    *,
    whole_gradient: bool,
    mark: Mark,
) -> Autograd | PersistentReplicas:
    """Return the replicas for a schedule that `legal.check` has accepted.

    With `whole_gradient`, the `.grad` of the module's parameters is the sum over all replicas
    before the optimizer steps.
    """
    overlapping = Overlapping()
    if len(devices) == 1:  # the module itself runs
        make = maker(module, Switches(), None, overlapping)
        return Autograd(module, optimizer, devices, make, overlapping, None, mark)
    flat = flat_weights(module, optimizer, schedule, devices[0], len(devices))
    if schedule.replicas == "persistent":
        return PersistentReplicas(
            module, optimizer, devices, schedule, flat, whole_gradient=whole_gradient, mark=mark
        )
    make = maker(module, schedule, flat, overlapping)
    return Autograd(module, optimizer, devices, make, overlapping, flat, mark)
