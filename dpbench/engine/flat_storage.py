"""Flat storage: parameters as views of one buffer per optimizer group and dtype, so that one copy moves a buffer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dpbench.engine.optimizer_state import State, is_elementwise
from dpbench.hardware.device import Device

ALIGNMENT_BYTES = 64
"""The alignment of slots: on unaligned tensors, kernels use other code paths, which round differently."""


@dataclass(frozen=True)
class Slot:
    """Elements [start, stop) of a flat buffer, which hold one parameter; `parameter` is its index."""

    parameter: int
    start: int
    stop: int


@dataclass(frozen=True)
class Flat:
    """The plan of one buffer: its dtype, the slot of each parameter, and its number of elements including padding."""

    dtype: torch.dtype
    slots: tuple[Slot, ...]
    size: int


@dataclass(frozen=True)
class Layout:
    """The plan of all buffers, which is the same on every device.

    Parameters that are in no buffer (frozen ones) are not listed.
    """

    flats: tuple[Flat, ...]

    def allocate(self, device: Device) -> list[torch.Tensor]:
        """Return one zeroed buffer per plan, on `device`."""
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
    """Return a layout with one buffer per group and dtype; `groups` contain indices of `tensors`.

    Each buffer can be cut into `shares` equal parts that start at aligned addresses. Raises ValueError for a tensor
    whose elements do not fill a contiguous range of memory exactly once, because a slot cannot represent its strides.
    """
    flats = []
    for group in groups:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for number in group:
            by_dtype.setdefault(tensors[number].dtype, []).append(number)
        flats += [_flat(dtype, numbers, tensors, shares) for dtype, numbers in by_dtype.items()]
    return Layout(tuple(flats))


def _flat(dtype: torch.dtype, numbers: Sequence[int], tensors: Sequence[torch.Tensor], shares: int) -> Flat:
    """Return the plan of one buffer, with the tensors one after the other at aligned offsets."""
    step = max(ALIGNMENT_BYTES // dtype.itemsize, 1)
    slots, at = [], 0
    for number in numbers:
        tensor = tensors[number]
        if not is_dense(tensor):
            raise ValueError(
                "storage=flat needs parameters that are dense in memory, but the parameter of shape "
                f"{tuple(tensor.shape)} has strides {tensor.stride()}: "
                "set parameter.data = parameter.data.contiguous(), or use storage=separate"
            )
        slots.append(Slot(number, at, at + tensor.numel()))
        at += -(-tensor.numel() // step) * step
    return Flat(dtype, tuple(slots), -(-at // (step * shares)) * step * shares)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a strided tensor fills its memory exactly once, in any order of dimensions."""
    if tensor.layout is not torch.strided:
        return False
    expected = 1
    for size, stride in sorted(zip(tensor.size(), tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def line(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements as a vector in memory order, which is also the order of its slot."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class FlatWeights:
    """A module's parameters, moved into flat buffers on their device; the Parameter objects stay the same."""

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
        """Copy each buffer to `device` in one transfer; return the views of the copies by parameter index."""
        return self.layout.views([device.put(buffer) for buffer in self.buffers], self.parameters)

    def release(self) -> None:
        """Give separate storage to the parameters that are still in the buffers.

        Parameters that the training loop has made views of the same slot still share memory afterwards.
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
    """Move one slot's parameters out of the flat buffer; parameters that share the slot share one copy of it."""
    if len(parameters) == 1:
        parameters[0].data = parameters[0].detach().clone()
    elif parameters:
        copy = buffer[slot.start : slot.stop].clone()
        for parameter in parameters:
            at = parameter.storage_offset() - slot.start
            parameter.data = copy.as_strided(parameter.size(), parameter.stride(), at)


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of a parameter, stored in a shard from element `at` onwards."""

    parameter: int
    start: int
    stop: int
    at: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the segment's elements of a tensor that has the shard's layout."""
        return line(whole)[self.at : self.at + self.stop - self.start]


@dataclass(frozen=True)
class ParamShard:
    """A tensor that an optimizer steps, with its gradient and the segments of parameters that it contains.

    `twins` are the shard's weights on every device.
    """

    weight: torch.Tensor
    gradient: torch.Tensor
    group: int
    segments: tuple[Segment, ...]
    twins: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Sum:
    """The destination of one segment's summed gradients.

    If the segment is a whole parameter, `target` has the parameter's shape; otherwise it is a vector.
    """

    segment: Segment
    target: torch.Tensor
    whole: bool

    def of(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the elements of a dense gradient, in the parameter's layout, that belong to this sum."""
        if self.whole:
            return gradient
        start, stop = self.segment.start, self.segment.stop
        return gradient.as_strided((stop - start,), (1,), gradient.storage_offset() + start)


def sums(shard: ParamShard, parameters: Sequence[torch.Tensor]) -> Iterator[Sum]:
    """Yield the destination of each segment's sum.

    The caller keeps the views that this creates, because creating a view takes longer than an addition.
    """
    for segment in shard.segments:
        like, gradient = parameters[segment.parameter], shard.gradient
        if segment.stop - segment.start < like.numel():
            yield Sum(segment, segment.of(gradient), whole=False)
        elif gradient.shape == like.shape:  # the parameter need not be dense
            yield Sum(segment, gradient, whole=True)
        else:
            at = gradient.storage_offset() + segment.at
            yield Sum(segment, gradient.as_strided(like.size(), like.stride(), at), whole=True)


def gathered(
    states: Sequence[tuple[Sequence[ParamShard], Any]], parameters: Sequence[torch.Tensor], like: Sequence[torch.Tensor]
) -> State:
    """Return the optimizer state by parameter, joined from the state of each shard, in the layout of `like`."""
    found: State = State(dict)
    with torch.no_grad():
        for shards, state in states:
            for shard in shards:
                for name, value in state.get(shard.weight, {}).items():
                    for segment in shard.segments:
                        n = segment.parameter
                        _put(found[parameters[n]], like[n], shard, segment, name, value)
    return found


def _put(own: dict[str, Any], like: torch.Tensor, shard: ParamShard, segment: Segment, name: str, value: Any) -> None:
    """Write one segment of a shard's state into its parameter's state; values that are not per element are copied."""
    if not isinstance(value, torch.Tensor) or name == "step" or value.numel() != shard.weight.numel():
        own[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        return
    if name not in own:
        own[name] = torch.zeros_like(like, dtype=value.dtype, requires_grad=False)
    line(own[name])[segment.start : segment.stop].copy_(segment.of(value))


def cut(given: Mapping[Any, Any], shards: Sequence[ParamShard], parameters: Sequence[torch.Tensor]) -> State:
    """Return the optimizer state by shard, from the state by parameter."""
    found: State = State(dict)
    with torch.no_grad():
        for shard in shards:
            for segment in shard.segments:
                for name, value in given.get(parameters[segment.parameter], {}).items():
                    _take(found[shard.weight], parameters[segment.parameter], shard, segment, name, value)
    return found


def _take(own: dict[str, Any], like: torch.Tensor, shard: ParamShard, segment: Segment, name: str, value: Any) -> None:
    """Write a parameter's state into one segment of a shard's state."""
    if not is_elementwise(name, value, like):
        if name not in own:
            own[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        return
    if name not in own:
        own[name] = torch.zeros_like(shard.weight, dtype=value.dtype, requires_grad=False)
    source = torch.empty_like(like, dtype=value.dtype).copy_(value)  # in the parameter's own strides
    segment.of(own[name]).copy_(line(source.detach())[segment.start : segment.stop])
