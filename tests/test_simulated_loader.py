"""The wait for data on a simulated GPU: host spans have times of the host, steps those of the GPU; both are true."""

from __future__ import annotations

import pytest

from dpbench.measure.clocks import CudaClock
from dpbench.records import HOST, Phase, ledger
from tests.simulated.backend import SimulatedDevice
from tests.simulated.machine import Machine
from tests.simulated.timeline import Gpu

FORWARD_S, BACKWARD_S = 2e-3, 4e-3


@pytest.mark.parametrize(
    ("load_s", "exposed_s"),
    [
        (10e-3, 4e-3),  # the GPU is idle for 4 ms of every step, while the host waits for data
        (5e-3, 0.0),  # the host is ahead, and waits for data while the GPU still computes earlier steps
    ],
)
def test_data_is_charged_where_the_gpu_waits_for_it(load_s: float, exposed_s: float) -> None:
    machine = Machine([Gpu(0, offset_s=3.0, drift=2e-5)])
    line, (stream,) = machine.timeline, machine.streams
    clock = CudaClock([SimulatedDevice(0, machine)], now=line.now)
    with clock.block():
        for _ in range(12):
            with clock.step(warmup=False):
                with clock.mark(Phase.DATA, HOST):
                    line.spend(load_s)
                for phase, seconds in ((Phase.FORWARD, FORWARD_S), (Phase.BACKWARD, BACKWARD_S)):
                    with clock.mark(phase, 0):
                        line.kernel(stream, seconds, "gemm")
    steps, spans = clock.steps(), clock.spans()
    for k in range(4, 12):
        found = ledger.phases(steps[k], [span for span in spans if span.step == k])
        step_s = max(load_s, FORWARD_S + BACKWARD_S)
        assert steps[k].seconds == pytest.approx(step_s, rel=0.01)
        assert found.get("data", 0.0) == pytest.approx(exposed_s, abs=0.01 * step_s)
        assert found["forward"] == pytest.approx(FORWARD_S, abs=0.01 * step_s)
        assert found["backward"] == pytest.approx(BACKWARD_S, abs=0.01 * step_s)
