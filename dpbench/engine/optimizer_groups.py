"""Stepper: one device's optimizer, made to step tensors of the engine's choosing; and which optimizers allow it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from dpbench.engine.errors import Refused

ELEMENTWISE = (Adam, AdamW, SGD, RMSprop, Adagrad)
"""Optimizers that treat every element by itself, so that parameters may be joined and cut."""

Stepped = tuple[torch.Tensor, torch.Tensor, int]
"""A weight, its gradient, and the number of the optimizer's group that it belongs to."""


class Stepper:
    """One device's optimizer over the weights that it steps, with their state by unit.

    A `natural` one is the user's optimizer, which steps its own parameters with its own state.
    """

    def __init__(self, optimizer: Optimizer, leader: Optimizer, units: Sequence[Stepped], *, natural: bool) -> None:
        self._optimizer, self._leader, self._units, self._natural = optimizer, leader, units, natural
        self._params = [[weight for weight, _, group in units if group == g] for g in range(len(leader.param_groups))]
        self.state: Any = defaultdict(dict)

    def step(self) -> None:
        """Step the units with the leader's present options."""
        for weight, gradient, _ in self._units:
            weight.grad = gradient
        with self._swapped():
            self._optimizer.step()

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        """Put the units and their state in the place of the optimizer's own."""
        if self._natural:
            yield
            return
        groups, leaders = self._optimizer.param_groups, self._leader.param_groups
        kept = [group["params"] for group in groups], self._optimizer.state
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
            for group, params in zip(groups, kept[0], strict=True):
                group["params"] = params
            self._optimizer.state = kept[1]


@dataclass(frozen=True)
class Group:
    """Parameters, by number, that may be stepped as one tensor: of one of the optimizer's groups, with alike state."""

    number: int
    parameters: tuple[int, ...]


def groups_of(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> list[Group]:
    """Return the optimizer's groups, cut where states differ in more than elements (a parameter that joined later).

    Parameters that need no gradient are never stepped. Raises Refused for tensors that the module does not have.
    """
    number = {id(p): n for n, p in enumerate(parameters)}
    found = []
    for g, group in enumerate(optimizer.param_groups):
        alike: dict[Hashable, list[int]] = {}
        for parameter in group["params"]:
            if id(parameter) not in number:
                raise Refused(
                    f"the optimizer steps a tensor of shape {tuple(parameter.shape)} that the module does not have as "
                    "a parameter; schedules with replicas=persistent cannot carry it: use schedule='cached'"
                )
            if parameter.requires_grad:
                alike.setdefault(_form(optimizer.state.get(parameter, {}), parameter), []).append(number[id(parameter)])
        found += [Group(g, tuple(numbers)) for numbers in alike.values()]
    return found


def _form(state: Mapping[str, Any], parameter: torch.Tensor) -> Hashable:
    """Return what two parameters' states have in common if one tensor can stand for both."""
    return tuple(
        (name, "" if is_elementwise(name, value, parameter) else _plain(value)) for name, value in sorted(state.items())
    )


def is_elementwise(name: str, value: Any, parameter: torch.Tensor) -> bool:
    """Return whether an entry of an optimizer's state has a number for each element of the parameter."""
    return isinstance(value, torch.Tensor) and name != "step" and value.shape == parameter.shape


def _plain(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), *value.flatten().tolist())
    return value if isinstance(value, Hashable) else id(value)


def mirror(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same kind and options, without parameters or state, as unpickling would make it."""
    groups: list[Mapping[str, Any]] = [{**group, "params": []} for group in optimizer.param_groups]
    twin: Optimizer = type(optimizer).__new__(type(optimizer))
    twin.__setstate__({"defaults": optimizer.defaults, "state": defaultdict(dict), "param_groups": groups})
    return twin
