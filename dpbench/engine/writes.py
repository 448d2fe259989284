"""Writes: what forwards write that replicas share, or that is lost with them.

A replica has its own weights, buffers, attributes and dicts of hooks. What forward assigns to them
is lost with the replica; only replica 0's writes into the memory of weights and buffers stay. All
other objects are one for all replicas: a list that is an attribute, a dict that a hook refers to.
Forwards that write into such an object at the same time may read each other's values.

`Watch` therefore compares what is shared, and what replica 0 owns, before and after forwards. The
first forwards of a module with shared containers, in training and in evaluation, run one after
another, and so do those after a container was added. If they write into one, all later forwards do,
too.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from dpbench.engine.containers import first_tensor, same, whole
from dpbench.engine.errors import Refused
from dpbench.engine.replicate import HOOKS, OWNED
from dpbench.engine.settings import SAVED_RANDOM_STATES
from dpbench.engine.turn import InOrder, Turn

LARGE = 1000
"""Of a container with more entries, only the number and the last ones are compared."""
DEEP = 4
"""Containers are followed through so many others."""
_CONTAINERS = (dict, list, tuple, set, deque)
_SIMPLE = frozenset(
    (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Tensor)
)
_OF_TORCH = frozenset(("_parameters", "_buffers", "_modules", *OWNED))
_RECOMPUTED = ("_orig", "_g")
"""Suffixes of the weights from which torch's old utilities compute another in each forward."""


@dataclass
class _Seen:
    """What the forwards of one module have written so far."""

    shared: str = ""
    """The first shared container that was written."""
    tensor: bool = False
    """Whether a tensor was among what was written."""
    how: str = ""
    lost: str = ""
    waited: bool = False
    """Whether forwards have waited for each other, so that they cannot take turns."""
    modes: set[tuple[bool, bool]] = field(default_factory=set)
    """Those in which forwards have been watched, by `training` and whether there are gradients."""

    def write(self, change: _Change, how: str) -> None:
        """Note that forwards have written into a container."""
        self.shared = self.shared or change.name
        self.tensor = self.tensor or change.tensor
        self.how = how


_SEEN: WeakKeyDictionary[nn.Module, _Seen] = WeakKeyDictionary()


def note_of(module: nn.Module) -> str:
    """Return what replicas of a module have been seen to share or to lose, or ""."""
    seen = _SEEN.get(module, _Seen())
    shared = f"forward writes into {seen.shared}{seen.how}" if seen.shared else ""
    return "; ".join(filter(None, (shared, seen.lost)))


class Watch:
    """What the replicas of a module share, and a context that watches their forwards."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._shared: _Shared | None = None
        self.settled = True
        """Whether the next forwards run as the last ones did, which may have taken turns once."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Make `copy` and `pickle` look at the copy's containers."""
        return Watch, (self._module,)

    @contextmanager
    def forwards(self, replicas: Sequence[Any]) -> Iterator[Turn | None]:
        """Watch the replicas' forwards inside the context; yield the turns that they must take.

        Without turns, yield None. Raises Refused if forwards ran at the same time and have written
        a tensor into a container that they share, or if they write one and parts of them are
        repeated in backward.
        """
        module = self._module
        if replicas[0] is module:  # there is but one
            yield None
            return
        seen = _SEEN.setdefault(module, _Seen())
        mode = (module.training, torch.is_grad_enabled())
        first = mode not in seen.modes
        shared, new = self._read(first, seen)
        owned = _Owned(replicas[0]) if first else None
        turns = not seen.waited and (bool(seen.shared) or new)
        order = InOrder(len(replicas)) if turns else None
        at_once = not turns and not seen.waited and len(replicas) > 1
        saves = SAVED_RANDOM_STATES.saves
        try:
            yield order
        except Exception as error:
            # a replica that has read what another wrote may fail, for example in backward
            if at_once and shared is not None and (change := shared.change()) is not None:
                _refuse(seen, change, error)
            raise
        if owned is not None:
            seen.lost = seen.lost or owned.written()
        self.settled = order is None or bool(seen.shared)
        if order is not None and order.in_vain:
            seen.waited, seen.how = True, _WAITED
        change = None if shared is None else shared.change()
        if change is None:
            self._shared = shared
        elif at_once:
            _refuse(seen, change, None)
        else:
            seen.write(change, _WAITED if seen.waited else _IN_TURNS)
        seen.modes.add(mode)  # last: an interrupted step has not been watched
        if seen.tensor and torch.is_grad_enabled() and SAVED_RANDOM_STATES.saves > saves:
            raise Refused(f"forward writes into {seen.shared}{_REPEATED}")

    def _read(self, first: bool, seen: _Seen) -> tuple[_Shared | None, bool]:
        """Return what is shared now, and whether forwards may write into parts of it unseen so far.

        Where forwards take turns anyway, nothing needs to be compared: return None.
        """
        before, self._shared = self._shared, None
        if seen.shared and not first:
            return None, False
        if before is not None and not first and before.change() is None:
            return before, False
        shared = whole(lambda: _Shared(self._module))
        known = set() if first or before is None else before.holders
        return shared, not shared.holders <= known


def _refuse(seen: _Seen, change: _Change, cause: Exception | None) -> None:
    """Note a write by forwards that ran at the same time; raise Refused if it has a tensor."""
    seen.write(change, _BEGAN)
    if change.tensor:
        raise Refused(f"forward writes into {seen.shared}{_AT_ONCE}") from cause


_COPIED = ", of which replicas have copies, which may be older,"
_IN_TURNS = ": their forwards run one after another"
_BEGAN = _IN_TURNS + ", except in the step in which this began"
_WAITED = (
    ", but forwards wait for each other: they run at the same time, and may read what another has"
    " written"
)
_AT_ONCE = (
    ", in a step in which they ran at the same time, so that one may have read what another has"
    " written; no weight has been updated: call the step again, which lets forwards run one after"
    " another from then on"
)
_REPEATED = (
    ", and activation checkpointing repeats parts of forward in backward, where they would read"
    " what another replica has written; pass such tensors as arguments and results, or use one"
    " device or DistributedDataParallel"
)


class _Change(NamedTuple):
    """A container whose content has changed, and whether a tensor is among what is new."""

    name: str
    tensor: bool


class _Shared:
    """The containers that the replicas of a module share, with their content.

    The content is read in C, because it is read twice in every step. What becomes reachable later
    does so by a change of one of these containers.
    """

    def __init__(self, module: nn.Module) -> None:
        named = list(_shared_by(module))
        dicts, lists, others = dict[int, str](), dict[int, str](), dict[int, str]()
        for number, (name, holder) in enumerate(named):
            small = isinstance(holder, _CONTAINERS) and len(holder) <= LARGE
            kind = others if not small else dicts if isinstance(holder, dict) else lists
            kind[number] = name
        self.holders = {id(holder) for _, holder in named}
        self._dicts = [named[number][1] for number in dicts]
        self._lists = [named[number][1] for number in lists]
        self._others = [named[number][1] for number in others]
        self._names = [*dicts.values(), *dicts.values(), *lists.values(), *others.values()]
        trees = [part.__dict__ for part in module.modules()]
        self._children = [tree["_modules"].values() for tree in trees if tree.get("_modules")]
        self._hooks = [tree[name] for tree in trees for name in HOOKS if name in tree]
        self._lengths = list(map(len, self._parts()))
        self._content = list(chain.from_iterable(self._parts()))
        self._tensors = [
            one for one in self._content if isinstance(one, torch.Tensor) and not one.is_inference()
        ]
        self._versions = list(map(_version, self._tensors))

    def _parts(self) -> list[Any]:
        """Return the content of each container: keys and values of dicts, then all others.

        The children of modules, and the numbers of their hooks, are the last.
        """
        values = map(dict.values, self._dicts)
        others = map(_content, self._others)
        tree = (*self._children, *filter(None, self._hooks))
        return [*self._dicts, *values, *self._lists, *others, *tree]

    def change(self) -> _Change | None:
        """Return the first change since the constructor, or None."""
        content = whole(lambda: list(chain.from_iterable(self._parts())))
        if not same(content, self._content):
            known = set(map(id, self._content))
            new = (one for one in content if id(one) not in known)
            return _Change(self._changed(), any(first_tensor(one) is not None for one in new))
        versions = list(map(_version, self._tensors))
        if versions == self._versions:
            return None
        pairs = zip(self._tensors, versions, self._versions, strict=True)
        written = {id(one) for one, now, before in pairs if now != before}
        named = zip(self._names, self._parts(), strict=False)
        name = next(name for name, part in named if any(id(one) in written for one in part))
        return _Change(name, tensor=True)

    def _changed(self) -> str:
        """Return the name of the first container whose content has changed."""
        before = iter(self._content)
        for name, part, length in zip(self._names, self._parts(), self._lengths, strict=False):
            if not same([*part], [*islice(before, length)]):
                return name
        return "the children or hooks of a module"


_version = attrgetter("_version")


def _content(holder: Any) -> list[Any]:
    """Return what is compared of a function, or of a large container."""
    if isinstance(holder, FunctionType):
        return [value for _, value in _variables(holder)]
    values = [*holder.values()] if isinstance(holder, dict) else [*holder]
    return [len(values), *values[-LARGE:]]


def _shared_by(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the containers and functions that replicas of a module share, with names.

    They are reached from the attributes, classes and hooks of the modules in its tree. The
    attributes of these modules themselves are among them: a hook may write into the original's.
    """
    named = list(module.named_modules())
    visited = {id(part) for _, part in named}
    waiting: list[tuple[str, Any, int]] = []
    for prefix, part in named:
        attributes = part.__dict__
        place = f"{prefix}." if prefix else ""
        for name in HOOKS:
            for hook in attributes.get(name, {}).values():
                waiting.append((f"a hook of {prefix or 'the module'}", hook, 0))
        if type(part).__module__.startswith("torch.nn.modules."):
            continue
        for kind in type(part).__mro__:
            if not _is_foreign(kind) and id(kind) not in visited:
                visited.add(id(kind))
                waiting += [(f"{kind.__name__}.{n}", one, 0) for n, one in vars(kind).items()]
        own = {name: one for name, one in attributes.items() if name not in _OF_TORCH}
        waiting += [(f"{place}{name}", one, 0) for name, one in own.items()]
        yield f"the attributes of {prefix or 'the module'} itself{_COPIED}", attributes
    while waiting:
        name, value, depth = waiting.pop()
        if type(value) in _SIMPLE or id(value) in visited or depth > DEEP:
            continue
        visited.add(id(value))
        holder, parts = _opened(name, value)
        if holder is not None:
            yield f"{name}, which replicas share", holder
        waiting += [(part, one, depth + 1) for part, one in parts]


def _opened(name: str, value: Any) -> tuple[Any, Iterable[tuple[str, Any]]]:
    """Return what of an object can be written, or None, and the named objects that it refers to."""
    holder: Any = None
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        holder, parts = value, _entries(name, value.items())
    elif isinstance(value, tuple | list | set | deque):
        holder, parts = value, _entries(name, enumerate(value))
    elif isinstance(value, FunctionType):
        parts = [*_variables(value), *_globals(value)]
        holder = value if parts else None
    elif isinstance(value, MethodType):
        parts = [(name, value.__self__), (name, value.__func__)]
    elif isinstance(value, partial):
        parts = [(name, value.func), (name, value.args), (name, value.keywords)]
    elif _is_followed(value):
        holder = value.__dict__
        parts = [(f"{name}.{key}", one) for key, one in holder.items()]
    return holder, parts


def _entries(name: str, items: Iterable[tuple[Any, Any]]) -> list[tuple[str, Any]]:
    entries = [*items]
    return [] if len(entries) > LARGE else [(f"{name}[{key!r}]", one) for key, one in entries]


def _variables(function: FunctionType) -> list[tuple[str, Any]]:
    """Return the variables of enclosing functions to which a function refers, by name."""
    found = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__" and cell != _EMPTY:
            found.append((name, cell.cell_contents))
    return found


_EMPTY = CellType()


def _globals(function: FunctionType) -> list[tuple[str, Any]]:
    """Return the global containers that a function names, and its defaults."""
    known = function.__globals__
    named = [(name, known.get(name)) for name in function.__code__.co_names]
    defaults = [(f"a default of {function.__name__}", one) for one in function.__defaults__ or ()]
    return [(name, one) for name, one in (*named, *defaults) if isinstance(one, _CONTAINERS)]


def _is_followed(value: Any) -> bool:
    """Return whether an object has attributes that forward may write."""
    kind = type(value)
    if issubclass(kind, type | ModuleType):
        return False
    known = issubclass(kind, nn.Module | SimpleNamespace)
    return isinstance(getattr(value, "__dict__", None), dict) and (known or not _is_foreign(kind))


def _is_foreign(kind: type) -> bool:
    """Return whether a class belongs to torch, numpy or Python."""
    package = kind.__module__.partition(".")[0]
    return package in ("torch", "numpy") or package in sys.stdlib_module_names


class _Owned:
    """What a replica owns, as it was before its forward."""

    def __init__(self, replica: Any) -> None:
        self._parts = list(replica.named_modules()) if isinstance(replica, nn.Module) else []
        self._before = [_owned_by(part) for _, part in self._parts]

    def written(self) -> str:
        """Return a clause that names the first thing that forward has assigned or added, or ""."""
        for (prefix, part), before in zip(self._parts, self._before, strict=True):
            now = _owned_by(part)
            if before.hooks != now.hooks:
                return _LOST_HOOK.format(f"the submodule {prefix}" if prefix else "the module")
        for (prefix, part), before in zip(self._parts, self._before, strict=True):
            now = _owned_by(part)
            for name in {**before.values, **now.values}:
                anew = any(hasattr(part, name + suffix) for suffix in _RECOMPUTED)
                pair = [one.values.get(name, ...) for one in (before, now)]
                if not anew and not same(*([one] for one in pair)):
                    return _LOST.format(f"{prefix}.{name}".removeprefix("."))
            for name, memory in before.weights.items():
                if not getattr(part, name).is_set_to(memory):
                    return _LOST.format(f"{prefix}.{name}.data".removeprefix("."))
        return ""


_LOST = (
    "forward assigns {}, which is lost with its replica, as in torch.nn.DataParallel; write into a"
    " registered buffer or weight in place, of which replica 0's writes stay"
)
_LOST_HOOK = (
    "forward adds a hook to {}, which is lost with its replica; if it is to stay, call the module"
    " once before"
)


class _Parts(NamedTuple):
    values: dict[str, Any]
    hooks: list[int]
    weights: dict[str, torch.Tensor]


def _owned_by(part: nn.Module) -> _Parts:
    attributes = part.__dict__
    weights = attributes.get("_former_parameters", {})
    values = {name: one for name, one in attributes.items() if name not in _OF_TORCH}
    for name in ("_buffers", "_modules"):
        values.update(attributes.get(name, {}))
    hooks = [number for name in HOOKS for number in attributes.get(name, ())]
    moves = isinstance(part, nn.RNNBase)  # on a GPU, cuDNN puts its weights into one buffer
    memory = {} if moves else {n: w.detach() for n, w in weights.items()}
    return _Parts(values, hooks, memory)
