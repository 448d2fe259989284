"""DistributedDataParallel whose gradients are views of the buckets, which saves copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from dpbench.hardware.device import Device
from dpbench.models import Model
from dpbench.records import Case, Mark
from dpbench.strategies import Parallelism, Reduction, Step, Strategy, Traits, ddp


class BucketView(Strategy):
    """DistributedDataParallel whose gradients are views of the buckets, which saves copies."""

    traits = Traits(
        parallelism=Parallelism.RANKS,
        reduction=Reduction.OVERLAPPED,
        shared_stream=True,
    )

    @contextmanager
    def start(
        self, case: Case, model: Model, devices: Sequence[Device], mark: Mark
    ) -> Iterator[Step]:
        """Yield this rank's training step."""
        yield ddp.DdpStep(case, model, devices[0], mark, wrap)


def wrap(module: nn.Module, device: Device) -> nn.Module:
    """Return this rank's module in torch's wrapper."""
    return ddp.wrap(module, device, gradient_as_bucket_view=True)


strategy = BucketView()
