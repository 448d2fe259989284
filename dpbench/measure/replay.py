"""Replay: make the random numbers of each forward a function of its inputs, so that verification covers dropout.

Replicas of one process draw from one generator, in an order that depends on the threads. Verification therefore gives
each forward a generator state that only its rows determine. The strategy and the reference then draw the same numbers
for the same chunk: in modules such as nn.Dropout, in functions, and in scaled dot-product attention.
"""

from __future__ import annotations

import threading
import zlib
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from dpbench.measure.structures import all_tensors

_ALONE = threading.RLock()
"""Held during a forward: the threads of the replicas share the generator of the host."""


def replay(module: nn.Module, *, alone: bool) -> None:
    """Let each forward of `module` draw the random numbers that its inputs determine, and restore the generators.

    With `alone`, the forwards of several threads run one after the other. The module becomes an instance of a new
    subclass of its class; its copies and replicas replay too.
    """
    kind = type(module)
    original = kind.forward

    def forward(self: nn.Module, *inputs: Any, **named: Any) -> Any:
        tensors = all_tensors((inputs, named))
        gpus = sorted({one.device.index for one in tensors if one.device.type == "cuda"})
        with _ALONE if alone else nullcontext(), torch.random.fork_rng(devices=gpus):
            torch.default_generator.manual_seed(seed := _seed(tensors))
            for index in gpus:
                torch.cuda.default_generators[index].manual_seed(seed)
            return original(self, *inputs, **named)

    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _seed(tensors: list[torch.Tensor]) -> int:
    """Return a number that the values of the tensors determine."""
    seed = 0
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous().reshape(-1)
        seed = zlib.crc32(values.view(torch.uint8).numpy().tobytes(), seed)
    return seed
