"""Logical CPU devices: separate tensors on the host, so that every schedule runs, and is tested, without a GPU."""

from __future__ import annotations

import torch

from dpbench.hardware.affinity import stay
from dpbench.hardware.devices._host import HostDevice


class CpuDevice(HostDevice):
    """A logical device on the host, with separate tensors and, optionally, its own core.

    `core` is a position among the process's cores; threads that work for the device are bound to it.
    """

    def __init__(self, index: int, core: int | None = None) -> None:
        self.index = index
        self._core = core
        self.name = f"cpu:{index}"
        self.torch_device = torch.device("cpu")

    def settle(self) -> None:
        """Bind the calling thread to the device's core."""
        if self._core is not None:
            stay(self._core)

    def memory(self) -> int | None:
        """Return None: the host's memory cannot be attributed to a logical device."""
        return None

    def take_peaks(self) -> dict[str, int]:
        """Return an empty dict; see `memory`."""
        return {}

    def reset_memory(self) -> None:
        """Do nothing: there is no peak to reset."""
