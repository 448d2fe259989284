"""Emulated devices: real placement errors and an exact count of bytes per device, on a machine without a GPU.

Once a device has been made (or `install` called), `module.to("lazy:0")`, `x.to("lazy:1")`, `torch.zeros(3,
device="lazy:0")` and `.cpu()` work in every thread, and tensors of two devices do not mix. Numbers are computed on
the host, bit by bit as on logical CPU devices, except where torch itself goes another way on the host: attention
(choose `SDPBackend.MATH` on both to compare) and RNNs, whose input it multiplies step by step, as on a GPU. Both
then agree within rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dpbench.hardware.devices._host import HostDevice
from dpbench.hardware.devices._wrapper import LAZY, install, ledger, set_home

__all__ = ["EmulatedDevice", "bounded", "bytes_only", "install"]


class EmulatedDevice(HostDevice):
    """One emulated device, or one of several replicas on it.

    `ordinal` is its number among the emulated devices; `shares_memory` marks a replica whose device already
    reports its memory under an earlier index.
    """

    def __init__(self, index: int, ordinal: int | None = None, *, shares_memory: bool = False) -> None:
        install()
        self.index = index
        self.ordinal = index if ordinal is None else ordinal
        self.name = f"emulated:{self.ordinal}" + (f"/{index}" if shares_memory else "")
        self.torch_device = torch.device(LAZY, self.ordinal)
        self._shares_memory = shares_memory

    def memory(self) -> int | None:
        """Return the peak of bytes; a colocated replica's share cannot be told apart, so only one reports."""
        return None if self._shares_memory else ledger.peak(self.torch_device)

    def take_peaks(self) -> dict[str, int]:
        """Return the peak of bytes since the last call, and begin anew."""
        return {} if self._shares_memory else {"allocated": ledger.take(self.torch_device)}

    def allocated(self) -> int:
        """Return the bytes that live on this device now."""
        return ledger.now(self.torch_device)

    def reset_memory(self) -> None:
        """Let the peak start anew from what lives now."""
        ledger.reset(self.torch_device)


@contextmanager
def bytes_only() -> Iterator[None]:
    """Let emulated tensors made here, by any thread, hold no numbers: models of any size, counted at no cost."""
    before = set_home(torch.device("meta"))
    try:
        yield
    finally:
        set_home(before)


@contextmanager
def bounded(count: int, size: int) -> Iterator[None]:
    """Let each of the first emulated devices hold so many bytes at most: beyond, torch.OutOfMemoryError names it."""
    devices = [torch.device(LAZY, ordinal) for ordinal in range(count)]
    for device in devices:
        ledger.bind(device, size)
    try:
        yield
    finally:
        for device in devices:
            ledger.bind(device, None)
