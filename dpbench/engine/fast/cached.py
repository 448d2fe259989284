"""The schedule `cached`: the copies of the module tree persist between calls.

What it changes in `step.step`: `replicate` copies the weights through autograd as before, but does
not rebuild the replicas' module trees; it binds the new tensors to the trees of the last call. It
relies on noticing every change of the module's parameters, submodules, buffers, hooks and plain
attributes. After a change, the trees are built again, which costs as much as in `reference`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from operator import is_, itemgetter, setitem
from typing import Any

import torch
from torch import nn

from dpbench.engine.containers import same, whole
from dpbench.engine.replicate import (
    GLOBAL_HOOKS,
    HOOKS,
    Reducer,
    buffers_of,
    check_placed,
    copied,
    parameters_of,
    rebuild,
)
from dpbench.hardware.device import Device
from dpbench.hardware.devices import Devices, as_devices
from dpbench.records import Mark, Phase, no_mark

_HOLDERS = ("_parameters", "_buffers", "_modules", "_former_parameters")


class CachedReplicas(threading.local):
    """A function `replicate` that keeps the replicas of the module that it was last called with.

    Each calling thread has its own, because a forward may store attributes in a replica.
    """

    def __init__(self) -> None:
        self._cache: ReplicaCache | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Make `copy` and `pickle` leave the replicas out."""
        return CachedReplicas, ()

    def replicate(
        self,
        module: nn.Module,
        devices: Devices,
        *,
        detach: bool = False,
        reducer: Reducer | None = None,
        mark: Mark = no_mark,
    ) -> list[nn.Module]:
        """Return one replica of the module per device: see `replicate.replicate`."""
        devices = as_devices(devices)
        with mark(Phase.REPLICATE, devices[0].index):
            if self._cache is None or self._cache.module is not module:
                self._cache = ReplicaCache(module)
            cache = self._cache
            cache.refresh()
            cache.check_placed(devices[0])
        tensors, copies = copied(cache.parameters, cache.buffers, devices, detach, reducer, mark)
        with mark(Phase.REPLICATE, devices[0].index):
            return cache.bind(tensors, copies, detached=detach)


class ReplicaCache:
    """Copies of a module's tree, one per replica, in two sets: for training, and without gradients.

    Training needs a separate set, because activation checkpointing repeats the forward during
    backward, and calls without gradients may happen between forward and backward.

    The copies are made again if the module's parameters, submodules, hooks or plain attributes have
    changed (`eval()`, `dropout.p = 0.1`), or if a forward has written attributes or hooks of a
    replica, because replicas lose these after each forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._read()
        self._unchecked = True

    def _read(self) -> None:
        modules = self._modules = list(self.module.modules())
        self._types = list(map(type, modules))
        self._watched: list[dict[str, Any]] = [
            d for m in modules for d in (m.__dict__, m._modules, m._parameters, m._buffers)
        ]
        self._hooks = list(_hooks_of(modules))
        self._names, self._seen = whole(self._present)
        self._library = all(_is_library(m) for m in modules)
        self.parameters: list[torch.Tensor] = parameters_of(self.module)
        self.buffers: list[torch.Tensor] = buffers_of(self.module)
        self._replicas: dict[bool, list[_CachedReplica]] = {}
        self._orders: dict[bool, list[int]] = {}

    def refresh(self) -> bool:
        """If the module has changed, discard all copies; return whether it had changed."""
        changed = self._changed()
        if changed:
            self._read()
            self._unchecked = True
        return changed

    def check_placed(self, root: Device) -> None:
        """Raise RuntimeError unless all parameters and buffers are on `root` and initialized."""
        home = root.torch_device
        if self._unchecked or not all(tensor.device == home for tensor in self.parameters):
            check_placed(chain(self.parameters, self.buffers), root)
            self._unchecked = False

    def _present(self) -> tuple[list[Any], list[Any]]:
        """Return the names and values of all that is watched."""
        watched: list[dict[Any, Any]] = [*self._watched, *filter(None, self._hooks)]
        names = list(chain.from_iterable(watched))
        return names, list(chain.from_iterable(map(dict.values, watched)))

    def _changed(self) -> bool:
        names, values = whole(self._present)
        return (
            names != self._names
            or not same(values, self._seen)
            or list(map(type, self._modules)) != self._types
        )

    def bind(
        self,
        sources: Sequence[torch.Tensor],
        copies: Sequence[Sequence[torch.Tensor]],
        *,
        detached: bool = False,
    ) -> list[nn.Module]:
        """Return one replica per list in `copies`.

        In replica i, `copies[i][n]` replaces the module's tensor `sources[n]`. `detached` selects
        the copies for calls without gradients.
        """
        order = [id(source) for source in sources]
        replicas = self._replicas.get(detached, [])
        watching = not self._library or any(self._hooks) or any(GLOBAL_HOOKS.values())
        if (
            len(replicas) < len(copies)
            or order != self._orders[detached]
            or any(replica.watching != watching or replica.written() for replica in replicas)
        ):
            self._orders[detached] = order
            replicas = self._replicas[detached] = [
                _CachedReplica(self.module, sources, one, watching=watching) for one in copies
            ]
        else:
            for replica, tensors in zip(replicas, copies, strict=False):
                replica.bind(tensors)
        return [replica.root for replica in replicas[: len(copies)]]


def _is_library(module: nn.Module) -> bool:
    """Return whether a module's forward, hooks aside, is torch's own: it sets no attributes."""
    return (
        type(module).__module__.startswith("torch.nn.modules.") and "forward" not in module.__dict__
    )


class _CachedReplica:
    """One replica: its root module, and every place in the module tree that refers to a tensor.

    With `watching`, it keeps a record of its attributes, in which `written` finds changes. Only
    modules with hooks and modules from outside torch need one, because all others set no attributes
    in forward.
    """

    def __init__(
        self,
        module: nn.Module,
        sources: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        *,
        watching: bool,
    ) -> None:
        self.root = rebuild(module, {id(s): t for s, t in zip(sources, tensors, strict=True)})
        self.watching = watching
        self._bound = tensors
        numbers = {id(tensor): i for i, tensor in enumerate(tensors)}
        containers = list(_containers(self.root))
        self._dicts = [one for one in containers if type(one) is not list]
        self._lists = [one for one in containers if type(one) is list]
        entries = [
            *((holder, key, value) for holder in self._dicts for key, value in holder.items()),
            *((holder, key, value) for holder in self._lists for key, value in enumerate(holder)),
        ]
        places = [
            (position, holder, key, numbers[id(value)])
            for position, (holder, key, value) in enumerate(entries)
            if id(value) in numbers
        ]
        self._positions = [position for position, _, _, _ in places]
        self._holders = [holder for _, holder, _, _ in places]
        self._keys = [key for _, _, key, _ in places]
        self._pick = _picker([number for _, _, _, number in places])
        self._hooks = list(_hooks_of(self.root.modules())) if watching else []
        self._numbers = self._hook_numbers()
        self._seen = self._values() if watching else []

    def bind(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace the replica's tensors in every place that refers to them.

        The loop runs in C, because it runs for every tensor in every step.
        """
        if len(tensors) == len(self._bound) and all(map(is_, tensors, self._bound)):
            return
        self._bound = tensors
        picked = self._pick(tensors)
        deque(map(setitem, self._holders, self._keys, picked), maxlen=0)
        if self.watching:
            deque(map(setitem, repeat(self._seen), self._positions, picked), maxlen=0)

    def written(self) -> bool:
        """Return whether a forward has set attributes or hooks since the last `bind`.

        Always False without `watching`.
        """
        if not self.watching:
            return False
        return self._hook_numbers() != self._numbers or not same(self._values(), self._seen)

    def _hook_numbers(self) -> list[int]:
        """Return the numbers that torch has given the replica's hooks."""
        return list(chain.from_iterable(filter(None, self._hooks)))

    def _values(self) -> list[Any]:
        """Return all values of the replica's dicts and lists, in order.

        The list keeps each value alive, so that the id of a deleted value cannot be reused.
        """
        return [
            *chain.from_iterable(map(dict.values, self._dicts)),
            *chain.from_iterable(self._lists),
        ]


def _hooks_of(modules: Iterable[nn.Module]) -> Iterable[dict[int, Any]]:
    """Yield each module's dicts of hooks."""
    for module in modules:
        attributes = module.__dict__
        yield from (attributes[name] for name in HOOKS if name in attributes)


def _containers(root: nn.Module) -> Iterable[Any]:
    """Yield each module's attribute dict, and the lists and dicts in it that may contain tensors.

    Any list may, such as the `_flat_weights` of RNNs; of the dicts only those that `_HOLDERS`
    names.
    """
    for module in root.modules():
        yield module.__dict__
        for name, value in module.__dict__.items():
            if type(value) is list or (type(value) is dict and name in _HOLDERS):
                yield value


def _picker(numbers: Sequence[int]) -> Any:
    """Return a function that picks the items at `numbers`, in C if there are several."""
    if len(numbers) > 1:
        return itemgetter(*numbers)
    return lambda tensors: [tensors[number] for number in numbers]
