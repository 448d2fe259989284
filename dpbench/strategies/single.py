"""One device without a wrapper: the baseline of every speed-up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dpbench.hardware.device import Device
from dpbench.records import HOST, Case, Mark, Phase, Profile, Task
from dpbench.records.work import Move, Shapes
from dpbench.strategies import (
    Forward,
    Parallelism,
    Role,
    Step,
    Strategy,
    Traits,
    Updates,
    precision_of,
    put_all,
)
from dpbench.strategies._tasks import Graph

if TYPE_CHECKING:
    import torch

    from dpbench.models import Model


class Single(Strategy):
    """One device without a wrapper: the baseline of every speed-up."""

    traits = Traits(parallelism=Parallelism.NONE, role=Role.BASELINE)

    @contextmanager
    def start(
        self, case: Case, model: Model, devices: Sequence[Device], mark: Mark
    ) -> Iterator[Step]:
        """Yield the step of a plain training loop, as in torch's tutorials, on the first device."""
        from dpbench.models import positional

        device = devices[0]
        module = model.module.to(device.torch_device)
        updates = Updates(case, model, module.parameters())

        def step(inputs: Any, target: Any) -> torch.Tensor:
            with mark(Phase.OPTIMIZER, device.index):
                updates.clear()
            with mark(Phase.SCATTER, device.index):
                *arguments, target = put_all([*positional(inputs), target], device)
            with precision_of(case):
                with mark(Phase.FORWARD, device.index):
                    output = module(*arguments)
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

        def forward(*inputs: Any) -> torch.Tensor:
            with mark(Phase.SCATTER, device.index):
                arguments = put_all(inputs, device)
            with mark(Phase.FORWARD, device.index):
                output: torch.Tensor = module(*arguments)
            return output

        yield forward

    def tasks(self, case: Case, profile: Profile) -> list[Task]:
        """Return the tasks of one step: scatter, forward, loss, backward and optimizer."""
        graph = Graph()
        rows = case.batch_size
        forward = (rows * profile.forward_flop, "flop")
        backward = (rows * profile.backward_flop, "flop")
        last = graph.add(Phase.SCATTER, 0, "copy:host:0", rows * profile.input_bytes, "bytes")
        last = graph.launch(Phase.FORWARD, 0, "host", profile.forward_launches, forward, [last])
        last = graph.add(Phase.LOSS, 0, "device:0", rows * profile.output_bytes, "bytes", [last])
        last = graph.launch(
            Phase.BACKWARD, 0, "host:0", profile.backward_launches, backward, [last]
        )
        graph.update(case, profile, 0, "host", [last])
        return graph.tasks

    def moves(self, case: Case, shapes: Shapes) -> Iterable[Move]:
        """Yield the transfer of the batch to the device, unless it is there before the step."""
        if case.inputs == "device":
            return
        yield Move(
            Phase.SCATTER, HOST, 0, case.batch_size * (shapes.input_bytes + shapes.target_bytes)
        )


strategy = Single()
