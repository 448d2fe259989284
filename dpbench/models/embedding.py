"""A large embedding table with dense gradients: replicas receive all weights, but compute little.

A batch uses only a few rows of the table, but `replicate` copies the whole table, and `reduce` adds
gradients that are mostly zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dims(NamedTuple):
    """The dimensions of the model in one size.

    The table has `rows` rows of `width` values; each sample uses `bag` rows.
    """

    rows: int
    bag: int
    width: int
    classes: int


DIMS = {
    "small": Dims(rows=16_384, bag=256, width=112, classes=10),
    "full": Dims(rows=1_000_000, bag=256, width=128, classes=1000),
}


class EmbeddingMean(nn.Module):
    """The mean of the table rows that a sample selects, followed by one linear layer."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(dims.rows, dims.width, mode="mean")
        self.head = nn.Linear(dims.width, dims.classes)

    def forward(self, bags: Tensor) -> Tensor:
        """Return logits of shape (batch, classes) for table row indices of shape (batch, bag)."""
        logits: Tensor = self.head(self.table(bags))
        return logits


def build(size: str) -> nn.Module:
    """Return the model: 1,836,138 parameters in the small size, 128,129,000 in the full size."""
    return EmbeddingMean(DIMS[size])


def batch(n: int, seed: int, size: str) -> tuple[Tensor, Tensor]:
    """Return n random samples: table row indices of shape (n, bag), and n class labels."""
    generator = torch.Generator().manual_seed(seed)
    dims = DIMS[size]
    return (
        torch.randint(dims.rows, (n, dims.bag), generator=generator),
        torch.randint(dims.classes, (n,), generator=generator),
    )


loss = F.cross_entropy
