"""Two models of which one step is bound by the host and the other by its operations.

Use them with --models benchmarks/models/bound.py:host,benchmarks/models/bound.py:compute.
"""

from itertools import pairwise
from types import SimpleNamespace

import torch
from torch import nn

LAYERS, NARROW = 150, 16
"""The layers of `host`, and the width of each: an operation takes as long as its launch."""
WIDE = (512, 1024, 1024, NARROW)
"""The widths of `compute`: with 128 rows or more, an operation takes far longer than its launch."""


def _drawn(width: int, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of shape (rows, width) and their class labels."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, width, generator=generator)
    return features, torch.randint(NARROW, (rows,), generator=generator)


def _layers(widths: tuple[int, ...]) -> nn.Sequential:
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers)


host = SimpleNamespace(
    build=lambda size: _layers((NARROW,) * (LAYERS + 1)),
    batch=lambda n, seed, size: _drawn(NARROW, n, seed),
    loss=nn.functional.cross_entropy,
)
compute = SimpleNamespace(
    build=lambda size: _layers(WIDE),
    batch=lambda n, seed, size: _drawn(WIDE[0], n, seed),
    loss=nn.functional.cross_entropy,
)
