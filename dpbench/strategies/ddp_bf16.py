"""DistributedDataParallel with torch's communication hook that rounds gradients to bf16 for the all-reduce."""

from __future__ import annotations

from dpbench.records import Case
from dpbench.strategies.ddp import DistributedDataParallel


class Bf16(DistributedDataParallel):
    """The strategy that trains with DistributedDataParallel and torch's `bf16_compress_hook`, which needs NCCL."""

    def skip(self, case: Case) -> str:
        """Return the reason why this strategy cannot run a case (for example, the ranks do not use NCCL), or ""."""
        if reason := super().skip(case):
            return reason
        return "" if "nccl" in self.backend(case) else "torch's bf16_compress_hook needs NCCL, and thus distinct GPUs"


STRATEGY = Bf16(hook="bf16_compress_hook", rounds_gradients=True)
