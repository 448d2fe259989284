"""The measurements of `gpu_truth.py`, on fake GPUs that keep time: spans are as long as kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.scripts import gpu_claims, gpu_truth
from dpbench.records import Case
from tests.gpu.test_times import needs_times

pytestmark = [pytest.mark.gpu, needs_times]

CASE = Case(
    model="resnet18",
    size="full",
    strategy="single",
    batch_size=64,
    device_kind="cuda",
    unverified=True,
)
TWO = {"strategy": "dp", "schedule": "reference", "devices": 2, "placement": "colocated"}


@pytest.fixture(scope="module")
def evidence() -> dict[str, Any]:
    """Return what is measured of few steps, for which the GPU takes longer than the host."""
    found: dict[str, Any] = {"fake": False, "withheld": ""}
    with pytest.MonkeyPatch.context() as patch:
        for name, few in {"STEPS": 6, "TURNS": 2, "WARMUP": 2, "ENERGY_S": 1.0}.items():
            patch.setattr(gpu_truth, name, few)
        with gpu_truth.started(CASE) as loop:
            for one in gpu_truth.alone(loop):
                found |= one
            single = gpu_truth.profiled(loop)
        with gpu_truth.started(replace(CASE, batch_size=128, **TWO)) as loop:
            dp = gpu_truth.profiled(loop)
    assert not single["withheld"]
    assert not dp["withheld"]
    assert single["off_s"] < 5e-6
    return found | {"profiled": {"single": single["phases"], "dp": dp["phases"]}}


@pytest.mark.parametrize("key", ["phases_cover", "phases_full"])
def test_spans_by_events_are_as_long_as_the_kernels_that_their_phase_launches(
    evidence: dict[str, Any], key: str
) -> None:
    (claim,) = (one for one in gpu_claims.CLAIMS if one.key == key)
    right, line = claim.line(evidence)
    assert right, line


def test_kernels_that_other_threads_launch_belong_to_their_phase(evidence: dict[str, Any]) -> None:
    forward_s = {name: one["forward"]["kernels_s"] for name, one in evidence["profiled"].items()}
    assert forward_s["dp"] == pytest.approx(2 * forward_s["single"], rel=0.02)
