"""The models of reports/public-figures/memory.csv, written from their papers.

Run one with `--models benchmarks.models.published:NAME`. The names of the transformers end in the
number of tokens of a sequence. Transformers use dropout of 0.1, as their scripts do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.models.resnet50 import resnet50 as layers_of_resnet50


@dataclass(frozen=True)
class Dims:
    """The dimensions of a transformer.

    `fused` selects fused attention instead of products with a softmax between.
    """

    words: int = 30_522
    positions: int = 512
    segments: int = 2
    width: int = 768
    heads: int = 12
    layers: int = 12
    fused: bool = False
    checkpointed: bool = False
    before: bool = False
    """Whether the normalisation precedes each part of a layer, as in GPT-2, and attention is
    causal.
    """


class Attention(nn.Module):
    """Self-attention with an output projection; the causal mask of GPT-2 is a buffer."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        self.projections = nn.ModuleList(
            nn.Linear(dims.width, dims.width) for _ in range(0 if dims.before else 3)
        )
        self.joined = nn.Linear(dims.width, 3 * dims.width) if dims.before else None
        self.output = nn.Linear(dims.width, dims.width)
        if dims.before:
            causal = torch.ones(1, 1, dims.positions, dims.positions, dtype=torch.bool)
            self.register_buffer("causal", causal)

    def forward(self, x: Tensor) -> Tensor:
        """Return the projected mixture of values for x of shape (batch, tokens, width)."""
        n, tokens, width = x.shape
        parts = (
            self.joined(x).chunk(3, -1) if self.joined else [each(x) for each in self.projections]
        )
        query, key, value = (
            part.view(n, tokens, self.dims.heads, -1).transpose(1, 2) for part in parts
        )
        del parts
        if self.dims.fused:
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1 * self.training)
        else:
            scores = query @ key.transpose(-1, -2)
            scores = scores / math.sqrt(width // self.dims.heads)
            if self.dims.before:
                least = torch.full(
                    (), torch.finfo(scores.dtype).min, dtype=scores.dtype, device=scores.device
                )
                scores = torch.where(self.causal[:, :, :tokens, :tokens], scores, least)
            else:
                scores = scores + torch.zeros(n, 1, 1, tokens, dtype=scores.dtype, device=x.device)
            mixed = F.dropout(scores.softmax(-1), 0.1, self.training) @ value
        return self.output(mixed.transpose(1, 2).reshape(n, tokens, width))


class Layer(nn.Module):
    """Attention and two linear layers, each with dropout, a shortcut and a normalisation."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.attention, self.before = Attention(dims), dims.before
        self.norms = nn.ModuleList(nn.LayerNorm(dims.width) for _ in range(2))
        self.wide, self.narrow = (
            nn.Linear(dims.width, 4 * dims.width),
            nn.Linear(4 * dims.width, dims.width),
        )

    def _mlp(self, x: Tensor) -> Tensor:
        return F.dropout(self.narrow(F.gelu(self.wide(x), approximate="none")), 0.1, self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations of shape (batch, tokens, width) after the layer."""
        if self.before:
            x = x + F.dropout(self.attention(self.norms[0](x)), 0.1, self.training)
            return x + self._mlp(self.norms[1](x))
        x = self.norms[0](x + F.dropout(self.attention(x), 0.1, self.training))
        return self.norms[1](x + self._mlp(x))


class Transformer(nn.Module):
    """Embeddings, layers and a head.

    The head is "masked" (BERT), "causal" (GPT-2), or "pooled" or "dense" (RoBERTa) with classes.
    """

    def __init__(self, dims: Dims, head: str, classes: int = 2) -> None:
        super().__init__()
        self.dims, self.head = dims, head
        sizes = (dims.words, dims.positions, *([dims.segments] if dims.segments else []))
        self.embeddings = nn.ModuleList(nn.Embedding(size, dims.width) for size in sizes)
        self.norm = nn.LayerNorm(dims.width)
        self.layers = nn.ModuleList(Layer(dims) for _ in range(dims.layers))
        if head != "causal":
            self.dense = nn.Linear(dims.width, dims.width)
        if head == "masked":
            self.last, self.bias = nn.LayerNorm(dims.width), nn.Parameter(torch.zeros(dims.words))
        elif head != "causal":
            self.classes = nn.Linear(dims.width, classes)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits: (batch, tokens, words), or (batch, classes)."""
        n, tokens = words.shape
        places = torch.arange(tokens, device=words.device).expand(n, tokens)
        ids = (words, places, torch.zeros_like(words))
        x = sum(embedding(one) for embedding, one in zip(self.embeddings, ids, strict=False))
        x = F.dropout(x if self.dims.before else self.norm(x), 0.1, self.training)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.dims.checkpointed else layer(x)
        if self.dims.before:
            return F.linear(self.norm(x), self.embeddings[0].weight)
        if self.head == "masked":
            return F.linear(self.last(F.gelu(self.dense(x))), self.embeddings[0].weight, self.bias)
        x = F.dropout(x[:, 0], 0.1, self.training) if self.head == "dense" else x[:, 0]
        return self.classes(F.dropout(torch.tanh(self.dense(x)), 0.1, self.training))


class Block(nn.Module):
    """A block of ConvNeXt.

    A depthwise convolution, two linear layers, a scale, and a shortcut with stochastic depth.
    """

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.drop = nn.LayerNorm(width, eps=1e-6), drop
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.ones(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations after the block; the shape is that of x."""
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.narrow(F.gelu(self.wide(y))).permute(0, 3, 1, 2)
        if self.drop and self.training:
            kept = torch.empty(len(y), 1, 1, 1, dtype=y.dtype, device=y.device).bernoulli_(
                1 - self.drop
            )
            y = y * kept.div_(1 - self.drop)
        y += x
        return y


class Norm2d(nn.LayerNorm):
    """Layer normalisation over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised images of shape (batch, channels, height, width)."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _convnext_large(size: str) -> nn.Module:
    """Return the network, which has 197,767,336 parameters."""
    widths, depths, layers, done = (192, 384, 768, 1536), (3, 3, 27, 3), [], 0
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        if stage:
            layers += [
                Norm2d(widths[stage - 1], eps=1e-6),
                nn.Conv2d(widths[stage - 1], width, 2, 2),
            ]
        else:
            layers += [nn.Conv2d(3, width, 4, 4), Norm2d(width, eps=1e-6)]
        for _ in range(depth):
            layers.append(Block(width, 0.5 * done / (sum(depths) - 1)))
            done += 1
    head = (
        nn.AdaptiveAvgPool2d(1),
        Norm2d(widths[-1], eps=1e-6),
        nn.Flatten(),
        nn.Linear(widths[-1], 1000),
    )
    return nn.Sequential(*layers, *head)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _tokens(n: int, tokens: int, seed: int) -> Tensor:
    return torch.randint(1000, (n, tokens), generator=torch.Generator().manual_seed(seed))


def _of_words(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), target.reshape(-1))


def _of_next_words(logits: Tensor, target: Tensor) -> Tensor:
    return _of_words(logits[:, :-1].contiguous(), target[:, 1:].contiguous())


def _transformer(dims: Dims, tokens: int, head: str, classes: int = 2) -> SimpleNamespace:
    """Return the model object of a transformer that trains on sequences of `tokens` tokens."""
    each_word = head in ("masked", "causal")

    def batch(n: int, seed: int, size: str) -> tuple[Tensor, Tensor]:
        return _tokens(n, tokens, seed), (
            _tokens(n, tokens, seed) if each_word else torch.zeros(n, dtype=torch.int64)
        )

    loss = {"masked": _of_words, "causal": _of_next_words}.get(head, F.cross_entropy)
    return SimpleNamespace(
        build=lambda size: Transformer(dims, head, classes),
        batch=batch,
        loss=loss,
        optimizer=_adamw,
    )


def _images(build: Callable[[str], nn.Module], channels: int = 3) -> SimpleNamespace:
    """Return the model object of a network for images of 224 x 224 pixels."""

    def batch(n: int, seed: int, size: str) -> tuple[Tensor, Tensor]:
        return torch.zeros(n, channels, 224, 224), torch.zeros(n, dtype=torch.int64)

    return SimpleNamespace(build=build, batch=batch, loss=F.cross_entropy, optimizer=_sgd)


LARGE = {"width": 1024, "heads": 16, "layers": 24}
ROBERTA = {"words": 50_265, "positions": 514, "segments": 1}
bert_large_classifier = _transformer(Dims(**LARGE), 512, "pooled")
bert_large_classifier_checkpointed = _transformer(Dims(**LARGE, checkpointed=True), 512, "pooled")
bert_base_masked_16 = _transformer(Dims(fused=True), 16, "masked")
bert_base_masked_512 = _transformer(Dims(fused=True), 512, "masked")
roberta_base_classifier_16 = _transformer(Dims(**ROBERTA), 16, "dense")
roberta_base_multiple_choice_16 = _transformer(Dims(**ROBERTA), 16, "pooled", classes=1)
gpt2_language_16 = _transformer(Dims(50_257, 1024, segments=0, before=True), 16, "causal")
convnext_large = _images(_convnext_large)
resnet50 = _images(lambda size: layers_of_resnet50())
resnet50_gray = _images(
    lambda size: nn.Sequential(nn.Conv2d(1, 3, 1), *layers_of_resnet50()), channels=1
)
