"""Three linear layers: the model `SimpleModel` of DataParallel tutorials.

The small size has the widths of "Multi-GPU training with DataParallel".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = {"small": (128, 256, 128, 10), "full": (4096, 8192, 4096, 1000)}


class SimpleModel(nn.Module):
    """Three linear layers with ReLU between them; the input of a sample is a vector of features."""

    def __init__(self, widths: tuple[int, int, int, int]) -> None:
        super().__init__()
        features, first, second, classes = widths
        self.fc1 = nn.Linear(features, first)
        self.fc2 = nn.Linear(first, second)
        self.fc3 = nn.Linear(second, classes)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape (batch, classes) for features of shape (batch, features)."""
        x = self.relu(self.fc1(x))
        x = self.relu(self.fc2(x))
        logits: Tensor = self.fc3(x)
        return logits


def build(size: str) -> nn.Module:
    """Return the model: 67,210 parameters in the small size, 71,218,152 in the full size."""
    return SimpleModel(WIDTHS[size])


def batch(n: int, seed: int, size: str) -> tuple[Tensor, Tensor]:
    """Return n random samples: normal values of shape (n, features), and n class labels."""
    generator = torch.Generator().manual_seed(seed)
    features, *_, classes = WIDTHS[size]
    return (
        torch.randn(n, features, generator=generator),
        torch.randint(classes, (n,), generator=generator),
    )


loss = F.cross_entropy
