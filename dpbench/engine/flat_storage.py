"""Flat storage: parameters as views of one buffer per optimizer group and dtype, so that one copy moves them all."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dpbench.engine.optimizer_state import State, is_elementwise
from dpbench.hardware.device import Device

ALIGNMENT_BYTES = 64
"""Every slot starts on such a boundary: kernels take other paths, and so make other bits, where a tensor does not."""


@dataclass(frozen=True)
class Slot:
    """The place of one parameter (by its number) in a flat buffer, in elements."""

    parameter: int
    start: int
    stop: int


@dataclass(frozen=True)
class Flat:
    """One buffer's plan: whose values it holds, where, and how many elements it has with the padding."""

    dtype: torch.dtype
    slots: tuple[Slot, ...]
    size: int


@dataclass(frozen=True)
class Layout:
    """The plan of all buffers: the same on every device.

    Parameters that no buffer holds (frozen ones) are not mentioned.
    """

    flats: tuple[Flat, ...]

    def allocate(self, device: Device) -> list[torch.Tensor]:
        """Return a zeroed buffer per plan on `device`."""
        with device.guard():
            return [torch.zeros(flat.size, dtype=flat.dtype, device=device.torch_device) for flat in self.flats]

    def views(self, buffers: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return each parameter's view of its slot, in the shape and strides of `like[parameter]`."""
        return {
            slot.parameter: buffer.as_strided(like[slot.parameter].size(), like[slot.parameter].stride(), slot.start)
            for flat, buffer in zip(self.flats, buffers, strict=True)
            for slot in flat.slots
        }


def plan(groups: Iterable[Iterable[int]], tensors: Sequence[torch.Tensor], shares: int = 1) -> Layout:
    """Lay out the tensors whose numbers each group lists, one buffer per group and dtype.

    Buffers can be cut into so many equal `shares`, each starting on a boundary. Raises ValueError for a tensor that
    has holes or overlaps, which a slot cannot mirror.
    """
    flats = []
    for group in groups:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for number in group:
            by_dtype.setdefault(tensors[number].dtype, []).append(number)
        flats += [_flat(dtype, numbers, tensors, shares) for dtype, numbers in by_dtype.items()]
    return Layout(tuple(flats))


def _flat(dtype: torch.dtype, numbers: Sequence[int], tensors: Sequence[torch.Tensor], shares: int) -> Flat:
    """Place the tensors one after the other, each on a boundary."""
    step = max(ALIGNMENT_BYTES // dtype.itemsize, 1)
    slots, at = [], 0
    for number in numbers:
        tensor = tensors[number]
        if not is_dense(tensor):
            raise ValueError(
                f"storage=flat needs parameters without holes; one of shape {tuple(tensor.shape)} has strides "
                f"{tensor.stride()}: make it .contiguous(), or use storage=separate"
            )
        slots.append(Slot(number, at, at + tensor.numel()))
        at += -(-tensor.numel() // step) * step
    return Flat(dtype, tuple(slots), -(-at // (step * shares)) * step * shares)


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a strided tensor fills its memory exactly once, in whatever order of dimensions."""
    if tensor.layout is not torch.strided:
        return False
    expected = 1
    for size, stride in sorted(zip(tensor.size(), tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def line(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements as a vector in memory order, which is the order of its slot."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class FlatWeights:
    """A module's parameters, moved into flat buffers on its device; the parameters stay the same objects."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], groups: Iterable[Iterable[int]], root: Device, shares: int = 1
    ) -> None:
        self.layout = plan(groups, parameters, shares)
        self.parameters = list(parameters)
        self.buffers = self.layout.allocate(root)
        self.views = self.layout.views(self.buffers, self.parameters)
        for number, view in self.views.items():
            view.copy_(self.parameters[number].detach())
            self.parameters[number].data = view

    def copies(self, device: Device) -> dict[int, torch.Tensor]:
        """Return fresh copies on `device` of all that the buffers hold, one transfer a buffer."""
        return self.layout.views([device.put(buffer) for buffer in self.buffers], self.parameters)

    def release(self) -> None:
        """Give the parameters that still lie in the buffers storage of their own again.

        Those that a loop has made views of one slot share memory afterwards too.
        """
        inside: dict[int, list[torch.Tensor]] = {}
        for parameter in self.parameters:
            inside.setdefault(parameter.untyped_storage().data_ptr(), []).append(parameter)
        for plan, buffer in zip(self.layout.flats, self.buffers, strict=True):
            here = sorted(inside.get(buffer.untyped_storage().data_ptr(), []), key=torch.Tensor.storage_offset)
            starts = [p.storage_offset() for p in here]
            for slot in plan.slots:
                _move_out(here[bisect_left(starts, slot.start) : bisect_left(starts, slot.stop)], slot, buffer)


def _move_out(parameters: Sequence[torch.Tensor], slot: Slot, buffer: torch.Tensor) -> None:
    """Give the parameters of one slot other storage: one of them a compact one, several a common one."""
    if len(parameters) == 1:
        parameters[0].data = parameters[0].detach().clone()
    elif parameters:
        copy = buffer[slot.start : slot.stop].clone()
        for parameter in parameters:
            at = parameter.storage_offset() - slot.start
            parameter.data = copy.as_strided(parameter.size(), parameter.stride(), at)


@dataclass(frozen=True)
class Piece:
    """Where elements [start, stop) of a parameter lie in a unit: from `at`."""

    parameter: int
    start: int
    stop: int
    at: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the piece's elements of a tensor that is laid out as the unit."""
        return line(whole)[self.at : self.at + self.stop - self.start]


@dataclass(frozen=True)
class Unit:
    """One tensor that an optimizer steps, its gradient, what it is made of, and where other devices keep it."""

    weight: torch.Tensor
    gradient: torch.Tensor
    group: int
    pieces: tuple[Piece, ...]
    twins: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Sum:
    """Where the sum of one piece's gradients goes: `target`, in the parameter's own shape if the piece is all of it."""

    piece: Piece
    target: torch.Tensor
    whole: bool

    def of(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the elements of a dense gradient, of the parameter's layout, that are summed here."""
        if self.whole:
            return gradient
        start, stop = self.piece.start, self.piece.stop
        return gradient.as_strided((stop - start,), (1,), gradient.storage_offset() + start)


def sums(unit: Unit, parameters: Sequence[torch.Tensor]) -> Iterator[Sum]:
    """Yield where each piece of a unit is summed: views made once, since cutting one takes longer than adding two."""
    for piece in unit.pieces:
        like, gradient = parameters[piece.parameter], unit.gradient
        if piece.stop - piece.start < like.numel():
            yield Sum(piece, piece.of(gradient), whole=False)
        elif gradient.shape == like.shape:  # it may have holes
            yield Sum(piece, gradient, whole=True)
        else:
            at = gradient.storage_offset() + piece.at
            yield Sum(piece, gradient.as_strided(like.size(), like.stride(), at), whole=True)


def gathered(
    states: Sequence[tuple[Sequence[Unit], Any]], parameters: Sequence[torch.Tensor], like: Sequence[torch.Tensor]
) -> State:
    """Return the state by parameter, from units and the state of each, laid out as `like`: what units were cut from."""
    found: State = State(dict)
    with torch.no_grad():
        for units, state in states:
            for unit in units:
                for name, value in state.get(unit.weight, {}).items():
                    for piece in unit.pieces:
                        n = piece.parameter
                        _put(found[parameters[n]], like[n], unit, piece, name, value)
    return found


def _put(own: dict[str, Any], like: torch.Tensor, unit: Unit, piece: Piece, name: str, value: Any) -> None:
    """Write one piece of a unit's state into a parameter's; what is no such piece belongs to all alike."""
    if not isinstance(value, torch.Tensor) or name == "step" or value.numel() != unit.weight.numel():
        own[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        return
    if name not in own:
        own[name] = torch.zeros_like(like, dtype=value.dtype, requires_grad=False)
    line(own[name])[piece.start : piece.stop].copy_(piece.of(value))


def cut(given: Mapping[Any, Any], units: Sequence[Unit], parameters: Sequence[torch.Tensor]) -> State:
    """Return the state by unit, from that by parameter."""
    found: State = State(dict)
    with torch.no_grad():
        for unit in units:
            for piece in unit.pieces:
                for name, value in given.get(parameters[piece.parameter], {}).items():
                    _take(found[unit.weight], parameters[piece.parameter], unit, piece, name, value)
    return found


def _take(own: dict[str, Any], like: torch.Tensor, unit: Unit, piece: Piece, name: str, value: Any) -> None:
    """Write a parameter's state into one piece of a unit's."""
    if not is_elementwise(name, value, like):
        if name not in own:
            own[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        return
    if name not in own:
        own[name] = torch.zeros_like(unit.weight, dtype=value.dtype, requires_grad=False)
    source = torch.empty_like(like, dtype=value.dtype).copy_(value)  # in the parameter's own strides
    piece.of(own[name]).copy_(line(source.detach())[piece.start : piece.stop])
