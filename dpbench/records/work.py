"""Work: what a model costs on a device, and a step as a graph of tasks, for predictions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from dpbench.records.case import Phase


@dataclass(frozen=True)
class Cost:
    """Seconds of work on one device: so much whatever the batch, and so much a sample; never less than the least."""

    fixed_s: float = 0.0
    sample_s: float = 0.0
    least_s: float = 0.0

    def at(self, samples: float) -> float:
        """Return the seconds of a batch."""
        return max(self.least_s, self.fixed_s + self.sample_s * samples)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What one model costs on one device, per sample where it scales with the batch.

    Counts describe the model alone. Seconds hold for one device and precision: those that are None are worked out
    from FLOP and bytes. `launches` are the operations that the host hands to the device; `gradient_bytes` are the
    sizes of the parameters in the order in which backward finishes their gradients, empty when nobody knows.
    """

    model: str
    parameter_tensors: int
    parameter_bytes: int
    buffer_bytes: int
    input_bytes: float
    output_bytes: float
    forward_flop: float
    backward_flop: float
    buffer_tensors: int = 0
    modules: int = 0
    forward_launches: int = 0
    backward_launches: int = 0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    gradient_bytes: tuple[int, ...] = ()
    source: str = "traced"  # "measured" | "traced" | "counted" | "given"
    forward: Cost | None = None
    loss: Cost | None = None
    backward: Cost | None = None
    optimizer: Cost | None = None
    rest: Cost | None = None
    """What a host's step takes beside these: copies of the batch, and what no phase covers."""

    @property
    def gradient_sizes(self) -> tuple[float, ...]:
        """Return the bytes of the gradients in the order in which backward finishes them; equal ones if unknown."""
        count = max(1, self.parameter_tensors)
        return self.gradient_bytes or (self.parameter_bytes / count,) * count


@dataclass(frozen=True)
class Task:
    """One piece of a step's work: so much of a unit on a resource, after other tasks.

    `after` are indices into the list of tasks whose end this one waits for; `overlap` are indices of tasks it
    follows but may run beside: it waits for their start. Units are flop, bytes, s, and what the host does one by one:
    launches, modules, tensors, threads, wakes. Resources:

        device:i                    the stream of device i: kernels, one after the other
        host, host:i                the main thread; the thread that serves device i
        gil                         the interpreter, shared by the threads of one process
        copy:a:b                    a copy from a to b, each a device's number or `host`
        all_reduce:k ...            the k-th collective; its tasks (one a device) begin and end together. Kinds:
                                    broadcast, reduce, all_reduce, reduce_scatter, all_gather
    """

    phase: Phase
    device: int
    resource: str
    amount: float
    unit: str
    after: tuple[int, ...] = ()
    overlap: tuple[int, ...] = ()


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
