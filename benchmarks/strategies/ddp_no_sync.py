"""DistributedDataParallel accumulating two micro-batches per step, the first in `no_sync`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from dpbench.engine.containers import mapped
from dpbench.hardware.device import Device
from dpbench.models import Model
from dpbench.records import Case, Mark, rows_of_chunks
from dpbench.strategies import Split, ddp

PARTS = 2
"""The number of micro-batches of each rank."""


class NoSync(ddp.Wrapped):
    """DistributedDataParallel accumulating two micro-batches per step, the first in `no_sync`."""

    def split(self, case: Case, module: nn.Module) -> Split:
        """Return the rows of each micro-batch of each rank."""
        return Split(tuple(count for rows in case.rows for count in rows_of_chunks(rows, PARTS)))

    def compares_buffers(self, case: Case) -> bool:
        """Return False: each micro-batch updates the buffers, but the reference does so once."""
        return False

    @contextmanager
    def start(
        self, case: Case, model: Model, devices: Sequence[Device], mark: Mark
    ) -> Iterator[ddp.DdpStep]:
        """Yield this rank's training step."""
        yield AccumulatingStep(case, model, devices[0], mark, self.wrap)


class AccumulatingStep(ddp.DdpStep):
    """The training step of one rank, in which only the last micro-batch reduces the gradients."""

    def backward(self, inputs: Any, target: Any) -> torch.Tensor:
        """Add up the gradients of the micro-batches, and return the sum of their losses."""
        rows = rows_of_chunks(self.case.rows[self.rank], PARTS)
        losses = []
        for number, count in enumerate(rows):
            given, wanted = part((inputs, target), rows, number)
            with nullcontext() if number == len(rows) - 1 else self.wrapped.no_sync():
                losses.append(self.forward_backward(given, wanted, self.share(count, len(rows))))
        return torch.stack(losses).sum()


def part(batch: Any, rows: Sequence[int], number: int) -> Any:
    """Return micro-batch `number` of a batch split into micro-batches of `rows` samples."""
    return mapped(batch, lambda tensor: tensor.split(rows)[number])


strategy = NoSync()
