"""VGG-16 without BatchNorm: the head has most parameters, the worst case for `replicate`.

Layers: K. Simonyan, A. Zisserman, "Very Deep Convolutional Networks for Large-Scale Image
Recognition", 2014, configuration D, without its dropout. In the full size, the head has 89 % of the
parameters but does only 0.8 % of the forward arithmetic, so hardly any computation can overlap with
the transfers of `replicate` and `reduce`. In the small size, it has 91 % of the parameters and does
33 % of the arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.models.resnet18 import images


class Dims(NamedTuple):
    """The dimensions of the model in one size.

    `pixels` is the side of an image, `width` the number of channels of the first stage, `hidden`
    the width of the head.
    """

    pixels: int
    width: int
    hidden: int
    classes: int


DIMS = {
    "small": Dims(pixels=32, width=8, hidden=1536, classes=10),
    "full": Dims(pixels=224, width=64, hidden=4096, classes=1000),
}
STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
"""(channels / `width`, number of convolutions) of each stage, which halves the image's sides."""


class VGG16(nn.Module):
    """Thirteen 3x3 convolutions in five stages, followed by three linear layers, the head."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for multiple, convolutions in STAGES:
            for _ in range(convolutions):
                layers += [nn.Conv2d(channels, dims.width * multiple, 3, padding=1), nn.ReLU()]
                channels = dims.width * multiple
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        side = dims.pixels // 2 ** len(STAGES)
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels * side * side, dims.hidden),
            nn.ReLU(),
            nn.Linear(dims.hidden, dims.hidden),
            nn.ReLU(),
            nn.Linear(dims.hidden, dims.classes),
        )
        # thirteen layers without normalisation: with torch's default weights, activations would
        # vanish
        for module in self.features:
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (batch, classes) for images (batch, 3, pixels, pixels)."""
        logits: Tensor = self.head(self.features(x))
        return logits


def build(size: str) -> nn.Module:
    """Return the model: 2,706,610 parameters in the small size, 138,357,544 in the full size."""
    return VGG16(DIMS[size])


def batch(n: int, seed: int, size: str) -> tuple[Tensor, Tensor]:
    """Return n random samples: images of shape (3, pixels, pixels), and n class labels."""
    return images(n, seed, DIMS[size].pixels, DIMS[size].classes)


loss = F.cross_entropy
