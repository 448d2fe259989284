"""DataParallel, explicit: scatter, replicate, parallel_apply, gather, in four visible lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dpbench.devices import Device
from dpbench.engine.apply import parallel_apply
from dpbench.engine.devices import DeviceId, resolve
from dpbench.engine.gather import gather
from dpbench.engine.replicate import check_placement, replicate
from dpbench.engine.scatter import scatter
from dpbench.records import Mark, no_mark
from dpbench.schedule import parse

PREFIX = "module."


def forward(
    module: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    devices: Sequence[Device],
    output: Device,
    dim: int = 0,
) -> Any:
    """Run `module` on a batch split over `devices` and return its outputs on `output`."""
    return run_pieces(module, scatter_arguments(inputs, kwargs, devices, dim), devices, output, dim)


def scatter_arguments(
    inputs: tuple[Any, ...], kwargs: Mapping[str, Any], devices: Sequence[Device], dim: int = 0, *, mark: Mark = no_mark
) -> list[Any]:
    """Split a call's arguments into one (inputs, kwargs) pair per replica; a call without any needs just one."""
    if not inputs and not kwargs:
        return [((), {})]
    return scatter((inputs, dict(kwargs)), devices, dim, mark=mark)


def run_pieces(
    module: nn.Module,
    pieces: Sequence[Any],
    devices: Sequence[Device],
    output: Device,
    dim: int = 0,
    *,
    mark: Mark = no_mark,
    on_reduce: Callable[[], None] = lambda: None,
) -> Any:
    """Replicate, apply and gather: what `forward` does once the arguments are scattered.

    One device runs the module itself; fewer pieces than devices use fewer replicas. `on_reduce` is called in
    backward where the replicas' work ends and the reduction begins.
    """
    used = devices[: len(pieces)]
    arguments, keywords = [piece[0] for piece in pieces], [piece[1] for piece in pieces]
    if len(devices) == 1:
        check_placement(module, devices[0])
        return parallel_apply([module], arguments, keywords, used, mark=mark)[0]
    detach = not torch.is_grad_enabled()
    replicas = replicate(module, used, detach=detach, mark=mark, on_reduce=on_reduce)
    outputs = parallel_apply(replicas, arguments, keywords, used, mark=mark)
    return gather(outputs, output, used, dim, mark=mark)


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceId] | None = None,
    output_device: DeviceId | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Evaluate `module(*inputs, **module_kwargs)` in parallel over `device_ids`.

    The functional form of `DataParallel`, with the arguments of torch.nn.parallel.data_parallel; `device_ids`
    also takes "cpu" repeated, for logical CPU devices. An `inputs` that is no tuple is a single argument; None is
    no argument. Returns the gathered output on `output_device` (default: the first device).
    """
    arguments = () if inputs is None else inputs if isinstance(inputs, tuple) else (inputs,)
    devices = resolve(device_ids)
    if not devices:
        return module(*arguments, **(module_kwargs or {}))
    return forward(module, arguments, module_kwargs or {}, devices, output_of(devices, output_device), dim)


def output_of(devices: Sequence[Device], output_device: DeviceId | None) -> Device:
    """Return the device that outputs are gathered on: one of `devices`, or another one as an extra."""
    if output_device is None:
        return devices[0]
    (wanted,) = resolve([output_device])
    for device in devices:
        if device.torch_device == wanted.torch_device:
            return device
    wanted.index = len(devices)
    return wanted


class DataParallel(nn.Module):
    """A drop-in for torch.nn.DataParallel whose every phase is a verb of its own.

    `device_ids` takes what torch takes (GPU numbers, devices, names) and "cpu" repeated for logical CPU devices;
    None means all GPUs, and without a GPU the wrapper passes calls through. The module must be on
    `device_ids[0]` when it is called, not when it is wrapped. Gradients of the replicas sum into the module's;
    unused parameters get zeros; names in `state_dict` carry the prefix "module.".
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[DeviceId] | None = None,
        output_device: DeviceId | None = None,
        dim: int = 0,
        *,
        schedule: str = "reference",
    ) -> None:
        super().__init__()
        self.module = module
        self.devices = resolve(device_ids)
        self.device_ids = [device.torch_device for device in self.devices]
        self.dim = dim
        self.schedule = parse(schedule)
        self.output_device = output_of(self.devices, output_device) if self.devices else None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on the batch split over the devices; return the gathered output."""
        if self.output_device is None:
            return self.module(*inputs, **kwargs)
        return forward(self.module, inputs, kwargs, self.devices, self.output_device, self.dim)

    def __getattr__(self, name: str) -> Any:
        """Look up what nn.Module holds; point at `.module` for what the wrapped module has."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                error.add_note(hint := f"hint: the wrapped module has it: use .module.{name}")
                raise AttributeError(f"{error}; {hint}", name=name, obj=self) from None
            raise

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights saved from a DataParallel module; refuse a prefix that does not fit, with the way out."""
        check_prefix(list(self.state_dict()), list(state_dict), strict=strict)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


def check_prefix(expected: Sequence[str], given: Sequence[str], *, strict: bool) -> None:
    """Raise RuntimeError when names differ from the expected ones by the prefix "module.", or share none.

    Without this, `strict=False` would load nothing and say nothing.
    """
    if not expected or set(expected) & set(given):
        return
    if {PREFIX + name for name in given} & set(expected):
        problem = f'they lack the prefix "{PREFIX}": they were saved from the unwrapped module'
        remedy = "load them into .module instead: wrapped.module.load_state_dict(state)"
    elif set(given) & {PREFIX + name for name in expected}:
        problem = f'they carry the prefix "{PREFIX}" once too often: they were saved from a wrapped module'
        remedy = "strip it: torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, 'module.')"
    elif not strict and given:
        problem, remedy = "none is expected", f"the module expects names like {expected[0]!r}"
    else:
        return  # torch's own message lists what is missing
    silent = "; strict=False would load nothing and say nothing" if not strict else ""
    raise RuntimeError(
        f"none of the {len(given)} names in the state dict fits the {len(expected)} of this module, "
        f"e.g. {given[0]!r}: {problem}{silent}; {remedy}"
    )
