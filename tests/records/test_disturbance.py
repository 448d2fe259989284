"""Whether other processes disturbed a trial, and what they can have taken from it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from dpbench.records import Case, Trial, disturbance, observed
from dpbench.records.facts import stated
from dpbench.records.load import TICK_S, GpuLoad, Load
from dpbench.records.registry import Parallelism
from tests.trials import trial_of


def loaded(case: Case, used: float, seconds: float = 2.0, cores: int = 2, **facts: Any) -> Trial:
    load = Load(foreign=used / cores, steal=0.0, cores=cores, seconds=seconds)
    return trial_of(case, [0.1] * 10, warmup=0, provenance=stated(foreign_load=load, **facts))


def test_what_others_took_is_beyond_the_cores_that_a_case_leaves_free() -> None:
    one = Case(model="m", strategy="single", batch_size=8)
    two = replace(one, strategy="ddp", devices=2)
    tick = 2 * TICK_S / 2.0  # of two cores in two seconds
    assert disturbance.taken_from(loaded(two, 0.3)) == pytest.approx(0.3 + tick)
    assert disturbance.taken_from(loaded(one, 0.3)) == 0.0
    assert disturbance.taken_from(loaded(one, 1.5)) == pytest.approx(0.5 + tick)
    assert disturbance.taken_from(loaded(two, tick / 2)) == 0.0, "less than the kernel counts"
    watched = replace(two, declared=observed.traits(Parallelism.NONE))
    assert disturbance.taken_from(loaded(watched, 0.3)) == pytest.approx(0.3 + tick)
    assert disturbance.taken_from(trial_of(two, [0.1])) == 0.0, "unknown"
    rounds, taken = disturbance.by_round([loaded(two, 0.3)])
    assert (rounds, taken) == ({0}, {0: pytest.approx(0.3 + tick)})


def test_a_gpu_that_others_use_bounds_nothing() -> None:
    case = Case(model="m", strategy="ddp", devices=2, batch_size=8, device_kind="cuda")
    used = GpuLoad(gpu=0, share=0.5, memory_bytes=0, processes=())
    assert disturbance.taken_from(loaded(case, 0.0, foreign_gpus=(used,))) == math.inf
    bound = loaded(case, 1.9, gpu_busy_s=0.099)
    assert disturbance.taken_from(bound) == 0.0, "the GPU computes for the whole step"
