"""The nets of the engine's tests, and their reference: a copy of the module per chunk, in turn."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

ROWS = (8, 7, 3)


def cpus(n: int) -> list[str]:
    return ["cpu"] * n


# ---------------------------------------------------------------- nets


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 1))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 5, 3),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Conv2d(5, 3, 3, groups=1),
        nn.BatchNorm2d(3),
        nn.Flatten(),
    )


class Tied(nn.Module):
    """One weight under three names: twice as a parameter, once inside a shared child."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.second = nn.Linear(12, 12, bias=False)
        self.second.weight = self.first.weight
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Frozen(nn.Module):
    """A layer that does not learn before, and one between, layers that do.

    A buffer that wants gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4)))
        self.layers[0].requires_grad_(False)
        self.layers[2].weight.requires_grad_(False)
        self.register_buffer("scale", torch.full((12,), 1.5, requires_grad=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale


class Unused(nn.Module):
    """A parameter that no replica uses, and one that only the replica with the first row uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never, self.seldom = nn.Linear(12, 5), nn.Linear(12, 5), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + (self.seldom(x) if x[0, 0] > 50 else 0.0)


class Normed(nn.Module):
    """Old and new parametrizations: weights computed in the forward, with buffers that change."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.utils.parametrizations.weight_norm(nn.Linear(12, 9))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(9, 9))
        self.list = nn.ParameterList([nn.Parameter(torch.randn(9)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.spectral(torch.relu(self.weight(x))) * self.list[0] + self.list[1]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.view(x.size(0), 2, 6))[0]


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (12,)),
    "conv": (conv, (3, 7, 7)),
    "tied": (Tied, (12,)),
    "frozen": (Frozen, (12,)),
    "unused": (Unused, (12,)),
    "normed": (Normed, (12,)),
    "lstm": (Recurrent, (12,)),
    "attention": (
        lambda: nn.TransformerEncoderLayer(12, 3, 17, dropout=0.0, batch_first=True),
        (4, 12),
    ),
    "no_parameters": (nn.Tanh, (12,)),
}
every_net = pytest.mark.parametrize("net", NETS)
every_count = pytest.mark.parametrize("n", [1, 2, 3, 4])


def made(net: str, rows: int) -> tuple[nn.Module, Tensor]:
    build, shape = NETS[net]
    torch.manual_seed(1)
    x = torch.randn(rows, *shape)
    x.view(rows, -1)[0, 0] = 100.0
    return build(), x


# ---------------------------------------------------------------- the reference


def chunked(
    module: nn.Module, x: Tensor, n: int
) -> tuple[Tensor, list[nn.Module], list[Tensor], list[Tensor]]:
    """Run chunk after chunk through copies.

    Return the whole output, copies, chunks and their outputs.
    """
    pieces = [
        piece.clone().requires_grad_(torch.is_grad_enabled()) for piece in x.detach().chunk(n)
    ]
    copies = [copy.deepcopy(module) for _ in pieces]
    outputs = [one(piece) for one, piece in zip(copies, pieces, strict=True)]
    return torch.cat([output.detach() for output in outputs]), copies, pieces, outputs


def chunked_gradients(
    module: nn.Module, x: Tensor, n: int, loss: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor | None], Tensor | None, dict[str, Tensor]]:
    """Return the output, the gradients of parameters and input, and the buffers.

    The gradients of each parameter are added in replica order.
    """
    whole, copies, pieces, outputs = chunked(module, x, n)
    whole.requires_grad_()
    loss(whole).backward()
    at = 0
    for output in outputs:
        if output.requires_grad:
            output.backward(whole.grad[at : at + len(output)].clone())
        at += len(output)
    gradients: dict[str, Tensor | None] = {}
    for name, parameter in [*module.named_parameters(), *module.named_buffers()]:
        total = None
        for one in copies:
            part = dict([*one.named_parameters(), *one.named_buffers()])[name].grad
            part = torch.zeros_like(parameter) if part is None and n > 1 else part
            if part is not None:
                total = part.clone() if total is None else total + part
        gradients[name] = total if parameter.requires_grad else None
    whole_x = torch.cat([piece.grad for piece in pieces]) if pieces[0].grad is not None else None
    return (
        whole.detach(),
        gradients,
        whole_x,
        {name: b.detach() for name, b in copies[0].named_buffers()},
    )


def wave(output: Tensor) -> Tensor:
    """Return a loss whose gradient differs from element to element."""
    weights = torch.linspace(-1, 1.7, output.numel()).view(output.shape)
    return (output * weights).sum() + output.square().mean()


def assert_same(ours: Tensor | None, theirs: Tensor | None, what: str) -> None:
    if theirs is None or ours is None:
        assert ours is theirs, what
    else:
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), what


def same(left: Any, right: Any) -> bool:
    """Compare structures by type and tensors by value."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)
