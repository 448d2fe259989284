"""Tiny modules, criteria, optimizers and batches for the law of a training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

CLASSES, WIDTH, TOKENS = 3, 4, 6
Batch = tuple[tuple[Tensor, Tensor], Tensor]
"""((inputs, numbers of the rows), target)."""


class Trapped(Exception):
    """An error that a replica raises on purpose."""


class Trap:
    """An error to raise in the replica that holds one row, in its forward or its backward."""

    def __init__(self) -> None:
        self.row, self.backward, self.error = -1, False, Trapped

    def check(self, ids: Tensor, hidden: Tensor, out: Tensor) -> Tensor:
        """Return `out`.

        Raise the error, or let the backward raise it, if the row is among `ids`.
        """
        if self.row >= 0 and bool((ids == self.row).any()):
            if not self.backward:
                raise self.error("trap")
            (hidden if hidden.requires_grad else out).register_hook(self._raise)
        return out

    def _raise(self, _: Tensor) -> None:
        raise self.error("trap")


class Net(nn.Module):
    """A norm, a tied, a frozen and an unused layer, and attributes that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.norm, self.unused = nn.BatchNorm1d(WIDTH), nn.Linear(2, 1)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.again, self.drop = self.first, nn.Dropout(0.0)
        self.trap, self.scale = Trap(), 1.0

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(self.frozen(x))) + self.again(x))
        return self.trap.check(ids, x, self.last(self.drop(x)) * self.scale)


class Table(nn.Module):
    """A dense embedding, and a buffer that counts rows in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))
        self.trap, self.scale = Trap(), 1.0

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if self.training:
            self.rows += len(x)
        h = torch.tanh(self.first(self.table((x[:, :2] * 9).long() % TOKENS).mean(1)))
        return self.trap.check(ids, h, self.last(h) * self.scale)


class Writer(nn.Module):
    """A forward that may rebind attributes and buffers: always, never, or in every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.trap, self.scale, self.count, self.writes = Trap(), 1.0, 1, "sometimes"
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if self.writes == "always" or (self.writes == "sometimes" and int(ids[0]) // 100 % 2):
            self.count, self.seen = self.count + 1, self.seen + 1
        h = torch.tanh(self.first(x))
        return self.trap.check(ids, h, self.last(h) * (self.scale * self.count) + self.seen)


class Codebook(nn.Module):
    """A forward that changes a frozen weight in place: a plain loop keeps what chunk 0 writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.codes = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.trap, self.scale = Trap(), 1.0

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.codes.lerp_(x.mean(0), 0.1)
        h = torch.tanh(self.first(x + self.codes.detach()))
        return self.trap.check(ids, h, self.last(h) * self.scale)


class Regularised:
    """A squared error with a penalty on the parameters of a module.

    It cannot be summed over rows.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.strength = module, 1e-2

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in self.module.parameters() if p.requires_grad)
        return (output - target).square().mean() + self.strength * penalty


MODULES: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "table": Table,
    "writer": Writer,
    "codebook": Codebook,
}
CRITERIA: dict[str, Callable[[nn.Module], Any]] = {
    "cross_entropy": lambda _: nn.CrossEntropyLoss(),
    "mse": lambda _: nn.MSELoss(),
    "smooth_l1": lambda _: nn.SmoothL1Loss(),
    "regularised": Regularised,
}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw_two_groups": lambda p: torch.optim.AdamW(
        [{"params": p[::2], "lr": 1e-2}, {"params": p[1::2], "lr": 5e-3, "weight_decay": 0.1}]
    ),
}
FUSED = {"fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True)}
"""With optimizer=flat, fused kernels agree within rounding only."""


def batch(
    number: int, rows: int, criterion: Any = None, dtype: torch.dtype = torch.float32
) -> Batch:
    """Return a batch that depends on its number.

    Cross entropy gets classes, of which it ignores some, or all.
    """
    generator = torch.Generator().manual_seed(number)
    x, target = (
        torch.randn(rows, WIDTH, generator=generator),
        torch.randn(rows, CLASSES, generator=generator),
    )
    ids = torch.arange(rows) + 100 * number
    if not isinstance(criterion, nn.CrossEntropyLoss):
        return (x.to(dtype), ids), target.to(dtype)
    labels = target.argmax(1)
    if number % 3 == 0:
        labels[:: 1 if number % 5 == 0 else 3] = criterion.ignore_index
    return (x.to(dtype), ids), labels
