"""Emulated devices: real placement errors and an exact count of bytes per device, on a machine without a GPU.

Once a device has been made (or `install` called), `module.to("lazy:0")`, `x.to("lazy:1")`, `torch.zeros(3,
device="lazy:0")` and `.cpu()` work in every thread, and tensors of two devices do not mix. Numbers are computed on
the host, bit by bit as on logical CPU devices, except where torch itself goes another way on the host: attention
(choose `SDPBackend.MATH` on both to compare) and RNNs, whose input it multiplies step by step, as on a GPU. Both
then agree within rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from dpbench.devices import Device
from dpbench.engine.devices._ledger import ledger
from dpbench.engine.devices._wrapper import LAZY, install, set_home

__all__ = ["EmulatedDevice", "bounded", "bytes_only", "install"]


class EmulatedDevice:
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

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fresh copy: fresh storage starts on a 64-byte boundary, and `linear` changes bits without."""
        return tensor.to(self.torch_device, copy=True)

    def clone(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensor by tensor: one flat copy would lose the alignment of all but the first."""
        return [self.put(tensor) for tensor in tensors]

    def guard(self) -> AbstractContextManager[Any]:
        """Do nothing: every tensor says where it is, and there is no stream."""
        return nullcontext()

    def wait(self, other: Device) -> None:
        """Do nothing: work is done when its call returns."""

    def borrow(self, tensors: Sequence[torch.Tensor]) -> None:
        """Do nothing: there are no streams."""

    def event(self) -> Any:
        """Return None: the host's clock tells the truth here."""
        return None

    def synchronize(self) -> None:
        """Do nothing: work is done when its call returns."""

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

    def can_collect(self, devices: Sequence[Device]) -> bool:
        """Return False: there are no collectives within a process."""
        return False

    def broadcast(self, tensors: Sequence[torch.Tensor], devices: Sequence[Device]) -> list[list[torch.Tensor]]:
        """Refuse; see `can_collect`."""
        raise RuntimeError(f"{self.name} has no collectives")

    def reduce_add(self, tensors: Sequence[Sequence[torch.Tensor]], devices: Sequence[Device]) -> list[torch.Tensor]:
        """Refuse; see `can_collect`."""
        raise RuntimeError(f"{self.name} has no collectives")


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
