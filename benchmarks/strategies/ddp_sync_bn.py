"""DistributedDataParallel with torch's SyncBatchNorm: statistics of the whole batch in every layer.

Each BatchNorm layer gathers the sums of all ranks in forward, and adds those of its gradients in
backward. Its cost is the ratio to ddp: `--strategies single,ddp,FILE:strategy`.
"""

from __future__ import annotations

from torch import nn

from dpbench.hardware.device import Device
from dpbench.records import Case
from dpbench.strategies import Split, ddp


class SyncBn(ddp.Wrapped):
    """DistributedDataParallel with torch's SyncBatchNorm in place of BatchNorm."""

    def skip(self, case: Case) -> str:
        """Return why this strategy cannot run a case, or ""."""
        if reason := super().skip(case):
            return reason
        return "" if case.device_kind == "cuda" else "torch's SyncBatchNorm runs on GPUs only"

    def split(self, case: Case, module: nn.Module) -> Split:
        """Return one part, because a layer's statistics are those of the whole batch."""
        return Split((case.batch_size,), replays=False)

    def wrap(self, module: nn.Module, device: Device) -> nn.Module:
        """Return this rank's module in torch's wrapper, with SyncBatchNorm layers."""
        synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        if not any(isinstance(part, nn.SyncBatchNorm) for part in synchronized.modules()):
            raise ValueError(
                "the model has no BatchNorm layer to synchronize; give --strategies ddp"
            )
        return ddp.wrap(synchronized, device)


strategy = SyncBn()
