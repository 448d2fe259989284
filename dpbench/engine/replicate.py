"""Replicate: one copy of the module per device, joined to the original by autograd.

Only this file calls torch's private `Module._replicate_for_data_parallel`. Modules whose copies need preparation
override that method; RNNs do so for their flat weights.
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

if TYPE_CHECKING:  # replica_cache imports this module
    from dpbench.engine.replica_cache import ReplicaCache


def replicate(
    module: nn.Module,
    devices: Devices,
    *,
    detach: bool = False,
    copier: Copier = copies_of,
    cache: ReplicaCache | None = None,
    overlap: bool = False,
    comm_dtype: torch.dtype | None = None,
    mark: Mark = no_mark,
    on_reduce: Callable[[], None] = lambda: None,
) -> list[nn.Module]:
    """Return one replica of `module` per device; replica 0 shares storage with the original.

    The replicas' weights are non-leaf tensors; backward sums their gradients into the gradients of the original's
    weights. With `detach` the weights are plain copies without gradients. `copier` copies the tensors to the devices.
    `cache` keeps the copied modules between calls. With `overlap`, gradients are reduced bucket by bucket while
    backward still runs. `comm_dtype` is the dtype to which gradients are rounded for the transfer; None means no
    rounding. `on_reduce` is called in backward when the reduction begins. Raises RuntimeError for parameters or buffers
    that are uninitialized or not on `devices[0]`, and Refused for modules that torch.compile has wrapped.
    """
    devices = as_devices(devices)
    with mark(Phase.REPLICATE, devices[0].index):
        if cache is None:
            parameters, buffers = unique(module.parameters()), unique(module.buffers())
            check_placed((*parameters, *buffers), devices[0])  # reuse the lists: walking the module again is slow
        else:
            cache.refresh()
            cache.check_placed(devices[0])
            parameters, buffers = cache.parameters, cache.buffers
    sources = [*parameters, *(b for b in buffers if b.requires_grad and not detach)]
    plain = [b for b in buffers if detach or not b.requires_grad]
    if detach:
        with torch.no_grad():  # as in torch: replica 0 has the parameters themselves, the other replicas plain copies
            copies = copier(sources, devices, mark)
    else:
        copies = broadcast(
            sources, devices, copier=copier, overlap=overlap, comm_dtype=comm_dtype, mark=mark, on_reduce=on_reduce
        )
    shared = copies_of(plain, devices, mark)
    for device in devices[1:]:  # replica 0 must not write its buffers in place while other devices still copy them
        devices[0].wait(device)
    order = [*sources, *plain]
    each = [[*weights, *statistics] for weights, statistics in zip(copies, shared, strict=True)]
    if cache is not None:
        with mark(Phase.REPLICATE, devices[0].index):
            return cache.bind(order, each, detached=detach)
    replicas = []
    for device, tensors in zip(devices, each, strict=True):
        with mark(Phase.REPLICATE, device.index):
            replicas.append(rebuild(module, {id(s): t for s, t in zip(order, tensors, strict=True)}))
    return replicas


def check_placement(module: nn.Module, root: Device) -> None:
    """Raise RuntimeError unless every parameter and buffer of `module` is on `root` and initialized."""
    check_placed((*module.parameters(), *module.buffers()), root)


def check_placed(tensors: Iterable[torch.Tensor], root: Device) -> None:
    """Raise RuntimeError unless all of a module's tensors are on `root` and initialized."""
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
    """Return a copy of the module tree, with `table[id(tensor)]` in place of each parameter and buffer."""
    modules = list(module.modules())
    _check_compiled(modules)
    copies = {id(m): m._replicate_for_data_parallel() for m in modules}
    for original in modules:
        if isinstance(original, GraphModule):  # copying a GraphModule registers new parameters
            copies[id(original)]._parameters = {}
    for original in modules:
        copy = copies[id(original)]
        # module.compile() stores a compiled call of the original; a copy that kept it would use the original's weights
        copy.__dict__.pop("_compiled_call_impl", None)
        for name, child in original._modules.items():
            copy._modules[name] = None if child is None else copies[id(child)]
        former = {}
        for name, parameter in original._parameters.items():
            if parameter is None:
                copy._parameters[name] = None
            else:  # a plain attribute: a copy is not a leaf, so it cannot be a Parameter
                former[name] = table[id(parameter)]
                setattr(copy, name, former[name])
        copy._former_parameters = former
        for name, buffer in original._buffers.items():
            copy._buffers[name] = None if buffer is None else table[id(buffer)]
    return copies[id(module)]  # type: ignore[no-any-return]


def _check_compiled(modules: Sequence[nn.Module]) -> None:
    """Raise Refused if `torch.compile` has wrapped one of `modules`.

    Such a module cannot be copied, because an attribute set on the copy would change the original.
    """
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is not None and any(isinstance(part, eval_frame.OptimizedModule) for part in modules):
        raise Refused(
            "a module that torch.compile has wrapped cannot be replicated; compile the original module in place with "
            "module.compile(), and pass that module"
        )


def unique(tensors: Any) -> list[torch.Tensor]:
    """Return the tensors in order, each of them once."""
    return list({id(tensor): tensor for tensor in tensors}.values())
