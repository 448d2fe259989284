"""The nets on which torch's DataParallel and ours are compared, each with its batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from dpbench.engine import DataParallel

TWO = ["cpu", "cpu"]


class Net(nn.Module):
    """A module out of a function of itself and its inputs."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def returning(run: Callable[[Tensor], Any], **options: Any) -> Callable[[Tensor], Any]:
    """Return a wrapper on two devices whose replicas return what `run` makes of their rows."""
    return DataParallel(Net(lambda _, x: run(x)), TWO, **options)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 5))


def conv() -> nn.Module:
    layers = [
        nn.Conv2d(3, 5, 3),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(45, 5),
    ]
    return nn.Sequential(*layers)


def lstm() -> nn.Module:
    rnn = nn.LSTM(12, 6, num_layers=2, bidirectional=True, batch_first=True)
    return Net(lambda m, x: m.head(m.rnn(x)[0][:, -1]), rnn=rnn, head=nn.Linear(12, 5))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return Net(
        lambda m, x: m.head(m.layer(m.embed(x)).mean(1)),
        embed=nn.Embedding(9, 8),
        layer=layer,
        head=nn.Linear(8, 5),
    )


def tied() -> nn.Module:
    net = Net(lambda m, x: m.b(torch.tanh(m.a(x))), a=nn.Linear(12, 12), b=nn.Linear(12, 12))
    net.b.weight = net.a.weight
    return net


def frozen() -> nn.Module:
    net = nn.Sequential(*(nn.Linear(12, 12) for _ in range(3)))
    net[0].requires_grad_(False)
    net[1].weight.requires_grad_(False)
    return net


def unused() -> nn.Module:
    return Net(lambda m, x: m.a(x), a=nn.Linear(12, 3), never=nn.Linear(2, 2))


def used_once() -> nn.Module:
    return Net(
        lambda m, x: m.a(x) + (m.w if x.get_device() == 1 else 0),
        a=nn.Linear(12, 3),
        w=nn.Parameter(torch.ones(3)),
    )


def parameter_containers() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        return (
            x * m.p[0]
            + sum(x * p for p in m.p)
            + sum(x * p for p in m.d.values())
            + m.d["k"] * len(m.p)
        )

    p = nn.ParameterList([nn.Parameter(torch.randn(12)) for _ in range(2)])
    return Net(run, p=p, d=nn.ParameterDict({"k": nn.Parameter(torch.randn(12))}))


def buffers() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        m.seen += x.detach().sum()
        return x * m.scale + m.shift

    net = Net(run)
    net.register_buffer("seen", torch.zeros((), device="lazy:0"))
    net.register_buffer("scale", torch.full((12,), 1.5, device="lazy:0", requires_grad=True))
    net.register_buffer("shift", torch.randn(12, device="lazy:0"), persistent=False)
    return net


def complex_weights() -> nn.Module:
    return Net(lambda m, x: x * m.w, w=nn.Parameter(torch.randn(12, dtype=torch.cfloat)))


def mapped() -> nn.Module:
    return Net(lambda m, x: torch.func.vmap(m.a)(x), a=nn.Linear(12, 5))


def differentiated() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: torch.tanh(m.a(y)).sum())(x)

    return Net(run, a=nn.Linear(12, 5))


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(12, 5).to("lazy:0"))


def rows(n: int) -> Tensor:
    return torch.randn(n, 12, requires_grad=True)


def words(n: int) -> Tensor:
    return torch.randint(9, (n, 4))


def steps(n: int) -> Tensor:
    return torch.randn(n, 4, 12, requires_grad=True)


def images(n: int) -> Tensor:
    return torch.randn(n, 3, 8, 8)


Case = tuple[Callable[[], nn.Module], Callable[[int], Tensor]]
NETS: dict[str, Case] = {
    "mlp": (mlp, rows),
    "conv with batch norm": (conv, images),
    "batch norm without affine": (lambda: nn.BatchNorm1d(4, affine=False, momentum=None), steps),
    "lstm": (lstm, steps),
    "gru, batch second": (lambda: nn.GRU(12, 3), steps),
    "transformer": (transformer, words),
    "attention": (
        lambda: Net(lambda m, x: m.a(x, x, x), a=nn.MultiheadAttention(12, 3, batch_first=True)),
        steps,
    ),
    "embedding": (lambda: nn.Embedding(9, 4, padding_idx=0), words),
    "sparse embedding": (lambda: nn.Embedding(9, 4, sparse=True), words),
    "embedding bag": (lambda: nn.EmbeddingBag(9, 4), words),
    "tied": (tied, rows),
    "frozen": (frozen, rows),
    "unused": (unused, rows),
    "used by one replica": (used_once, rows),
    "parameter containers": (parameter_containers, rows),
    "buffers": (buffers, rows),
    "complex": (complex_weights, rows),
    "channels last": (lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), images),
    "no parameters": (lambda: Net(lambda m, x: x * 2), rows),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(12, 5)), rows),
    "old weight norm": (old_weight_norm, rows),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(12, 5)), rows),
    "old spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(12, 5)), rows),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(12, 5)), rows),
    "vmap inside": (mapped, rows),
    "gradient inside": (differentiated, rows),
    "half precision": (
        lambda: nn.Linear(12, 5).to(torch.bfloat16),
        lambda n: rows(n).detach().to(torch.bfloat16),
    ),
}
