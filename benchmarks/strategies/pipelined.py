"""Model parallelism with micro-batches: the devices are the stages of a pipeline.

A step starts the forward of all micro-batches, then their backward. The host does not wait for
GPUs, so that one GPU computes a micro-batch while the next GPU computes the micro-batch before it.
Devices on the host compute when they are called, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dpbench.engine.containers import mapped
from dpbench.hardware.device import Device
from dpbench.models import Model
from dpbench.records import Case, Mark, Phase, rows_of_chunks
from dpbench.records.arguments import call
from dpbench.strategies import (
    Parallelism,
    Split,
    StepFunction,
    Strategy,
    Traits,
    Updates,
    precision_of,
    put_all,
)

from .layers import on, spread

MICRO_BATCHES = 4


class Pipelined(Strategy):
    """Model parallelism with micro-batches: the devices are the stages of a pipeline."""

    traits = Traits(parallelism=Parallelism.OTHER, shared_stream=True)

    def split(self, case: Case, module: nn.Module) -> Split:
        """Return the rows of each micro-batch."""
        return Split(
            rows_of_chunks(case.batch_size, MICRO_BATCHES), replays=case.device_kind != "cuda"
        )

    def compares_buffers(self, case: Case) -> bool:
        """Return False: each micro-batch updates the buffers, but the reference does so once."""
        return False

    @contextmanager
    def start(
        self, case: Case, model: Model, devices: Sequence[Device], mark: Mark
    ) -> Iterator[StepFunction]:
        """Place the layers on the devices, and yield the training step."""
        root, last = devices[0], devices[-1]
        rows = self.split(case, model.module).rows
        # a model's own loss is a mean with an unknown divisor, so each micro-batch has the same
        # weight
        shares = [1 / len(rows) if model.owns_loss else count / case.batch_size for count in rows]
        with spread(model, devices, mark) as flow:
            updates = Updates(case, model, model.module.parameters())

            def forward(inputs: Any, target: Any, share: float) -> torch.Tensor:
                with precision_of(case):
                    with flow.during(Phase.FORWARD, root):
                        output = on(call(model.module, inputs), last)
                    with mark(Phase.LOSS, last.index):
                        return model.loss(output, target) * share

            def step(inputs: Any, target: Any) -> torch.Tensor:
                with mark(Phase.OPTIMIZER, root.index):
                    updates.clear()
                with mark(Phase.SCATTER, root.index):
                    (inputs,) = put_all([inputs], root)
                    (target,) = put_all([target], last)
                    batches = [part((inputs, target), rows, number) for number in range(len(rows))]
                losses = [
                    forward(rows_of_inputs, rows_of_target, share)
                    for (rows_of_inputs, rows_of_target), share in zip(batches, shares, strict=True)
                ]
                for loss in losses:
                    with flow.during(Phase.BACKWARD, last):
                        updates.scaled(loss).backward()
                with flow.during(Phase.OPTIMIZER, *devices):
                    updates.step()
                return torch.stack(losses).sum().detach()

            yield step


def part(batch: Any, rows: Sequence[int], number: int) -> Any:
    """Return micro-batch `number` of a batch that is split into micro-batches of `rows` samples."""
    return mapped(batch, lambda tensor: tensor.split(rows)[number])


strategy = Pipelined()
