"""CUDA graphs: a replica's forward and loss as one graph, and its backward as another, recorded once per batch shape.

There are two graphs because the divisor of the loss is summed over the replicas between forward and backward. The
backward graph starts from the derivative of the step's loss with respect to the replica's sum of the loss. This
derivative is computed outside the graphs. The divisor, gradient accumulation and gradient scaling therefore have
bitwise the same effect as without graphs. A graph always reads and writes the memory with which it was recorded: each
step copies its batch into that memory, and reads the gradients from it. Dropout draws new random numbers in every
replay.

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
from dpbench.hardware.device import Device, WorkRecorder
from dpbench.hardware.devices._many import copy_all

LIMIT = 4
"""The maximum number of batch shapes to record. Each recorded graph keeps the memory of its activations."""


def key_of(value: Any) -> Hashable | None:
    """Return a key of a batch; graphs recorded for one batch also compute every other batch with an equal key.

    Return None if the batch cannot be recorded, because it contains a tensor that requires a gradient, or an object
    other than tensors, numbers, strings, None and containers of these.
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
    """One replica's two CUDA graphs for one batch shape, and the memory that the graphs read and write.

    The constructor records the graphs. `total(output, target)` returns the sum of the loss over the rows. `piece` is
    the replica's part of a batch, as a pair (inputs, target).
    """

    def __init__(
        self,
        recorder: WorkRecorder,
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
        self._slope = torch.ones_like(self._slope)  # allocated on the stream that writes to it
        (self._output, self._total), self._forward = recorder.record(forward)
        self._gradients, self._backward = recorder.record(backward)

    def forward(self, piece: tuple[Any, Any]) -> tuple[Any, torch.Tensor]:
        """Replay the forward for the rows of `piece`, and return the output and the sum of the loss.

        The next call overwrites the memory of the output and of the sum.
        """
        copy_all(self._given, tensors_in(piece))
        self._forward()
        return self._output, self._total

    def backward(self, slope: torch.Tensor, *, owned: bool) -> None:
        """Replay the backward, and set `.grad` of every parameter.

        `slope` is the derivative of the step's scaled loss with respect to the replica's sum of the loss; the backward
        starts from it. With `owned`, the gradients are copies; without it, the next call overwrites their memory.
        """
        self._slope.copy_(slope)
        self._backward()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient.clone() if owned and gradient is not None else gradient


def _laid_out(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient with the strides of its parameter, as autograd stores it in `.grad`."""
    if dense(gradient).stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)


class Graphs:
    """The CUDA graphs of all replicas, by the shape of the batch.

    The constructor raises ValueError if a device cannot record graphs.
    """

    def __init__(self, module: nn.Module, devices: Sequence[Device], weights: ReplicaWeights, loss: Loss) -> None:
        self._module, self._devices, self._weights, self._loss = module, devices, weights, loss
        self._recorders = [_recorder(device) for device in devices]
        self._state = self._now()
        self._recorded: dict[Hashable, list[Recorded]] = {}

    def prepare(self, pieces: Sequence[tuple[Any, Any]], replicas: Sequence[nn.Module]) -> list[Recorded] | None:
        """Return the graphs of each replica for its piece of the batch; record them first if the batch's shape is new.

        Return None if the batch must run without graphs, because it cannot be recorded or because `LIMIT` other shapes
        have already been recorded. Raises ValueError if graphs must be recorded and the module has hooks.
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
        """Return a key of the state on which graphs depend; graphs that were recorded with another key are invalid.

        The key contains the module's version, autocast, the settings of the loss, and the addresses of weights and
        buffers.
        """
        tensors = [t for of in (self._weights.parameters, self._weights.buffers) for one in of for t in one]
        kind = self._devices[0].torch_device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        return self._weights.version, autocast, self._loss.key(), tuple(tensor.data_ptr() for tensor in tensors)

    def _record(self, i: int, piece: tuple[Any, Any], replica: nn.Module) -> Recorded:
        """Record the graphs of replica i for batches of the shape of `piece`, the replica's part of the batch.

        The caller records one replica after the other, because two captures must not overlap.
        """
        device, buffers = self._devices[i], self._weights.buffers[i]
        with device.guard():
            before = [buffer.detach().clone() for buffer in buffers]
            summed = self._loss.summed()
            assert summed is not None
            try:
                return Recorded(self._recorders[i], replica, self._weights.parameters[i], summed.total, piece)
            except Exception as error:
                error.add_note(
                    f"graphs=on: the module cannot be recorded as a CUDA graph in replica {i} on device {device.name}; "
                    "it may synchronize with the GPU (as .item() does), or have data-dependent shapes; use a schedule "
                    "with graphs=off, such as schedule='zero1'"
                )
                raise
            finally:  # the warm-up has run the module, which may have written its buffers
                with torch.no_grad():
                    copy_all(buffers, before)


def _recorder(device: Device) -> WorkRecorder:
    recorder = device.recorder()
    if recorder is None:
        raise ValueError(
            f"graphs=on needs devices that can record CUDA graphs, but {device.name} cannot; use a schedule with "
            "graphs=off"
        )
    return recorder


def _check_hooks(module: nn.Module) -> None:
    """Raise ValueError if the module or a submodule has hooks, because a replay would not run them."""
    for name, part in module.named_modules():
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            raise ValueError(
                f"graphs=on needs a module without hooks, but {name or 'the module'} has a hook, which the replay of a "
                "graph would not run; use a schedule with graphs=off, such as schedule='zero1'"
            )
