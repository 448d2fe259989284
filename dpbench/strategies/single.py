"""One device without a wrapper: the baseline of every speed-up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dpbench.hardware.device import Device
from dpbench.records import Case, Mark, Phase
from dpbench.records.arguments import call
from dpbench.records.work import StepSizes, Task
from dpbench.strategies import (
    Forward,
    Parallelism,
    Role,
    StepFunction,
    Strategy,
    Traits,
    Updates,
    precision_of,
    put_all,
)
from dpbench.strategies._steps import alone

if TYPE_CHECKING:
    import torch

    from dpbench.models import Model


class Single(Strategy):
    """One device without a wrapper: the baseline of every speed-up."""

    traits = Traits(parallelism=Parallelism.NONE, role=Role.BASELINE)

    @contextmanager
    def start(
        self, case: Case, model: Model, devices: Sequence[Device], mark: Mark
    ) -> Iterator[StepFunction]:
        """Yield the step of a plain training loop, as in torch's tutorials, on the first device."""
        device = devices[0]
        module = model.module.to(device.torch_device)
        updates = Updates(case, model, module.parameters())

        def step(inputs: Any, target: Any) -> torch.Tensor:
            with mark(Phase.OPTIMIZER, device.index):
                updates.clear()
            with mark(Phase.SCATTER, device.index):
                inputs, target = put_all([inputs, target], device)
            with precision_of(case):
                with mark(Phase.FORWARD, device.index):
                    output = call(module, inputs)
                with mark(Phase.LOSS, device.index):
                    loss = model.loss(output, target)
            with mark(Phase.BACKWARD, device.index):
                updates.scaled(loss).backward()
            with mark(Phase.OPTIMIZER, device.index):
                updates.step()
            return loss.detach()

        yield step

    @contextmanager
    def infer(
        self, case: Case, model: Model, devices: Sequence[Device], mark: Mark
    ) -> Iterator[Forward]:
        """Yield the forward of the module on the first device."""
        device = devices[0]
        module = model.module.to(device.torch_device)

        def forward(*inputs: Any, **named: Any) -> torch.Tensor:
            with mark(Phase.SCATTER, device.index):
                arguments, named = put_all([inputs, named], device)
            with mark(Phase.FORWARD, device.index):
                output: torch.Tensor = module(*arguments, **named)
            return output

        yield forward

    def describe(self, case: Case, sizes: StepSizes) -> list[Task]:
        """Return the tasks of a step on one device."""
        return alone(case, sizes, row_bytes=sizes.input_bytes + sizes.target_bytes).tasks


strategy = Single()
