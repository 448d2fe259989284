"""Graphs: a replica's forward, loss and backward as two CUDA graphs, recorded once a shape and replayed without Python.

Two, because the replicas' weights are added up in between: backward starts from a slope that is computed eagerly, so
that the divisor, an accumulation or a gradient scale enter as they do elsewhere, bit by bit. What a graph reads and
writes stays where it was recorded: rows are copied in, gradients are handed out. Dropout draws anew in every replay.

A replay runs what was recorded, whatever Python would have done: a module, a weight, a buffer or an autocast setting
that has changed makes all graphs void.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn

from dpbench.engine.collectives import dense
from dpbench.engine.containers import keys_of, mapped, parts_of, tensors_in
from dpbench.engine.losses import Loss
from dpbench.engine.persistent import Persistent
from dpbench.hardware.device import Device, Recorder
from dpbench.hardware.devices._many import copy_all

LIMIT = 4
"""How many shapes of batch are recorded, the first that come: each keeps its activations' memory."""


def key_of(value: Any) -> Hashable | None:
    """Return what batches have in common that one graph can serve; None for what no graph can.

    That is a tensor that wants a gradient, and an object whose meaning only Python knows.
    """
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            return None
        return value.shape, value.stride(), value.dtype, value.device
    if value is None or isinstance(value, bool | int | float | str):
        return type(value), value
    keys = keys_of(value)
    if keys is None:
        return None
    parts = [key_of(part) for part in parts_of(value, keys)]
    return None if None in parts else (type(value), tuple(keys), tuple(parts))


class Recorded:
    """One replica's two graphs for one shape, and the memory that they read and write."""

    def __init__(
        self,
        recorder: Recorder,
        module: nn.Module,
        parameters: Sequence[torch.Tensor],
        total: Callable[[Any, Any], torch.Tensor],
        piece: tuple[Any, Any],
    ) -> None:
        inputs, target = static = mapped(piece, torch.clone)
        self._given = tensors_in(static)
        self._parameters = [p for p in parameters if p.requires_grad]
        live: list[torch.Tensor] = []  # the sum with its history, from forward to backward

        def forward() -> tuple[Any, torch.Tensor]:
            output = module(*inputs)
            live[:] = [total(output, target)]
            return mapped(output, torch.Tensor.detach), live[0].detach()

        def backward() -> list[torch.Tensor | None]:
            found = torch.autograd.grad(live, self._parameters, [self._slope], allow_unused=True)
            return [None if g is None else _laid_out(g, p) for g, p in zip(found, self._parameters, strict=True)]

        def both() -> None:
            _, total = forward()
            self._slope = torch.ones_like(total)
            backward()

        recorder.warm_up(both)
        self._slope = torch.ones_like(self._slope)  # on the stream that will write it
        (self._output, self._total), self._forward = recorder.record(forward)
        self._gradients, self._backward = recorder.record(backward)

    def forward(self, piece: tuple[Any, Any]) -> tuple[Any, torch.Tensor]:
        """Return output and sum over the rows of `piece`, in memory that the next forward writes again."""
        copy_all(self._given, tensors_in(piece))
        self._forward()
        return self._output, self._total

    def backward(self, slope: torch.Tensor, *, owned: bool) -> None:
        """Leave gradients in `.grad`, in memory that the next backward writes again unless they are `owned`."""
        self._slope.copy_(slope)
        self._backward()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient.clone() if owned and gradient is not None else gradient


def _laid_out(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient in its parameter's strides, as autograd leaves it in `.grad`."""
    if dense(gradient).stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)


class Graphs:
    """All replicas' graphs, by the shape of the batch. Raises ValueError where the devices record nothing."""

    def __init__(self, module: nn.Module, devices: Sequence[Device], kept: Persistent, loss: Loss) -> None:
        self._module, self._devices, self._kept, self._loss = module, devices, kept, loss
        self._recorders = [_recorder(device) for device in devices]
        self._state = self._now()
        self._recorded: dict[Hashable, list[Recorded]] = {}

    def prepare(self, pieces: Sequence[tuple[Any, Any]], replicas: Sequence[nn.Module]) -> list[Recorded] | None:
        """Return the replicas' graphs for pieces of a batch, recorded now if their shape is new.

        None asks to run eagerly: for what no graph can serve, and for more shapes than `LIMIT`.
        """
        if (state := self._now()) != self._state:
            self._recorded, self._state = {}, state
        key = key_of(list(pieces))
        if key is None or (key not in self._recorded and len(self._recorded) == LIMIT):
            return None
        if key not in self._recorded:
            _check_hooks(self._module)
            self._recorded[key] = [self._record(i, piece, replicas[i]) for i, piece in enumerate(pieces)]
        return self._recorded[key]

    def _now(self) -> Hashable:
        """Return what graphs are bound to besides shapes: the module's version, the loss, addresses, and autocast."""
        tensors = [t for of in (self._kept.parameters, self._kept.buffers) for one in of for t in one]
        kind = self._devices[0].torch_device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        return self._kept.version, autocast, self._loss.key(), tuple(tensor.data_ptr() for tensor in tensors)

    def _record(self, i: int, piece: tuple[Any, Any], replica: nn.Module) -> Recorded:
        """Record one replica, in the calling thread and one after the other: captures must not meet."""
        device, buffers = self._devices[i], self._kept.buffers[i]
        with device.guard():
            before = [buffer.detach().clone() for buffer in buffers]
            summed = self._loss.summed()
            assert summed is not None
            try:
                return Recorded(self._recorders[i], replica, self._kept.parameters[i], summed.total, piece)
            except Exception as error:
                error.add_note(
                    f"graphs=on: replica {i} on device {device.name} cannot be recorded as a CUDA graph (it may wait "
                    "for the GPU, or shape its work by the data); use graphs=off, such as schedule='zero1'"
                )
                raise
            finally:  # warming up has run the module
                with torch.no_grad():
                    copy_all(buffers, before)


def _recorder(device: Device) -> Recorder:
    recorder = device.recorder()
    if recorder is None:
        raise ValueError(f"graphs=on needs devices that record graphs, and {device.name} does not; use graphs=off")
    return recorder


def _check_hooks(module: nn.Module) -> None:
    """Refuse hooks of modules, which a replay would not run."""
    for name, part in module.named_modules():
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            raise ValueError(
                f"graphs=on needs modules without hooks, which a replay does not run, and {name or 'the module'} has "
                "one; use graphs=off, such as schedule='zero1'"
            )
