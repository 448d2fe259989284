"""Layers over devices: place a module's layers on several devices, and mark the phases of each device.

The layers are the module's children that have parameters or buffers. A child that is an `nn.Sequential` is replaced by
its children. The layers are divided, in order, into contiguous groups with about equal bytes of parameters, one group
per device. Children without parameters and buffers compute where their inputs are. Parameters of the module that are in
no child are on the first device. A hook of each layer copies the layer's inputs to the layer's device. `Block` is one
layer that runs on several devices.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dpbench.engine import DataParallel
from dpbench.engine.containers import mapped
from dpbench.engine.data_parallel import run_pieces, scatter_arguments
from dpbench.engine.workers import IntraOp
from dpbench.hardware.device import Device
from dpbench.models import Model, positional
from dpbench.records import HOST, Case, Mark, Phase
from dpbench.strategies import Forward, Updates, precision_of
from dpbench.strategies.single import put_all

if TYPE_CHECKING:
    import torch
    from torch import nn


@contextmanager
def spread(case: Case, model: Model, devices: Sequence[Device], mark: Mark) -> Iterator[Flow]:
    """Place the layers on the devices, and yield the `Flow` that marks phases in steps; on exit, remove the hooks.

    Raises ValueError if the module has fewer layers than devices.
    """
    module, groups = model.module, grouped(case, model, len(devices))
    module.to(devices[0].torch_device)
    device_of = {layer: device for group, device in zip(groups, devices, strict=True) for layer in group}
    flow = Flow(devices, mark)
    with ExitStack() as hooks:
        for child in dict.fromkeys(_children(module)):
            _hook(child, device_of.get(child), flow, hooks)
        yield flow


def grouped(case: Case, model: Model, count: int) -> list[list[nn.Module]]:
    """Return the layers of the module in `count` groups. Raises ValueError if the module has fewer layers."""
    children = dict.fromkeys(_children(model.module))
    layers = [child for child in children if any(True for _ in (*child.parameters(), *child.buffers()))]
    if len(layers) < count:
        fewer = len(layers) * (case.devices // count)
        raise ValueError(
            f"{case.strategy} needs at least one layer per device, but the model {model.name} has {len(layers)} "
            f"layer(s) for {count} devices: give "
            + (f"--devices {fewer} or fewer" if fewer else "another model in --models")
        )
    placed = assign([sum(p.nbytes for p in layer.parameters()) for layer in layers], count)
    return [[layer for layer, at in zip(layers, placed, strict=True) if at == number] for number in range(count)]


def assign(sizes: Sequence[int], count: int) -> list[int]:
    """Return the device number of each layer; each of `count` devices gets a contiguous group of layers.

    `sizes` has the size of each layer; the groups have about equal total sizes. If there are at least `count` layers,
    no group is empty.
    """
    total, before = sum(sizes) or 1, 0.0
    found: list[int] = []
    for position, size in enumerate(sizes):
        middle = (before + size / 2) / total * count
        least = found[-1] if found else 0
        # each later device must still get one of the remaining layers
        left = len(sizes) - position
        number = min(max(int(middle), least, count - left), least + 1 if found else 0, count - 1)
        found.append(number)
        before += size
    return found


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module's children in order; each nn.Sequential is replaced by its children."""
    from torch import nn

    for child in module.children():
        if type(child) is nn.Sequential:
            yield from _children(child)
        else:
            yield child


class Flow:
    """The progress of a step through the devices: the current device, and the open marks."""

    def __init__(self, devices: Sequence[Device], mark: Mark) -> None:
        self.devices, self._mark = devices, mark
        self._open = ExitStack()
        self.at = devices[0]
        """The device on which the last layer ran."""

    def enter(self, phase: Phase, *devices: Device) -> None:
        """Close the open marks, and open a mark of `phase` on each of `devices`."""
        self.leave()
        for device in devices:
            self._open.enter_context(self._mark(phase, device.index))

    def leave(self) -> None:
        """Close the open marks."""
        self._open.close()

    @contextmanager
    def during(self, phase: Phase, device: Device) -> Iterator[None]:
        """Open a mark of `phase` on `device` inside this context; at its end, close the marks that are then open."""
        self.enter(phase, device)
        try:
            yield
        finally:
            self.leave()

    def cross(self, value: torch.Tensor, copy: torch.Tensor, source: Device, target: Device) -> None:
        """Register hooks that switch the marks when backward crosses from device `target` back to device `source`.

        `copy`, on `target`, is the copy of `value`, on `source`. If `source` is the host, the transfer of the gradient
        is marked as the phase `gather`.
        """
        if source.index != HOST:
            copy.register_hook(lambda gradient: self.enter(Phase.BACKWARD, source))
            return

        def fetch(gradient: torch.Tensor) -> None:
            target.synchronize()  # the copy to pageable memory waits for the device in any case
            self.enter(Phase.GATHER, source)

        copy.register_hook(fetch)
        value.register_hook(lambda gradient: self.enter(Phase.BACKWARD, source))


class SpreadStep:
    """The training step of a module whose layers are spread over the devices of a flow.

    `wrapped` is the module, or a wrapper that calls it.
    """

    def __init__(self, case: Case, model: Model, flow: Flow, mark: Mark, wrapped: nn.Module | None = None) -> None:
        self._case, self._model, self._flow, self._mark = case, model, flow, mark
        self._wrapped = model.module if wrapped is None else wrapped
        self._updates = Updates(case, model, model.module.parameters())
        self.returned_s = 0.0
        """The time at which the last backward returned, in seconds on the clock of `time.perf_counter`."""

    def __call__(self, inputs: Any, target: Any, scale: float = 1.0) -> torch.Tensor:
        """Train on a batch and return the loss, which is multiplied by `scale`."""
        mark, flow = self._mark, self._flow
        root, last = flow.devices[0], flow.devices[-1]
        with mark(Phase.OPTIMIZER, root.index):
            self._updates.clear()
        with mark(Phase.SCATTER, root.index):
            arguments, (target,) = put_all(positional(inputs), root), put_all([target], last)
        flow.at = root
        with precision_of(self._case):
            output = self._wrapped(*arguments)
            with mark(Phase.LOSS, last.index):
                loss = self._model.loss(mapped(output, lambda tensor: tensor.to(last.torch_device)), target)
                loss = loss if scale == 1.0 else loss * scale
        with flow.during(Phase.BACKWARD, flow.at):
            self._updates.scaled(loss).backward()
        self.returned_s = time.perf_counter()
        with ExitStack() as stack:
            for device in flow.devices:
                stack.enter_context(mark(Phase.OPTIMIZER, device.index))
            self._updates.step()
        return loss.detach()


def spread_forward(module: nn.Module, flow: Flow, mark: Mark) -> Forward:
    """Return the forward of a module whose layers are spread over the devices of a flow."""
    root = flow.devices[0]

    def forward(*inputs: Any) -> torch.Tensor:
        with mark(Phase.SCATTER, root.index):
            arguments = put_all(inputs, root)
        flow.at = root
        output: torch.Tensor = module(*arguments)
        return output

    return forward


def _hook(child: nn.Module, device: Device | None, flow: Flow, hooks: ExitStack) -> None:
    """Move a child module to `device`, and register hooks that copy its inputs there and mark forward and backward.

    If `device` is None, the child computes where its inputs are. Closing `hooks` removes the hooks. A copy from the
    host counts as the phase `scatter`, any other copy as `forward`.
    """
    import torch
    from torch.nn.utils.rnn import PackedSequence
    from torch.utils._pytree import tree_map_only

    if device is not None:
        child.to(device.torch_device)

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        before, here = flow.at, flow.at if device is None else device
        loads = before.index == HOST != here.index
        flow.enter(Phase.SCATTER if loads else Phase.FORWARD, here)
        if device is None:
            return args, kwargs
        flow.at = device

        def moved(value: Any) -> Any:
            copy = value.to(device.torch_device)
            source, tensor = (one.data if isinstance(one, PackedSequence) else one for one in (value, copy))
            if before is not device and tensor.requires_grad:  # backward on this device ends with this gradient
                flow.cross(source, tensor, before, device)
            return copy

        found = tree_map_only(
            (torch.Tensor, PackedSequence), moved, (args, kwargs),
            is_leaf=lambda value: isinstance(value, PackedSequence),
        )  # fmt: skip
        if loads:
            flow.enter(Phase.FORWARD, device)
        return found

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        flow.leave()

    for handle in (
        child.register_forward_pre_hook(enter, with_kwargs=True),
        child.register_forward_hook(leave, always_call=True),
    ):
        hooks.callback(handle.remove)


class Block(DataParallel):
    """dpbench.DataParallel around a block; it switches the marks of `flow` where a pass enters and leaves the block.

    Backward runs through the layers after the block, then through the replicas of the block, and then through the
    layers before it.
    """

    def __init__(self, module: nn.Module, devices: Sequence[Device], flow: Flow, mark: Mark) -> None:
        super().__init__(module, list(devices), mark=mark)
        self._flow = flow

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the block with its arguments split over the devices; return the gathered output."""
        flow, root = self._flow, self.devices[0]
        flow.leave()
        _on_gradient((inputs, kwargs), lambda: flow.enter(Phase.BACKWARD, root))
        pieces = scatter_arguments(inputs, kwargs, self.devices, mark=self._mark)
        with IntraOp(self.devices):
            output = run_pieces(self.module, pieces, self.devices, root, mark=self._mark, on_reduce=flow.leave)
        used = self.devices[: len(pieces)]
        _on_gradient(output, lambda: flow.enter(Phase.BACKWARD, *used))
        flow.enter(Phase.FORWARD, root)
        return output


def _on_gradient(values: Any, call: Any) -> None:
    """Make backward call `call` each time that it has computed the gradient of a tensor in `values`."""
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            value.register_hook(lambda gradient: call())
