"""DistributedDataParallel with torch's hook that rounds gradients to bf16 for the all-reduce."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from dpbench.hardware.device import Device
from dpbench.records import Case
from dpbench.strategies import ddp


class Bf16(ddp.Wrapped):
    """DistributedDataParallel with torch's hook that rounds gradients to bf16 for all-reduce."""

    traits = replace(ddp.Wrapped.traits, rounds_gradients=True)

    def skip(self, case: Case) -> str:
        """Return why this strategy cannot run a case (for example, without NCCL), or ""."""
        if reason := super().skip(case):
            return reason
        return (
            ""
            if "nccl" in self.backend(case)
            else "torch's bf16_compress_hook needs NCCL, and thus distinct GPUs"
        )

    def wrap(self, module: nn.Module, device: Device) -> nn.Module:
        """Return this rank's module in torch's wrapper."""
        wrapped = ddp.wrap(module, device)
        wrapped.register_comm_hook(None, bf16_compress_hook)
        return wrapped


strategy = Bf16()
