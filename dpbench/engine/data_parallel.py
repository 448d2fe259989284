"""DataParallel as a module wrapper and as a function: scatter, replicate, apply and gather."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from dpbench.engine import legal
from dpbench.engine._switches import OF
from dpbench.engine.collectives import Overlapping
from dpbench.engine.errors import Refused, call_on
from dpbench.engine.gather import gather, target_of
from dpbench.engine.legal import Identity
from dpbench.engine.parallel_apply import parallel_apply
from dpbench.engine.replicas import Maker, flat_weights, maker
from dpbench.engine.replicate import check_placement, replicate
from dpbench.engine.scatter import scatter
from dpbench.engine.workers import IntraOp, check_uncached, choose, keep_memory
from dpbench.hardware.device import Device
from dpbench.hardware.devices import DeviceId, Devices, as_devices, resolve
from dpbench.records import Mark, Phase, no_mark
from dpbench.records.schedule import SELECTED, Schedule, parse
from dpbench.records.words import count

PREFIX = "module."


def scatter_arguments(
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    devices: Sequence[Device],
    dim: int = 0,
    *,
    chunk_sizes: Sequence[int] | None = None,
    mark: Mark = no_mark,
) -> list[Any]:
    """Split a call's arguments into one (inputs, kwargs) pair per replica.

    A call without arguments gives one pair. `chunk_sizes` has the number of rows of each replica;
    None means equal chunks.
    """
    if not inputs and not kwargs:
        return [((), {})]
    return scatter((inputs, dict(kwargs)), devices, dim, chunk_sizes=chunk_sizes, mark=mark)


def run_pieces(
    module: nn.Module,
    pieces: Sequence[Any],
    devices: Sequence[Device],
    output: Device,
    dim: int = 0,
    *,
    mark: Mark = no_mark,
) -> Any:
    """Replicate the module, apply the replicas to `pieces`, and gather the output on `output`.

    `pieces` has one (inputs, kwargs) pair per replica; there may be more devices than replicas. If
    `devices` has only one device, the module itself runs.
    """
    used = devices[: len(pieces)]
    arguments = [piece[0] for piece in pieces]
    keywords = [piece[1] for piece in pieces]
    if len(devices) == 1:
        check_placement(module, devices[0])
        with devices[0].guard(), mark(Phase.FORWARD, devices[0].index):
            return call_on(devices[0], module, arguments[0], keywords[0])
    check_uncached(module)
    replicas = replicate(module, used, detach=not torch.is_grad_enabled(), mark=mark)
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

    The arguments are those of torch.nn.parallel.data_parallel. In addition, a list such as ["cpu",
    "cpu"] as `device_ids` means logical CPU devices. If `device_ids` is None, all GPUs are used;
    without a GPU the module is called directly. If `inputs` is not a tuple, it is passed as a
    single argument; None means no positional arguments. The output is gathered on `output_device`
    (default: the first device).
    """
    arguments = () if inputs is None else inputs if isinstance(inputs, tuple) else (inputs,)
    devices = resolve(device_ids)
    if not devices:
        return module(*arguments, **(module_kwargs or {}))
    pieces = scatter_arguments(arguments, module_kwargs or {}, devices, dim)
    return run_pieces(module, pieces, devices, output_of(devices, output_device), dim)


def output_of(devices: Sequence[Device], output_device: DeviceId | None) -> Device:
    """Return the device on which outputs are gathered; without `output_device`, the first one.

    If `output_device` is not among `devices`, it is an additional device, with index
    `len(devices)`.
    """
    if output_device is None:
        return devices[0]
    wanted = target_of(output_device)
    for device in devices:
        if device.torch_device == wanted.torch_device:
            return device
    wanted.index = len(devices)
    return wanted


def id_of(device: Device) -> DeviceId:
    """Return a device's id as torch gives it: an index for a GPU, a torch.device otherwise."""
    return device.torch_device.index if device.torch_device.type == "cuda" else device.torch_device


def _schedule(schedule: str) -> Schedule:
    """Raise ValueError for a schedule that needs TrainStep."""
    found = Schedule.CACHED if schedule in SELECTED else parse(schedule)
    if found.keeps_replicas:
        raise ValueError(
            f"the schedule {found} needs TrainStep: DataParallel cannot detect the optimizer's"
            " step, so that the weights of kept replicas would be outdated; give reference, pool or"
            " cached"
        )
    return found


class DataParallel(nn.Module):
    """A drop-in replacement for torch.nn.DataParallel, with a separate method for each phase.

    `device_ids` accepts the values that torch accepts (GPU indices, devices, names), and Device
    objects. In addition, a list such as ["cpu", "cpu"] means logical CPU devices. None means all
    GPUs; without a GPU the wrapper calls the module directly. When the wrapper is called, the
    module must be on `device_ids[0]`; with a single device, the constructor moves it there. The
    replicas' gradients are summed into the module's gradients; unused parameters get zeros. Names
    in `state_dict` have the prefix "module.". Subclasses may override `scatter`, `replicate`,
    `parallel_apply` and `gather`, as with torch.

    Where torch silently gives a wrong result, this engine gives the right result or raises an
    error: see docs/contract.md. `schedule` is reference, pool or cached; the others
    need TrainStep and raise ValueError.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Devices | None = None,
        output_device: DeviceId | None = None,
        dim: int = 0,
        *,
        schedule: str = Schedule.REFERENCE,
        mark: Mark = no_mark,
    ) -> None:
        super().__init__()
        self.module = module
        self.devices = resolve(None) if device_ids is None else as_devices(device_ids)
        self.device_ids = [id_of(device) for device in self.devices]
        self.dim = dim
        self.schedule = _schedule(schedule)
        self._mark = mark
        self._workers = choose(OF[self.schedule].workers)
        self._make: Maker | None = None
        self._identity: Identity | None = None
        self.output_device: DeviceId | None = None
        if self.devices:
            self._output = output_of(self.devices, output_device)
            self.output_device = id_of(self._output)
            self.src_device_obj = self.devices[0].torch_device
            keep_memory(self.devices)
        if len(self.devices) == 1:
            module.to(self.src_device_obj)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module with its arguments split over the devices; return the gathered output."""
        # inside a replica of another wrapper, the batch has already been split
        if not self.devices or "_is_replica" in self.__dict__:
            return self.module(*inputs, **kwargs)
        arguments, keywords = self.scatter(inputs, kwargs, self.device_ids)
        if len(self.devices) == 1:
            check_placement(self.module, self.devices[0])
            with self._mark(Phase.FORWARD, self.devices[0].index):
                return call_on(self.devices[0], self.module, arguments[0], keywords[0])
        check_uncached(self.module)
        with IntraOp(self.devices):
            replicas = self.replicate(self.module, self.device_ids[: len(arguments)])
            outputs = self.parallel_apply(replicas, arguments, keywords)
            return self.gather(outputs, self.output_device)

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], device_ids: Sequence[DeviceId]
    ) -> Any:
        """Split a call's arguments into a tuple of inputs and one of keyword arguments."""
        devices = self.devices[: len(device_ids)]
        pieces = scatter_arguments(inputs, kwargs, devices, self.dim, mark=self._mark)
        return tuple(zip(*pieces, strict=True))

    def replicate(self, module: nn.Module, device_ids: Sequence[DeviceId]) -> list[nn.Module]:
        """Return one replica of `module` for each of `device_ids`."""
        devices = self.devices[: len(device_ids)]
        if module is not self.module:
            return replicate(module, devices, detach=not torch.is_grad_enabled(), mark=self._mark)
        if self._make is None or (self._identity is not None and self._identity.changed()):
            self._make = self._maker(devices)
        return self._make(devices, not torch.is_grad_enabled(), self._mark, lambda: None)

    def _maker(self, devices: Sequence[Device]) -> Maker:
        """Store the parameters as the schedule requires, and return a function that makes replicas.

        Raises RuntimeError if the module is not on the first device, and Refused if its parameters
        cannot be stored in this way.
        """
        check_placement(self.module, devices[0])
        if reason := legal.storage(OF[self.schedule], self.module, devices):
            raise Refused(reason)
        flat = flat_weights(self.module, None, OF[self.schedule], devices[0])
        self._identity = Identity(flat.parameters) if flat else None
        return maker(self.module, OF[self.schedule], flat, Overlapping())

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Call each replica on its device, and return the list of outputs."""
        devices = self.devices[: len(replicas)]
        return parallel_apply(
            replicas, inputs, kwargs, devices, workers=self._workers, mark=self._mark
        )

    def gather(self, outputs: Sequence[Any], output_device: DeviceId | None) -> Any:
        """Return the outputs, concatenated along `dim` on `output_device`."""
        target = (
            self._output
            if output_device == self.output_device
            else output_of(self.devices, output_device)
        )
        return gather(outputs, target, self.devices[: len(outputs)], self.dim, mark=self._mark)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy or pickle, without those that refer to replicas."""
        return {**self.__dict__, "_make": None, "_identity": None}

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapper.

        If only the wrapped module has it, the AttributeError suggests `.module`.
        """
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                error.add_note(
                    hint := f"hint: the wrapped module has this attribute; use .module.{name}"
                )
                raise AttributeError(f"{error}; {hint}", name=name, obj=self) from None
            raise

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights that were saved from a DataParallel module.

        Returns torch's lists of missing and unexpected keys. Raises RuntimeError if none of the
        names match.
        """
        check_prefix(list(self.state_dict()), list(state_dict), strict=strict)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


def check_prefix(expected: Sequence[str], given: Sequence[str], *, strict: bool) -> None:
    """Raise RuntimeError if none of the given names is among the expected names.

    The message states whether the prefix "module." is the reason. Without this check, torch would
    silently load nothing with `strict=False`. With `strict=True`, names that differ in more than
    the prefix are left to torch's own error, which lists them.
    """
    if not expected or set(expected) & set(given):
        return
    if {PREFIX + name for name in given} & set(expected):
        problem = (
            f'the names lack the prefix "{PREFIX}", because the state dict is from an unwrapped'
            " module"
        )
        remedy = (
            "load the state dict into the unwrapped module: wrapped.module.load_state_dict(state)"
        )
    elif set(given) & {PREFIX + name for name in expected}:
        problem = (
            f'the names have the prefix "{PREFIX}" once too often, because the state dict is from a'
            " wrapped module"
        )
        remedy = (
            "strip the prefix:"
            " torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, 'module.')"
        )
    elif not strict and given:
        problem = f'the names differ in more than the prefix "{PREFIX}"'
        remedy = "load a state dict that was saved from a module of this class"
    else:
        return  # torch's own message lists the missing names
    silent = (
        " (with strict=False, torch would raise no error and load nothing)" if not strict else ""
    )
    raise RuntimeError(
        f"none of the names in the state dict ({count(len(given), 'name')}, such as {given[0]!r})"
        f" is among the names of this module ({count(len(expected), 'name')}, such as"
        f" {expected[0]!r}): {problem}{silent}; {remedy}"
    )


def load_state_dict(
    module: nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True, assign: bool = False
) -> Any:
    """Load a state dict into a module, whether or not the names in it have the prefix "module.".

    DataParallel and DistributedDataParallel put this prefix before the wrapped module's names. It
    is added or removed, repeatedly if necessary, until names match; `state_dict` itself stays
    unchanged. `strict`, `assign` and the returned value are those of torch's
    `Module.load_state_dict`. Raises RuntimeError if none of the names match.
    """
    expected = set(module.state_dict())
    given = OrderedDict(state_dict)
    given._metadata = dict(getattr(state_dict, "_metadata", None) or {})  # type: ignore[attr-defined]
    fitting = given
    while (
        given and not expected & set(fitting) and all(name.startswith(PREFIX) for name in fitting)
    ):
        consume_prefix_in_state_dict_if_present(fitting, PREFIX)
    while not expected & set(fitting) and _below(expected, fitting):
        fitting = _prefixed(fitting)
    check_prefix(list(expected), list(fitting), strict=False)
    return module.load_state_dict(fitting, strict=strict, assign=assign)


def _below(expected: set[str], given: Mapping[str, Any]) -> bool:
    """Return whether the names may match with the prefix "module." before them.

    An expected name must start with the prefix and end with one of the given names.
    """
    return any(
        name.startswith(PREFIX) and name.removeprefix(PREFIX).endswith(tuple(given))
        for name in expected
    )


def _prefixed(given: Any) -> Any:
    prefixed = OrderedDict((PREFIX + name, value) for name, value in given.items())
    versions = {
        PREFIX + name if name else PREFIX[:-1]: facts for name, facts in given._metadata.items()
    }
    prefixed._metadata = versions  # type: ignore[attr-defined]
    return prefixed
