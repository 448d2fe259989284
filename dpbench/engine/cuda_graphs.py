"""Graphs: a replica's forward, loss and backward as two CUDA graphs, recorded per shape and replayed without Python.

There are two graphs because the divisor of the loss is summed over the replicas in between. Backward starts from a
gradient of the loss sum that is computed eagerly, so that the divisor, gradient accumulation and gradient scaling have
bitwise the same effect as without graphs. A graph always reads and writes the memory with which it was recorded: each
step's rows are copied into that memory, and its gradients are read from there. Dropout draws new random numbers in
every replay.

A replay repeats the recorded kernels and runs no Python code. All graphs are therefore discarded when the module, the
memory of a weight or buffer, an autocast setting or a setting of the loss has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn

from dpbench.engine.collectives import dense
from dpbench.engine.containers import keys_of, mapped, parts_of, tensors_in
from dpbench.engine.losses import Loss
from dpbench.engine.persistent import ReplicaWeights
from dpbench.hardware.device import Device, Recorder
from dpbench.hardware.devices._many import copy_all

LIMIT = 4
"""The maximum number of batch shapes to record. Each recording keeps the memory of its activations."""


def key_of(value: Any) -> Hashable | None:
    """Return a key that is equal for batches that one graph can serve, or None if no graph can serve the batch.

    No graph can serve a tensor that requires a gradient, or an object other than tensors, numbers and strings.
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
        live: list[torch.Tensor] = []  # the sum with its autograd history, kept from forward to backward

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
        self._slope = torch.ones_like(self._slope)  # allocate it on the stream that writes it
        (self._output, self._total), self._forward = recorder.record(forward)
        self._gradients, self._backward = recorder.record(backward)

    def forward(self, piece: tuple[Any, Any]) -> tuple[Any, torch.Tensor]:
        """Return the output and the loss sum for the rows of `piece`, in memory that the next forward overwrites."""
        copy_all(self._given, tensors_in(piece))
        self._forward()
        return self._output, self._total

    def backward(self, slope: torch.Tensor, *, owned: bool) -> None:
        """Set `.grad` of every parameter.

        With `owned` the gradients are copies; otherwise the next backward overwrites their memory.
        """
        self._slope.copy_(slope)
        self._backward()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient.clone() if owned and gradient is not None else gradient


def _laid_out(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient with the strides of its parameter, as autograd stores it in `.grad`."""
    if dense(gradient).stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)


class Graphs:
    """All replicas' graphs, by the shape of the batch. Raises ValueError if a device cannot record graphs."""

    def __init__(self, module: nn.Module, devices: Sequence[Device], weights: ReplicaWeights, loss: Loss) -> None:
        self._module, self._devices, self._weights, self._loss = module, devices, weights, loss
        self._recorders = [_recorder(device) for device in devices]
        self._state = self._now()
        self._recorded: dict[Hashable, list[Recorded]] = {}

    def prepare(self, pieces: Sequence[tuple[Any, Any]], replicas: Sequence[nn.Module]) -> list[Recorded] | None:
        """Return the replicas' graphs for pieces of a batch, recorded now if their shape is new.

        Return None if the batch must run eagerly, because no graph can serve it or because `LIMIT` other shapes have
        already been recorded. Raises ValueError if the module has hooks when a graph must be recorded.
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
        """Return the state on which graphs depend: module version, autocast, loss settings and memory addresses."""
        tensors = [t for of in (self._weights.parameters, self._weights.buffers) for one in of for t in one]
        kind = self._devices[0].torch_device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        return self._weights.version, autocast, self._loss.key(), tuple(tensor.data_ptr() for tensor in tensors)

    def _record(self, i: int, piece: tuple[Any, Any], replica: nn.Module) -> Recorded:
        """Record one replica. The caller records the replicas in turn, because captures must not overlap."""
        device, buffers = self._devices[i], self._weights.buffers[i]
        with device.guard():
            before = [buffer.detach().clone() for buffer in buffers]
            summed = self._loss.summed()
            assert summed is not None
            try:
                return Recorded(self._recorders[i], replica, self._weights.parameters[i], summed.total, piece)
            except Exception as error:
                error.add_note(
                    f"graphs=on: replica {i} on device {device.name} cannot be recorded as a CUDA graph (it may wait "
                    "for the GPU, or have data-dependent shapes); use graphs=off, such as schedule='zero1'"
                )
                raise
            finally:  # the warm-up has run the module, which may have written its buffers
                with torch.no_grad():
                    copy_all(buffers, before)


def _recorder(device: Device) -> Recorder:
    recorder = device.recorder()
    if recorder is None:
        raise ValueError(
            f"graphs=on needs devices that can record CUDA graphs, but {device.name} cannot; use graphs=off"
        )
    return recorder


def _check_hooks(module: nn.Module) -> None:
    """Raises ValueError for modules with hooks, which a replay would not run."""
    for name, part in module.named_modules():
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            raise ValueError(
                f"graphs=on needs modules without hooks, because a replay does not run hooks, but "
                f"{name or 'the module'} has one; use graphs=off, such as schedule='zero1'"
            )
