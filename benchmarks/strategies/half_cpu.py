"""Part CPU, part GPU: the first half of the layers on the host, the rest on an accelerator.

Activations move to the accelerator in the phase `forward`, and their gradients move back in
`backward`. The phases of the layers on the host are recorded for the device HOST.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dpbench.hardware.device import Device
from dpbench.hardware.devices.host import CpuDevice
from dpbench.models import Model
from dpbench.records import HOST, Case, Mark
from dpbench.strategies import AUTOCAST, Parallelism, StepFunction, Traits

from .model_parallel import ModelParallel


class HalfCpu(ModelParallel):
    """Part CPU, part GPU: the first half of the layers on the host, the rest on an accelerator."""

    traits = Traits(parallelism=Parallelism.NONE)

    def skip(self, case: Case) -> str:
        """Return why this strategy cannot run a case (for example, on logical CPUs), or ""."""
        if case.device_kind == "cpu":
            return "half_cpu needs an accelerator: without a GPU, give --device-kind emulated"
        if case.precision in AUTOCAST:
            return f"autocast applies to one kind of device: leave out --precision {case.precision}"
        if case.compile:
            return (
                "torch.compile does not support layers on the host and a GPU: leave out --compile"
            )
        return ""

    @contextmanager
    def start(
        self, case: Case, model: Model, devices: Sequence[Device], mark: Mark
    ) -> Iterator[StepFunction]:
        """Place the layers on the host and the accelerator, and yield the training step."""
        with super().start(case, model, [CpuDevice(HOST), devices[0]], mark) as step:
            yield step


strategy = HalfCpu()
