"""Flat storage: parameters as views of large buffers, which one transfer copies.

There is one flat buffer per optimizer group and dtype. Optimizer state is converted between two
forms: by parameter, as torch keeps it, and by shard, as the devices' optimizers keep it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dpbench.engine.optimizer_state import State, is_elementwise
from dpbench.hardware.device import Device

ALIGNMENT_BYTES = 64
"""On unaligned tensors, kernels use other code paths, which round differently."""


@dataclass(frozen=True)
class Slot:
    """The place of one parameter, given by index, in a flat buffer: elements [start, stop)."""

    parameter: int
    start: int
    stop: int


@dataclass(frozen=True)
class Flat:
    """The plan of one flat buffer, with its `size` in elements, including padding."""

    dtype: torch.dtype
    slots: tuple[Slot, ...]
    size: int


@dataclass(frozen=True)
class Layout:
    """The plans of the flat buffers; every device has one buffer per plan.

    Frozen parameters are in no flat buffer and have no slot.
    """

    flats: tuple[Flat, ...]

    def allocate(self, device: Device) -> list[torch.Tensor]:
        """Return one buffer of zeros per plan."""
        with device.guard():
            return [
                torch.zeros(flat.size, dtype=flat.dtype, device=device.torch_device)
                for flat in self.flats
            ]

    def views(
        self, buffers: Sequence[torch.Tensor], like: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Return, by parameter index, a view of each slot in `buffers`.

        The view of parameter n has the shape and strides of `like[n]`.
        """
        return {
            slot.parameter: buffer.as_strided(
                like[slot.parameter].size(), like[slot.parameter].stride(), slot.start
            )
            for flat, buffer in zip(self.flats, buffers, strict=True)
            for slot in flat.slots
        }


def plan(
    groups: Iterable[Iterable[int]], tensors: Sequence[torch.Tensor], shares: int = 1
) -> Layout:
    """Return a layout with one flat buffer per dtype and group of indices of `tensors`.

    Each buffer can be cut into `shares` equal parts that start at aligned addresses. Raises
    ValueError for a tensor that is not dense, because a slot cannot represent its strides.
    """
    flats = []
    for group in groups:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for number in group:
            by_dtype.setdefault(tensors[number].dtype, []).append(number)
        flats += [_flat(dtype, numbers, tensors, shares) for dtype, numbers in by_dtype.items()]
    return Layout(tuple(flats))


def _flat(
    dtype: torch.dtype, numbers: Sequence[int], tensors: Sequence[torch.Tensor], shares: int
) -> Flat:
    step = max(ALIGNMENT_BYTES // dtype.itemsize, 1)
    slots = []
    offset = 0
    for number in numbers:
        tensor = tensors[number]
        if not is_dense(tensor):
            raise ValueError(
                "storage=flat needs parameters that are dense in memory, but the parameter of"
                f" shape {tuple(tensor.shape)} has strides {tensor.stride()}: set parameter.data ="
                " parameter.data.contiguous(), or use storage=separate"
            )
        slots.append(Slot(number, offset, offset + tensor.numel()))
        offset += -(-tensor.numel() // step) * step
    return Flat(dtype, tuple(slots), -(-offset // (step * shares)) * step * shares)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill a contiguous range of memory exactly once.

    Tensors that are not strided, such as sparse tensors, are not dense.
    """
    if tensor.layout is not torch.strided:
        return False
    expected = 1
    for size, stride in sorted(
        zip(tensor.size(), tensor.stride(), strict=True), key=lambda pair: pair[1]
    ):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def line(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a dense tensor as a vector in memory order, as in a slot."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class FlatWeights:
    """The flat buffers on the device `root` that hold a module's parameters.

    The Parameter objects stay the same; their data become views of the buffers. Each group in
    `groups` consists of indices of `parameters`; it gets one buffer per dtype, which can be cut
    into `shares` equal parts.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        groups: Iterable[Iterable[int]],
        root: Device,
        shares: int = 1,
    ) -> None:
        self.layout = plan(groups, parameters, shares)
        self.parameters = list(parameters)
        self.buffers = self.layout.allocate(root)
        self.views = self.layout.views(self.buffers, self.parameters)
        for number, view in self.views.items():
            view.copy_(self.parameters[number].detach())
            self.parameters[number].data = view

    def copies(self, device: Device) -> dict[int, torch.Tensor]:
        """Copy each flat buffer to `device`; return views of these copies by parameter index."""
        return self.layout.views([device.put(buffer) for buffer in self.buffers], self.parameters)

    def release(self) -> None:
        """Move the parameters that are still in the flat buffers into separate storage.

        Parameters that the training loop has made views of the same slot still share memory
        afterwards.
        """
        inside: dict[int, list[torch.Tensor]] = {}
        for parameter in self.parameters:
            inside.setdefault(parameter.untyped_storage().data_ptr(), []).append(parameter)
        for plan, buffer in zip(self.layout.flats, self.buffers, strict=True):
            here = sorted(
                inside.get(buffer.untyped_storage().data_ptr(), []), key=torch.Tensor.storage_offset
            )
            starts = [p.storage_offset() for p in here]
            for slot in plan.slots:
                _move_out(
                    here[bisect_left(starts, slot.start) : bisect_left(starts, slot.stop)],
                    slot,
                    buffer,
                )


def _move_out(parameters: Sequence[torch.Tensor], slot: Slot, buffer: torch.Tensor) -> None:
    if len(parameters) == 1:
        parameters[0].data = parameters[0].detach().clone()
    elif parameters:
        copy = buffer[slot.start : slot.stop].clone()
        for parameter in parameters:
            at = parameter.storage_offset() - slot.start
            parameter.data = copy.as_strided(parameter.size(), parameter.stride(), at)


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
