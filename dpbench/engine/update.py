"""Update: reduced gradients to new weights, on device 0, on each device, or on each device a share.

A unit is what one device's optimizer steps: a parameter, or a slice of a flat buffer. The optimizer that the user
made steps device 0's units, so that its param_groups, schedulers and hooks are the ones that count; the other
devices' optimizers follow its options.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from dpbench.devices import Device
from dpbench.engine.persistent import Persistent
from dpbench.engine.reduce import arrive
from dpbench.engine.storage import FlatWeights, line
from dpbench.records import Mark, Phase
from dpbench.schedule import Schedule

ELEMENTWISE = (Adam, AdamW, SGD, RMSprop, Adagrad)
"""Optimizers that treat every element by itself, so that parameters may be joined and cut."""

Sources = Sequence[tuple[Device, Sequence[torch.Tensor | None]]]
"""Gradients by parameter, of each replica that has some."""


@dataclass(frozen=True)
class Piece:
    """Where elements [start, stop) of a parameter lie in a unit: from `at`."""

    parameter: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Unit:
    """One tensor that an optimizer steps, its gradient, what it is made of, and where other devices keep it."""

    weight: torch.Tensor
    gradient: torch.Tensor
    group: int
    pieces: tuple[Piece, ...]
    twins: tuple[torch.Tensor, ...]


class Update:
    """All devices' units and optimizers."""

    def __init__(
        self,
        optimizer: Optimizer,
        replicas: Persistent,
        flat: FlatWeights | None,
        devices: Sequence[Device],
        schedule: Schedule,
        mark: Mark,
    ) -> None:
        self.optimizer, self._replicas, self._devices, self._mark = optimizer, replicas, devices, mark
        self._comm_dtype = torch.bfloat16 if schedule.comm_dtype == "bf16" else None
        self._groups = groups_of(optimizer, replicas.parameters[0])
        self._sharded = schedule.update == "sharded"
        self.owners = range(1 if schedule.update == "root" else len(devices))
        if schedule.optimizer == "flat":
            assert flat is not None
            self._units = [self._slices(flat, i) for i in self.owners]
        else:
            self._units = [self._whole(i) for i in self.owners]
        self._steppers = [
            _Stepper(optimizer if i == 0 else _mirror(optimizer), optimizer, units)
            for i, units in enumerate(self._units)
        ]
        self._hooks = [
            optimizer.register_state_dict_pre_hook(lambda _: self._export()),
            optimizer.register_load_state_dict_post_hook(lambda _: self._import()),
        ]
        self._import()

    def _whole(self, i: int) -> list[Unit]:
        """Return a unit for every parameter that device i steps: all, or its share by size."""
        parameters = self._replicas.parameters
        mine = [(g, n) for g, numbers in enumerate(self._groups) for n in numbers]
        if self._sharded:
            share = _shares([parameters[0][n].numel() for _, n in mine], len(self._devices))
            mine = [pair for pair, owner in zip(mine, share, strict=True) if owner == i]
        units = []
        for group, n in mine:
            weight = parameters[i][n]
            with self._devices[i].guard():
                gradient = torch.zeros_like(weight, requires_grad=False)
            piece = Piece(n, 0, weight.numel(), 0)
            units.append(Unit(weight, gradient, group, (piece,), tuple(one[n].data for one in parameters)))
        return units

    def _slices(self, flat: FlatWeights, i: int) -> list[Unit]:
        """Return a unit for every flat buffer that an optimizer's group fills, or for device i's slice of it."""
        units = []
        group_of = {n: g for g, numbers in enumerate(self._groups) for n in numbers}
        for f, plan in enumerate(flat.layout.flats):
            group = group_of.get(plan.slots[0].parameter)
            if group is None:
                continue
            start, stop = _cut(plan.size, len(self._devices), i) if self._sharded else (0, plan.size)
            pieces = tuple(
                Piece(
                    s.parameter, max(s.start, start) - s.start, min(s.stop, stop) - s.start, max(s.start, start) - start
                )
                for s in plan.slots
                if max(s.start, start) < min(s.stop, stop)
            )
            twins = tuple(flats[f][start:stop] for flats in self._replicas.flats)
            with self._devices[i].guard():
                weight = twins[i].detach().requires_grad_()
                gradient = torch.zeros_like(twins[i])
            if start < stop:
                units.append(Unit(weight, gradient, group, pieces, twins))
        return units

    def collect(self, i: int, sources: Sources, numbers: Sequence[int] | None = None) -> None:
        """Add up the sources' gradients, in order, into the units of device i; of the numbered parameters, or all."""
        device, wanted = self._devices[i], None if numbers is None else set(numbers)
        with self._mark(Phase.REDUCE, device.index), device.guard(), torch.no_grad():
            for other, gradients in sources:
                device.wait(other)
                device.borrow([g for g in gradients if g is not None])
            for unit in self._units[i]:
                for piece in unit.pieces:
                    if wanted is None or piece.parameter in wanted:
                        self._sum(device, unit, piece, [gradients[piece.parameter] for _, gradients in sources])

    def _sum(self, device: Device, unit: Unit, piece: Piece, found: Sequence[torch.Tensor | None]) -> None:
        """Write the sum of one piece; a replica that did not use the parameter adds nothing."""
        whole = len(unit.pieces) == 1 and unit.gradient.numel() == piece.stop - piece.start == unit.weight.numel()
        separate = whole and unit.gradient.dim() != 1
        target = unit.gradient if separate else line(unit.gradient)[piece.at : piece.at + piece.stop - piece.start]
        comm = self._comm_dtype if len(found) > 1 else None
        parts = []
        for part in found:
            if part is None:
                continue
            if part.layout is not torch.strided:
                raise ValueError(
                    "replicas=persistent needs dense gradients, and one is sparse; use schedule='cached', or "
                    "sparse=False"
                )
            mine = part if separate else line(part)[piece.start : piece.stop]
            parts.append(arrive(mine, device, comm))
        if not parts:
            target.zero_()
        elif len(parts) == 1:
            target.copy_(parts[0])
        else:
            torch.add(parts[0], parts[1], out=target)
            for part in parts[2:]:
                target.add_(part)

    def show(self) -> None:
        """Put the reduced gradients where the module's user looks for them, as far as device 0 has them whole."""
        parameters = self._replicas.parameters[0]
        for n, view in self._shown().items():
            parameters[n].grad = view

    def _shown(self) -> dict[int, torch.Tensor | None]:
        shown: dict[int, torch.Tensor | None] = {n: None for numbers in self._groups for n in numbers}
        for unit in self._units[0]:
            for piece in unit.pieces:
                like = self._replicas.parameters[0][piece.parameter]
                if piece.stop - piece.start == like.numel():
                    at = unit.gradient.storage_offset() + piece.at
                    shown[piece.parameter] = unit.gradient.as_strided(like.size(), like.stride(), at)
        return shown

    def step(self, i: int) -> None:
        """Let device i's optimizer step its units."""
        device = self._devices[i]
        with self._mark(Phase.OPTIMIZER, device.index), device.guard():
            self._steppers[i].step()

    def spread(self, i: int) -> None:
        """Copy to device i what the other devices have stepped for it."""
        device = self._devices[i]
        with self._mark(Phase.REPLICATE, device.index), device.guard(), torch.no_grad():
            for j in self.owners:
                if j != i:
                    device.wait(self._devices[j])
                    for unit in self._units[j]:
                        unit.twins[i].copy_(unit.weight.detach(), non_blocking=True)

    @property
    def shared(self) -> bool:
        """Tell whether devices have to exchange what they stepped."""
        return self._sharded

    def gather_gradients(self) -> None:
        """Bring the whole reduced gradient to device 0, after a last step of sharded updates."""
        parameters = self._replicas.parameters[0]
        for units in self._units:
            for unit in units:
                for piece in unit.pieces:
                    p = parameters[piece.parameter]
                    if p.grad is None:
                        p.grad = torch.zeros_like(p)
                    part = line(unit.gradient)[piece.at : piece.at + piece.stop - piece.start]
                    line(p.grad)[piece.start : piece.stop].copy_(part)

    def _export(self) -> None:
        """Put every parameter's optimizer state, gathered from all units, where `optimizer.state_dict` reads it."""
        state: defaultdict[Any, Any] = defaultdict(dict)
        owners = self.owners if self._sharded else self.owners[:1]
        with torch.no_grad():
            for i in owners:
                for unit in self._units[i]:
                    for name, value in self._steppers[i].state.get(unit.weight, {}).items():
                        for piece in unit.pieces:
                            self._export_piece(state, unit, piece, name, value)
        if not self._steppers[0].natural:
            self.optimizer.state = state

    def _export_piece(self, state: Any, unit: Unit, piece: Piece, name: str, value: Any) -> None:
        parameter = self._replicas.parameters[0][piece.parameter]
        own = state[parameter]
        if not isinstance(value, torch.Tensor) or name == "step" or value.numel() != unit.weight.numel():
            own[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
            return
        if name not in own:
            own[name] = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False)
        part = line(value)[piece.at : piece.at + piece.stop - piece.start]
        line(own[name])[piece.start : piece.stop].copy_(part)

    def _import(self) -> None:
        """Take every unit's state from the parameters' in the user's optimizer."""
        given = self.optimizer.state
        with torch.no_grad():
            for i in self.owners:
                if self._steppers[i].natural:
                    continue
                fresh: defaultdict[Any, Any] = defaultdict(dict)
                for unit in self._units[i]:
                    for piece in unit.pieces:
                        own = given.get(self._replicas.parameters[0][piece.parameter], {})
                        for name, value in own.items():
                            self._import_piece(fresh[unit.weight], unit, piece, name, value)
                self._steppers[i].state = fresh

    def _import_piece(self, state: dict[str, Any], unit: Unit, piece: Piece, name: str, value: Any) -> None:
        parameter = self._replicas.parameters[0][piece.parameter]
        if not isinstance(value, torch.Tensor) or name == "step" or value.shape != parameter.shape:
            if name not in state:
                state[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
            return
        if name not in state:
            state[name] = torch.zeros_like(unit.weight, dtype=value.dtype, requires_grad=False)
        source = torch.empty_like(parameter, dtype=value.dtype).copy_(value)  # in the parameter's own strides
        part = line(source.detach())[piece.start : piece.stop]
        line(state[name])[piece.at : piece.at + piece.stop - piece.start].copy_(part)

    def close(self) -> None:
        """Leave the user's optimizer as an ordinary loop would: state complete, no hooks."""
        self._export()
        for hook in self._hooks:
            hook.remove()


class _Stepper:
    """One device's optimizer over its units."""

    def __init__(self, optimizer: Optimizer, leader: Optimizer, units: Sequence[Unit]) -> None:
        self._optimizer, self._leader, self._units = optimizer, leader, units
        self._params = [[u.weight for u in units if u.group == g] for g in range(len(leader.param_groups))]
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
        for unit in self._units:
            unit.weight.grad = unit.gradient
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


def _mirror(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same kind and options, without parameters or state, as unpickling would make it."""
    groups: list[Mapping[str, Any]] = [{**group, "params": []} for group in optimizer.param_groups]
    mirror: Optimizer = type(optimizer).__new__(type(optimizer))
    mirror.__setstate__({"defaults": optimizer.defaults, "state": defaultdict(dict), "param_groups": groups})
    return mirror


def _shares(sizes: Sequence[int], devices: int) -> list[int]:
    """Give each size to a device, the largest first to whoever has least."""
    load, owner = [0] * devices, [0] * len(sizes)
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        owner[n] = load.index(min(load))
        load[owner[n]] += sizes[n]
    return owner


def _cut(size: int, devices: int, i: int) -> tuple[int, int]:
    """Return device i's part of a buffer, cut at multiples of 16 elements so that it stays aligned."""
    step = -(-size // (16 * devices)) * 16
    return min(i * step, size), min((i + 1) * step, size)
