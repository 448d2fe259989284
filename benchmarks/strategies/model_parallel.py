"""Model parallelism: the whole batch passes through layers spread over the devices.

Activations move between two devices in the phase `forward`, and their gradients move back in
`backward`. The loss is computed on the last device. Only one device computes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dpbench.hardware.device import Device
from dpbench.models import Model
from dpbench.records import Case, Mark, Phase
from dpbench.records.arguments import call
from dpbench.strategies import (
    Parallelism,
    StepFunction,
    Strategy,
    Traits,
    Updates,
    precision_of,
    put_all,
)

from .layers import on, spread


class ModelParallel(Strategy):
    """Model parallelism: the whole batch passes through layers spread over the devices."""

    traits = Traits(parallelism=Parallelism.OTHER, shared_stream=True)

    @contextmanager
    def start(
        self, case: Case, model: Model, devices: Sequence[Device], mark: Mark
    ) -> Iterator[StepFunction]:
        """Place the layers on the devices, and yield the training step."""
        root, last = devices[0], devices[-1]
        with spread(model, devices, mark) as flow:
            updates = Updates(case, model, model.module.parameters())

            def step(inputs: Any, target: Any) -> torch.Tensor:
                with mark(Phase.OPTIMIZER, root.index):
                    updates.clear()
                with mark(Phase.SCATTER, root.index):
                    (inputs,) = put_all([inputs], root)
                    (target,) = put_all([target], last)
                with precision_of(case):
                    with flow.during(Phase.FORWARD, root):
                        output = on(call(model.module, inputs), last)
                    with mark(Phase.LOSS, last.index):
                        loss = model.loss(output, target)
                with flow.during(Phase.BACKWARD, last):
                    updates.scaled(loss).backward()
                with flow.during(Phase.OPTIMIZER, *devices):
                    updates.step()
                return loss.detach()

            yield step


strategy = ModelParallel()
