"""DistributedDataParallel whose gradients are views of the buckets, which saves copies."""

from __future__ import annotations

from torch import nn

from dpbench.hardware.device import Device
from dpbench.strategies import ddp


class BucketView(ddp.Wrapped):
    """DistributedDataParallel whose gradients are views of the buckets, which saves copies."""

    def wrap(self, module: nn.Module, device: Device) -> nn.Module:
        """Return this rank's module in torch's wrapper."""
        return ddp.wrap(module, device, gradient_as_bucket_view=True)


strategy = BucketView()
