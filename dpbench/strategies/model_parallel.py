"""Model parallelism: the module's layers are spread over the devices, and the whole batch passes through all of them.

`_layers` describes how the layers are divided. Activations move between two devices in the `forward` phase, and their
gradients move back in `backward`. The loss is computed on the device of the last layer, to which the target is copied.
Only one device computes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dpbench.hardware.device import Device
from dpbench.records import Case, Mark, Phase, Profile, Task
from dpbench.strategies import Forward, Parallelism, Step, Strategy, Traits
from dpbench.strategies._tasks import Graph

if TYPE_CHECKING:
    from dpbench.models import Model


class ModelParallel(Strategy):
    """The strategy that trains in one process, with contiguous groups of the module's layers on several devices."""

    traits = Traits(parallelism=Parallelism.LAYERS, shared_stream=True)

    @contextmanager
    def start(self, case: Case, model: Model, devices: Sequence[Device], mark: Mark) -> Iterator[Step]:
        """Place the layers on the devices and yield the training step; on exit, remove the hooks from the module.

        Raises ValueError if the module has fewer layers than devices.
        """
        from dpbench.strategies._layers import SpreadStep, spread

        with spread(case, model, devices, mark) as flow:
            yield SpreadStep(case, model, flow, mark)

    @contextmanager
    def infer(self, case: Case, model: Model, devices: Sequence[Device], mark: Mark) -> Iterator[Forward]:
        """Place the layers on the devices and yield the forward, whose output is on the last device."""
        from dpbench.strategies._layers import spread, spread_forward

        with spread(case, model, devices, mark) as flow:
            yield spread_forward(model.module, flow, mark)

    def tasks(self, case: Case, profile: Profile) -> list[Task]:
        """Return the tasks of one step, in which one device after the other does an equal part of the work.

        A profile does not have the sizes of activations. Each copy between two devices is assumed to be as large as the
        output.
        """
        graph, count, rows = Graph(), case.devices, case.batch_size
        moved = rows * profile.output_bytes
        at = graph.add(Phase.SCATTER, 0, "copy:host:0", rows * profile.input_bytes, "bytes")
        for phase, flop, launches, order in (
            (Phase.FORWARD, profile.forward_flop, profile.forward_launches, range(count)),
            (Phase.BACKWARD, profile.backward_flop, profile.backward_launches, range(count - 1, -1, -1)),
        ):
            for step, i in enumerate(order):
                if step:
                    at = graph.add(phase, i, f"copy:{order[step - 1]}:{i}", moved, "bytes", [at])
                work = (rows * flop / count, "flop")
                at = graph.launch(phase, i, "host", launches / count, work, [at])
            if phase is Phase.FORWARD:
                at = graph.add(Phase.LOSS, count - 1, f"device:{count - 1}", moved, "bytes", [at])
        for i in range(count):
            graph.update(case, profile, i, "host", [at], share=1 / count)
        return graph.tasks


STRATEGY = ModelParallel()
