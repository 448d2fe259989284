"""Busy times and reductions of dpbench's own profiled step, with activities of real traces."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._C._autograd import DeviceType

from dpbench.hardware.devices import open_devices
from dpbench.measure import merging
from dpbench.measure.worker import bench, profiling
from dpbench.observe import kineto
from dpbench.records import Case, Phase, Span, Step
from dpbench.records.activity import Activity, busy
from dpbench.records.trial import NO_PROFILE, Trial
from tests.observe.kineto_files import EXCERPTS

DDP = Case(model="mlp", strategy="ddp", devices=2, batch_size=64, device_kind="cuda")


@pytest.fixture(scope="module")
def profile():
    return kineto.read(EXCERPTS / "a100-x2-ddp-rank0.json.gz")


def events(profile, **changes):
    """Return a trace's device events as torch.profiler's `events()` does, in microseconds."""
    zero_us = profile.zero_us  # it is searched for at each call
    return [
        SimpleNamespace(
            **{
                "device_type": DeviceType.CUDA,
                "device_index": one.device,
                "name": one.name,
                "time_range": SimpleNamespace(
                    start=one.start_us - zero_us, end=one.end_us - zero_us
                ),
            }
            | changes
        )
        for one in profile.device
    ]


def event(kind: DeviceType, name: str, start_s: float, end_s: float, id: int) -> SimpleNamespace:
    return SimpleNamespace(
        device_type=kind,
        device_index=0,
        name=name,
        id=id,
        time_range=SimpleNamespace(start=start_s * 1e6, end=end_s * 1e6),
    )


def launched(found: list[SimpleNamespace]) -> list[SimpleNamespace]:
    """Return GPU events with their launches, in one profiled step."""
    for id, one in enumerate(found):
        one.id = id
    calls = [
        event(DeviceType.CPU, "cudaLaunchKernel", at / 1e6, at / 1e6, id)
        for id, at in enumerate(one.time_range.start for one in found)
    ]
    return [*found, *calls, event(DeviceType.CPU, merging.PROFILED, -1.0, 1e6, 0)]


def activities_of(found: list[SimpleNamespace], first: dict[int, int]) -> list[Activity]:
    profile = profiling.by_step(launched(found), first, 1)
    assert not profile.withheld
    return [*profile.steps[0]]


def test_events_of_a_profiler_are_the_activities_of_the_trace(profile) -> None:
    found = activities_of(events(profile), {0: 1})
    times = busy(found)[1]
    assert len(found) == len(profile.device)
    # the whole span has two steps of 222 and 220 ms; the figures are those of HTA, which leaves out
    # the second step
    assert times.compute_s == pytest.approx(2 * 0.037625, rel=0.04)
    assert times.exposed_communication_s == pytest.approx(
        times.communication_s * (1 - 0.15), rel=0.01
    )
    assert [one.metric for one in bench._busy_samples([found])] == [
        "kernel_busy_s",
        "collective_busy_s",
        "exposed_communication_s",
    ]


COMMUNICATION, MOVED = re.compile("nccl|Memcpy PtoP"), re.compile("Memcpy|Memset")


@pytest.mark.parametrize("path", sorted(EXCERPTS.glob("*.json.gz")), ids=lambda path: path.name)
def test_busy_times_of_real_traces_are_the_counted_microseconds(path: Path) -> None:
    """Compare a run's profiled step with counts of the tenths of a microsecond a GPU works in."""
    trace = kineto.read(path)
    (device,) = {one.device for one in trace.device}
    found = busy(activities_of(events(trace), {device: 0}))[0]
    start_us, end_us = (
        min(one.start_us for one in trace.device),
        max(one.end_us for one in trace.device),
    )
    works = {
        kind: np.zeros(round((end_us - start_us) * 10) + 1, dtype=bool)
        for kind in ("sent", "copied", "computed")
    }
    for one in trace.device:
        kind = (
            "sent"
            if COMMUNICATION.match(one.name)
            else "copied"
            if MOVED.match(one.name)
            else "computed"
        )
        works[kind][round((one.start_us - start_us) * 10) : round((one.end_us - start_us) * 10)] = (
            True
        )
    counted_s = {
        "compute_s": works["computed"],
        "communication_s": works["sent"],
        "copies_s": works["copied"],
        "exposed_communication_s": works["sent"] & ~works["computed"],
        "kernels_s": works["computed"] | works["copied"],
    }
    for name, counted in counted_s.items():
        assert getattr(found, name) == pytest.approx(counted.sum() / 1e7, rel=0.01, abs=1e-5), name


def test_annotations_hosts_and_gpus_of_others_are_no_activities(profile) -> None:
    assert not any(map(profiling.is_activity, events(profile, is_user_annotation=True)))
    assert not any(map(profiling.is_activity, events(profile, device_type=DeviceType.CPU)))
    assert activities_of(events(profile), {3: 0}) == []


BACKWARD = tuple(
    Span(step, Phase.BACKWARD, 0, "cuda_event", at, at + 0.05)
    for step in range(2)
    for at in (step + 0.1, step + 0.2)
)


def activities(*named: tuple[str, float, float]) -> list[Activity]:
    return [Activity(0, *one) for one in named]


REDUCING = activities(
    ("ncclDevKernel_Broadcast_RING_LL", 0.00, 0.01),
    ("volta_sgemm", 0.10, 0.12),
    ("volta_sgemm", 0.12, 0.14),
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 0.13, 0.15),
)


def test_the_exposed_reduction_of_a_profiled_step_is_the_end_of_each_last_backward() -> None:
    found = merging.reductions(DDP, BACKWARD, [REDUCING])
    assert [(one.step, one.phase, one.clock) for one in found] == [
        (n, Phase.REDUCE, merging.PROFILED) for n in range(2)
    ]
    assert [(one.start_s, one.end_s) for one in found] == [
        (pytest.approx(0.24), 0.25),
        (pytest.approx(1.24), 1.25),
    ]
    trial = Trial(
        case=DDP,
        steps=tuple(Step(1.0, False, n + 1.0) for n in range(2)),
        spans=(*BACKWARD, *found),
    )
    for phases in trial.ledger.phases:
        assert phases["reduce"] == pytest.approx(0.01)
        assert phases["backward"] == pytest.approx(0.09)


def test_a_reduction_is_never_longer_than_its_backward() -> None:
    long = activities(("ncclDevKernel_AllReduce_Sum_f32", 0.0, 9.0))
    assert {(one.start_s, one.end_s) for one in merging.reductions(DDP, BACKWARD, [long])} == {
        (0.2, 0.25),
        (1.2, 1.25),
    }


@pytest.mark.parametrize("strategy", ["dp", "fsdp", "single"])
def test_other_strategies_get_no_reduction_from_the_profile(strategy) -> None:
    assert merging.reductions(replace(DDP, strategy=strategy), BACKWARD, [REDUCING]) == []


def test_a_recorded_reduction_stays() -> None:
    recorded = Span(0, Phase.REDUCE, 0, "host", 0.24, 0.25)
    assert merging.reductions(DDP, (*BACKWARD, recorded), [REDUCING]) == []
    assert merging.reductions(DDP, BACKWARD, [REDUCING[:3]]) == []


GPU, HOST = DeviceType.CUDA, DeviceType.CPU


def three_steps() -> list[SimpleNamespace]:
    """Return the events of three profiled steps, each with a copy and two kernels."""
    found = []
    for step in range(3):
        found.append(event(HOST, merging.PROFILED, step, step + 0.9, 0))
        for number, name in enumerate(("Memcpy HtoD", "gemm", "relu")):
            at, id = step + 0.2 * number, 10 * step + number
            # an operator has an id of its own
            found.append(event(HOST, "aten::mm", at, at + 0.05, id + 1))
            found.append(event(HOST, "cudaLaunchKernel", at + 0.01, at + 0.02, id))
            found.append(event(GPU, name, at + 0.05, at + 0.05 + 0.01 * (step + 1), id))
    return found


def test_an_activity_belongs_to_the_step_that_launched_it() -> None:
    found = profiling.by_step(reversed(three_steps()), {0: 5}, 3)
    assert not found.withheld
    assert [sorted(one.name for one in step) for step in found.steps] == [
        ["Memcpy HtoD", "gemm", "relu"]
    ] * 3
    readings = [(one.metric, one.device, one.value) for one in bench._busy_samples(found.steps)]
    assert readings == [
        ("kernel_busy_s", 5, pytest.approx(seconds)) for seconds in (0.03, 0.06, 0.09)
    ]


def test_a_kernel_of_any_collective_has_the_name_of_the_one_that_launched_it() -> None:
    found = []
    for one in three_steps():
        if one.name == "gemm":
            one.name = "ncclDevKernel_Generic_1"
            launch_s = one.time_range.start / 1e6 - 0.05
            found.append(event(HOST, "nccl:all_reduce", launch_s, launch_s + 0.05, 0))
        found.append(one)
    steps = profiling.by_step(found, {0: 0}, 3).steps
    assert [sorted(one.name for one in step) for step in steps] == [
        ["Memcpy HtoD", "nccl:all_reduce", "relu"]
    ] * 3
    assert merging.exposed_reductions(DDP, steps)[0] == pytest.approx([0.01, 0.02, 0.03])


def test_copies_that_a_library_makes_without_a_recorded_call_belong_to_the_step_of_their_time() -> (
    None
):
    found = [one for one in three_steps() if (one.device_type, one.id) != (HOST, 10)]
    profile = profiling.by_step(found, {0: 0}, 3)
    assert [len(step) for step in profile.steps] == [3, 3, 3]


def shifted(found: list[SimpleNamespace], seconds: float) -> list[SimpleNamespace]:
    """Return the events, with another time for one kernel."""
    for one in found:
        if (one.device_type, one.id) == (GPU, 11):
            span = one.time_range
            one.time_range = SimpleNamespace(start=span.start + seconds * 1e6, end=span.end)
            one.time_range.end += seconds * 1e6
    return found


WRONG = {
    "no kernel for 1 launch": lambda found: [
        one for one in found if (one.device_type, one.id) != (GPU, 11)
    ],
    "no launch of the kernel gemm": lambda found: [
        one for one in found if one.name == "aten::mm" or (one.device_type, one.id) != (HOST, 11)
    ],
    "different numbers of kernels: 2, 1, 2": lambda found: [one for one in found if one.id != 11],
    "2 of 3 steps": lambda found: found[1:],
    "no work of the GPUs": lambda found: [
        one for one in found if one.device_type == HOST and one.name != "cudaLaunchKernel"
    ],
    "gemm outside the step": lambda found: shifted(found, -0.1),
    "gemm outside": lambda found: shifted(found, 0.9),
}


@pytest.mark.parametrize("said", WRONG)
def test_a_profile_with_lost_or_wrong_records_is_withheld(said: str) -> None:
    profile = profiling.by_step(WRONG[said](three_steps()), {0: 0}, 3)
    assert said in profile.withheld
    assert not profile.steps


def test_a_device_that_is_idle_in_a_profiled_step_has_a_reading_of_0() -> None:
    steps = [[Activity(0, "k", 0.0, 0.1), Activity(1, "k", 0.0, 0.1)], [Activity(0, "k", 1.0, 1.2)]]
    found = [(one.device, one.value) for one in bench._busy_samples(steps)]
    assert found == [(0, 0.1), (0, pytest.approx(0.2)), (1, 0.1), (1, 0.0)]


def test_the_reduction_of_a_step_is_the_median_of_the_profiled_steps() -> None:
    profile = [
        activities(("ncclDevKernel_AllReduce_Sum_f32", 0.0, seconds))
        for seconds in (0.03, 0.01, 0.02)
    ]
    assert {
        (round(one.start_s, 6), one.end_s) for one in merging.reductions(DDP, BACKWARD, profile)
    } == {
        (0.23, 0.25),
        (1.23, 1.25),
    }


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_the_profiled_steps_follow_one_that_warms_the_profiler_up() -> None:
    taken: list[int] = []
    found = profiling.profiled(lambda: taken.append(1), open_devices("cpu", 1), 3)
    assert "no work of the GPUs" in found.withheld, "the steps themselves were found"
    assert len(taken) == 4


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_only_errors_of_the_profiler_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def fails(error: Exception) -> None:
        raise error

    for error in (torch.OutOfMemoryError("full"), RuntimeError("the user's")):
        with pytest.raises(type(error), match=str(error)):
            profiling.profiled(lambda error=error: fails(error), open_devices("cpu", 1), 3)
    no_cupti = RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")
    monkeypatch.setattr(torch.profiler.profile, "start", lambda self: fails(no_cupti))
    found = profiling.profiled(lambda: taken.append(1), open_devices("cpu", 1), 3)
    assert "INSUFFICIENT_PRIVILEGES" in found.withheld
    assert len(taken) == 4, "the other ranks take these steps, too"
    full = torch.OutOfMemoryError("full")
    monkeypatch.setattr(torch.profiler.profile, "start", lambda self: fails(full))
    with pytest.raises(torch.OutOfMemoryError):
        profiling.profiled(lambda: taken.append(1), open_devices("cpu", 1), 3)


def test_a_rank_without_a_profile_withholds_the_reductions_of_all() -> None:
    steps = tuple(Step(1.0, False, n + 1.0) for n in range(2))
    spans = (*BACKWARD, *merging.reductions(DDP, BACKWARD, [REDUCING]))
    whole = Trial(case=DDP, steps=steps, spans=spans)
    without = Trial(case=DDP, steps=steps, spans=BACKWARD, provenance={NO_PROFILE: "lost"})
    for parts in ([whole, without], [without, whole]):
        merged = merging.merge(parts)
        assert merged.provenance[NO_PROFILE] == "lost"
        assert all(span.phase is not Phase.REDUCE for span in merged.spans)
    assert any(span.phase is Phase.REDUCE for span in merging.merge([whole, whole]).spans)
