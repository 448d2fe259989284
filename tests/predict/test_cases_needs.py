"""Device memory of a described machine: what fits, where it first does not, the largest batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpbench.predict import machine
from dpbench.predict.cases import UNTRACED, Predictor, needs
from dpbench.predict.memory import CONTEXT_BYTES, NCCL_BYTES
from dpbench.predict.tables import needs_table as told
from dpbench.records import Case, Source, Status

BOX = machine.load("rtx-2080-ti-x4")
DP = Case(
    model="mlp", strategy="torch_dp", devices=2, batch_size=64, device_kind="cuda", optimizer="adam"
)


def small(memory_bytes: float) -> machine.Machine:
    return replace(BOX, gpu=replace(BOX.gpu, memory_bytes=memory_bytes))


def test_device_0_holds_more_and_the_whole_counts_context_and_communication() -> None:
    (need,) = needs([DP], BOX)
    first, other = need.peaks("allocated")
    assert first > other > 4 * 67_210, "weights at least"
    assert all(r >= a for r, a in zip(need.peaks("reserved"), need.peaks("allocated"), strict=True))
    assert need.process_bytes[0] == need.peaks("reserved")[0] + CONTEXT_BYTES + NCCL_BYTES
    assert (need.fits, need.failed_device, need.largest) == (True, None, None)


def test_what_does_not_fit_is_a_trial_out_of_memory_that_names_the_device() -> None:
    (need,) = needs([DP], small(CONTEXT_BYTES + NCCL_BYTES + 2**20))
    assert (need.fits, need.failed_device) == (False, 0)
    trial = replace(Predictor(BOX).predict(DP), need=need).trial()
    assert (trial.status, trial.source, trial.failed_device, trial.steps) == (
        Status.OOM,
        Source.PREDICTED,
        0,
        (),
    )
    assert "device 0" in trial.reason
    assert trial.memory
    assert "no: device 0" in told([need])


def test_a_machine_that_does_not_say_its_memory_decides_nothing() -> None:
    (need,) = needs([DP], small(0.0))
    assert need.fits is None
    assert "unknown" in told([need])


@pytest.mark.slow
def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    box = small(CONTEXT_BYTES + NCCL_BYTES + 16 * 2**20)
    (found,) = needs([DP], box, largest=True)
    assert found.largest
    assert found.largest > DP.devices, "several devices exchange gradients"
    fits = [
        next(needs([replace(DP, batch_size=batch)], box)).fits
        for batch in (found.largest, 4 * found.largest)
    ]
    assert fits == [True, False]


def test_a_model_known_by_name_alone_has_no_memory_and_says_why() -> None:
    (need,) = needs([replace(DP, model="resnet50")], BOX)
    assert (need.memory, need.reason) == ((), UNTRACED)
    assert UNTRACED in told([need])


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp"])
def test_every_strategy_is_known(strategy: str) -> None:
    case = replace(
        DP, strategy=strategy, schedule="reference" if strategy == "dp" else "", devices=2
    )
    case = replace(case, devices=1) if strategy == "single" else case
    (need,) = needs([case], BOX)
    assert need.fits
    assert len(need.process_bytes) == case.devices
