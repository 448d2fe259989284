"""Logical CPU devices: separate tensors on the host, so that every schedule runs, and is tested, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dpbench.devices import Device


class CpuDevice:
    """One logical device on the host, told from its siblings by its tensors alone."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"cpu:{index}"
        self.torch_device = torch.device("cpu")

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fresh copy: fresh storage starts on a 64-byte boundary, and `linear` changes bits without."""
        return tensor.to(self.torch_device, copy=True)

    def clone(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensor by tensor: one flat copy would lose the alignment of all but the first."""
        return [self.put(tensor) for tensor in tensors]

    def guard(self) -> AbstractContextManager[Any]:
        """Do nothing: the host is always current."""
        return nullcontext()

    def wait(self, other: Device) -> None:
        """Do nothing: host work is done when its call returns."""

    def borrow(self, tensors: Sequence[torch.Tensor]) -> None:
        """Do nothing: the host has no streams."""

    def event(self) -> Any:
        """Return None: the host's clock tells the truth here."""
        return None

    def synchronize(self) -> None:
        """Do nothing: host work is done when its call returns."""

    def memory(self) -> int | None:
        """Return None: the host cannot tell the memory of one logical device from another's."""
        return None

    def take_peaks(self) -> dict[str, int]:
        """Return nothing; see `memory`."""
        return {}

    def reset_memory(self) -> None:
        """Do nothing, as `memory` has nothing to forget."""

    def can_collect(self, devices: Sequence[Device]) -> bool:
        """Return False: the host has no collectives within a process."""
        return False

    def broadcast(self, tensors: Sequence[torch.Tensor], devices: Sequence[Device]) -> list[list[torch.Tensor]]:
        """Refuse; see `can_collect`."""
        raise RuntimeError(f"{self.name} has no collectives")

    def reduce_add(self, tensors: Sequence[Sequence[torch.Tensor]], devices: Sequence[Device]) -> list[torch.Tensor]:
        """Refuse; see `can_collect`."""
        raise RuntimeError(f"{self.name} has no collectives")
