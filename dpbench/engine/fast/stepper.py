"""Stepper: one device's optimizer, which steps shards, and the groups of parameters in shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from dpbench.engine.errors import Refused
from dpbench.engine.fast.shards import ParamShard

ELEMENTWISE = (Adam, AdamW, SGD, RMSprop, Adagrad)
"""The optimizers that step every element independently: parameters may be joined and cut."""


class Stepper:
    """One device's optimizer, with the shards that it steps and its state by their weights.

    `leader` is the user's optimizer, whose options every other optimizer copies.
    """

    def __init__(
        self, optimizer: Optimizer, leader: Optimizer, shards: Sequence[ParamShard]
    ) -> None:
        self._optimizer = optimizer
        self._leader = leader
        self.shards = shards
        self._gradients = [(shard.weight, shard.gradient) for shard in shards]
        self._params = [
            [shard.weight for shard in shards if shard.group == g]
            for g in range(len(leader.param_groups))
        ]
        self.state: Any = defaultdict(dict)

    def step(self) -> None:
        """Step the shards with the present options of the user's optimizer."""
        for weight, gradient in self._gradients:
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
        try:
            for group, params in zip(groups, self._params, strict=True):
                group["params"] = params
            self._optimizer.state = self.state
            yield
        finally:
            if self._optimizer.state is not state_before:
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
