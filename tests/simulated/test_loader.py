"""Host spans have times of the host, steps those of a simulated GPU.

Work of other streams may outlast the steps.
"""

from __future__ import annotations

import pytest

from dpbench.analysis import validity
from dpbench.measure.clocks import CudaClock
from dpbench.records import HOST, Case, Phase, Status, Trial, ledger
from tests.simulated.backend import SimulatedDevice
from tests.simulated.machine import Machine
from tests.simulated.timeline import Gpu, Stream

FORWARD_S, BACKWARD_S = 2e-3, 4e-3


@pytest.mark.parametrize(
    ("load_s", "exposed_s"),
    [
        (10e-3, 4e-3),  # the GPU is idle for 4 ms of every step, while the host waits for data
        (
            5e-3,
            0.0,
        ),  # the host is ahead, and waits for data while the GPU still computes earlier steps
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


@pytest.mark.parametrize(
    ("copy_s", "excess"),
    [
        (1e-3, 0.0),
        (
            2e-3,
            0.0,
        ),  # the copy of the last step outlasts the block, but the next steps would not be slower
        (2.2e-3, 0.1),
        (5e-3, 1.5),  # a step takes 2 ms by its events, and 5 ms in truth
    ],
)
def test_work_for_which_no_step_waits_is_labelled_if_it_outlasts_them(
    copy_s: float, excess: float
) -> None:
    machine = Machine([Gpu(0, offset_s=3.0, drift=2e-5)])
    line, side = machine.timeline, Stream(0)
    machine.streams.append(side)
    clock = CudaClock([SimulatedDevice(0, machine)], now=line.now)
    for _ in range(3):
        with clock.block():
            for _ in range(10):
                with clock.step(warmup=False):
                    line.kernel(machine.streams[0], 2e-3, "gemm")
                    line.wait(side, machine.streams[0])
                    line.copy(None, side, copy_s, "Memcpy HtoD")
    case = Case(model="mlp", strategy="single", device_kind="cuda", batch_size=1)
    trial = Trial(case=case, status=Status.OK, steps=clock.steps(), samples=clock.samples())
    (check,) = [one for one in validity.check(trial, 8) if one.key == "outlasting"]
    assert check.value == pytest.approx(excess, abs=0.01)
    assert check.ok is (excess < 0.05)
