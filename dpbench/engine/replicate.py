"""Replicate: one copy of the module per device, joined to the original by a single autograd node.

The private `Module._replicate_for_data_parallel` is used here and nowhere else: modules that must prepare their
copies (RNNs and their flat weights) override it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy

from dpbench.engine.collectives import Copier, broadcast, copies_of
from dpbench.engine.errors import Refused
from dpbench.hardware.device import Device
from dpbench.hardware.devices import Devices, as_devices
from dpbench.records import Mark, Phase, no_mark

if TYPE_CHECKING:  # trees are built by this module's own verb
    from dpbench.engine.replica_cache import Trees


def replicate(
    module: nn.Module,
    devices: Devices,
    *,
    detach: bool = False,
    copier: Copier = copies_of,
    trees: Trees | None = None,
    overlap: bool = False,
    comm_dtype: torch.dtype | None = None,
    mark: Mark = no_mark,
    on_reduce: Callable[[], None] = lambda: None,
) -> list[nn.Module]:
    """Return one replica of `module` per device; replica 0 shares storage with the original.

    The replicas' weights are non-leaf tensors whose gradients sum into the original's; with `detach` they are
    plain copies. `trees` keeps the copied modules from call to call, `copier` moves the tensors, `overlap` reduces
    while backward still runs, `comm_dtype` is what gradients are rounded to on their way. Raises RuntimeError for
    parameters on another device than `devices[0]`, or without shape yet.
    """
    devices = as_devices(devices)
    with mark(Phase.REPLICATE, devices[0].index):
        if trees is None:
            parameters, buffers = unique(module.parameters()), unique(module.buffers())
            check_placed((*parameters, *buffers), devices[0])  # not of the module: walking it is what costs
        else:
            trees.refresh()
            trees.check_placed(devices[0])
            parameters, buffers = trees.parameters, trees.buffers
    sources = [*parameters, *(b for b in buffers if b.requires_grad and not detach)]
    plain = [b for b in buffers if detach or not b.requires_grad]
    if detach:
        with torch.no_grad():  # as in torch: replica 0 has the parameters themselves, the others plain copies
            copies = copier(sources, devices, mark)
    else:
        copies = broadcast(
            sources, devices, copier=copier, overlap=overlap, comm_dtype=comm_dtype, mark=mark, on_reduce=on_reduce
        )
    shared = copies_of(plain, devices, mark)
    for device in devices[1:]:  # replica 0 may write its buffers in place while others still copy them
        devices[0].wait(device)
    order = [*sources, *plain]
    each = [[*weights, *statistics] for weights, statistics in zip(copies, shared, strict=True)]
    if trees is not None:
        with mark(Phase.REPLICATE, devices[0].index):
            return trees.bind(order, each, detached=detach)
    replicas = []
    for device, tensors in zip(devices, each, strict=True):
        with mark(Phase.REPLICATE, device.index):
            replicas.append(rebuild(module, {id(s): t for s, t in zip(order, tensors, strict=True)}))
    return replicas


def check_placement(module: nn.Module, root: Device) -> None:
    """Raise RuntimeError unless every parameter and buffer of `module` lives on `root`."""
    check_placed((*module.parameters(), *module.buffers()), root)


def check_placed(tensors: Iterable[torch.Tensor], root: Device) -> None:
    """Raise RuntimeError unless all of a module's tensors live on `root`."""
    home = root.torch_device
    for tensor in tensors:
        if is_lazy(tensor):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with `DataParallel`. Run a dummy forward pass "
                "to correctly initialize the modules"
            )
        if tensor.device != home:
            raise RuntimeError(
                f"module must have its parameters and buffers on device {home} (device_ids[0]) but "
                f"found one of them on device: {tensor.device}; move it first: module.to('{home}')"
            )


def rebuild(module: nn.Module, table: dict[int, torch.Tensor]) -> nn.Module:
    """Copy the tree of modules, putting `table`'s tensor wherever the original has the tensor of that id."""
    modules = list(module.modules())
    _check_compiled(modules)
    copies = {id(m): m._replicate_for_data_parallel() for m in modules}
    for original in modules:
        if isinstance(original, GraphModule):  # the copy of one has parameters of its own
            copies[id(original)]._parameters = {}
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


def _check_compiled(modules: Sequence[nn.Module]) -> None:
    """Refuse modules that `torch.compile` has wrapped: what is set on a copy of one is set on the original."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is not None and any(isinstance(part, eval_frame.OptimizedModule) for part in modules):
        raise Refused(
            "a module that torch.compile has wrapped cannot be replicated; compile it in place instead: "
            "module.compile(), and pass the module"
        )


def unique(tensors: Any) -> list[torch.Tensor]:
    """List tensors once each, in order."""
    return list({id(tensor): tensor for tensor in tensors}.values())
