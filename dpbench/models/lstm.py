"""An LSTM over packed sequences of different lengths: the recurrent case of torch's DataParallel
FAQ.

The inputs are a tuple of tokens of shape (n, T) and lengths of shape (n,), both scattered along
dimension 0. Each row is one sample with one class label. The loss is divided by the number of rows
and is therefore independent of the padding. Packing needs the lengths on the host; on an
accelerator, every forward therefore waits until the lengths have been copied to the host.
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
    """An embedding, an LSTM over packed sequences, the mean over each sequence, and one linear
    layer.
    """

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.embedding = nn.Embedding(dims.vocabulary, dims.width)
        self.lstm = nn.LSTM(dims.width, dims.hidden, dims.layers, batch_first=True)
        self.head = nn.Linear(dims.hidden, dims.classes)

    def states(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the LSTM's outputs of shape (batch, T, hidden), which are zero after the end of
        each sequence.
        """
        self.lstm.flatten_parameters()
        x = pack_padded_sequence(
            self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        # By default, each replica would pad to the longest sequence *of its chunk*, and gather
        # cannot concatenate chunks of different widths. total_length pads all chunks to the T of
        # the whole batch.
        padded, _ = pad_packed_sequence(
            self.lstm(x)[0], batch_first=True, total_length=tokens.size(1)
        )
        return padded

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return logits of shape (batch, classes) for token ids of shape (batch, T) and lengths of
        shape (batch,).
        """
        total = self.states(tokens, lengths).sum(dim=1)
        mean = total / lengths.to(total.device).unsqueeze(
            1
        )  # the layers may be on another device than the inputs
        logits: Tensor = self.head(mean)
        return logits


def build(size: str) -> nn.Module:
    """Return the model, which has 131,210 parameters in the small size and 48,538,600 in the full
    size.
    """
    return PackedLSTM(DIMS[size])


def batch(n: int, seed: int, size: str) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the inputs (tokens, lengths) and the class labels of n random sequences.

    `tokens` are token ids of shape (n, T), with 0 after the end of each sequence. `lengths` are n
    values from 1 to T. The lengths are spread evenly over this range and shuffled: the total work
    is the same for every seed, but the chunks of a batch differ.
    """
    generator = torch.Generator().manual_seed(seed)
    dims = DIMS[size]
    lengths = (2 * torch.arange(n) + 1) * dims.tokens // (2 * n) + 1
    lengths = lengths[torch.randperm(n, generator=generator)]
    tokens = torch.randint(1, dims.vocabulary, (n, dims.tokens), generator=generator)
    tokens[torch.arange(dims.tokens) >= lengths.unsqueeze(1)] = 0
    return (tokens, lengths), torch.randint(dims.classes, (n,), generator=generator)


loss = F.cross_entropy
