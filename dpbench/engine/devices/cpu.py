"""Logical CPU devices: separate tensors on the host, so that every schedule runs, and is tested, without a GPU."""

from __future__ import annotations

import torch

from dpbench.engine.devices._host import HostDevice


class CpuDevice(HostDevice):
    """One logical device on the host, told from its siblings by its tensors alone."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"cpu:{index}"
        self.torch_device = torch.device("cpu")

    def memory(self) -> int | None:
        """Return None: the host cannot tell the memory of one logical device from another's."""
        return None

    def take_peaks(self) -> dict[str, int]:
        """Return nothing; see `memory`."""
        return {}

    def reset_memory(self) -> None:
        """Do nothing, as `memory` has nothing to forget."""
