"""Profiled steps on GPUs: busy times are those that the GPU itself counts, or are withheld."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dpbench.analysis import validity
from dpbench.hardware.devices import open_devices
from dpbench.measure.worker import profiling, trial
from dpbench.records import Case, Effort, Status
from dpbench.records.activity import KERNELS, Kind, busy, kind_of

pytestmark = pytest.mark.gpu
STEPS = 3


class EnergyCounter:
    """The joules that GPU 0 uses for its work, from NVML's counter without the idle power."""

    def __init__(self) -> None:
        self._nvml = pytest.importorskip("pynvml")
        self._nvml.nvmlInit()
        self._gpu = self._nvml.nvmlDeviceGetHandleByIndex(0)
        torch.cuda.synchronize()
        self._idle_w = 0.0
        before = self.read()
        time.sleep(0.5)
        self._idle_w = self.joules(before) / (time.perf_counter() - before[0])

    def read(self) -> tuple[float, float]:
        return time.perf_counter(), self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu) / 1e3

    def joules(self, before: tuple[float, float]) -> float:
        (began_s, began_j), (ended_s, ended_j) = before, self.read()
        return float(ended_j - began_j - self._idle_w * (ended_s - began_s))

    @property
    def busy_w(self) -> float:
        """The watts of a fake GPU's work: it has full power while it is busy, whatever it does."""
        return self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._gpu) / 1e3 - self._idle_w


@pytest.mark.slow
def test_the_busy_time_of_steps_is_what_a_fake_gpu_counts() -> None:
    if "fake" not in torch.cuda.get_device_name(0).lower():
        pytest.skip("the power of a real GPU depends on its work")
    values = torch.zeros(2**24, device="cuda")
    row = torch.zeros(2**10)
    counter = EnergyCounter()
    joules = []

    def step() -> None:
        torch.cuda.synchronize()
        before = counter.read()
        values[: len(row)] = row.to("cuda")
        for _ in range(8):
            values.add_(1.0)
        torch.cuda.synchronize()
        joules.append(counter.joules(before))

    profile = profiling.profiled(step, open_devices("cuda", 1), STEPS)
    assert not profile.withheld
    found = [busy(step)[0].metrics[KERNELS] for step in profile.steps]
    assert len(found) == STEPS
    assert sum(found) == pytest.approx(sum(joules[1:]) / counter.busy_w, rel=0.02)


@pytest.mark.parametrize(
    ("ahead_us", "said"),
    [
        (60, ""),
        (-60, ""),
        # the profiler leaves out what ends after it has stopped, as the last kernel here
        (10_000, "after its step|no kernel for 1 launch"),
        (-10_000, "before its launch"),
    ],
)
def test_a_gpu_whose_clock_is_off_the_hosts_keeps_its_profile_up_to_100_us(
    ahead_us: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "fake" not in torch.cuda.get_device_name(0).lower():
        pytest.skip("the clock of a real GPU cannot be set")
    monkeypatch.setenv("FAKECUDA_CUPTI_OFFSET_US", str(ahead_us))
    values = torch.zeros(2**20, device="cuda")

    def step() -> None:
        time.sleep(0.03)
        values.add_(1.0)

    profile = profiling.profiled(step, open_devices("cuda", 1), STEPS)
    assert bool(profile.withheld) is bool(said)
    assert re.search(said, profile.withheld)
    assert [len(step) for step in profile.steps] == ([] if said else [1] * STEPS)


@pytest.mark.parametrize(
    ("early", "said"),
    # the profiler of torch 2.11 does not know the name of each launch
    [(2, ""), (8, "no kernel for 2 launches|different numbers of kernels")],
)
def test_early_records_at_the_start_of_a_profile_cost_the_step_that_is_not_recorded(
    early: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "fake" not in torch.cuda.get_device_name(0).lower():
        pytest.skip("the records of a real GPU cannot be set")
    monkeypatch.setenv("FAKECUDA_CUPTI_EARLY", str(early))
    values = torch.zeros(2**20, device="cuda")

    def step() -> None:
        for _ in range(6):
            values.add_(1.0)

    profile = profiling.profiled(step, open_devices("cuda", 1), STEPS)
    assert bool(profile.withheld) is bool(said)
    assert re.search(said, profile.withheld)
    assert [len(step) for step in profile.steps] == ([] if said else [6] * STEPS)


CASE = Case(model="mlp", strategy="single", batch_size=16, device_kind="cuda", unverified=True)
QUICK = Effort(budget_s=0.05, warmup_steps=1, min_steps=2, max_steps=8, block_steps=4)


def without_kernel(events: list[Any]) -> list[Any]:
    """Return a profiler's events without one kernel in the middle, as if its record were lost."""
    kernels = [
        one for one in events if profiling.is_activity(one) and kind_of(one.name) is Kind.COMPUTE
    ]
    lost = kernels[len(kernels) // 2]
    return [one for one in events if one is not lost]


def without_launch(events: list[Any]) -> list[Any]:
    """Return a profiler's events without one kernel and its launch."""
    lost = {id(one) for one in events} - {id(one) for one in without_kernel(events)}
    (kernel,) = (one for one in events if id(one) in lost)
    return [one for one in events if one.id != kernel.id or one.name == profiling.PROFILED]


def late(events: list[Any]) -> list[Any]:
    """Return a profiler's events with one kernel in a step after the one that launched it."""
    lost = {id(one) for one in events} - {id(one) for one in without_kernel(events)}
    (kernel,) = (one for one in events if id(one) in lost)
    kernel.time_range.start += 1e6
    kernel.time_range.end += 1e6
    return events


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (lambda events: events, ""),
        # the profiler of torch 2.11 does not know the name of each launch; other calls that torch's
        # events lack are found in Kineto's
        (without_kernel, "no kernel for 1 launch|different numbers of kernels"),
        (without_launch, "no kernel for 1 launch|different numbers of kernels"),
        (late, "after its step"),
    ],
    ids=["whole", "kernel", "launch", "late"],
)
def test_a_trial_with_a_lost_record_has_no_busy_times_and_says_so(
    plant: Callable[[list[Any]], list[Any]],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = torch.profiler.profile.events
    monkeypatch.setattr(torch.profiler.profile, "events", lambda self: plant(list(events(self))))
    done = trial.run(CASE, QUICK, tmp_path)
    assert done.status is Status.OK, done.reason
    found = {one.metric for one in done.samples}
    assert (KERNELS in found) is not bool(said)
    assert re.search(said, done.provenance.get("no_profile", ""))
    failed = {rule.key for rule in validity.troubles([done], 8)}
    assert ("no_profile" in failed) is bool(said)
