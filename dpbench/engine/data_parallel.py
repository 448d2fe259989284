"""DataParallel as a module wrapper and as a function: scatter, replicate, apply and gather."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dpbench.engine.checkpoints import check_prefix
from dpbench.engine.errors import call_on
from dpbench.engine.fast.cached import CachedReplicas
from dpbench.engine.fast.pool import Pool
from dpbench.engine.gather import gather, target_of
from dpbench.engine.parallel_apply import parallel_apply
from dpbench.engine.replicate import check_placement, replicate
from dpbench.engine.runner import Runner
from dpbench.engine.scatter import scatter
from dpbench.engine.settings import IntraOp, check_uncached, keep_memory, kept
from dpbench.engine.writes import Watch, note_of
from dpbench.hardware.device import Device
from dpbench.hardware.devices import DeviceId, Devices, as_devices, resolve
from dpbench.records import Mark, Phase, no_mark
from dpbench.records.schedule import SELECTED, Schedule, parse


def scatter_arguments(
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    devices: Sequence[Device],
    dim: int = 0,
    *,
    mark: Mark = no_mark,
) -> list[Any]:
    """Split a call's arguments into one (inputs, kwargs) pair per replica.

    A call without arguments gives one pair.
    """
    if not inputs and not kwargs:
        return [((), {})]
    return scatter((inputs, dict(kwargs)), devices, dim, mark=mark)


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
    inputs_of, kwargs_of = zip(*pieces, strict=True)
    if len(devices) == 1:
        check_placement(module, devices[0])
        with devices[0].guard():
            return call_on(devices[0], module, inputs_of[0], kwargs_of[0])
    used = devices[: len(pieces)]
    check_uncached(module)
    replicas = replicate(module, used, detach=not torch.is_grad_enabled())
    with Watch(module).forwards(replicas) as turn:
        outputs = parallel_apply(replicas, inputs_of, kwargs_of, used, turn=turn)
    return gather(outputs, output_of(devices, output_device), used, dim)


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


def wrapper_runner(schedule: Schedule, note: str = "") -> Runner:
    """Return what one of the schedules that keep no replicas keeps between calls."""
    if schedule is Schedule.REFERENCE:
        return Runner(schedule, note)
    if schedule is Schedule.POOL:
        return Runner(schedule, note, Pool())
    return Runner(schedule, note, Pool(), CachedReplicas().replicate)


def id_of(device: Device) -> DeviceId:
    """Return a device's id as torch gives it: an index for a GPU, a torch.device otherwise."""
    return device.torch_device.index if device.torch_device.type == "cuda" else device.torch_device


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
    error: see docs/contract.md. `schedule` is reference, pool or cached. The others need TrainStep,
    because a wrapper cannot notice the optimizer's step; they raise ValueError.
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
        self.schedule = Schedule.CACHED if schedule in SELECTED else parse(schedule)
        if self.schedule.keeps_replicas:
            known = ", ".join(one for one in Schedule if not one.keeps_replicas)
            raise ValueError(
                f"the schedule {self.schedule} needs TrainStep, because DataParallel cannot notice"
                f" the optimizer's step; give one of {known}"
            )
        self._mark = mark
        self._runner = wrapper_runner(self.schedule)
        self._watch = Watch(module)
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
        restore = kept()
        try:
            with IntraOp(self.devices):
                replicas = self.replicate(self.module, self.device_ids[: len(arguments)])
                outputs = self.parallel_apply(replicas, arguments, keywords)
                return self.gather(outputs, self.output_device)
        except BaseException:
            restore()
            raise

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
        make = self._runner.replicate if module is self.module else replicate
        return make(module, devices, detach=not torch.is_grad_enabled(), mark=self._mark)

    @property
    def settled(self) -> bool:
        """Return whether the next calls run alike; the first ones may try alternatives."""
        return self._watch.settled and self._runner.settled

    @property
    def note(self) -> str:
        """Return the first things that forward has written and replicas share or lose, or ""."""
        return note_of(self.module)

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Call each replica on its device, and return the list of outputs."""
        devices = self.devices[: len(replicas)]
        workers = self._runner.workers
        with self._watch.forwards(replicas) as turn:
            return parallel_apply(
                replicas, inputs, kwargs, devices, workers=workers, turn=turn, mark=self._mark
            )

    def gather(self, outputs: Sequence[Any], output_device: DeviceId | None) -> Any:
        """Return the outputs, concatenated along `dim` on `output_device`."""
        target = (
            self._output
            if output_device == self.output_device
            else output_of(self.devices, output_device)
        )
        return gather(outputs, target, self.devices[: len(outputs)], self.dim, mark=self._mark)

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
