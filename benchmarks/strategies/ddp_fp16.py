"""DistributedDataParallel with torch's hook to all-reduce gradients rounded to fp16."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from dpbench.hardware.device import Device
from dpbench.strategies import ddp


class Fp16(ddp.Wrapped):
    """DistributedDataParallel with torch's hook to all-reduce gradients rounded to fp16."""

    traits = replace(ddp.Wrapped.traits, rounds_gradients=True)

    def wrap(self, module: nn.Module, device: Device) -> nn.Module:
        """Return this rank's module in torch's wrapper."""
        wrapped = ddp.wrap(module, device)
        wrapped.register_comm_hook(None, fp16_compress_hook)
        return wrapped


strategy = Fp16()
