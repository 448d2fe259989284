"""An LSTM over packed sequences of different lengths, as in the FAQ of torch's DataParallel.

The inputs are a tuple of tokens of shape (n, T) and lengths of shape (n,), both scattered along
dimension 0. The loss is divided by the number of rows, and is therefore independent of the padding.
Packing needs the lengths on the host; on an accelerator, every forward waits for this copy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Dims(NamedTuple):
    """The dimensions of the model in one size.

    `tokens` is the length T to which all sequences are padded.
    """

    vocabulary: int
    tokens: int
    width: int
    hidden: int
    layers: int
    classes: int


DIMS = {
    "small": Dims(vocabulary=1000, tokens=48, width=64, hidden=64, layers=2, classes=10),
    "full": Dims(vocabulary=30_000, tokens=128, width=1024, hidden=1024, layers=2, classes=1000),
}


class PackedLSTM(nn.Module):
    """An embedding, an LSTM over packed sequences, the mean over a sequence, a linear layer."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.embedding = nn.Embedding(dims.vocabulary, dims.width)
        self.lstm = nn.LSTM(dims.width, dims.hidden, dims.layers, batch_first=True)
        self.head = nn.Linear(dims.hidden, dims.classes)

    def states(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the LSTM's outputs of shape (batch, T, hidden), zero after a sequence's end."""
        self.lstm.flatten_parameters()
        x = pack_padded_sequence(
            self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        # without total_length, each replica would pad to the longest sequence of its chunk, and
        # gather cannot concatenate chunks of different widths
        padded, _ = pad_packed_sequence(
            self.lstm(x)[0], batch_first=True, total_length=tokens.size(1)
        )
        return padded

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return logits (batch, classes) for token ids (batch, T) and lengths (batch,)."""
        total = self.states(tokens, lengths).sum(dim=1)
        # the layers may be on another device than the inputs
        mean = total / lengths.to(total.device).unsqueeze(1)
        logits: Tensor = self.head(mean)
        return logits


def build(size: str) -> nn.Module:
    """Return the model: 131,210 parameters in the small size, 48,538,600 in the full size."""
    return PackedLSTM(DIMS[size])


def batch(n: int, seed: int, size: str) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the inputs (tokens, lengths) and the class labels of n random sequences.

    `tokens` are token ids of shape (n, T), with 0 after the end of each sequence. `lengths` are n
    values spread evenly from 1 to T and shuffled: the total work is the same for every seed, but
    the chunks of a batch differ.
    """
    generator = torch.Generator().manual_seed(seed)
    dims = DIMS[size]
    lengths = (2 * torch.arange(n) + 1) * dims.tokens // (2 * n) + 1
    lengths = lengths[torch.randperm(n, generator=generator)]
    tokens = torch.randint(1, dims.vocabulary, (n, dims.tokens), generator=generator)
    tokens[torch.arange(dims.tokens) >= lengths.unsqueeze(1)] = 0
    return (tokens, lengths), torch.randint(dims.classes, (n,), generator=generator)


loss = F.cross_entropy
