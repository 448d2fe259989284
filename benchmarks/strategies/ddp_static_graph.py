"""DistributedDataParallel with `static_graph=True`: every step must use the same parameters."""

from __future__ import annotations

from torch import nn

from dpbench.hardware.device import Device
from dpbench.strategies import ddp


class StaticGraph(ddp.Wrapped):
    """DistributedDataParallel with `static_graph=True`: every step must use the same parameters."""

    def wrap(self, module: nn.Module, device: Device) -> nn.Module:
        """Return this rank's module in torch's wrapper."""
        return ddp.wrap(module, device, static_graph=True)


strategy = StaticGraph()
