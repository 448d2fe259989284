"""Units: what one device steps, and the optimizer's state: by unit for who steps, by parameter for everybody else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dpbench.engine.flat_storage import line
from dpbench.engine.optimizer_groups import is_elementwise
from dpbench.engine.optimizer_state import State


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
