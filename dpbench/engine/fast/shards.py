"""Shards: the tensors that the devices' optimizers step, with the sums of gradients there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dpbench.engine.fast.flat_storage import line


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of a parameter in memory order; the shard stores them from `at` on.

    `parameter` is the parameter's index.
    """

    parameter: int
    start: int
    stop: int
    at: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the segment's elements of `whole`, a dense tensor as large as the shard."""
        return line(whole)[self.at : self.at + self.stop - self.start]


@dataclass(frozen=True)
class ParamShard:
    """A tensor that one device's optimizer steps: a parameter, a flat buffer, or a slice of one.

    `gradient` is the summed gradient of `weight`. `group` is the index of the optimizer group.
    `segments` are the parts of parameters that the shard contains. `twins[i]` is the tensor on
    device i that holds the same weights.
    """

    weight: torch.Tensor
    gradient: torch.Tensor
    group: int
    segments: tuple[Segment, ...]
    twins: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Sum:
    """The memory for the gradient of one segment, summed over the replicas.

    `target` is a view of the shard's gradient. If the segment is a whole parameter, `whole` is True
    and `target` has the parameter's shape; if not, `target` is a vector.
    """

    segment: Segment
    target: torch.Tensor
    whole: bool

    def of(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the segment's elements of one replica's gradient, in the shape of `target`.

        Unless the segment is the whole parameter, the gradient must be dense, with the parameter's
        strides.
        """
        if self.whole:
            return gradient
        start, stop = self.segment.start, self.segment.stop
        return gradient.as_strided((stop - start,), (1,), gradient.storage_offset() + start)


def sums(shard: ParamShard, parameters: Sequence[torch.Tensor]) -> Iterator[Sum]:
    """Yield a `Sum` for each segment of a shard.

    Callers should keep these objects for all steps, because creating a view takes longer than an
    addition.
    """
    for segment in shard.segments:
        like = parameters[segment.parameter]
        gradient = shard.gradient
        if segment.stop - segment.start < like.numel():
            yield Sum(segment, segment.of(gradient), whole=False)
        elif gradient.shape == like.shape:  # no view is needed, so the parameter need not be dense
            yield Sum(segment, gradient, whole=True)
        else:
            at = gradient.storage_offset() + segment.at
            yield Sum(segment, gradient.as_strided(like.size(), like.stride(), at), whole=True)
