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
from torch.autograd.profiler_util import EventList, FunctionEvent

from dpbench.hardware.devices import open_devices
from dpbench.measure import merging
from dpbench.measure.worker import bench, profiling
from dpbench.observe import kineto
from dpbench.records import Case, Phase, Span, Step
from dpbench.records.activity import Activity, busy
from dpbench.records.trial import Trial
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


@pytest.mark.parametrize("kernel", ["ncclDevKernel_Generic_1", "two_shot_kernel"])
@pytest.mark.parametrize(
    ("operator", "stated"),
    [
        ("nccl:all_reduce", ""),
        ("symm_mem::two_shot_all_reduce_", ""),
        ("record_param_comms", "allreduce"),
    ],
)
@pytest.mark.parametrize("thread", [1, 2**64 - 1])  # torch knows the launch's thread, or does not
def test_a_kernel_belongs_to_the_collective_that_launched_it(
    kernel, operator, stated, thread
) -> None:
    found = []
    for one in three_steps():
        if one.name == "aten::mm":  # its kernel is the collective's own
            one.thread = 2
        if one.name == "cudaLaunchKernel":
            one.thread = thread
        if one.name == "gemm":
            one.name = kernel
            launch_s = one.time_range.start / 1e6 - 0.05
            around = event(HOST, operator, launch_s, launch_s + 0.05, 0)
            around.thread = 1
            around.event_metadata = SimpleNamespace(collective_name=stated) if stated else None
            found.append(around)
        found.append(one)
    steps = profiling.by_step(found, {0: 0}, 3).steps
    assert [[one.kind for one in sorted(step)] for step in steps] == [
        ["copy", "compute", "communication"]
        if kernel > "relu"
        else ["copy", "communication", "compute"]
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


US = 1e-6
STEP_S = 100 * US


def close_steps(gpu: int, ahead_s: float) -> list[SimpleNamespace]:
    """Return the events of three steps of 100 us, with 8 kernels of one GPU in each.

    A kernel begins 4 us after its launch, and a step ends 12 us after its last kernel. The GPU's
    clock is `ahead_s` ahead of the host's.
    """
    found = []
    for step in range(3):
        start_s = 1.0 + 10 * step * STEP_S
        found.append(event(HOST, merging.PROFILED, start_s, start_s + STEP_S, 0))
        for number in range(8):
            at_s, id = start_s + (10 * number + 8) * US, 100 * gpu + 10 * step + number + 1
            found.append(event(HOST, "cudaLaunchKernel", at_s, at_s + 5 * US, id))
            on_gpu_s = at_s + 4 * US + ahead_s
            found.append(event(GPU, "gemm", on_gpu_s, on_gpu_s + 6 * US, id))
            found[-1].device_index = gpu
    return found


def moved(found: list[SimpleNamespace], id: int, seconds: float) -> list[SimpleNamespace]:
    """Return the events, with another time for the kernel `id`."""
    for one in found:
        if (one.device_type, one.id) == (GPU, id):
            one.time_range.start += seconds * 1e6
            one.time_range.end += seconds * 1e6
    return found


@pytest.mark.parametrize("ahead_us", [0.0, 8.5, 60.0, 95.0, -8.5, -60.0, -95.0])
def test_a_gpu_whose_clock_is_a_little_off_keeps_its_profile(ahead_us: float) -> None:
    right = profiling.by_step(close_steps(0, 0.0), {0: 0}, 3)
    found = profiling.by_step(close_steps(0, ahead_us * US), {0: 0}, 3)
    assert not found.withheld
    assert [len(step) for step in found.steps] == [8, 8, 8]
    for step, true in zip(found.steps, right.steps, strict=True):
        assert busy(step)[0].kernels_s == pytest.approx(busy(true)[0].kernels_s)
        # corrected to within the launch before a kernel and the host's wait after it
        assert all(
            abs(one.start_s - other.start_s) < 12.1 * US
            for one, other in zip(step, true, strict=True)
        )


def test_each_gpu_has_a_clock_of_its_own() -> None:
    found = profiling.by_step(
        [*close_steps(0, 60 * US), *(one for one in close_steps(1, -60 * US) if one.id)],
        {0: 0, 1: 1},
        3,
    )
    assert not found.withheld
    for step in found.steps:
        first, second = ([one for one in step if one.device == gpu] for gpu in (0, 1))
        assert len(first) == len(second) == 8
        assert first[0].start_s - second[0].start_s == pytest.approx(16 * US, abs=US)


@pytest.mark.parametrize(
    ("ahead_us", "said"),
    [(150, "gemm ends 138 µs after its step"), (-150, "gemm begins 146 µs before its launch")],
)
def test_a_clock_that_is_farther_off_withholds_the_profile_with_the_number(
    ahead_us: float, said: str
) -> None:
    found = profiling.by_step(close_steps(0, ahead_us * US), {0: 0}, 3)
    assert said in found.withheld
    assert "100 µs" in found.withheld
    assert not found.steps


@pytest.mark.parametrize(("early_us", "corrected_us"), [(5.0, 5.0), (50.0, 31.0), (90.0, 51.0)])
def test_one_kernel_that_begins_before_its_launch_withholds_nothing(
    early_us: float, corrected_us: float
) -> None:
    events = moved(close_steps(0, 0.0), 11, (-4 - early_us) * US)
    found = profiling.by_step(events, {0: 0}, 3)
    assert [len(step) for step in found.steps] == [8, 8, 8]
    # up to 12 us, all kernels still end before their step; of more, half is corrected
    right_s = close_steps(0, 0.0)[2].time_range.start * US
    assert found.steps[0][0].start_s - right_s == pytest.approx(corrected_us * US)


def test_kernels_that_wait_in_a_queue_tell_nothing_of_the_clock() -> None:
    found = close_steps(0, 0.0)
    for one in found:
        if one.device_type == HOST and one.name != merging.PROFILED:
            one.time_range.start -= one.id % 10 * 7
            one.time_range.end -= one.id % 10 * 7
    right = profiling.by_step(close_steps(0, 0.0), {0: 0}, 3)
    assert profiling.by_step(found, {0: 0}, 3).steps == right.steps


def test_a_copy_without_a_launch_is_placed_by_the_corrected_clock() -> None:
    found = close_steps(0, -60 * US)
    for step in range(3):  # just after the begin of the step
        at_s = 1.0 + 10 * step * STEP_S + 6 * US - 60 * US
        found.append(event(GPU, "Memcpy HtoD", at_s, at_s + US, 900 + step))
    steps = profiling.by_step(found, {0: 0}, 3).steps
    assert [sum(one.name == "Memcpy HtoD" for one in step) for step in steps] == [1, 1, 1]


class NestedCalls:
    """A profiler of two threads without operators, one of which launches within the other's."""

    calls = ((1, 0, 10), (2, 2, 4))
    """The number, begin and end in microseconds of each call."""

    def __init__(self) -> None:
        results = SimpleNamespace(
            events=lambda: map(self._raw, self.calls), trace_start_ns=lambda: 5000
        )
        self.profiler = SimpleNamespace(kineto_results=results)

    def events(self) -> EventList:
        events = EventList(
            [FunctionEvent(id, "cudaLaunchKernel", 1, *at_us) for id, *at_us in self.calls]
        )
        events._build_tree()
        return events

    def _raw(self, call: tuple[int, int, int]) -> SimpleNamespace:
        id, start_us, end_us = call
        return SimpleNamespace(
            name=lambda: "cudaLaunchKernel",
            device_type=lambda: HOST,
            correlation_id=lambda: id,
            linked_correlation_id=lambda: 0,
            start_ns=lambda: 5000 + 1000 * start_us,
            duration_ns=lambda: 1000 * (end_us - start_us),
            start_thread_id=lambda: 1,
        )


def test_a_launch_that_torch_takes_for_a_duplicate_is_a_launch() -> None:
    profiler = NestedCalls()
    assert [one.id for one in profiler.events()] == [1], "torch leaves out the other"
    found = [
        (one.id, one.time_range.start, one.time_range.end)
        for one in profiling._typed(profiler)
        if profiling.is_call(one)
    ]
    assert found == list(profiler.calls)


class UntypedProfiler:
    """A profiler as in torch 2.11: its events have no types, and calls of CUDA 13 no names."""

    def __init__(self, launch: str) -> None:
        self._launch = launch
        self.profiler = SimpleNamespace(
            kineto_results=SimpleNamespace(
                events=lambda: map(self._raw, self._events), trace_start_ns=lambda: 0
            )
        )
        self._events = three_steps()
        for one in self._events:
            if one.name == "cudaLaunchKernel":
                one.name = launch

    def events(self) -> list[SimpleNamespace]:
        return self._events

    def _raw(self, one: SimpleNamespace) -> SimpleNamespace:
        linked = one.id + 1 if one.name == self._launch or one.device_type == GPU else 0
        return SimpleNamespace(
            name=lambda: one.name,
            device_type=lambda: one.device_type,
            correlation_id=lambda: one.id,
            linked_correlation_id=lambda: linked,
        )


@pytest.mark.parametrize("launch", ["INVALID", "a call with an unknown name"])
def test_a_launch_of_any_name_is_found_by_its_link_to_an_operator(
    launch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "_recorded", lambda *_, **__: UntypedProfiler(launch))
    gpu = SimpleNamespace(index=0, torch_device=torch.device("cuda", 0))
    found = profiling.profiled(lambda: None, [gpu], 3)
    assert not found.withheld
    assert [len(step) for step in found.steps] == [3, 3, 3]


def test_a_launch_outside_an_operator_that_has_no_name_is_found() -> None:
    """Such a launch is linked to nothing: torch 2.11 under CUDA 13, in a library's own code."""
    found = three_steps()
    for one in found:
        if one.name == "cudaLaunchKernel":
            one.name = "INVALID"
    assert [len(step) for step in profiling.by_step(found, {0: 0}, 3).steps] == [3, 3, 3]


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
    "gemm begins 60.0 ms before its launch": lambda found: shifted(found, -0.1),
    "gemm ends 270 ms after its step": lambda found: shifted(found, 0.9),
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
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11
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


@pytest.mark.parametrize(
    ("changes", "withheld"),
    [
        ({}, True),
        ({"placement": "colocated"}, False),  # these reduce through the host
        ({"devices": 1}, False),
        ({"strategy": "single", "devices": 1}, False),
        ({"mode": "no_grad"}, False),
    ],
)
def test_a_profile_of_ranks_without_a_collective_is_withheld(
    changes, withheld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of a library that dpbench does not recognise would count as compute."""
    found = profiling.Profile(steps=[activities(("two_shot_kernel", 0.0, 0.1))])
    monkeypatch.setattr(profiling, "profiled", lambda step, devices, count: found)
    prepared = SimpleNamespace(case=replace(DDP, **changes), devices=(), batches=[()])
    timer = SimpleNamespace(_prepared=prepared, _profiled_steps=1)
    assert bool(bench.CaseTimer._profile(timer).withheld) is withheld
    known = profiling.Profile(steps=[REDUCING])
    monkeypatch.setattr(profiling, "profiled", lambda step, devices, count: known)
    assert bench.CaseTimer._profile(timer) is known


def test_a_rank_without_a_profile_withholds_the_reductions_of_all() -> None:
    steps = tuple(Step(1.0, False, n + 1.0) for n in range(2))
    spans = (*BACKWARD, *merging.reductions(DDP, BACKWARD, [REDUCING]))
    whole = Trial(case=DDP, steps=steps, spans=spans)
    without = Trial(case=DDP, steps=steps, spans=BACKWARD, provenance={"no_profile": "lost"})
    for parts in ([whole, without], [without, whole]):
        merged = merging.merge(parts)
        assert merged.provenance["no_profile"] == "lost"
        assert all(span.phase is not Phase.REDUCE for span in merged.spans)
    assert any(span.phase is Phase.REDUCE for span in merging.merge([whole, whole]).spans)
