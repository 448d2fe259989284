"""DistributedDataParallel whose gradients are rounded to bf16 for the all-reduce, by torch's communication hook."""

from __future__ import annotations

from dpbench.records import Case
from dpbench.strategies.ddp import DistributedDataParallel


class Bf16(DistributedDataParallel):
    """DistributedDataParallel with torch's `bf16_compress_hook`."""

    def skip(self, case: Case) -> str:
        """Return the reason to skip a case whose ranks do not communicate through NCCL, or that `ddp` cannot run."""
        if reason := super().skip(case):
            return reason
        return "" if "nccl" in self.backend(case) else "torch's bf16_compress_hook needs NCCL, that is, distinct GPUs"


STRATEGY = Bf16(hook="bf16_compress_hook", rounds_gradients=True)
