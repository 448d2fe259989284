"""A transformer encoder that classifies token sequences: many equal layers, many small tensors.

The full size has the dimensions of BERT-base (J. Devlin et al., "BERT", 2018), but no segment table
and no pooling layer. Dropout is 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dims(NamedTuple):
    """The dimensions of the model in one size.

    `positions` is the maximum length of a sequence, and `tokens` the length in a batch. `width` is
    the size of an embedding, and `hidden` the size of a feed-forward layer.
    """

    vocabulary: int
    positions: int
    tokens: int
    width: int
    heads: int
    hidden: int
    layers: int
    classes: int


DIMS = {
    "small": Dims(1000, 32, tokens=32, width=64, heads=4, hidden=256, layers=2, classes=10),
    "full": Dims(
        30_522, 512, tokens=128, width=768, heads=12, hidden=3072, layers=12, classes=1000
    ),
}


class Transformer(nn.Module):
    """Token and position embeddings, encoder layers, the mean over the sequence, a linear layer."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.tokens = nn.Embedding(dims.vocabulary, dims.width)
        self.positions = nn.Parameter(torch.empty(dims.positions, dims.width))
        self.norm = nn.LayerNorm(dims.width)
        layer = nn.TransformerEncoderLayer(
            dims.width, dims.heads, dims.hidden, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, dims.layers, enable_nested_tensor=False)
        self.head = nn.Linear(dims.width, dims.classes)
        # TransformerEncoder copies its layer including the weights: draw separate weights for each
        # layer
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, classes) for token ids of shape (batch, tokens)."""
        x = self.norm(self.tokens(tokens) + self.positions[: tokens.size(1)])
        logits: Tensor = self.head(self.encoder(x).mean(dim=1))
        return logits


def build(size: str) -> nn.Module:
    """Return the model: 166,794 parameters in the small size, 109,659,112 in the full size."""
    return Transformer(DIMS[size])


def batch(n: int, seed: int, size: str) -> tuple[Tensor, Tensor]:
    """Return n random samples: token ids of shape (n, tokens), and n class labels."""
    generator = torch.Generator().manual_seed(seed)
    dims = DIMS[size]
    return (
        torch.randint(dims.vocabulary, (n, dims.tokens), generator=generator),
        torch.randint(dims.classes, (n,), generator=generator),
    )


loss = F.cross_entropy
