"""torch.nn.DataParallel, with marks in the four methods that subclasses may override.

The reduction runs inside autograd, where no mark can be set, so the phase `backward` includes it.
Comparisons with other strategies use the sum of `backward` and `reduce`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from dpbench.hardware.device import Device
from dpbench.records import Case, Mark, Phase, marked
from dpbench.records.arguments import call
from dpbench.records.schedule import Schedule
from dpbench.records.spelling import dashed
from dpbench.records.work import StepSizes, Task
from dpbench.strategies import (
    Forward,
    Memory,
    Reduction,
    Role,
    StepFunction,
    Strategy,
    Traits,
    Updates,
    precision_of,
    put_all,
)
from dpbench.strategies._chain import of_schedule

if TYPE_CHECKING:
    import torch

    from dpbench.models import Model


class TorchDataParallel(Strategy):
    """torch.nn.DataParallel, with marks in the four methods that subclasses may override."""

    traits = Traits(role=Role.WRAPPER, reduction=Reduction.IN_BACKWARD, shared_stream=True)
    memory = Memory.WRAPPER

    def skip(self, case: Case) -> str:
        """Return the reason why this strategy cannot run a case, or "" if it can."""
        if case.device_kind == "cpu":
            return (
                "torch.nn.DataParallel needs an accelerator, because on the CPU it only calls the"
                " module; to run it on emulated devices, give"
                f" {dashed('device_kind', 'emulated')}"
            )
        if case.precision == "bf16" and case.devices > 1:
            return (
                "torch.nn.DataParallel does not pass autocast's dtype to its threads, so bf16 would"
                " run as fp16"
            )
        return ""

    def compares_buffers(self, case: Case) -> bool:
        """Return False if the replicas share one GPU: each then updates the same buffers."""
        return case.placement != "colocated"

    @contextmanager
    def start(
        self, case: Case, model: Model, devices: Sequence[Device], mark: Mark
    ) -> Iterator[StepFunction]:
        """Yield the training step of torch's tutorials, with torch.nn.DataParallel."""
        from dpbench.strategies._torch_parallel import Marked, on_emulated_devices

        root = devices[0]
        root.can_collect(devices)  # refuses what torch would never end
        model.module.to(root.torch_device)
        updates = Updates(case, model, model.module.parameters())
        used = range(len(case.rows))

        def step(inputs: Any, target: Any) -> torch.Tensor:
            with mark(Phase.OPTIMIZER, 0):
                updates.clear()
            with mark(Phase.SCATTER, 0):
                (target,) = put_all([target], root)
            with precision_of(case):
                output = call(wrapped, inputs)
                with mark(Phase.LOSS, 0):
                    loss = model.loss(output, target)
            with marked(mark, Phase.BACKWARD, used):
                updates.scaled(loss).backward()
            with mark(Phase.OPTIMIZER, 0):
                updates.step()
            return loss.detach()

        with on_emulated_devices(case.devices) if case.device_kind == "emulated" else nullcontext():
            wrapped = Marked(model.module, devices, mark)
            yield step

    @contextmanager
    def infer(
        self, case: Case, model: Model, devices: Sequence[Device], mark: Mark
    ) -> Iterator[Forward]:
        """Yield the forward of torch.nn.DataParallel."""
        from dpbench.strategies._torch_parallel import Marked, on_emulated_devices

        devices[0].can_collect(devices)
        model.module.to(devices[0].torch_device)
        with on_emulated_devices(case.devices) if case.device_kind == "emulated" else nullcontext():
            yield Marked(model.module, devices, mark)

    def describe(self, case: Case, sizes: StepSizes) -> list[Task]:
        """Return the tasks of a step, which are those of the engine's schedule `reference`."""
        return of_schedule(case, sizes, Schedule.REFERENCE, wrapper=True)


strategy = TorchDataParallel()
