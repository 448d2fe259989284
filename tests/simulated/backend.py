"""The simulated machine behind dpbench's `Device` and `CudaClock`.

Tensors are those of the emulated devices: their values are computed at once on the host. Every
operator on them also queues simulated work on the current stream of its device. `running` installs
this, and yields the devices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.utils.flop_counter import flop_registry

from dpbench.hardware import rates
from dpbench.hardware.device import Device
from dpbench.hardware.devices import _wrapper
from dpbench.hardware.devices.host import EmulatedDevice
from dpbench.measure import clocks, merging
from dpbench.measure.worker import profiling
from dpbench.records import HOST, Phase
from tests.simulated.machine import Machine
from tests.simulated.timeline import Event, Stream

aten = torch.ops.aten
_quiet = threading.local()
LINK_BYTES = 2**18
"""The size of the copies that time a link; it is small, because the values are copied, too."""
FREE = (
    "empty",
    "detach",
    "_unsafe_view",
    "alias",
    "set_",
    "lift_fresh",
    "resize_",
    "unbind",
    "split",
)
"""Prefixes of the names of operators that start no kernel, besides views."""


@contextmanager
def values_only() -> Iterator[None]:
    """Inside the context, operators of this thread compute values but queue no simulated work."""
    before = getattr(_quiet, "on", False)
    _quiet.on = True
    try:
        yield
    finally:
        _quiet.on = before


class SimulatedDevice(EmulatedDevice):
    """A GPU of a simulated machine, used through the current stream, as spread replicas do."""

    def __init__(self, index: int, machine: Machine) -> None:
        super().__init__(index)
        self.machine, self.stream, self.background = machine, machine.streams[index], Stream(index)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on this GPU.

        A tensor of the host is copied in a background stream, as by torch's scatter.
        """
        if tensor.device.type == _wrapper.LAZY:
            return super().put(tensor)
        with values_only():
            copy = super().put(tensor)
        seconds = self.machine.host_s(self.index, tensor.nbytes)
        self.machine.timeline.copy(None, self.background, seconds, "Memcpy HtoD (Pinned -> Device)")
        self.machine.timeline.wait(self.stream, self.background)
        return copy

    def wait(self, other: Device) -> None:
        """Make this device's stream wait for that of `other`."""
        if isinstance(other, SimulatedDevice):
            self.machine.timeline.wait(self.stream, other.stream)

    def at_work(self, sources: Iterable[Device]) -> list[int]:
        """Return this device and all other sources: a copy is work of the sender's stream."""
        return [self.index, *(one.index for one in sources if one.index != self.index)]

    def event(self, reuse: Event | None = None) -> Event:
        """Record and return an event.

        Creating it and recording it each cost the host a tenth of a call.
        """
        self.machine.timeline.spend(self.machine.timeline.call_s / (5 if reuse is None else 10))
        event = Event(self.machine.timeline, self.index) if reuse is None else reuse
        event.record(self.stream)
        return event

    def synchronize(self) -> None:
        """Block the host until the work of this GPU is complete, on all its streams."""
        self.machine.timeline.synchronize([*streams_of(self.machine, self.index), self.background])

    def can_collect(self, devices: Sequence[Device]) -> bool:
        """Return whether there are several devices."""
        return len(devices) > 1

    def broadcast(
        self, tensors: Sequence[torch.Tensor], devices: Sequence[Device]
    ) -> list[list[torch.Tensor]]:
        """Return copies of `tensors` on all `devices`, made by NCCL on their current streams."""
        _group(
            self.machine, self.machine.streams, devices, sum(t.nbytes for t in tensors), "Broadcast"
        )
        with values_only():
            return [
                [t if d is devices[0] else t.to(d.torch_device, copy=True) for t in tensors]
                for d in devices
            ]

    def reduce_add(
        self, tensors: Sequence[Sequence[torch.Tensor]], devices: Sequence[Device]
    ) -> list[torch.Tensor]:
        """Return the sums on this device, made by NCCL on the current streams."""
        _group(
            self.machine,
            self.machine.streams,
            devices,
            sum(t.nbytes for t in tensors[0]),
            "Reduce_Sum",
        )
        with values_only():
            return [
                sum(t.to(self.torch_device) for t in each) for each in zip(*tensors, strict=True)
            ]  # type: ignore[misc]

    def collectives(self, devices: Sequence[Device]) -> Nccl | None:
        """Return NCCL's collectives over `devices`, which run on separate streams.

        None for one device.
        """
        return Nccl(self.machine, devices) if self.can_collect(devices) else None


class Nccl:
    """NCCL's in-place collectives, as rings on one additional stream of each device."""

    def __init__(self, machine: Machine, devices: Sequence[Device]) -> None:
        self._machine, self._devices = machine, devices
        self._streams = {
            device.torch_device.index: Stream(device.torch_device.index) for device in devices
        }
        machine.streams += self._streams.values()

    def follow(self, i: int) -> None:
        """Make later collectives wait for the work on the current stream of device i."""
        ordinal = self._devices[i].torch_device.index
        self._machine.timeline.wait(self._streams[ordinal], self._machine.streams[ordinal])

    def lead(self, i: int) -> None:
        """Make the current stream of device i wait for all collectives queued so far."""
        ordinal = self._devices[i].torch_device.index
        self._machine.timeline.wait(self._machine.streams[ordinal], self._streams[ordinal])

    def reduce(self, tensors: Sequence[torch.Tensor], root: int) -> None:
        """Write the sum of all tensors into `tensors[root]`."""
        self._queue("Reduce_Sum", tensors[0].nbytes)
        self._write([tensors[root]], self._sum(tensors))

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write the sum of all tensors into every tensor.

        Each device sends every part of it almost twice.
        """
        self._queue("AllReduce_Sum", 2 * (len(tensors) - 1) * tensors[0].nbytes // len(tensors))
        self._write(tensors, self._sum(tensors))

    def reduce_scatter(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write part i of the sum to part i of `tensors[i]`."""
        self._queue("ReduceScatter_Sum", (len(tensors) - 1) * tensors[0].nbytes // len(tensors))
        total = self._sum(tensors)
        for i, tensor in enumerate(tensors):
            self._write([self._part(tensor, i)], self._part(total, i))

    def all_gather(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy part i of `tensors[i]` to part i of every other tensor."""
        self._queue("AllGather", (len(tensors) - 1) * tensors[0].nbytes // len(tensors))
        for i, tensor in enumerate(tensors):
            self._write(
                [self._part(other, i) for other in tensors if other is not tensor],
                self._part(tensor, i),
            )

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int) -> None:
        """Copy the values of `tensors[root]` to all other tensors."""
        self._queue("Broadcast", tensors[0].nbytes)
        self._write([tensor for tensor in tensors if tensor is not tensors[root]], tensors[root])

    def _queue(self, name: str, size: int) -> None:
        """Queue a ring in which each device sends `size` bytes to the next."""
        streams = [self._streams.get(i, own) for i, own in enumerate(self._machine.streams)]
        _group(self._machine, streams, self._devices, size, name)

    def _part(self, tensor: torch.Tensor, i: int) -> torch.Tensor:
        with values_only():
            return tensor.view(len(self._devices), -1)[i]

    @staticmethod
    def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        with values_only():
            return torch.stack([tensor.cpu() for tensor in tensors]).sum(0)

    @staticmethod
    def _write(targets: Sequence[torch.Tensor], value: torch.Tensor) -> None:
        with values_only(), torch.no_grad():
            for target in targets:
                target.copy_(value)


def streams_of(machine: Machine, device: int) -> list[Stream]:
    """Return all streams of a device."""
    return [stream for stream in machine.streams if stream.device == device]


def _group(
    machine: Machine, streams: Sequence[Stream], devices: Sequence[Device], size: int, name: str
) -> None:
    """Queue one NCCL kernel per device."""
    ordinals = [device.torch_device.index for device in devices]
    machine.timeline.collective(
        [streams[i] for i in ordinals],
        machine.ring_s(ordinals, size),
        f"ncclDevKernel_{name}_f32_RING_LL",
    )


def _queue(
    machine: Machine, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> None:
    """Queue the work of one operator on the simulated machine."""
    name, streams = func.name().removeprefix("aten::"), machine.streams
    if func.namespace == "prim" or func.is_view or name.startswith(FREE):
        return
    if name.startswith("_local_scalar_dense"):
        machine.timeline.read(
            streams[args[0].device.index], machine.host_s(args[0].device.index, args[0].nbytes)
        )
        return
    for source, target in _copies(func, args, result):
        _copy(machine, source, target)
        if source.device != target.device:
            continue
    if func in _wrapper.ANY_DEVICE or name.startswith("_foreach_copy"):
        return
    flops = (
        flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        if func.overloadpacket in flop_registry
        else 0
    )
    if name.startswith("_foreach_"):
        lists = [value for value in args if isinstance(value, list | tuple)]
        by_device: dict[int, int] = {}
        for tensor in _wrapper._tensors(lists):
            if tensor.device.type == _wrapper.LAZY:
                by_device[tensor.device.index] = (
                    by_device.get(tensor.device.index, 0) + tensor.nbytes
                )
    else:
        tensors = [t for t in _wrapper._tensors((*args, result)) if t.device.type == _wrapper.LAZY]
        by_device = {tensors[0].device.index: sum(t.nbytes for t in tensors)} if tensors else {}
    for device, size in by_device.items():
        seconds = machine.rates.kernel_s + max(
            flops / machine.rates.flops, size / machine.rates.memory
        )
        machine.timeline.kernel(streams[device], seconds, f"kernel_{name}")


def _copies(func: Any, args: Sequence[Any], result: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the pairs (source, target) of tensors that an operator copies."""
    if func is aten._to_copy.default:
        return [(args[0], result)]
    if func is aten.copy_.default:
        return [(args[1], args[0])]
    if func.name().startswith("aten::_foreach_copy"):
        return [(source, target) for target, source in zip(*args[:2], strict=True)]
    return []


def _copy(machine: Machine, source: torch.Tensor, target: torch.Tensor) -> None:
    """Queue one copy: a kernel on one device, or a transfer between devices or with the host."""
    of, to, line = source.device, target.device, machine.timeline
    if of == to:
        line.kernel(
            machine.streams[to.index],
            machine.rates.kernel_s + 2 * source.nbytes / machine.rates.memory,
            "copy",
        )
    elif of.type != _wrapper.LAZY:
        line.copy(
            None,
            machine.streams[to.index],
            machine.host_s(to.index, source.nbytes),
            "Memcpy HtoD (Pinned -> Device)",
        )
    elif to.type != _wrapper.LAZY:
        line.read(machine.streams[of.index], machine.host_s(of.index, source.nbytes))
    else:
        seconds = machine.link_s(of.index, to.index, source.nbytes)
        line.copy(
            machine.streams[of.index],
            machine.streams[to.index],
            seconds,
            "Memcpy PtoP (Device -> Device)",
        )


@dataclass(frozen=True)
class TrueSpan:
    """A phase on a device, or on the host, in true seconds.

    `ready_s` is the time at which all devices have done the work that was queued before the phase.
    """

    step: int
    phase: Phase
    device: int
    start_s: float
    end_s: float
    ready_s: float


class Witness(clocks.CudaClock):
    """A `CudaClock` over simulated devices, which also notes the true times of the simulation.

    `true_ends` has the true end of each step: the time at which the work queued so far is complete
    on all devices.
    """

    def __init__(self, devices: Sequence[SimulatedDevice]) -> None:
        self.line = devices[0].machine.timeline
        super().__init__(devices, now=self.line.now)
        self.sims, self.true_spans, self.true_ends, self.true_begins = (
            devices,
            list[TrueSpan](),
            [],
            [],
        )
        self.host_ends: list[float] = []

    def _front(self, device: int) -> float:
        stream = self.sims[0].machine.streams[device] if device != HOST else None
        return self.line.now() if stream is None else self.line.front(stream)

    @contextmanager
    def mark(self, phase: Phase, device: int) -> Iterator[None]:
        step, mark = len(self.true_ends), super().mark(phase, device)
        # else a call of another thread may come between the event and its true time
        with self.line.held():
            mark.__enter__()
            start_s, ready_s = self._front(device), max(self._front(d.index) for d in self.sims)
        try:
            yield
        finally:
            with self.line.held():
                mark.__exit__(None, None, None)
                end_s = self._front(device)
        self.true_spans.append(TrueSpan(step, phase, device, start_s, end_s, ready_s))

    @contextmanager
    def block(self) -> Iterator[None]:
        with super().block():
            self.true_begins.append(
                (len(self.true_ends), max(self._front(d.index) for d in self.sims))
            )
            yield

    @contextmanager
    def step(self, *, warmup: bool) -> Iterator[None]:
        with super().step(warmup=warmup):
            yield
            self.host_ends.append(self.line.now())
        self.true_ends.append(max(self._front(d.index) for d in self.sims))


def _profiled(machine: Machine) -> Callable[..., profiling.Profile]:
    """Return a replacement of `profiling.profiled` that reads the activities from the timeline."""

    def profiled(
        step: Callable[[], object], devices: Sequence[Device], count: int
    ) -> profiling.Profile:
        for device in devices:
            device.synchronize()
        events: list[SimpleNamespace] = []
        for _ in range(count):
            start_s = machine.timeline.now()
            before = len(machine.timeline.work)
            step()
            for device in devices:
                device.synchronize()
            end_s = machine.timeline.now()
            machine.profiled.append((start_s, end_s))
            events.append(_event(DeviceType.CPU, merging.PROFILED, start_s, end_s))
            for number, work in enumerate(machine.timeline.work[before:], start=before):
                launch = _event(DeviceType.CPU, "cudaLaunchKernel", start_s, start_s, id=number)
                kernel = _event(DeviceType.CUDA, work.name, work.start_s, work.end_s, id=number)
                kernel.device_index = work.device
                events += [launch, kernel]
        first = {device.torch_device.index: device.index for device in devices}
        return profiling.by_step(events, first, count)

    return profiled


def _event(
    kind: DeviceType, name: str, start_s: float, end_s: float, id: int = 0
) -> SimpleNamespace:
    return SimpleNamespace(
        device_type=kind,
        device_index=0,
        name=name,
        id=id,
        time_range=SimpleNamespace(start=start_s * 1e6, end=end_s * 1e6),
    )


@contextmanager
def running(machine: Machine) -> Iterator[list[SimulatedDevice]]:
    """Inside the context, operators on emulated tensors queue work on `machine`.

    Yield its devices.
    """
    real = _wrapper._dispatch

    def dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        result = real(func, args, kwargs)
        if not getattr(_quiet, "on", False):
            _queue(machine, func, args, kwargs, result)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_wrapper, "_dispatch", dispatch)
        patch.setattr(clocks, "choose", Witness)
        patch.setattr(profiling, "profiled", _profiled(machine))
        patch.setattr(rates, "LINK_BYTES", LINK_BYTES)
        yield [SimulatedDevice(gpu.index, machine) for gpu in machine.timeline.gpus]
