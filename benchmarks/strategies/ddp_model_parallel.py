"""DistributedDataParallel with model parallelism: each rank spreads its layers over two devices.

A case with n devices has n / 2 ranks; rank r uses the devices 2 r and 2 r + 1. The exposed
reduction is recorded for the first device of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpbench.hardware.device import Device
from dpbench.models import Model
from dpbench.records import Case, Mark, Phase
from dpbench.records.arguments import call
from dpbench.strategies import ddp, precision_of

from .layers import Flow, on, spread

PER_RANK = 2
"""The number of devices of a rank."""


class DdpModelParallel(ddp.Wrapped):
    """DistributedDataParallel with model parallelism: each rank's layers span two devices."""

    traits = replace(ddp.Wrapped.traits, devices_per_replica=PER_RANK)

    def skip(self, case: Case) -> str:
        """Return why this strategy cannot run a case (for example, an odd device count), or ""."""
        if case.devices % PER_RANK:
            return f"each rank needs {PER_RANK} devices: give --devices {case.devices + 1}"
        return super().skip(case)

    @contextmanager
    def start(
        self, case: Case, model: Model, devices: Sequence[Device], mark: Mark
    ) -> Iterator[ddp.DdpStep]:
        """Place this rank's layers on its devices, and yield its training step."""
        with spread(model, devices, mark) as flow:
            yield SpreadStep(case, model, flow, mark, self.wrap)

    def wrap(self, module: nn.Module, device: Device) -> nn.Module:
        """Return this rank's module wrapped without device_ids, so that no inputs are moved."""
        return DistributedDataParallel(module)


class SpreadStep(ddp.DdpStep):
    """The training step of one rank, whose layers are spread over the devices of `flow`."""

    def __init__(
        self,
        case: Case,
        model: Model,
        flow: Flow,
        mark: Mark,
        wrap: Callable[[nn.Module, Device], nn.Module],
    ) -> None:
        super().__init__(case, model, flow.devices[0], mark, wrap)
        self.flow = flow

    def forward_backward(self, inputs: Any, target: Any, share: float) -> torch.Tensor:
        """Run forward and backward through the rank's devices.

        Return the loss, which is multiplied by `share`.
        """
        root, last = self.flow.devices
        with precision_of(self.case):
            with self.flow.during(Phase.FORWARD, root):
                output, target = on((call(self.wrapped, inputs), target), last)
            with self.mark(Phase.LOSS, last.index):
                loss = self.model.loss(output, target) * share
        with self.flow.during(Phase.BACKWARD, last):
            self.updates.scaled(loss).backward()
        return loss.detach()


strategy = DdpModelParallel()
