"""Work: the sizes of a model's tensors, the bytes that a step moves, and the times of copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import msgspec

from dpbench.records.case import Case, Phase

FACT = "model"
"""The key of a trial's provenance for `Shapes`."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The sizes of a model's tensors in bytes: parameters and buffers in total, others per sample.

    `parameter_tensors` is the number of parameters. `trainable_bytes` are those of parameters with
    gradients.
    """

    parameter_tensors: int
    parameter_bytes: int
    trainable_bytes: int
    buffer_bytes: int
    input_bytes: float
    target_bytes: float
    output_bytes: float

    @classmethod
    def of(cls, provenance: Mapping[str, Any]) -> Self | None:
        """Return the sizes in a trial's provenance; None if any of them is missing."""
        stored = provenance.get(FACT) or {}
        names = [f.name for f in fields(cls)]
        return (
            cls(**{name: stored[name] for name in names})
            if all(name in stored for name in names)
            else None
        )


@dataclass(frozen=True)
class Move:
    """The bytes that a phase moves from device `source` to device `target`; -1 is the host."""

    phase: Phase
    source: int
    target: int
    bytes: float


def received(moves: Iterable[Move], device: int) -> float:
    """Return the bytes that `device` receives."""
    return sum(move.bytes for move in moves if move.target == device)


def sent(moves: Iterable[Move], device: int) -> float:
    """Return the bytes that `device` sends."""
    return sum(move.bytes for move in moves if move.source == device)


LINKS = "links"
"""The key of a trial's provenance for its `CopyTimes`."""


def times_links(case: Case) -> bool:
    """Return whether one process drives two or more GPUs of a case, and can time their links."""
    on_gpus = case.device_kind == "cuda" and case.placement == "spread"
    return on_gpus and case.devices > 1 and not case.traits.ranks


@dataclass(frozen=True, kw_only=True)
class CopyTimes:
    """The seconds of copies of `bytes` bytes from device `source` to `target`; -1 is the host.

    They were timed after the steps of a trial; each item of a trial is one pass over all links.
    """

    source: int
    target: int
    bytes: int
    seconds: tuple[float, ...]

    @staticmethod
    def all_of(provenance: Mapping[str, Any]) -> tuple[CopyTimes, ...]:
        """Return the copy times in a trial's provenance, without the keys of a newer version.

        Left out are copies without bytes or durations above 0, which have no rate.
        """
        found = msgspec.convert(provenance.get(LINKS, ()), list[CopyTimes])
        return tuple(one for one in found if one.bytes > 0 and min(one.seconds, default=0.0) > 0)


OPERATIONS = "operations"
"""The key of a trial's provenance for its `Operations`."""


@dataclass(frozen=True, kw_only=True)
class Operations:
    """The floating-point operations of a sample in forward and backward, and a device's peak.

    The peak is the best rate of large matrix products, per second, in the precision of the case.
    """

    forward: float
    backward: float
    peak_per_s: float

    @classmethod
    def of(cls, provenance: Mapping[str, Any]) -> Self | None:
        """Return the operations in a trial's provenance; None if they are unknown.

        Keys of a newer version are ignored.
        """
        stored = provenance.get(OPERATIONS)
        return msgspec.convert(stored, cls) if stored else None


DRAWS = "error_draws"
"""The key of a prediction's provenance for draws of the logarithm of its step time's error.

Draw i uses the same random numbers in all predictions, so errors that two steps share cancel in the
ratio of the steps.
"""


def middle_draws(draws: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest of the middle 80 % of random draws of one value."""
    ordered = sorted(draws)
    return ordered[int(0.1 * len(ordered))], ordered[int(0.9 * len(ordered)) - 1]


def middle_ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the logarithm of a ratio's error, from those of two steps.

    In the last tenth of the draws, a machine delivers less than its links' rates, which moves the
    middle 80 % of all draws of a ratio to one side. The interval therefore also holds the middle
    80 % of the other draws, and the predicted ratio.
    """
    draws = [a - b for a, b in zip(above, below, strict=True)]
    lows, highs = zip(
        middle_draws(draws), middle_draws(draws[: int(0.9 * len(draws))]), strict=True
    )
    return min(0.0, *lows), max(0.0, *highs)
