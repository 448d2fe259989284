"""A training step on emulated devices computes the bits of logical CPU devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpbench.engine import TrainStep, resolve


class Sequence(nn.Module):
    """Embedding, self-attention and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x)).mean(1))


class Recurrent(nn.Module):
    """Two LSTM cells, step by step: nn.LSTM itself takes another way on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(6, 7), nn.LSTMCell(7, 5)])

    def forward(self, x: Tensor) -> Tensor:
        states: list[Any] = [None, None]
        for step in x.unbind(1):
            for i, cell in enumerate(self.cells):
                states[i] = cell(step if i == 0 else states[0][0], states[i])
        return states[1][0]


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 5)),
        lambda n: torch.randn(n, 12),
    ),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(180, 5)
        ),
        lambda n: torch.randn(n, 3, 8, 8),
    ),
    "lstm": (Recurrent, lambda n: torch.randn(n, 4, 6)),
    "embedding": (
        lambda: nn.Sequential(nn.EmbeddingBag(11, 6, mode="sum"), nn.Tanh(), nn.Linear(6, 5)),
        lambda n: torch.randint(11, (n, 4)),
    ),
    "transformer": (Sequence, lambda n: torch.randint(11, (n, 4))),
}


@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("name", NETS)
def test_steps_compute_the_bits_of_logical_cpu_devices(name: str, rows: int) -> None:
    make, batch = NETS[name]
    x, y = batch(rows), torch.randint(5, (rows,))

    def train(ids: list[str], home: str) -> list[Tensor]:
        resolve(ids)
        torch.manual_seed(1)
        net = make().to(home)
        make_optimizer = lambda parameters: torch.optim.Adam(parameters, lr=0.01)  # noqa: E731
        with TrainStep(net, F.cross_entropy, make_optimizer, ids, "reference") as step:
            losses = [step(x, y).cpu() for _ in range(3)]
        return [*losses, *(t.detach().cpu() for t in net.state_dict().values())]

    with sdpa_kernel(SDPBackend.MATH):
        assert all(
            map(
                torch.equal,
                train(["cpu"] * 3, "cpu"),
                train([f"emulated:{i}" for i in range(3)], "lazy:0"),
            )
        )
