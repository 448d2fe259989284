"""A model for dpbench: replace the parts marked CHANGE by your own, then run these commands.

dpbench check --models {file}:model
dpbench run --models {file}:model --devices 1,2 --batch-sizes 64
"""

import torch
from torch import nn


class Net(nn.Module):
    """CHANGE: your module.

    It may use dropout, and may return a tensor, a dict, a dataclass or its own loss.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10)
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (rows, 10); the first dimension of every output is the batch."""
        logits: torch.Tensor = self.layers(features)
        return logits


class Example:
    """The object that `--models {file}:model` names."""

    loss = staticmethod(nn.functional.cross_entropy)
    """CHANGE: a function of (output, target) that returns a 0-dim tensor; None if forward does."""

    def build(self, size: str) -> nn.Module:
        """Return the module on the CPU, with random weights. `size` is "small" or "full"."""
        return Net({"small": 64, "full": 1024}[size])

    def batch(self, n: int, seed: int, size: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return (inputs, target) with n rows on the CPU; the same seed must give the same values.

        CHANGE: inputs are a tensor, a tuple of positional arguments of forward, or a dict of its
        keyword arguments. A dict alone, without a target, is for models that return their own loss.
        """
        generator = torch.Generator().manual_seed(seed)
        features = torch.randn(n, 32, generator=generator)
        return {"features": features}, torch.randint(10, (n,), generator=generator)

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of `--optimizer own`; optional."""
        return torch.optim.AdamW(parameters, lr=3e-4)


model = Example()
