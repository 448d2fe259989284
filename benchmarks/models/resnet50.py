"""A ResNet-50 in the style of torchvision, but without it.

Use it with --models benchmarks/models/resnet50.py:net.
"""

from types import SimpleNamespace

import torch
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """Three convolutions with batch normalisation around a shortcut.

    The output has four times `planes` channels.
    """

    def __init__(self, channels: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, planes, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = (
            nn.Conv2d(planes, planes, 3, stride, 1, bias=False),
            nn.BatchNorm2d(planes),
        )
        self.conv3, self.bn3 = (
            nn.Conv2d(planes, 4 * planes, 1, bias=False),
            nn.BatchNorm2d(4 * planes),
        )
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or channels != 4 * planes:
            shortcut = nn.Conv2d(channels, 4 * planes, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(4 * planes))

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations after the block."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(out)))))
        activations: Tensor = self.relu(out + self.downsample(x))
        return activations


def resnet50(width: int = 64, classes: int = 1000) -> nn.Module:
    """Return the network; it has 25,557,032 parameters with the published width of 64."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    ]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            planes, stride = width << stage, 2 if stage and not block else 1
            layers.append(Bottleneck(channels, planes, stride))
            channels = 4 * planes
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )


def batch(n: int, seed: int, size: str) -> tuple[Tensor, Tensor]:
    """Return n images and their classes; the images of the small size have 32 x 32 pixels."""
    side, generator = {"small": 32, "full": 224}[size], torch.Generator().manual_seed(seed)
    images = torch.randn(n, 3, side, side, generator=generator)
    return images, torch.randint(1000, (n,), generator=generator)


net = SimpleNamespace(
    build=lambda size: resnet50({"small": 8, "full": 64}[size]),
    batch=batch,
    loss=nn.functional.cross_entropy,
)
