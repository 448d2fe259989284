"""Cached replicas: the copies of the tree of modules are kept, and each step only binds new tensors to them.

Building the trees is most of what replicate costs the host; binding costs some tens of nanoseconds a tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import itemgetter, setitem
from typing import Any

import torch
from torch import nn

from dpbench.devices import Device
from dpbench.engine.replicate import check_placed, rebuild, unique


class Trees:
    """One kept copy of a module's tree per replica.

    What the trees were copied from is compared before every use: a module whose parameters, submodules or plain
    attributes have changed (`eval()`, `dropout.p = 0.1`) is copied anew. So is, every time, one whose forward writes
    attributes: what torch's replicas forget after each forward must not live on in a kept one.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._trees: list[_Tree] = []
        self._checked = False
        self._forgets = True
        self._order: list[int] = []
        self._read()

    def _read(self) -> None:
        """Take down the module as it is now."""
        modules = list(self.module.modules())
        self._watched: list[dict[str, Any]] = [d for m in modules for d in (m.__dict__, m._modules)]
        self._seen = [dict(watched) for watched in self._watched]
        self._holders: list[dict[str, Any]] = [d for m in modules for d in (m._parameters, m._buffers)]
        self._ids = [id(tensor) for holder in self._holders for tensor in holder.values()]
        self.parameters: list[torch.Tensor] = unique(self.module.parameters())
        self.buffers: list[torch.Tensor] = unique(self.module.buffers())
        self._trees = []

    def refresh(self, root: Device) -> bool:
        """Read the module again if it has changed, and check that it is on `root`; return whether it had changed."""
        changed = self._changed()
        if changed:
            self._read()
        home = root.torch_device
        if changed or not all(tensor.device == home for tensor in chain(self.parameters, self.buffers)):
            check_placed(chain(self.parameters, self.buffers), root)
        return changed

    def _changed(self) -> bool:
        """Tell whether the module is no longer what was read."""
        if [id(tensor) for holder in self._holders for tensor in holder.values()] != self._ids:
            return True
        try:
            return self._watched != self._seen
        except (RuntimeError, ValueError):  # tensors and arrays that are not the same object refuse to be compared
            return True

    def bind(self, sources: Sequence[torch.Tensor], copies: Sequence[Sequence[torch.Tensor]]) -> list[nn.Module]:
        """Return one replica per list of `copies`, which stand for the module's tensors in the order of `sources`."""
        order = [id(source) for source in sources]
        if len(self._trees) < len(copies) or order != self._order or not self._may_stay():
            self._order = order
            self._trees = [_Tree(self.module, sources, one) for one in copies]
        else:
            for tree, tensors in zip(self._trees, copies, strict=False):
                tree.bind(tensors)
        return [tree.root for tree in self._trees[: len(copies)]]

    def _may_stay(self) -> bool:
        """Tell whether the trees are as they were built, which is looked at once: after their first forward."""
        if not self._checked:
            self._checked = True
            self._forgets = not any(tree.written() for tree in self._trees)
        return self._forgets


class _Tree:
    """One replica: its root module, and every place in it that holds a tensor of the original."""

    def __init__(self, module: nn.Module, sources: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        self.root = rebuild(module, {id(s): t for s, t in zip(sources, tensors, strict=True)})
        numbers = {id(tensor): i for i, tensor in enumerate(tensors)}
        places = [
            (holder, key, numbers[id(value)]) for holder, key, value in _entries(self.root) if id(value) in numbers
        ]
        self._holders = [holder for holder, _, _ in places]
        self._keys = [key for _, key, _ in places]
        self._pick = _picker([number for _, _, number in places])
        self._plain = self._attributes()

    def bind(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put each tensor wherever the replica holds it, a loop that never enters Python code."""
        deque(map(setitem, self._holders, self._keys, self._pick(tensors)), maxlen=0)

    def written(self) -> bool:
        """Tell whether a forward has bound attributes anew, tensors of the original apart."""
        now = self._attributes()
        return now.keys() != self._plain.keys() or any(now[key] is not value for key, value in self._plain.items())

    def _attributes(self) -> dict[tuple[int, Any], Any]:
        """Return every entry that binding does not write; the values are kept, so that no id is reused."""
        bound = {(id(holder), key) for holder, key in zip(self._holders, self._keys, strict=True)}
        return {
            (id(holder), key): value for holder, key, value in _entries(self.root) if (id(holder), key) not in bound
        }


def _entries(root: nn.Module) -> Iterable[tuple[Any, Any, Any]]:
    """Yield (holder, key, value) of all that a tree's modules have, one level into their own dicts and lists.

    Modules that keep tensors in containers of their own (RNNs keep `_flat_weights`) are so found without knowing them.
    """
    for module in root.modules():
        for name, value in module.__dict__.items():
            yield module.__dict__, name, value
            if type(value) is list:
                yield from ((value, i, part) for i, part in enumerate(value))
            elif type(value) is dict and name in ("_parameters", "_buffers", "_modules", "_former_parameters"):
                yield from ((value, key, part) for key, part in value.items())


def _picker(numbers: Sequence[int]) -> Any:
    """Return a function that picks those items of a sequence, in C."""
    if len(numbers) > 1:
        return itemgetter(*numbers)
    return lambda tensors: [tensors[number] for number in numbers]
