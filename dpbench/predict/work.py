"""Work: the cost of a model on a device, and how torch groups tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpbench.records.work import StepSizes

COALESCED_BYTES = 10 * 2**20
"""The limit of the flat buffers in which torch.nn.parallel.comm copies tensors."""
DDP_SYNC_BYTES = 250 * 2**20
"""The limit of the messages in which DistributedDataParallel broadcasts weights and buffers."""
SLOT_BYTES = 64
"""The alignment of each tensor in a flat buffer."""


def chunks(sizes_bytes: Sequence[int], limit_bytes: int) -> list[list[int]]:
    """Split tensor sizes into consecutive groups of at most `limit_bytes`, like `take_tensors`.

    A tensor that is larger than the limit forms a group alone.
    """
    runs: list[list[int]] = [[]]
    for size in sizes_bytes:
        if runs[-1] and sum(runs[-1]) + size > limit_bytes:
            runs.append([])
        runs[-1].append(size)
    return [run for run in runs if run]


def flat_bytes(sizes_bytes: Sequence[int]) -> int:
    """Return the bytes of a flat buffer that holds all tensors."""
    return sum(-(-size // SLOT_BYTES) * SLOT_BYTES for size in sizes_bytes)


@dataclass(frozen=True)
class Cost:
    """The seconds of work on one device: a fixed part plus a part per sample, or `least_s`."""

    fixed_s: float = 0.0
    sample_s: float = 0.0
    least_s: float = 0.0

    def at(self, samples: float) -> float:
        """Return the seconds of the work for a number of samples."""
        return max(self.least_s, self.fixed_s + self.sample_s * samples)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The sizes, operation counts and costs of one model for training on one device.

    The FLOP and bytes of inputs, outputs, forward and backward are per sample. Fields named
    `*_launches` count the operations that the host submits to the device. `gradient_bytes` are the
    sizes of the parameters in the order in which backward finishes their gradients; empty if
    unknown. Fields of type `Cost` are for one kind of device and one precision; a cost of None is
    computed from FLOP and bytes.
    """

    model: str
    parameter_tensors: int
    parameter_bytes: int
    buffer_bytes: int
    input_bytes: float
    output_bytes: float
    forward_flop: float = 0.0
    backward_flop: float = 0.0
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

    @property
    def gradient_sizes(self) -> tuple[float, ...]:
        """Return the bytes of the gradients in the order of backward; equal sizes if unknown."""
        count = max(1, self.parameter_tensors)
        return self.gradient_bytes or (self.parameter_bytes / count,) * count

    @property
    def sizes(self) -> StepSizes:
        """Return the sizes from which a strategy describes its step.

        A profile does not say which parameters have gradients: all count as trained. Nor does it
        have the bytes of targets, whose copies therefore take no time.
        """
        return StepSizes(
            parameter_tensors=self.parameter_tensors,
            parameter_bytes=self.parameter_bytes,
            trainable_bytes=self.parameter_bytes,
            buffer_tensors=self.buffer_tensors,
            buffer_bytes=self.buffer_bytes,
            input_bytes=self.input_bytes,
            target_bytes=0,
            output_bytes=self.output_bytes,
            modules=self.modules,
            forward_launches=self.forward_launches,
            backward_launches=self.backward_launches,
            gradient_sizes=self.gradient_sizes,
        )
