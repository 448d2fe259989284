"""ResNet-18: convolutions with BatchNorm, whose running statistics are buffers to replicate.

Topology: K. He et al., "Deep Residual Learning for Image Recognition", 2015, the 18-layer column of
table 1, with projection shortcuts where the shape changes. The small size is the same network for
images of 24x24 pixels, with a 3x3 stem of stride 1, no max-pooling, and fewer channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dims(NamedTuple):
    """The dimensions of the model in one size.

    `width` is the number of channels of the first stage, and `pixels` is the side of an image.
    `large_stem` selects the stem of the paper, for large images.
    """

    pixels: int
    width: int
    classes: int
    large_stem: bool


DIMS = {
    "small": Dims(pixels=24, width=8, classes=10, large_stem=False),
    "full": Dims(pixels=224, width=64, classes=1000, large_stem=True),
}
STAGES = 4
BLOCKS_PER_STAGE = 2


class BasicBlock(nn.Module):
    """Two successive 3x3 convolutions; a shortcut adds the block's input to their output.

    With stride 2, the block halves each side of the image.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        same_shape = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same_shape else _projection(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """The stem, four stages of two blocks, the mean over the image, and one linear layer."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.stem = _stem(dims)
        blocks = []
        channels = dims.width
        for stage in range(STAGES):
            for position in range(BLOCKS_PER_STAGE):
                width = dims.width * 2**stage
                stride = 2 if stage > 0 and position == 0 else 1
                blocks.append(BasicBlock(channels, width, stride))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, dims.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (batch, classes) for images (batch, 3, pixels, pixels)."""
        x = self.blocks(self.stem(x))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def _projection(inputs: int, outputs: int, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def _stem(dims: Dims) -> nn.Module:
    """The large stem reduces each side of the image to a quarter."""
    kernel, stride = (7, 2) if dims.large_stem else (3, 1)
    layers = [
        nn.Conv2d(3, dims.width, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(dims.width),
        nn.ReLU(),
    ]
    if dims.large_stem:
        layers.append(nn.MaxPool2d(3, stride=2, padding=1))
    return nn.Sequential(*layers)


def build(size: str) -> nn.Module:
    """Return the model: 176,402 parameters in the small size, 11,689,512 in the full size."""
    return ResNet18(DIMS[size])


def batch(n: int, seed: int, size: str) -> tuple[Tensor, Tensor]:
    """Return n random samples: images of shape (3, pixels, pixels), and n class labels."""
    return images(n, seed, DIMS[size].pixels, DIMS[size].classes)


def images(n: int, seed: int, pixels: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return n random images of shape (3, pixels, pixels), and n random labels below `classes`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, pixels, pixels, generator=generator), torch.randint(
        classes, (n,), generator=generator
    )


loss = F.cross_entropy
