"""DistributedDataParallel with torch's hook to all-reduce gradients rounded to fp16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from dpbench.hardware.device import Device
from dpbench.models import Model
from dpbench.records import Case, Mark
from dpbench.strategies import Parallelism, Reduction, Step, Strategy, Traits, ddp


class Fp16(Strategy):
    """DistributedDataParallel with torch's hook to all-reduce gradients rounded to fp16."""

    traits = Traits(
        parallelism=Parallelism.RANKS,
        reduction=Reduction.OVERLAPPED,
        shared_stream=True,
        rounds_gradients=True,
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
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


strategy = Fp16()
