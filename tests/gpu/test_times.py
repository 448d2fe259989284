"""Times of strategies on GPUs: phases begin with their inputs, and the baseline is the plain loop.

Fake GPUs keep time if they compute no values (`FAKECUDA_NUMERICS=0`). The first test repeats this
file in such a process; a process that computes values skips the others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from dpbench import models
from dpbench.engine import gather, reduce, scatter
from dpbench.hardware.device import Device
from dpbench.hardware.devices import open_devices
from dpbench.measure.clocks import CudaClock
from dpbench.records import Case, Mark, Phase, Span, registry
from dpbench.strategies._torch_parallel import Marked

pytestmark = pytest.mark.multi_gpu

CLOCK_ONLY = {"FAKECUDA_NUMERICS": "0", "FAKECUDA_DATA": "0"}
STRATEGIES = Path(__file__).parents[2] / "benchmarks" / "strategies"
PRODUCTS = 60
FLOPS = 20e12
"""Of a fake GPU, per second."""
TOLERANCE_S = 1e-3
"""The times of two GPUs are converted to the host's clock separately."""


def computes() -> bool:
    """Return whether this machine has fake GPUs that compute values, so that times mean nothing."""
    fake = torch.cuda.is_available() and torch.cuda.get_device_name().startswith("Fake")
    return fake and not CLOCK_ONLY.items() <= os.environ.items()


needs_times = pytest.mark.skipif(computes(), reason="these fake GPUs keep no time")


@pytest.mark.slow
@pytest.mark.skipif(not computes(), reason="the GPUs of this process keep time")
def test_times_on_fake_gpus_that_compute_no_values() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-n0", "-q", "-p", "no:cacheprovider"],
        env={**os.environ, **CLOCK_ONLY},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout


def spans_of(file: str, batch_size: int) -> Iterator[list[Span]]:
    """Yield the spans of each step but the first, on two GPUs."""
    name = f"{STRATEGIES / file}.py:strategy"
    case = Case(model="mlp", strategy=name, devices=2, batch_size=batch_size, device_kind="cuda")
    devices = open_devices("cuda", 2)
    clock = CudaClock(devices)
    model = models.load("mlp", "small", 0)
    batch = model.batch(batch_size, 0)
    runner: Any = registry.strategy(name)
    with runner.start(case, model, devices, clock.mark) as step, clock.block():
        for _ in range(3):
            with clock.step(warmup=False):
                step(*batch)
    for number in (1, 2):
        yield [span for span in clock.spans() if span.step == number]


@needs_times
def test_the_phases_of_model_parallel_begin_when_their_inputs_arrive() -> None:
    order = [
        (Phase.FORWARD, 0),
        (Phase.FORWARD, 1),
        (Phase.LOSS, 1),
        (Phase.BACKWARD, 1),
        (Phase.BACKWARD, 0),
    ]
    for spans in spans_of("model_parallel", 65536):
        at = {(span.phase, span.device): span for span in spans}
        for one, following in pairwise(order):
            assert at[one].end_s <= at[following].start_s + TOLERANCE_S


@needs_times
def test_spans_have_the_hosts_seconds_on_gpus_whose_clocks_run_fast_and_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not torch.cuda.get_device_name().startswith("Fake"):
        pytest.skip("the clock of a real GPU cannot be set")
    monkeypatch.setenv("FAKECUDA_DRIFT_PPM", "100000,-100000")
    devices = open_devices("cuda", 2)
    clock = CudaClock(devices)
    works = [torch.empty(4096, 4096, device=device.torch_device) for device in devices]
    with clock.block(), clock.step(warmup=False):
        for device, work in zip(devices, works, strict=True):
            with device.guard(), clock.mark(Phase.FORWARD, device.index):
                for _ in range(PRODUCTS):
                    work @ work
    seconds = {span.device: span.end_s - span.start_s for span in clock.spans()}
    true_s = PRODUCTS * 2 * 4096**3 / FLOPS
    assert seconds == pytest.approx({0: true_s, 1: true_s}, rel=0.02)
    assert clock.drift == pytest.approx((1 / 1.1 - 1, 1 / 0.9 - 1), abs=0.02)


def torchs_gather(outputs: list[torch.Tensor], devices: list[Device], mark: Mark) -> object:
    return Marked(torch.nn.Identity(), devices, mark).gather(outputs, 0)


MOVES: dict[Phase, list[Callable[[list[torch.Tensor], list[Device], Mark], object]]] = {
    Phase.SCATTER: [lambda values, devices, mark: scatter(values[0], devices, mark=mark)],
    Phase.GATHER: [
        lambda values, devices, mark: gather(values, devices[0], devices, mark=mark),
        torchs_gather,
    ],
    Phase.REDUCE: [
        lambda values, devices, mark: reduce([[one] for one in values], devices, mark=mark)
    ],
}


@needs_times
@pytest.mark.parametrize(
    ("phase", "move"), [(phase, move) for phase, moves in MOVES.items() for move in moves]
)
@pytest.mark.parametrize("grad", [False, True])
def test_a_transfer_between_gpus_is_on_the_lanes_of_both(
    phase: Phase, move: Callable[..., object], grad: bool
) -> None:
    devices = open_devices("cuda", 2)
    clock = CudaClock(devices)
    values = [torch.empty(2**26, device=device.torch_device) for device in devices]
    with clock.block(), clock.step(warmup=False), torch.set_grad_enabled(grad):
        move(values, devices, clock.mark)
    spans = [span for span in clock.spans() if span.phase is phase]
    seconds = {
        device: sum(s.end_s - s.start_s for s in spans if s.device == device) for device in (0, 1)
    }
    sender, receiver = (0, 1) if phase is Phase.SCATTER else (1, 0)
    assert seconds[sender] > seconds[receiver] / 2
