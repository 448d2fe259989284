"""Models that ask for more memory than there is, and others that misbehave: `--model tests.hungry:CPU`."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dpbench.models import mlp


def _plug(forward: Any) -> SimpleNamespace:
    """Return a model whose forward does `forward(x)` before the real work."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp.build("small")

        def forward(self, x: Tensor) -> Tensor:
            forward(x)
            return self.inner(x)

    return SimpleNamespace(build=lambda size: Net(), batch=mlp.batch, loss=mlp.loss)


PETABYTE = 1 << 50

CPU = _plug(lambda x: torch.empty(PETABYTE, dtype=torch.uint8))
GPU = _plug(lambda x: torch.empty(PETABYTE, dtype=torch.uint8, device=x.device))
HANGS = _plug(lambda x: time.sleep(3600))
DIES = _plug(lambda x: os.abort())
RAISES = _plug(lambda x: (_ for _ in ()).throw(ArithmeticError("planted in forward")))
