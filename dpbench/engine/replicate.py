"""Replicate: one copy of the module per device, joined to the original by a single autograd node.

The private `Module._replicate_for_data_parallel` is used here and nowhere else: modules that must prepare their
copies (RNNs and their flat weights) override it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dpbench.devices import Device
from dpbench.engine.broadcast import Broadcast, copies_of
from dpbench.engine.devices import Devices, as_devices
from dpbench.records import Mark, Phase, no_mark


def replicate(
    module: nn.Module,
    devices: Devices,
    *,
    detach: bool = False,
    mark: Mark = no_mark,
    on_reduce: Callable[[], None] = lambda: None,
) -> list[nn.Module]:
    """Return one replica of `module` per device; replica 0 shares storage with the original.

    The replicas' weights are non-leaf tensors whose gradients sum into the original's; with `detach` they are
    plain copies. Raises RuntimeError for parameters on another device than `devices[0]`, or without shape yet.
    """
    devices = as_devices(devices)
    with mark(Phase.REPLICATE, devices[0].index):
        check_placement(module, devices[0])
        parameters, buffers = unique(module.parameters()), unique(module.buffers())
    sources = [*parameters, *(b for b in buffers if b.requires_grad and not detach)]
    plain = [b for b in buffers if detach or not b.requires_grad]
    if detach:
        with torch.no_grad():  # as in torch: replica 0 has the parameters themselves, the others plain copies
            copies = copies_of(sources, devices, mark)
    else:
        flat = Broadcast.apply(devices, mark, on_reduce, *sources) if sources else ()  # type: ignore[no-untyped-call]
        copies = [list(flat[i * len(sources) : (i + 1) * len(sources)]) for i in range(len(devices))]
    shared = copies_of(plain, devices, mark)
    for device in devices[1:]:  # replica 0 may write its buffers in place while others still copy them
        devices[0].wait(device)
    replicas = []
    for device, weights, statistics in zip(devices, copies, shared, strict=True):
        with mark(Phase.REPLICATE, device.index):
            table = {id(s): t for s, t in zip([*sources, *plain], [*weights, *statistics], strict=True)}
            replicas.append(rebuild(module, table))
    return replicas


def check_placement(module: nn.Module, root: Device) -> None:
    """Raise RuntimeError unless every parameter and buffer of `module` lives on `root`."""
    for tensor in (*module.parameters(), *module.buffers()):
        if is_lazy(tensor):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with `DataParallel`. Run a dummy forward pass "
                "to correctly initialize the modules"
            )
        if tensor.device != root.torch_device:
            raise RuntimeError(
                f"module must have its parameters and buffers on device {root.torch_device} (device_ids[0]) but "
                f"found one of them on device: {tensor.device}; move it first: module.to('{root.torch_device}')"
            )


def rebuild(module: nn.Module, table: dict[int, torch.Tensor]) -> nn.Module:
    """Copy the tree of modules, putting `table`'s tensor wherever the original has the tensor of that id."""
    modules = list(module.modules())
    copies = {id(m): m._replicate_for_data_parallel() for m in modules}
    for original in modules:
        copy = copies[id(original)]
        for name, child in original._modules.items():
            copy._modules[name] = None if child is None else copies[id(child)]
        former = {}
        for name, parameter in original._parameters.items():
            if parameter is None:
                copy._parameters[name] = None
            else:  # a plain attribute: a copy is no leaf, so it cannot be a Parameter
                former[name] = table[id(parameter)]
                setattr(copy, name, former[name])
        copy._former_parameters = former
        for name, buffer in original._buffers.items():
            copy._buffers[name] = None if buffer is None else table[id(buffer)]
    return copies[id(module)]  # type: ignore[no-any-return]


def unique(tensors: Any) -> list[torch.Tensor]:
    """List tensors once each, in order."""
    return list({id(tensor): tensor for tensor in tensors}.values())
