"""Devices: return the devices for users' ids, which are torch's ids, "cpu" repeated, or "emulated:0", "emulated:1"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from dpbench.hardware.device import Device
from dpbench.hardware.devices._wrapper import LAZY
from dpbench.hardware.devices.cuda import CudaDevice
from dpbench.hardware.devices.host import CpuDevice, EmulatedDevice

DeviceId = int | str | torch.device
Devices = Sequence[Device | DeviceId]
"""The argument type of the engine's functions: devices, or ids for `resolve`."""


def as_devices(devices: Devices) -> list[Device]:
    """Return the devices unchanged, or the devices for the ids."""
    given: list[Any] = list(devices)
    return given if given and hasattr(given[0], "put") else resolve(given)


def resolve(device_ids: Sequence[DeviceId] | None) -> list[Device]:
    """Return one device per id; None means every GPU, and gives an empty list without GPUs.

    An id is the index of a GPU, a torch.device, or the name of a device. A GPU that is listed twice runs colocated
    replicas. "cpu" may be repeated any number of times. "emulated:1" is the device of tensors on "lazy:1". Ids of other
    kinds, or of several kinds, raise ValueError.
    """
    if isinstance(device_ids, DeviceId):
        raise ValueError(f"device_ids must be a list such as [{device_ids!r}], got {device_ids!r}")
    if device_ids is None:
        device_ids = range(torch.cuda.device_count())
    parsed = [_parse(i) for i in device_ids]
    kinds = sorted({device.type for device in parsed})
    if len(kinds) > 1 or kinds not in ([], ["cpu"], ["cuda"], [LAZY]):
        named = ", ".join(str(i) for i in device_ids)
        raise ValueError(
            f"device_ids must all be of one kind: GPUs, 'cpu', or emulated devices such as 'emulated:0'; got {named}"
        )
    if kinds == ["cpu"]:
        return [cast(Device, CpuDevice(index)) for index in range(len(parsed))]
    if kinds == [LAZY]:
        return _emulated([device.index or 0 for device in parsed])
    return _cuda([_ordinal(device) for device in parsed])


def _parse(device_id: DeviceId) -> torch.device:
    """Return the torch.device of an id; an integer is the index of a GPU."""
    if isinstance(device_id, int):
        return torch.device("cuda", device_id)
    name = str(device_id)
    return torch.device(LAZY + name.removeprefix("emulated") if name.startswith("emulated") else name)


def _emulated(ordinals: Sequence[int]) -> list[Device]:
    """Return emulated devices; devices with the same ordinal share one memory."""
    return [
        cast(Device, EmulatedDevice(index, ordinal, shares_memory=ordinal in ordinals[:index]))
        for index, ordinal in enumerate(ordinals)
    ]


def _ordinal(device: torch.device) -> int:
    """Return a GPU's index; for "cuda", that of the current GPU. Raises ValueError for a GPU that does not exist."""
    count = torch.cuda.device_count()
    if count == 0:
        raise ValueError(f"device_ids names {device}, but torch sees no GPU here; use 'cpu' for logical CPU devices")
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    if not 0 <= ordinal < count:
        raise ValueError(f"device_ids names cuda:{ordinal}, but torch sees {count} GPU(s): 0 to {count - 1}")
    return ordinal


def _cuda(ordinals: Sequence[int], *, shared_stream: bool = False, own_processes: bool = False) -> list[Device]:
    """Return a device per replica.

    A replica that is not the first on its GPU has its own stream, unless `shared_stream` is true. `own_processes` means
    that each device is used in a separate process, with a separate allocator.
    """
    devices = []
    for index, ordinal in enumerate(ordinals):
        again = ordinal in ordinals[:index]
        shares_memory = again and not own_processes  # each process has its own allocator
        device = CudaDevice(index, ordinal, own_stream=again and not shared_stream, shares_memory=shares_memory)
        devices.append(cast(Device, device))
    return devices


def open_devices(
    kind: str,
    count: int,
    *,
    ids: Sequence[int] = (),
    placement: str = "spread",
    shared_stream: bool = False,
    own_processes: bool = False,
) -> list[Device]:
    """Return `count` devices of a kind; the threads of each logical CPU device are bound to one core.

    Placement "spread" takes the first `count` of `ids` (or of all GPUs); "colocated" puts all replicas on the first.
    `own_processes` means that each device is used in a separate process. Raises ValueError if this machine has fewer
    devices.
    """
    if kind == "cpu":
        return [cast(Device, CpuDevice(index, core=index)) for index in range(count)]
    if kind == "emulated":
        return _emulated([0] * count if placement == "colocated" else list(ids[:count]) or list(range(count)))
    if kind != "cuda":
        raise ValueError(f"unknown device kind {kind!r}; known: cpu, cuda, emulated")
    available = list(ids) or list(range(torch.cuda.device_count()))
    wanted = available[:1] * count if placement == "colocated" else available[:count]
    if len(wanted) < count:
        raise ValueError(
            f"{count} devices are required, but there are {len(available)} GPU(s)"
            + ("; --placement colocated lets replicas share one" if available else "; use --device-kind cpu")
        )
    return _cuda(
        [_ordinal(torch.device("cuda", i)) for i in wanted], shared_stream=shared_stream, own_processes=own_processes
    )
