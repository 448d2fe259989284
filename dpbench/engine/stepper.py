"""Stepper: one device's optimizer, made to step tensors of the engine's choosing; and which optimizers allow it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from dpbench.schedule import Schedule

ELEMENTWISE = (Adam, AdamW, SGD, RMSprop, Adagrad)
"""Optimizers that treat every element by itself, so that parameters may be joined and cut."""

Stepped = tuple[torch.Tensor, torch.Tensor, int]
"""A weight, its gradient, and the number of the optimizer's group that it belongs to."""


class Stepper:
    """One device's optimizer over the weights that are its to step."""

    def __init__(self, optimizer: Optimizer, leader: Optimizer, units: Sequence[Stepped]) -> None:
        self._optimizer, self._leader, self._units = optimizer, leader, units
        self._params = [[weight for weight, _, group in units if group == g] for g in range(len(leader.param_groups))]
        given = [p for group in leader.param_groups for p in group["params"]]
        mine = [p for params in self._params for p in params]
        self.natural = (
            optimizer is leader and len(given) == len(mine) and all(a is b for a, b in zip(given, mine, strict=True))
        )
        self._state: Any = defaultdict(dict)

    @property
    def state(self) -> Any:
        """Return the optimizer's state by unit."""
        return self._optimizer.state if self.natural else self._state

    @state.setter
    def state(self, state: Any) -> None:
        self._state = state

    def step(self) -> None:
        """Step the units with the leader's present options."""
        for weight, gradient, _ in self._units:
            weight.grad = gradient
        with self._swapped():
            self._optimizer.step()

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        """Put the units and their state in the place of the optimizer's own."""
        if self.natural:
            yield
            return
        groups, leaders = self._optimizer.param_groups, self._leader.param_groups
        kept = [group["params"] for group in groups], self._optimizer.state
        if groups is not leaders:
            for group, leader in zip(groups, leaders, strict=True):
                group.update({name: value for name, value in leader.items() if name != "params"})
        for group, params in zip(groups, self._params, strict=True):
            group["params"] = params
        self._optimizer.state = self._state
        try:
            yield
        finally:
            self._state = self._optimizer.state
            for group, params in zip(groups, kept[0], strict=True):
                group["params"] = params
            self._optimizer.state = kept[1]


def groups_of(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the numbers of each group's parameters; those that need no gradient are never stepped."""
    number = {id(p): n for n, p in enumerate(parameters)}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in number:
                raise ValueError(
                    f"the optimizer steps a tensor of shape {tuple(parameter.shape)} that is no parameter of the "
                    "module; schedules with persistent replicas cannot carry it: use schedule='cached'"
                )
    return [[number[id(p)] for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]


def why_not(optimizer: Optimizer, schedule: Schedule) -> str:
    """Return what forbids this optimizer on a schedule, or "" if nothing does."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        return "LBFGS asks for the loss several times a step, through a closure; TrainStep takes one step at a time"
    if schedule.optimizer == "flat" and type(optimizer) not in ELEMENTWISE:
        names = ", ".join(one.__name__ for one in ELEMENTWISE)
        return f"optimizer=flat needs an elementwise optimizer ({names}), not {kind}"
    if schedule.update == "sharded" and type(optimizer) not in ELEMENTWISE:
        return f"update=sharded needs an optimizer that treats parameters one by one, and does not know {kind}"
    return ""


def mirror(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same kind and options, without parameters or state, as unpickling would make it."""
    groups: list[Mapping[str, Any]] = [{**group, "params": []} for group in optimizer.param_groups]
    twin: Optimizer = type(optimizer).__new__(type(optimizer))
    twin.__setstate__({"defaults": optimizer.defaults, "state": defaultdict(dict), "param_groups": groups})
    return twin
