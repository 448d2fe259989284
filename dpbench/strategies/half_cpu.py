"""Part CPU and part GPU: the first half of the layers is on the host, the second half on one accelerator.

`_layers` describes how the layers are divided. The phase `scatter` of the accelerator is the copy of the activations
from the host, and the phase `gather` of the host is the copy of the activations' gradients back to the host. The host
waits for the accelerator before this second copy, so that `gather` contains only the copy; the copy would wait for the
accelerator in any case. The input of the first layer stays on the host. The phases of the layers on the host are
recorded for the device HOST.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dpbench.hardware.device import Device
from dpbench.records import HOST, Case, Mark
from dpbench.strategies import AUTOCAST, Forward, Parallelism, Step, Strategy, Traits

if TYPE_CHECKING:
    from dpbench.models import Model


class HalfCpu(Strategy):
    """The strategy that trains on the host and one accelerator, each of which has half of the layers."""

    traits = Traits(parallelism=Parallelism.NONE)

    def skip(self, case: Case) -> str:
        """Return the reason why this strategy cannot run a case (for example, on logical CPU devices), or ""."""
        if case.device_kind == "cpu":
            return "half_cpu needs an accelerator in addition to the host; without a GPU, give --device-kind emulated"
        if case.precision in AUTOCAST:
            return (
                f"half_cpu runs without autocast, which applies to one kind of device only: leave out --precision "
                f"{case.precision}"
            )
        if case.compile:
            return "half_cpu does not support torch.compile over layers on the host and a GPU: leave out --compile"
        return ""

    @contextmanager
    def start(self, case: Case, model: Model, devices: Sequence[Device], mark: Mark) -> Iterator[Step]:
        """Place the layers on the host and the accelerator, and yield the training step.

        Raises ValueError if the module has fewer than two layers.
        """
        from dpbench.hardware.devices.host import CpuDevice
        from dpbench.strategies._layers import SpreadStep, spread

        with spread(case, model, [CpuDevice(HOST), devices[0]], mark) as flow:
            yield SpreadStep(case, model, flow, mark)

    @contextmanager
    def infer(self, case: Case, model: Model, devices: Sequence[Device], mark: Mark) -> Iterator[Forward]:
        """Place the layers on the host and the accelerator; yield the forward, whose output is on the accelerator."""
        from dpbench.hardware.devices.host import CpuDevice
        from dpbench.strategies._layers import spread, spread_forward

        with spread(case, model, [CpuDevice(HOST), devices[0]], mark) as flow:
            yield spread_forward(model.module, flow, mark)


STRATEGY = HalfCpu()
