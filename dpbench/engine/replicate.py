"""Replicate: copy the module to each device, joined to the original by autograd.

Only this file calls torch's private `Module._replicate_for_data_parallel`. Modules whose copies
need preparation override that method; RNNs do so for their flat weights. Copying the module tree
takes most of the host time of replicate.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import Function
from torch.fx import GraphModule
from torch.nn.modules import module as module_hooks
from torch.nn.parameter import is_lazy

from dpbench.engine.errors import Refused
from dpbench.engine.reduce import Gradients, reduce
from dpbench.hardware.device import Device
from dpbench.hardware.devices import Devices, as_devices
from dpbench.records import Mark, Phase, marked, no_mark

HOOKS = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, OrderedDict))
"""The names of the dicts of hooks that torch gives every module."""
GLOBAL_HOOKS = {
    name: hooks
    for name in HOOKS
    if (hooks := getattr(module_hooks, f"_global{name}", None)) is not None
}
"""The hooks that every call of any module runs, by the name of a module's own ones of this kind."""
OWNED = (*HOOKS, "_non_persistent_buffers_set")
"""The containers of which each replica gets a copy: torch's replicas share them with the module."""
Reducer = Callable[[Gradients], list[torch.Tensor]]
"""What autograd calls to sum the replicas' gradients: gradients by replica and parameter."""


class Replicate(Protocol):
    """The interface of `replicate`, for the steps that keep replicas' module trees."""

    def __call__(
        self,
        module: nn.Module,
        devices: Devices,
        *,
        detach: bool = False,
        reducer: Reducer | None = None,
        mark: Mark = no_mark,
    ) -> list[nn.Module]:
        """Return one replica of `module` per device."""


def replicate(
    module: nn.Module,
    devices: Devices,
    *,
    detach: bool = False,
    reducer: Reducer | None = None,
    mark: Mark = no_mark,
) -> list[nn.Module]:
    """Return one replica of `module` per device; replica 0 shares storage with the original.

    The replicas' weights are non-leaf tensors: in backward, autograd passes their gradients to
    `reducer` (None means `reduce`), and adds the sums to the gradients of the original's weights.
    With `detach` the weights are plain copies without gradients. Raises RuntimeError for parameters
    or buffers that are uninitialized or not on `devices[0]`, and Refused for modules that
    torch.compile has wrapped.
    """
    devices = as_devices(devices)
    with mark(Phase.REPLICATE, devices[0].index):
        parameters, buffers = parameters_of(module), buffers_of(module)
        check_placed((*parameters, *buffers), devices[0])
    tensors, per_replica = copied(parameters, buffers, devices, detach, reducer, mark)
    replicas = []
    for device, of_replica in zip(devices, per_replica, strict=True):
        with mark(Phase.REPLICATE, device.index):
            replicas.append(rebuild(module, dict(zip(map(id, tensors), of_replica, strict=True))))
    return replicas


def copied(
    parameters: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    devices: Sequence[Device],
    detach: bool,
    reducer: Reducer | None,
    mark: Mark,
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Return a module's tensors in one order, and in the same order each replica's tensors.

    Replica 0 shares storage with the module: its weights are outputs of `Broadcast`, and its
    buffers the module's own, so that writes to them, such as those of BatchNorm, change the module.
    The other replicas have copies. The arguments are those of `replicate`.
    """
    plain = [b for b in buffers if detach or not b.requires_grad]
    trained = [*parameters, *(b for b in buffers if b.requires_grad and not detach)]
    if detach:
        with torch.no_grad():
            per_replica = copies_of(trained, devices, mark)
    else:
        reducer = reducer or partial(reduce, devices=devices, mark=mark)
        joined = Broadcast.apply(devices, reducer, mark, *trained) if trained else ()  # type: ignore[no-untyped-call]
        per_replica = [
            list(joined[i * len(trained) : (i + 1) * len(trained)]) for i in range(len(devices))
        ]
    for of_replica, its_plain in zip(per_replica, copies_of(plain, devices, mark), strict=True):
        of_replica.extend(its_plain)
    # replica 0 must not write its buffers in place while other devices still copy them: work that
    # is queued on the first device from here on starts after the copies
    for device in devices[1:]:
        devices[0].wait(device)
    return [*trained, *plain], per_replica


class Broadcast(Function):
    """An autograd function that copies tensors to every device; its backward reduces gradients.

    One node copies all parameters, so that its backward starts when the last replica's backward has
    ended.
    """

    @staticmethod
    def forward(
        ctx: Any,
        devices: Sequence[Device],
        reducer: Reducer,
        mark: Mark,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return the originals, then the copies of device 1, and so on, in one tuple."""
        # the first device's last, so that it stays the current one
        ctx.guards = [device.guard() for device in reversed(devices)]
        ctx.reducer = reducer
        ctx.count = len(tensors)
        copies = [t for one in copies_of(tensors, devices, mark) for t in one]
        wanted = ctx.needs_input_grad[3:] * len(devices)
        frozen = [t for t, wants in zip(copies, wanted, strict=True) if not wants]
        ctx.mark_non_differentiable(*frozen)
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients, summed over the replicas, and None for each other argument.

        For a parameter that a replica did not use, autograd passes zeros to this function, and not
        None; the sum for a parameter that no replica used is therefore zero, as in torch. The sums
        are computed on the streams of the forward, to which the gradients' memory belongs: the
        thread in which autograd runs this has others.
        """
        wanted = [n for n, wants in enumerate(ctx.needs_input_grad[3:]) if wants]
        starts = range(0, len(gradients), ctx.count)
        with ExitStack() as guards:
            for guard in ctx.guards:
                guards.enter_context(guard)
            sums = ctx.reducer([[gradients[i + n] for n in wanted] for i in starts])
        whole: list[Any] = [None] * ctx.count
        for n, total in zip(wanted, sums, strict=True):
            whole[n] = total
        return None, None, None, *whole


def copies_of(
    tensors: Sequence[torch.Tensor], devices: Sequence[Device], mark: Mark
) -> list[list[torch.Tensor]]:
    """Return one list per device: the tensors themselves for the first, copies for all others.

    Distinct GPUs get them by NCCL's broadcast.
    """
    root, *others = devices
    if tensors and root.can_collect(devices):
        with marked(mark, Phase.REPLICATE, (device.index for device in devices)):
            return root.broadcast(tensors, devices)
    copies = [list(tensors)]
    for device in others:
        with marked(mark, Phase.REPLICATE, device.at_work([root])):
            copies.append(device.clone(tensors))
    return copies


def rebuild(module: nn.Module, table: dict[int, torch.Tensor]) -> nn.Module:
    """Return a copy of the module tree, with `table[id(tensor)]` in place of each tensor.

    The copy has dicts of hooks of its own, so that a hook that forward adds is lost with the
    replica. If they were shared, such hooks would pile up on the module.
    """
    modules = list(module.modules())
    compiled = sys.modules.get("torch._dynamo.eval_frame")
    if compiled is not None and any(isinstance(one, compiled.OptimizedModule) for one in modules):
        # an attribute set on the copy would change the original
        raise Refused(
            "a module that torch.compile has wrapped cannot be replicated; compile the original"
            " module in place with module.compile(), and pass that module"
        )
    copies = {id(m): m._replicate_for_data_parallel() for m in modules}
    for copy in copies.values():
        attributes = copy.__dict__
        for name in OWNED:
            if name in attributes:  # a ScriptModule may lack some
                attributes[name] = attributes[name].copy()
    for original in modules:
        if isinstance(original, GraphModule):  # copying a GraphModule registers new parameters
            copies[id(original)]._parameters = {}
    for original in modules:
        copy = copies[id(original)]
        # module.compile() stores a compiled call of the original; a copy that kept it would use the
        # original's weights
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


def check_placed(tensors: Iterable[torch.Tensor], root: Device) -> None:
    """Raise RuntimeError unless all of a module's tensors are on `root` and initialized."""
    home = root.torch_device
    for tensor in tensors:
        if is_lazy(tensor):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with `DataParallel`. Run a"
                " dummy forward pass to correctly initialize the modules"
            )
        if tensor.device != home:
            raise RuntimeError(
                f"module must have its parameters and buffers on device {home} (device_ids[0]) but "
                f"found one of them on device: {tensor.device}; move it first: module.to('{home}')"
            )


def check_placement(module: nn.Module, root: Device) -> None:
    """Raise RuntimeError unless all parameters and buffers are on `root` and initialized."""
    check_placed((*parameters_of(module), *buffers_of(module)), root)


def parameters_of(module: nn.Module) -> list[torch.Tensor]:
    """Return all parameters of a module, each of them once.

    A module may override `parameters()`, for example to hide a frozen part from optimizers.
    """
    return unique(p for m in module.modules() for p in m._parameters.values() if p is not None)


def buffers_of(module: nn.Module) -> list[torch.Tensor]:
    """Return all buffers of a module, each of them once."""
    return unique(b for m in module.modules() for b in m._buffers.values() if b is not None)


def unique(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors in order, each of them once."""
    return list({id(tensor): tensor for tensor in tensors}.values())
