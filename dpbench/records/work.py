"""Work: the sizes of a model's tensors, what a step does and moves, and the times of copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import msgspec

from dpbench.records.case import Case, Phase


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model's tensors, each None if unknown.

    `modules`, `parameter_tensors` and `buffer_tensors` are numbers; the others are bytes, in total
    for parameters and buffers, and per sample for inputs, targets and outputs.
    """

    modules: int | float | None = None
    parameter_tensors: int | float | None = None
    buffer_tensors: int | float | None = None
    parameter_bytes: int | float | None = None
    trainable_bytes: int | float | None = None
    buffer_bytes: int | float | None = None
    input_bytes: int | float | None = None
    target_bytes: int | float | None = None
    output_bytes: int | float | None = None


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
    def of(cls, sizes: Sizes | None) -> Self | None:
        """Return the sizes that a trial states; None if any of them is missing."""
        values: dict[str, Any] = {f.name: getattr(sizes, f.name, None) for f in fields(cls)}
        return None if None in values.values() else cls(**values)


@dataclass(frozen=True, kw_only=True)
class StepSizes(Shapes):
    """The sizes and numbers from which a strategy describes its step.

    Only times depend on the fields of this class; they are 0 or empty if bytes alone are asked for.
    `buffer_tensors` is the number of buffers. `forward_launches` and `backward_launches` are the
    operations that the host submits to a device. `gradient_sizes` are the bytes of the gradients in
    the order in which backward finishes them.
    """

    buffer_tensors: int = 0
    modules: int = 0
    forward_launches: int = 0
    backward_launches: int = 0
    gradient_sizes: tuple[float, ...] = ()


@dataclass(frozen=True)
class Group:
    """The devices of a collective, and the way of its bytes.

    In a `ring`, each of the `receivers` sends to the next one. Otherwise each of the `senders`
    sends to every receiver.
    """

    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    ring: bool = False


COLLECTIVES = frozenset(
    kind + joined
    for kind in ("broadcast", "reduce", "all_reduce", "reduce_scatter", "all_gather")
    for joined in ("", "_coalesced")
)
"""The kinds of collectives; torch joins the tensors of a coalesced one into large messages."""
RESOURCES = COLLECTIVES | {"device", "host", "gil", "copy"}
"""The kinds of resources of a task."""
UNITS = frozenset(("bytes", "share", "launches", "modules", "tensors", "threads", "wakes"))
"""The units of a task's amount."""


class Task(msgspec.Struct, frozen=True):
    """One part of a step's work: its amount and unit, its resource, and the tasks it waits for.

    `after` and `overlap` are indices into the list of the step's tasks. The task starts when all
    tasks in `after` have ended and all tasks in `overlap` have started. Units are bytes, share (of
    the kernels of a device's forward or backward), and kinds of operations of the host: launches,
    modules, tensors, threads and wakes. A resource is one of these:

        device:i                    the stream of device i, which runs one kernel after the other
        host                        the main thread
        host:i                      the thread that serves device i
        gil                         the interpreter lock, shared by the threads of one process
        copy:a:b                    the link for a copy from a to b
        all_reduce:k                the k-th collective

    In a copy, a and b are indices of devices, or `host`. The tasks of a collective, one per device,
    start and end together; its kind is broadcast, reduce, all_reduce, reduce_scatter or all_gather,
    and `group` has its devices. Its amount is the bytes of the whole message. A task that is not
    `timed` moves bytes, but predictions leave it out.
    """

    phase: Phase
    device: int
    resource: str
    amount: float
    unit: str
    after: tuple[int, ...] = ()
    overlap: tuple[int, ...] = ()
    group: Group | None = None
    timed: bool = True


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


def times_links(case: Case) -> bool:
    """Return whether one process drives two or more GPUs of a case, and can time their links."""
    on_gpus = case.device_kind == "cuda" and case.placement == "spread"
    return on_gpus and case.devices > 1 and not case.traits.ranks


def fastest(amount: float, seconds: Iterable[float]) -> float:
    """Return the rate per second of repetitions that each did `amount`; 0 if one took no time.

    It is that of the fastest one: other programs, a clock that has yet to rise, or a library that
    loads only make repetitions slower. What is computed from it, such as the least seconds of a
    phase, is a bound.
    """
    least_s = min(seconds)
    return amount / least_s if least_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class CopyTimes:
    """The seconds of copies of `bytes` bytes from device `source` to `target`; -1 is the host.

    They were timed after the steps of a trial; each item of a trial is one pass over all links.
    """

    source: int
    target: int
    bytes: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Operations:
    """The floating-point operations of a sample in forward and backward, and a device's peak.

    `forward_convolutions` and `backward_convolutions` are those of convolutions among them, and
    `dtype` is torch's type of the factors of all of them, such as "float32"; "" if they have
    several types, or if the model has an autocast of its own. All three are unknown in trials of
    earlier versions. The peak is the best rate of large matrix products, per second, in the
    precision of the case.
    """

    forward: float
    backward: float
    peak_per_s: float
    forward_convolutions: float = 0.0
    backward_convolutions: float = 0.0
    dtype: str = ""


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
