"""DistributedDataParallel with torch's hook that rounds gradients to bf16 for the all-reduce."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from dpbench.hardware.device import Device
from dpbench.models import Model
from dpbench.records import Case, Mark
from dpbench.strategies import Parallelism, Reduction, Step, Strategy, Traits, ddp


class Bf16(Strategy):
    """DistributedDataParallel with torch's hook that rounds gradients to bf16 for all-reduce."""

    traits = Traits(
        parallelism=Parallelism.RANKS,
        reduction=Reduction.OVERLAPPED,
        shared_stream=True,
        rounds_gradients=True,
    )

    def skip(self, case: Case) -> str:
        """Return why this strategy cannot run a case (for example, without NCCL), or ""."""
        if reason := super().skip(case):
            return reason
        return (
            ""
            if "nccl" in self.backend(case)
            else "torch's bf16_compress_hook needs NCCL, and thus distinct GPUs"
        )

    @contextmanager
    def start(
        self, case: Case, model: Model, devices: Sequence[Device], mark: Mark
    ) -> Iterator[Step]:
        """Yield this rank's training step."""
        yield ddp.DdpStep(case, model, devices[0], mark, wrap)


def wrap(module: nn.Module, device: Device) -> nn.Module:
    """Return this rank's module in torch's wrapper."""
    wrapped = ddp.wrap(module, device)
    wrapped.register_comm_hook(None, bf16_compress_hook)
    return wrapped


strategy = Bf16()
