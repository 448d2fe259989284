"""Outlook: a run on a machine with one GPU is answered by a prediction from its measured step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dpbench.analysis.decision import Choice
from dpbench.analysis.report import Report
from dpbench.predict import outlook
from dpbench.records import Case, Phase, Trial, fake, plan, words
from dpbench.records.resources import Resources
from tests.trials import report_on, trial_of

STEP_S = 0.050
PARTS = (
    (Phase.SCATTER, 0, 0.00, 0.01),
    (Phase.FORWARD, 0, 0.01, 0.35),
    (Phase.LOSS, 0, 0.35, 0.36),
    (Phase.BACKWARD, 0, 0.36, 0.95),
    (Phase.OPTIMIZER, 0, 0.95, 1.00),
)
HOME = plan.baseline(
    model="resnet18", size="full", precision="tf32", batch_size=64, device_kind="cuda"
)
SHARED = replace(
    HOME, strategy="dp", devices=2, batch_size=128, schedule="reference", placement="colocated"
)
MODEL = {
    "modules": 68,
    "parameter_tensors": 62,
    "parameter_bytes": 46_758_208,
    "buffer_tensors": 60,
    "buffer_bytes": 38_560,
    "input_bytes": 602_112.0,
    "output_bytes": 4_000.0,
}


def trials(*cases: Case, step_s: float = STEP_S, **facts: Any) -> list[Trial]:
    return [
        trial_of(
            case,
            [step_s * case.batch_size / 64 * (1.1 if case.devices > 1 else 1)] * 12,
            warmup=2,
            parts=PARTS,
            clock="cuda_event",
            round=number,
            provenance={"model": MODEL, **facts},
        )
        for case in cases
        for number in range(4)
    ]


def report(*gpus: str, cases: tuple[Case, ...] = (HOME, SHARED), **facts: Any) -> Report:
    described = [{"name": gpu, "memory_bytes": 140 << 30} for gpu in gpus]
    provenance = {"gpus": {"gpus": described}, "host": {"cores": 16}}
    return report_on(trials(*cases, **facts), provenance)


def test_one_gpu_is_answered_by_the_speed_ups_of_several_with_their_intervals() -> None:
    (answer,) = report("NVIDIA H200").answers
    assert answer.choice is Choice.PREDICTED
    assert answer.settled
    assert "PREDICTED" in answer.labels
    beyond = outlook.outlook(HOME, trials(HOME), Resources(gpu="NVIDIA H200"))
    assert beyond
    assert [(row.case.strategy, row.case.devices) for row in beyond.rows] == [
        (strategy, devices) for strategy in ("torch_dp", "ddp") for devices in (2, 4, 8)
    ]
    for row in beyond.rows:
        assert row.speedup
        assert row.speedup.low < row.speedup.value < row.speedup.high
        assert 0.9 < row.speedup.value <= row.case.devices
        assert words.times(row.speedup) in answer.headline
    dp, ddp = beyond.rows[2].speedup, beyond.rows[5].speedup
    assert dp
    assert ddp
    assert ddp.value > dp.value, "eight processes beat eight threads"


def test_the_replicas_that_shared_the_gpu_show_what_the_schedule_costs() -> None:
    (answer,) = report("NVIDIA H200").answers
    assert "0.909×" in answer.reason, "two replicas took 1.1 times as long as their steps in turn"


def test_the_command_to_run_next_predicts_the_same_numbers_from_the_measured_step() -> None:
    (answer,) = report("NVIDIA H200").answers
    assert "--machine '8x NVIDIA H200'" in answer.command
    assert "--step-s 0.05" in answer.command
    assert "--batch-per-device 64" in answer.command


@pytest.mark.parametrize(
    ("gpus", "facts"),
    [
        pytest.param(("NVIDIA H200", "NVIDIA H200"), {}, id="two GPUs, which can be measured"),
        pytest.param(("Unheard-of 9000",), {}, id="an unknown GPU"),
        pytest.param(("NVIDIA H200",), {"model": {}}, id="no sizes of the model"),
    ],
)
def test_without_its_basis_nothing_is_predicted(
    gpus: tuple[str, ...], facts: dict[str, Any]
) -> None:
    (answer,) = report(*gpus, **facts).answers
    assert answer.choice is Choice.UNKNOWN
    assert "PREDICTED" not in answer.labels


def test_times_of_fake_gpus_decide_nothing_and_their_prediction_says_so() -> None:
    (answer,) = report("NVIDIA H200", **{"fake_gpus": True}).answers
    assert answer.choice is Choice.UNKNOWN
    assert fake.WHY in answer.headline
    assert {"PREDICTED", "FAKE-GPU"} <= {*answer.labels}


def test_a_run_without_the_interpreter_lock_is_continued_without_it() -> None:
    with_lock, without = (report("NVIDIA H200", gil=one).answers[0] for one in ("on", "off"))
    assert "NO-GIL" in without.labels
    assert "NO-GIL" not in with_lock.labels
    assert "no GIL" in without.command
    assert "no GIL" not in with_lock.command
