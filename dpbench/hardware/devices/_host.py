"""Host devices: the common methods of devices on the host, where work is done when its call returns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dpbench.hardware.device import Collectives, Device, Recorder


class HostDevice:
    """A device whose tensors are in the host's memory, whatever device they report."""

    index: int
    name: str
    torch_device: torch.device

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new copy. New storage is aligned to 64 bytes; other alignments change the rounding of `linear`."""
        return tensor.to(self.torch_device, copy=True)

    def clone(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensor by tensor, because in one flat copy all tensors except the first would lose their alignment."""
        return [self.put(tensor) for tensor in tensors]

    def guard(self) -> AbstractContextManager[Any]:
        """Do nothing: the host is always current, and has no streams."""
        return nullcontext()

    def settle(self) -> None:
        """Do nothing: the device has no core."""

    def wait(self, other: Device) -> None:
        """Do nothing: host work is done when its call returns."""

    def borrow(self, tensors: Sequence[torch.Tensor]) -> None:
        """Do nothing: the host has no streams."""

    def event(self) -> Any:
        """Return None: the host's clock measures this device's work."""
        return None

    def synchronize(self) -> None:
        """Do nothing: host work is done when its call returns."""

    def can_collect(self, devices: Sequence[Device]) -> bool:
        """Return False: the host has no collectives within a process."""
        return False

    def broadcast(self, tensors: Sequence[torch.Tensor], devices: Sequence[Device]) -> list[list[torch.Tensor]]:
        """Raises RuntimeError; see `can_collect`."""
        raise RuntimeError(f"{self.name} has no collectives")

    def reduce_add(self, tensors: Sequence[Sequence[torch.Tensor]], devices: Sequence[Device]) -> list[torch.Tensor]:
        """Raises RuntimeError; see `can_collect`."""
        raise RuntimeError(f"{self.name} has no collectives")

    def collectives(self, devices: Sequence[Device]) -> Collectives | None:
        """Return None; see `can_collect`."""
        return None

    def recorder(self) -> Recorder | None:
        """Return None: the host cannot replay work without Python."""
        return None
