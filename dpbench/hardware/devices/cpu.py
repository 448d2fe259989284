"""Logical CPU devices: separate tensors on the host, so that every schedule runs, and is tested, without a GPU."""

from __future__ import annotations

import torch

from dpbench.hardware.affinity import stay
from dpbench.hardware.devices._host import HostDevice


class CpuDevice(HostDevice):
    """One logical device on the host, told from its siblings by its tensors, and by a core of its own if it has one.

    `core` counts among the process's cores; threads that work for the device stay there.
    """

    def __init__(self, index: int, core: int | None = None) -> None:
        self.index = index
        self._core = core
        self.name = f"cpu:{index}"
        self.torch_device = torch.device("cpu")

    def settle(self) -> None:
        """Keep the calling thread on the device's core."""
        if self._core is not None:
            stay(self._core)

    def memory(self) -> int | None:
        """Return None: the host cannot tell the memory of one logical device from another's."""
        return None

    def take_peaks(self) -> dict[str, int]:
        """Return nothing; see `memory`."""
        return {}

    def reset_memory(self) -> None:
        """Do nothing, as `memory` has nothing to forget."""
