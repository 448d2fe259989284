"""Optimizer state: `optimizer.state` has an entry per parameter; the devices store shards.

Reading and changing `optimizer.state` has the same effect as in a loop without the engine. The
first access gathers the values from the shards. From then on they are copied from the entries to
the shards before each step, and back after each step, because the training loop may keep references
to the entries. If the state is never accessed, no values are copied.
"""

from __future__ import annotations

from collections import UserDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from dpbench.engine.errors import Refused

State = defaultdict[Any, Any]
"""An optimizer's state in torch's format: for each tensor, a dict of values by name."""


class FetchedState(UserDict[Any, Any]):
    """An optimizer's state by parameter, which the function `fetch` gathers at the first access."""

    def __init__(self, fetch: Callable[[], State]) -> None:
        self._fetch: Callable[[], State] | None = fetch
        self._entries = State(dict)

    @property
    def fetched(self) -> bool:
        """Return whether the user's code has accessed the entries, and may have changed them."""
        return self._fetch is None

    @property
    def data(self) -> State:  # type: ignore[override]
        """The entries, which every method of a UserDict accesses by this attribute."""
        if self._fetch is not None:
            fetch, self._fetch = self._fetch, None
            self._entries.update(fetch())
        return self._entries

    def store(self, state: State) -> None:
        """Write the values of `state` into the entries.

        A tensor is overwritten in place if the new value has the same shape and dtype.
        """
        for parameter, values in state.items():
            entry = self.data[parameter]
            for name, value in values.items():
                held = entry.get(name)
                if _alike(held, value):
                    held.copy_(value)
                else:
                    entry[name] = value

    def __missing__(self, key: Any) -> Any:
        return self.data[key]

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the entry of a parameter, or the default if there is none."""
        return self.data.get(key, default)

    def copy(self) -> State:  # type: ignore[override]
        """Return a copy that is an ordinary defaultdict, as torch's."""
        return self.data.copy()

    __copy__ = copy  # type: ignore[assignment]

    def __or__(self, other: Any) -> Any:
        return self.data | other

    def __reduce__(self) -> Any:
        return self.data.__reduce__()


def _alike(held: Any, value: Any) -> bool:
    return (
        isinstance(held, torch.Tensor)
        and isinstance(value, torch.Tensor)
        and held.shape == value.shape
        and held.dtype == value.dtype
    )


ELEMENTWISE = (Adam, AdamW, SGD, RMSprop, Adagrad)
"""The optimizers that step every element independently: parameters may be joined and cut."""

Stepped = tuple[torch.Tensor, torch.Tensor, int]
"""A weight, its gradient, and the index of its optimizer group."""


class Stepper:
    """One device's optimizer, with the shards that it steps and its state by shard.

    `leader` is the user's optimizer, whose options every other optimizer copies.
    """

    def __init__(self, optimizer: Optimizer, leader: Optimizer, shards: Sequence[Stepped]) -> None:
        self._optimizer = optimizer
        self._leader = leader
        self._shards = shards
        self._params = [
            [weight for weight, _, group in shards if group == g]
            for g in range(len(leader.param_groups))
        ]
        self.state: Any = defaultdict(dict)

    def step(self) -> None:
        """Step the shards with the present options of the user's optimizer."""
        for weight, gradient, _ in self._shards:
            weight.grad = gradient
        with self._swapped():
            self._optimizer.step()

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        """Give the optimizer the shards, their state, and the present options of `leader`."""
        groups, leaders = self._optimizer.param_groups, self._leader.param_groups
        params_before = [group["params"] for group in groups]
        state_before = self._optimizer.state
        if groups is not leaders:
            for group, leader in zip(groups, leaders, strict=True):
                group.update({name: value for name, value in leader.items() if name != "params"})
        for group, params in zip(groups, self._params, strict=True):
            group["params"] = params
        self._optimizer.state = self.state
        try:
            yield
        finally:
            self.state = self._optimizer.state
            for group, params in zip(groups, params_before, strict=True):
                group["params"] = params
            self._optimizer.state = state_before


@dataclass(frozen=True)
class OptimizerGroup:
    """Indices of parameters that can be stepped as one tensor.

    `number` is the index of their optimizer group.
    """

    number: int
    parameters: tuple[int, ...]


def groups_of(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> list[OptimizerGroup]:
    """Return the optimizer's groups, split where parameters' states cannot be joined in one tensor.

    They cannot, for example, if one parameter has been stepped more often than another. Parameters
    that require no gradient are left out. Raises Refused if the optimizer steps a tensor that is
    not one of `parameters`.
    """
    number = {id(p): n for n, p in enumerate(parameters)}
    groups = []
    for g, group in enumerate(optimizer.param_groups):
        alike: dict[Hashable, list[int]] = {}
        for parameter in group["params"]:
            if id(parameter) not in number:
                raise Refused(
                    f"the optimizer steps a tensor of shape {tuple(parameter.shape)} that is not a"
                    " parameter of the module, which kept replicas cannot handle: use"
                    " schedule='cached'"
                )
            if parameter.requires_grad:
                alike.setdefault(_form(optimizer.state.get(parameter, {}), parameter), []).append(
                    number[id(parameter)]
                )
        groups += [OptimizerGroup(g, tuple(numbers)) for numbers in alike.values()]
    return groups


def _form(state: Mapping[str, Any], parameter: torch.Tensor) -> Hashable:
    """Return a key that is equal for parameters whose optimizer states can be joined."""
    return tuple(
        (name, "" if is_elementwise(name, value, parameter) else _plain(value))
        for name, value in sorted(state.items())
    )


def is_elementwise(name: str, value: Any, parameter: torch.Tensor) -> bool:
    """Return whether the state's entry `name` has one number per element of the parameter."""
    return isinstance(value, torch.Tensor) and name != "step" and value.shape == parameter.shape


def _plain(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), *value.flatten().tolist())
    return value if isinstance(value, Hashable) else id(value)


def mirror(optimizer: Optimizer) -> Optimizer:
    """Return a new optimizer of the same type and options, without parameters and state.

    As pickle does when it restores an object, this does not call the constructor.
    """
    groups: list[Mapping[str, Any]] = [{**group, "params": []} for group in optimizer.param_groups]
    twin: Optimizer = type(optimizer).__new__(type(optimizer))
    twin.__setstate__(
        {"defaults": optimizer.defaults, "state": defaultdict(dict), "param_groups": groups}
    )
    return twin
