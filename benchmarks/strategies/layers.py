"""Place the layers of a module on several devices, and mark the device that computes.

The strategies in the files beside this one use it. The layers are the module's children that have
parameters or buffers. A child that is an `nn.Sequential` is replaced by its children. The layers
are divided, in order, into contiguous groups with about equal bytes of parameters, one group per
device. Everything between two layers runs on the device of the layer before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map_only

from dpbench.engine.containers import mapped
from dpbench.hardware.device import Device
from dpbench.models import Model
from dpbench.records import Mark, Phase


class Flow:
    """The marks of the devices that compute now; `at` is the first of these devices."""

    def __init__(self, devices: Sequence[Device], mark: Mark) -> None:
        self.devices = devices
        self.at = devices[0]
        self._mark = mark
        self._open = ExitStack()

    def enter(self, phase: Phase, *devices: Device) -> None:
        """Close the open marks, and open a mark of `phase` on each of `devices`."""
        self.leave()
        self.at = devices[0]
        for device in devices:
            self._open.enter_context(self._mark(phase, device.index))

    def leave(self) -> None:
        """Close the open marks."""
        self._open.close()

    @contextmanager
    def during(self, phase: Phase, *devices: Device) -> Iterator[None]:
        """Open marks of `phase` inside this context.

        At its end, close the marks that are then open.
        """
        self.enter(phase, *devices)
        try:
            yield
        finally:
            self.leave()


@contextmanager
def spread(model: Model, devices: Sequence[Device], mark: Mark) -> Iterator[Flow]:
    """Place the layers on the devices, and yield the `Flow` that they mark.

    On exit, remove the hooks.

    Raises ValueError if the module has fewer layers than devices.
    """
    flow = Flow(devices, mark)
    layers = [child for child in dict.fromkeys(_children(model.module)) if _has_state(child)]
    if len(layers) < len(devices):
        raise ValueError(
            f"the model {model.name} has {len(layers)} layers for {len(devices)} devices: give"
            " fewer --devices, or another model in --models"
        )
    sizes = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in layers]
    model.module.to(devices[0].torch_device)
    with ExitStack() as hooks:
        for layer, number in zip(layers, assign(sizes, len(devices)), strict=True):
            hooks.callback(_place(layer, devices[number], flow).remove)
        yield flow


def on(value: Any, device: Device) -> Any:
    """Return the structure `value` with all its tensors on `device`."""
    return mapped(value, lambda tensor: tensor.to(device.torch_device))


def assign(sizes: Sequence[int], count: int) -> list[int]:
    """Return the device number of each layer.

    Each of `count` devices gets a contiguous group of layers.

    `sizes` has the size of each layer; the groups have about equal total sizes. If there are at
    least `count` layers, no group is empty.
    """
    total = sum(sizes) or 1
    before = 0.0
    numbers: list[int] = []
    for position, size in enumerate(sizes):
        middle = (before + size / 2) / total * count
        least = numbers[-1] if numbers else 0
        most = least + 1 if numbers else 0
        # each later device must still get one of the remaining layers
        needed = count - (len(sizes) - position)
        numbers.append(min(max(int(middle), least, needed), most, count - 1))
        before += size
    return numbers


def _children(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child) is nn.Sequential:
            yield from _children(child)
        else:
            yield child


def _has_state(module: nn.Module) -> bool:
    return any(True for _ in (*module.parameters(), *module.buffers()))


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def _place(layer: nn.Module, device: Device, flow: Flow) -> Any:
    """Move a layer to a device, and return the handle of the hook that moves its inputs there.

    Where the flow comes from another device, the marks switch: to this device when its inputs have
    arrived, and back to the other device when the gradients have arrived there in backward. The
    time of a copy thus belongs to the device that sends.
    """
    layer.to(device.torch_device)

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        source = flow.at

        def moved(value: Any) -> Any:
            tensor = value.data if isinstance(value, PackedSequence) else value
            sent = source is not device and tensor.device == source.torch_device
            if sent and tensor.requires_grad:
                tensor.register_hook(lambda gradient: flow.enter(Phase.BACKWARD, source))
            return value.to(device.torch_device)

        inputs = tree_map_only(
            (torch.Tensor, PackedSequence), moved, (args, kwargs), is_leaf=_is_packed
        )
        if source is not device:
            flow.enter(Phase.FORWARD, device)
        return inputs

    return layer.register_forward_pre_hook(enter, with_kwargs=True)
