"""Emulated devices: real placement errors and an exact count of bytes per device, on a machine without a GPU.

Once a device has been created (or `install` called), `module.to("lazy:0")`, `x.to("lazy:1")`, `torch.zeros(3,
device="lazy:0")` and `.cpu()` work in every thread, and tensors of two devices cannot be combined. Numbers are computed
on the host, bitwise equal to those of logical CPU devices, with two exceptions that agree within rounding. For
attention, torch uses another kernel on logical CPU devices (to compare, choose `SDPBackend.MATH` on both). For RNNs on
emulated devices, torch multiplies the input step by step, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dpbench.hardware.devices._host import HostDevice
from dpbench.hardware.devices._wrapper import LAZY, install, ledger, set_home

__all__ = ["EmulatedDevice", "bounded", "bytes_only", "install"]


class EmulatedDevice(HostDevice):
    """An emulated device, as one replica uses it.

    `ordinal` is its number among the emulated devices. `shares_memory` is True if a replica with a lower index already
    reports the memory of this device.
    """

    def __init__(self, index: int, ordinal: int | None = None, *, shares_memory: bool = False) -> None:
        install()
        self.index = index
        self.ordinal = index if ordinal is None else ordinal
        self.name = f"emulated:{self.ordinal}" + (f"/{index}" if shares_memory else "")
        self.torch_device = torch.device(LAZY, self.ordinal)
        self._shares_memory = shares_memory

    def memory(self) -> int | None:
        """Return the peak in bytes, or None for a colocated replica whose device another replica reports."""
        return None if self._shares_memory else ledger.peak(self.torch_device)

    def take_peaks(self) -> dict[str, int]:
        """Return the peak in bytes since the last call, and reset it."""
        return {} if self._shares_memory else {"allocated": ledger.take(self.torch_device)}

    def allocated(self) -> int:
        """Return the bytes that are allocated on this device now."""
        return ledger.now(self.torch_device)

    def reset_memory(self) -> None:
        """Reset the peak to the bytes that are allocated now."""
        ledger.reset(self.torch_device)


@contextmanager
def bytes_only() -> Iterator[None]:
    """Create emulated tensors without values inside the context, in any thread: models of any size take no memory."""
    before = set_home(torch.device("meta"))
    try:
        yield
    finally:
        set_home(before)


@contextmanager
def bounded(count: int, size: int) -> Iterator[None]:
    """Limit the first `count` emulated devices to `size` bytes each; exceeding it raises torch.OutOfMemoryError."""
    devices = [torch.device(LAZY, ordinal) for ordinal in range(count)]
    for device in devices:
        ledger.bind(device, size)
    try:
        yield
    finally:
        for device in devices:
            ledger.bind(device, None)
