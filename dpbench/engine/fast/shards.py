"""Shards: the tensors that the devices' optimizers step, and optimizer state in two forms.

The state is kept by parameter, as torch keeps it, and by shard, as the devices' optimizers do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dpbench.engine.fast.flat_storage import line
from dpbench.engine.fast.optimizer_state import State, is_elementwise


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


def gathered(
    states: Sequence[tuple[Sequence[ParamShard], Any]],
    parameters: Sequence[torch.Tensor],
    like: Sequence[torch.Tensor],
) -> State:
    """Return the optimizer state by parameter, joined from the state of all shards.

    `states` has a pair for each stepping device: its shards, and their optimizer state. The keys of
    the returned state are `parameters`; the tensors in it have the strides of `like`.
    """
    joined: State = State(dict)
    with torch.no_grad():
        for shards, state in states:
            for shard in shards:
                for name, value in state.get(shard.weight, {}).items():
                    for segment in shard.segments:
                        n = segment.parameter
                        _put(joined[parameters[n]], like[n], shard, segment, name, value)
    return joined


def _put(
    entry: dict[str, Any],
    like: torch.Tensor,
    shard: ParamShard,
    segment: Segment,
    name: str,
    value: Any,
) -> None:
    """Copy the value `name` of a shard's optimizer state into `entry`, the parameter's state.

    Values that are not elementwise, such as the step count, are copied whole.
    """
    if (
        not isinstance(value, torch.Tensor)
        or name == "step"
        or value.numel() != shard.weight.numel()
    ):
        entry[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        return
    if name not in entry:
        entry[name] = torch.zeros_like(like, dtype=value.dtype, requires_grad=False)
    line(entry[name])[segment.start : segment.stop].copy_(segment.of(value))


def cut(
    given: Mapping[Any, Any], shards: Sequence[ParamShard], parameters: Sequence[torch.Tensor]
) -> State:
    """Return the optimizer state by shard weight, cut from `given`, the state by parameter."""
    state: State = State(dict)
    with torch.no_grad():
        for shard in shards:
            for segment in shard.segments:
                for name, value in given.get(parameters[segment.parameter], {}).items():
                    _take(
                        state[shard.weight],
                        parameters[segment.parameter],
                        shard,
                        segment,
                        name,
                        value,
                    )
    return state


def _take(
    entry: dict[str, Any],
    like: torch.Tensor,
    shard: ParamShard,
    segment: Segment,
    name: str,
    value: Any,
) -> None:
    """Copy the value `name` of a parameter's optimizer state into `entry`, the shard's state.

    Values that are not elementwise, such as the step count, are copied whole.
    """
    if not is_elementwise(name, value, like):
        if name not in entry:
            entry[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        return
    if name not in entry:
        entry[name] = torch.zeros_like(shard.weight, dtype=value.dtype, requires_grad=False)
    in_strides_of_like = torch.empty_like(like, dtype=value.dtype).copy_(value)
    segment.of(entry[name]).copy_(line(in_strides_of_like.detach())[segment.start : segment.stop])
