"""The mlp with a slowdown in one phase, which `verdicts.py` expects dpbench to find.

The phase spins for DPBENCH_PLANTED_S seconds once per step, whatever the number of replicas.
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import torch
from torch import nn

from dpbench.models import mlp

PLANTED_S = float(os.environ.get("DPBENCH_PLANTED_S", "0"))
DEVICES = int(os.environ.get("DPBENCH_PLANTED_DEVICES", "1"))


def spin() -> None:
    """Keep this thread, and the interpreter lock, busy for PLANTED_S seconds."""
    end = time.perf_counter() + PLANTED_S
    while time.perf_counter() < end:
        pass


class SlowForward(mlp.SimpleModel):
    """The mlp with a forward that spins once per step, in the replica that calls it first."""

    calls = itertools.count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if next(self.calls) % DEVICES == 0:
            spin()
        return super().forward(x)


class SlowBackward(torch.autograd.Function):
    """An identity function with a backward that spins."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        spin()
        return gradients[0]


class Variant:
    """A model for dpbench: the mlp, with a slowdown in one phase or without any."""

    def __init__(self, phase: str) -> None:
        self._phase = phase

    def build(self, size: str) -> nn.Module:
        return SlowForward(mlp.WIDTHS[size]) if self._phase == "forward" else mlp.build(size)

    def batch(self, n: int, seed: int, size: str) -> Any:
        return mlp.batch(n, seed, size)

    def loss(
        self, output: torch.Tensor, target: torch.Tensor, reduction: str = "mean"
    ) -> torch.Tensor:
        if self._phase == "loss":
            spin()
        if self._phase == "backward":
            output = SlowBackward.apply(output)
        return mlp.loss(output, target, reduction)


none, forward, loss, backward = (
    Variant(phase) for phase in ("none", "forward", "loss", "backward")
)
