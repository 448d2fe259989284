"""Moves: the bytes that one training step must move between devices, and the shapes that they follow from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from dpbench.records.case import Phase

FACT = "model"
"""The key of a trial's provenance under which the worker stores the values of `Shapes`."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The bytes of a model's tensors: weights and buffers in total; inputs, target and output per sample."""

    parameter_tensors: int
    parameter_bytes: int
    trainable_bytes: int
    buffer_bytes: int
    input_bytes: float
    target_bytes: float
    output_bytes: float

    @classmethod
    def of(cls, provenance: Mapping[str, Any]) -> Self | None:
        """Return the shapes that a worker stored; None when one of them is missing."""
        found = provenance.get(FACT) or {}
        names = [f.name for f in fields(cls)]
        return cls(**{name: found[name] for name in names}) if all(name in found for name in names) else None


@dataclass(frozen=True)
class Move:
    """Bytes from one device to another (-1: the host) in one phase of one step."""

    phase: Phase
    source: int
    target: int
    bytes: float


def received(moves: Iterable[Move], device: int) -> float:
    """Return the bytes that a device receives."""
    return sum(move.bytes for move in moves if move.target == device)


def sent(moves: Iterable[Move], device: int) -> float:
    """Return the bytes that a device sends."""
    return sum(move.bytes for move in moves if move.source == device)
