"""Devices on the host: logical CPU devices and emulated devices.

Each operation is done when its call returns.

Logical CPU devices have separate tensors, so that every schedule can run and be tested without a
GPU. Emulated devices also raise an error if tensors of different devices are combined, as GPUs do,
and count the bytes on each device exactly.

After an emulated device has been created, or this module's `install` has been called,
`module.to("lazy:0")`, `x.to("lazy:1")`, `torch.zeros(3, device="lazy:0")` and `.cpu()` work in
every thread. Values are computed on the host. They are bitwise equal to those of logical CPU
devices, except for attention and RNNs, whose results are equal within rounding. For attention,
torch uses another kernel on logical CPU devices (to compare, choose `SDPBackend.MATH` on both). For
RNNs on emulated devices, torch multiplies the input step by step, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dpbench.hardware.device import Device
from dpbench.hardware.devices._byte_count import byte_count
from dpbench.hardware.devices._wrapper import LAZY, bytes_only, install, load_operators


class CpuDevice(Device):
    """A logical device on the host, with separate tensors and, optionally, an assigned core."""

    def __init__(self, index: int, core: int | None = None) -> None:
        self.index = index
        self.core = core
        self.name = f"cpu:{index}"
        self.torch_device = torch.device("cpu")


__all__ = ["EmulatedDevice", "bounded", "bytes_only", "install", "load_operators"]


class EmulatedDevice(Device):
    """An emulated device, as used by one replica.

    `ordinal` is the number i in the device `lazy:i` of its tensors; it defaults to `index`.
    `shares_memory` is True if a replica with a lower index already reports its memory.
    """

    def __init__(
        self, index: int, ordinal: int | None = None, *, shares_memory: bool = False
    ) -> None:
        install()
        if index:  # the replicas of several devices run in several threads
            load_operators()
        self.index = index
        self.ordinal = index if ordinal is None else ordinal
        self.name = f"emulated:{self.ordinal}" + (f"/{index}" if shares_memory else "")
        self.torch_device = torch.device(LAZY, self.ordinal)
        self._shares_memory = shares_memory

    def take_peaks(self) -> dict[str, int]:
        """Return the peak of bytes since the last reset (key `allocated`), and reset it.

        The dict is empty if another replica already reports this device's memory.
        """
        return {} if self._shares_memory else {"allocated": byte_count.take(self.torch_device)}

    def allocated(self) -> int:
        """Return the bytes that are allocated on this device now."""
        return byte_count.now(self.torch_device)

    def reset_memory(self) -> None:
        """Reset the peak of allocated bytes to the bytes that are allocated now."""
        byte_count.reset(self.torch_device)


@contextmanager
def bounded(count: int, size: int) -> Iterator[None]:
    """Limit the first `count` emulated devices to `size` bytes each inside the context.

    An allocation that would exceed the limit raises torch.OutOfMemoryError.
    """
    devices = [torch.device(LAZY, ordinal) for ordinal in range(count)]
    for device in devices:
        byte_count.bind(device, size)
    try:
        yield
    finally:
        for device in devices:
            byte_count.bind(device, None)
