"""Flat storage: parameters as views of large buffers, which one transfer copies.

There is one flat buffer per optimizer group and dtype.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

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

    Each buffer can be cut into `shares` equal parts that start at aligned addresses. The tensors
    must be dense (see `is_dense`), because a slot represents no other strides.
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
        size = tensors[number].numel()
        slots.append(Slot(number, offset, offset + size))
        offset += -(-size // step) * step
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
        try:
            for number, view in self.views.items():
                view.copy_(self.parameters[number].detach())
                self.parameters[number].data = view
        except BaseException:  # an interrupt: other parameters would have moved already
            self.release()
            raise

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
