"""Devices: convert the device ids of users to devices.

Ids are torch's ids of GPUs, "cpu" once for each logical CPU device, or "emulated:0" and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from dpbench.hardware.device import Device
from dpbench.hardware.devices._wrapper import LAZY
from dpbench.hardware.devices.cuda import CudaDevice
from dpbench.hardware.devices.host import CpuDevice, EmulatedDevice
from dpbench.records.errors import UsageError
from dpbench.records.spelling import dashed

DeviceId = int | str | torch.device
Devices = Sequence[Device | DeviceId]
"""The type of the argument `devices` of the engine's functions: devices, or ids for `resolve`."""


def as_devices(devices: Devices, *, own_streams: bool = False) -> list[Device]:
    """Return `devices` as a list; if they are ids, `resolve` converts them to devices."""
    if isinstance(devices, DeviceId):
        return resolve(devices)  # raises ValueError, because this is one id and not a list
    given: list[Any] = list(devices)
    if given and isinstance(given[0], Device):
        return given
    return resolve(given, own_streams=own_streams)


@contextmanager
def holding(devices: Sequence[Device]) -> Iterator[None]:
    """In the context, all threads use the calling thread's current streams for `devices`."""
    with ExitStack() as held:
        for device in devices:
            held.enter_context(device.hold())
        yield


def resolve(device_ids: Sequence[DeviceId] | None, *, own_streams: bool = False) -> list[Device]:
    """Return one device per id; None means all GPUs, of which there may be none.

    An id is the index of a GPU, a torch.device, or the name of a device. If a GPU is listed several
    times, its replicas are colocated. They use the current stream of the GPU, as all work of a
    caller who knows no other stream. With `own_streams`, each of them but the first has a stream of
    its own: other work on the GPU must then wait for the device. The tensors of the emulated device
    "emulated:1" report the device "lazy:1". Raises ValueError for ids of an unknown kind, ids of
    different kinds, and GPUs that do not exist.
    """
    if isinstance(device_ids, DeviceId):
        raise UsageError(
            f"device_ids must be a list of ids, but is {device_ids!r}; give [{device_ids!r}]"
        )
    if device_ids is None:
        device_ids = range(torch.cuda.device_count())
    parsed = [_parse(i) for i in device_ids]
    kinds = sorted({device.type for device in parsed})
    if len(kinds) > 1 or kinds not in ([], ["cpu"], ["cuda"], [LAZY]):
        named = ", ".join(str(i) for i in device_ids)
        raise UsageError(
            "device_ids must all be of one kind: GPUs, 'cpu', or emulated devices such as"
            f" 'emulated:0'; got {named}"
        )
    if kinds == ["cpu"]:
        return [CpuDevice(index) for index in range(len(parsed))]
    if kinds == [LAZY]:
        return _emulated([device.index or 0 for device in parsed])
    return _cuda([_ordinal(device) for device in parsed], own_streams=own_streams)


def _parse(device_id: DeviceId) -> torch.device:
    if isinstance(device_id, int):
        return torch.device("cuda", device_id)
    name = str(device_id)
    return torch.device(
        LAZY + name.removeprefix("emulated") if name.startswith("emulated") else name
    )


def _emulated(ordinals: Sequence[int]) -> list[Device]:
    """Devices with the same ordinal share one memory."""
    return [
        EmulatedDevice(index, ordinal, shares_memory=ordinal in ordinals[:index])
        for index, ordinal in enumerate(ordinals)
    ]


def _ordinal(device: torch.device) -> int:
    """Return the index of the GPU `device`; "cuda" without an index means the current GPU.

    Raises ValueError if this GPU does not exist.
    """
    count = torch.cuda.device_count()
    if count == 0:
        raise UsageError(
            f"device_ids contains {device}, but torch finds no GPU on this machine; use 'cpu' for"
            " logical CPU devices"
        )
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    if not 0 <= ordinal < count:
        raise UsageError(
            f"device_ids contains cuda:{ordinal}, but torch finds {count} GPU(s); use an index"
            f" below {count}"
        )
    return ordinal


def _cuda(
    ordinals: Sequence[int], *, own_streams: bool, own_processes: bool = False
) -> list[Device]:
    """Return a device per replica i on the GPU `ordinals[i]`; see `resolve` and `open_devices`."""
    devices: list[Device] = []
    for index, ordinal in enumerate(ordinals):
        again = ordinal in ordinals[:index]
        shares_memory = again and not own_processes  # each process has its own allocator
        own_stream = again and own_streams
        devices.append(
            CudaDevice(index, ordinal, own_stream=own_stream, shares_memory=shares_memory)
        )
    return devices


def kind_of(device: torch.device) -> str:
    """Return the kind, as in `open_devices`, of a device with this torch.device."""
    return {"cuda": "cuda", LAZY: "emulated"}.get(device.type, "cpu")


def open_devices(
    kind: str,
    count: int,
    *,
    ids: Sequence[int] = (),
    placement: str = "spread",
    shared_stream: bool = False,
    own_processes: bool = False,
) -> list[Device]:
    """Return `count` devices of `kind`, which is "cpu", "cuda" or "emulated".

    Each logical CPU device has one core, to which its threads are bound. Placement "spread" uses
    the first `count` of `ids`, or of all devices if `ids` is empty. Placement "colocated" puts all
    replicas on one GPU or emulated device. With `shared_stream`, colocated replicas share one
    stream. `own_processes` means that each device is used in a separate process. Raises ValueError
    for an unknown kind, or if there are too few GPUs.
    """
    if kind == "cpu":
        return [CpuDevice(index, core=index) for index in range(count)]
    if kind == "emulated":
        return _emulated(
            [0] * count if placement == "colocated" else list(ids[:count]) or list(range(count))
        )
    if kind != "cuda":
        raise UsageError(
            f"unknown device kind {kind!r}; the known kinds are cpu, cuda and emulated"
        )
    available = list(ids) or list(range(torch.cuda.device_count()))
    wanted = available[:1] * count if placement == "colocated" else available[:count]
    if len(wanted) < count:
        raise UsageError(
            f"too few GPUs: {count} required, {len(available)} available"
            + (
                f"; use {dashed('placement', 'colocated')} to put all replicas on one GPU"
                if available
                else f"; use {dashed('device_kind', 'cpu')}"
            )
        )
    return _cuda(
        [_ordinal(torch.device("cuda", i)) for i in wanted],
        own_streams=not shared_stream,
        own_processes=own_processes,
    )
