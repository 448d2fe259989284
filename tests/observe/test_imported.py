"""dpbench import: steps, phases, devices and clocks of traces, the store, and invalid files."""

from __future__ import annotations

import codecs
import gzip
import json
import statistics
import tracemalloc

import pytest

from dpbench import observe
from dpbench.cli import cli, main
from dpbench.observe import imported, kineto
from dpbench.observe.attribution import attribute
from dpbench.records import HOST, Phase, Source, words
from dpbench.records.activity import Activity, Busy, busy, difference, length, union
from dpbench.records.registry import Parallelism, Role
from dpbench.store import Naming, Store
from tests.amounts import amounts
from tests.observe.kineto_files import (
    EXCERPTS,
    WHOLE,
    Writer,
    costs_of,
    loop_of,
    needs_whole_traces,
)


def phases_ms(path, step=0):
    """Return the milliseconds of one step's phases on the critical path, if they occur."""
    trial = loop_of(path).trial
    return {
        name: pytest.approx(1e3 * seconds, abs=1e-3)
        for name, seconds in trial.ledger.phases[step].items()
    }


# -- intervals and busy times


def test_intervals_are_added_up_once() -> None:
    one, other = union([(5, 6), (0, 2), (1, 3), (3, 4), (7, 7)]), union([(2, 5.5), (9, 10)])
    assert one == [(0, 4), (5, 6)]
    assert length(one) == 5
    assert difference(one, other) == [(0, 2), (5.5, 6)]
    assert difference(other, one) == [(4, 5), (9, 10)]
    assert length(difference(one, other)) == length(union([*one, *other])) - length(other)


def test_communication_includes_copies_between_gpus_and_is_exposed_where_nothing_computes() -> None:
    found = busy(
        [
            Activity(0, "sgemm", 0.0, 4.0),
            Activity(0, "relu", 3.0, 5.0),
            Activity(0, "Memcpy HtoD (Pinned -> Device)", 4.5, 6.0),
            Activity(0, "ncclDevKernel_AllReduce_Sum", 4.0, 8.0),
            Activity(0, "Memset (Device)", 9.0, 10.0),
            Activity(1, "Memcpy PtoP (Device -> Device)", 2.0, 3.0),
            Activity(1, "Memcpy DtoD (Device -> Device)", 5.0, 6.0),
        ]
    )
    assert found[0] == Busy(
        span_s=10.0,
        compute_s=5.0,
        copies_s=2.5,
        exposed_copies_s=2.0,
        communication_s=4.0,
        exposed_communication_s=3.0,
        kernels_s=7.0,
        idle_s=1.0,
    )
    assert found[1] == Busy(
        span_s=4.0,
        copies_s=1.0,
        exposed_copies_s=1.0,
        communication_s=1.0,
        exposed_communication_s=1.0,
        kernels_s=1.0,
        idle_s=2.0,
    )


# -- phases of a step that is written by hand


def step_of(trace: Writer, at_ms: float = 0.0, *, profiler: bool = True, number: int = 1) -> None:
    """Write one step of 100 ms with all phases of one device, its backward in autograd's thread."""
    if profiler:
        trace.note(f"ProfilerStep#{number}", at_ms, at_ms + 100)
    trace.op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at_ms, at_ms + 20)
    trace.op("aten::stack", at_ms + 5, at_ms + 15)
    trace.op("aten::to", at_ms + 20, at_ms + 25)
    trace.op("aten::copy_", at_ms + 21, at_ms + 25)
    trace.kernel("Memcpy HtoD (Pageable -> Device)", at_ms + 21, at_ms + 22, at_ms + 25)
    trace.op("aten::linear", at_ms + 25, at_ms + 27, **{"Sequence number": 1})
    trace.kernel("sgemm", at_ms + 26, at_ms + 26, at_ms + 40)
    trace.op("aten::relu", at_ms + 28, at_ms + 30, **{"Sequence number": 2})
    trace.kernel("relu", at_ms + 29, at_ms + 41, at_ms + 45)
    trace.op("aten::cross_entropy_loss", at_ms + 30, at_ms + 32, **{"Sequence number": 3})
    trace.kernel("nll_loss", at_ms + 31, at_ms + 45, at_ms + 46)
    for name, began, runs in (("NllLossBackward0", 33, (46, 48)), ("AddmmBackward0", 35, (48, 60))):
        trace.op(
            name,
            at_ms + began,
            at_ms + began + 2,
            tid=2,
            **{"Fwd thread id": 1, "Sequence number": 1},
        )
        start_ms, end_ms = (at_ms + one for one in runs)
        trace.kernel("sgemm_backward", at_ms + began + 1, start_ms, end_ms, tid=2)
    trace.op("aten::linalg_vector_norm", at_ms + 38, at_ms + 39)
    trace.kernel("norm", at_ms + 38.5, at_ms + 60, at_ms + 62)
    trace.op("aten::mul_", at_ms + 39, at_ms + 40)
    trace.note("Optimizer.step#Adam.step", at_ms + 41, at_ms + 45)
    trace.op("aten::_foreach_add_", at_ms + 42, at_ms + 44)
    trace.kernel("adam", at_ms + 43, at_ms + 62, at_ms + 70)
    trace.op("aten::item", at_ms + 46, at_ms + 80)
    trace.kernel("Memcpy DtoH (Device -> Pageable)", at_ms + 46, at_ms + 70, at_ms + 71)


def test_each_phase_of_a_step_is_found_without_annotations_of_the_user(tmp_path) -> None:
    trace = Writer()
    for number in range(3):
        step_of(trace, 100.0 * number, number=number + 1)
    path = trace.write(tmp_path / "loop.pt.trace.json")
    for step in (1, 2):  # the first step begins with its first copy
        # the device is behind the host: it finishes backward while the host waits for the loss
        assert phases_ms(path, step) == {
            "data": 20.0,
            "scatter": 5.0,
            "forward": 20.0,
            "loss": 1.0,
            "backward": 14.0,
            "clip": 2.0,
            "optimizer": 8.0,
            "read": 10.0,
            "unattributed": 20.0,
        }
    host = attribute(kineto.read(path)).host[1]
    assert {name: round(1e3 * seconds, 3) for name, seconds in host.items()} == {
        "data": 20,
        "scatter": 5,
        "forward": 5,
        "loss": 2,
        "backward": 4,
        "clip": 2,
        "optimizer": 4,
        "read": 34,
    }


def test_planted_waits_for_data_appear_in_data(tmp_path) -> None:
    trace = Writer()
    trace.note("ProfilerStep#1", 0, 200)
    trace.op("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 137.5)
    trace.op("aten::linear", 138, 150, **{"Sequence number": 1})
    found = loop_of(trace.write(tmp_path / "a.json"))
    assert found.trial.ledger.phases[0]["data"] == pytest.approx(0.1375)
    facts = found.trial.facts.loop
    assert facts is not None
    assert facts.loader_workers is None
    first, second = found.notes
    assert "DataLoader workers" in first
    assert "intervals of the host" in second


def test_without_a_profiler_step_the_optimizers_steps_end_the_steps_and_the_first_is_warm_up(
    tmp_path,
) -> None:
    trace = Writer()
    for number in range(3):
        step_of(trace, 100.0 * number, profiler=False)
    found = loop_of(trace.write(tmp_path / "a.json"))
    assert found.traces[0].attributed.names == ("step 0", "step 1", "step 2")
    assert [step.warmup for step in found.trial.steps] == [True, False, False]
    assert found.trial.timed == pytest.approx((0.1, 0.1))
    assert found.trial.case.optimizer == "adam"


def test_the_last_of_several_optimizers_ends_a_step_and_one_within_another_does_not(
    tmp_path,
) -> None:
    trace = Writer()
    for at in (0.0, 100.0, 200.0):
        trace.note("Optimizer.step#Shampoo.step", at + 50, at + 60)
        trace.note("Optimizer.step#EMA.step", at + 70, at + 80)
        trace.note("Optimizer.step#SGD.step", at + 72, at + 75)
    found = loop_of(trace.write(tmp_path / "a.json"))
    assert [step.end_s for step in found.trial.steps] == pytest.approx([0.03, 0.13, 0.23])
    assert found.trial.case.optimizer == "ema+sgd+shampoo"


def test_the_closure_of_an_optimizer_is_no_optimizer(tmp_path) -> None:
    trace = Writer()
    trace.note("ProfilerStep#1", 0, 100)
    trace.note("Optimizer.step#LBFGS.step", 10, 90)
    trace.op("aten::linear", 20, 30, **{"Sequence number": 1})
    trace.op("autograd::engine::evaluate_function: AddmmBackward0", 30, 50, **{"Fwd thread id": 1})
    assert phases_ms(trace.write(tmp_path / "a.json")) == {
        "forward": 10.0,
        "backward": 20.0,
        "unattributed": 70.0,
    }


def test_after_a_loss_an_operator_without_gradients_is_not_clipping(tmp_path) -> None:
    """The loss of an evaluation under `no_grad` ends the time in which gradients are clipped."""
    trace = Writer()
    trace.note("ProfilerStep#1", 0, 100)
    trace.op("aten::linear", 0, 10, **{"Sequence number": 1})
    trace.op("autograd::engine::evaluate_function: AddmmBackward0", 10, 20, **{"Fwd thread id": 1})
    trace.op("aten::cross_entropy_loss", 20, 30)
    trace.op("aten::norm", 30, 40)
    trace.op("aten::linear", 40, 60)
    assert phases_ms(trace.write(tmp_path / "a.json")) == {
        "forward": 40.0,
        "loss": 10.0,
        "backward": 10.0,
        "unattributed": 40.0,
    }


def test_annotations_of_the_user_come_before_operators(tmp_path) -> None:
    trace = Writer()
    trace.note("ProfilerStep#1", 0, 100)
    for name, begin, end in (
        ("## data_load ##", 0, 10),
        ("## forward ##", 10, 40),
        ("## backward ##", 40, 80),
        ("clip_gradients", 80, 85),
        ("## optimizer ##", 85, 95),
    ):
        trace.note(name, begin, end)
        trace.op("aten::mul", begin + 1, begin + 2)
    assert phases_ms(trace.write(tmp_path / "a.json")) == {
        "data": 10.0,
        "forward": 30.0,
        "backward": 40.0,
        "clip": 5.0,
        "optimizer": 10.0,
        "unattributed": 5.0,
    }


def test_only_the_part_of_a_reduction_that_outlasts_backward_is_reduce(tmp_path) -> None:
    trace = Writer(distributedInfo={"backend": "nccl", "rank": 0, "world_size": 2})
    trace.note("ProfilerStep#1", 0, 100)
    trace.note("DistributedDataParallel.forward", 10, 20)
    trace.kernel("sgemm", 11, 12, 30)
    trace.op(
        "autograd::engine::evaluate_function: AddmmBackward0", 20, 29, tid=2, **{"Fwd thread id": 1}
    )
    trace.kernel("sgemm", 21, 30, 50, tid=2)
    trace.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 22, 40, 60, tid=2, stream=20)
    trace.note("Optimizer.step#SGD.step", 30, 35)
    trace.kernel("sgd", 31, 60, 70)
    path = trace.write(tmp_path / "a.json")
    found = phases_ms(path)
    assert {name: found[name] for name in ("forward", "backward", "reduce", "optimizer")} == {
        "forward": 20.0,  # the host begins it at 10, the device at 12
        "backward": 20.0,
        "reduce": 10.0,
        "optimizer": 10.0,
    }
    trial = loop_of(path).trial
    assert {
        m: trial.readings(m)[0]
        for m in ("collective_busy_s", "exposed_communication_s", "kernel_busy_s")
    } == {
        "collective_busy_s": [pytest.approx(0.02)],
        "exposed_communication_s": [pytest.approx(0.01)],
        "kernel_busy_s": [pytest.approx(0.048)],
    }
    assert trial.case.traits.parallelism is Parallelism.RANKS
    facts = trial.facts.loop
    assert facts is not None
    assert facts.wrapper == "DistributedDataParallel"


def reducing(path, kernel, *, named=""):
    """Write 100 ms: forward 20, backward 20, 40 of a reduction alone, and backward 20."""
    trace = Writer(distributedInfo={"backend": "nccl", "rank": 0, "world_size": 2})
    for number in range(4):
        at = 100.0 * number
        trace.note(f"ProfilerStep#{number}", at, at + 100)
        trace.op("aten::linear", at + 1, at + 3, **{"Sequence number": 1})
        trace.kernel("sgemm", at + 2, at + 2, at + 20)
        backward = {"tid": 2, "Fwd thread id": 1}
        trace.op("autograd::engine::evaluate_function: AddmmBackward0", at + 4, at + 15, **backward)
        trace.kernel("sgemm", at + 5, at + 20, at + 40, tid=2)
        if named:
            trace.note(named, at + 6, at + 8, tid=2)
        trace.kernel(kernel, at + 7, at + 35, at + 80, tid=2, stream=20)
        trace.kernel("sgemm", at + 14, at + 80, at + 100, tid=2)
    return trace.write(path / "a.json")


@pytest.mark.parametrize(
    ("kernel", "named", "phase"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "", "reduce"),
        # the kernels of RCCL do not name the collective
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "nccl:all_reduce", "reduce"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "nccl:broadcast", "replicate"),
    ],
)
def test_a_collective_in_the_middle_of_backward_divides_it(tmp_path, kernel, named, phase) -> None:
    path = reducing(tmp_path, kernel, named=named)
    for step in (1, 2, 3):
        found = phases_ms(path, step)
        assert {name: found[name] for name in ("forward", "backward", phase)} == {
            "forward": 19.0,  # 1 ms of it on the host, before the device begins
            "backward": 40.0,
            phase: 40.0,
        }
    assert costs_of(path) == {"reduction": pytest.approx(0.04)}


@pytest.mark.parametrize("call", ["aten::item", "aten::to", "cudaDeviceSynchronize"])
def test_a_host_that_waits_in_a_call_launches_nothing_meanwhile(tmp_path, call) -> None:
    """The host launches for 30 ms, which the device does in 50; then it waits for the device."""
    trace = Writer()
    for number in range(4):
        at = 76.0 * number
        trace.note(f"ProfilerStep#{number}", at, at + 76)
        for place in range(10):
            trace.op("aten::linear", at + 3 * place, at + 3 * place + 3, **{"Sequence number": 1})
            trace.kernel("sgemm", at + 3 * place + 1, at + 25 + 5 * place, at + 30 + 5 * place)
        if call.startswith("cuda"):
            trace.call(call, at + 30, at + 76)
        else:
            trace.op(call, at + 30, at + 76)
            trace.kernel("Memcpy DtoH (Device -> Pageable)", at + 31, at + 75, at + 76)
    path = trace.write(tmp_path / "a.json")
    copy_s = 0.0 if call.startswith("cuda") else 0.001
    assert costs_of(path) == {"reads": pytest.approx(0.026 - copy_s)}


def test_a_host_that_launches_for_longer_than_the_device_works_has_a_small_batch(tmp_path) -> None:
    trace = Writer()
    for number in range(4):
        at = 100.0 * number
        trace.note(f"ProfilerStep#{number}", at, at + 100)
        for place in range(10):
            start = at + 10 * place
            trace.op("aten::linear", start, start + 10, **{"Sequence number": 1})
            trace.kernel("sgemm", start + 5, start + 5, start + 9)
    assert costs_of(trace.write(tmp_path / "a.json")) == {"launches": pytest.approx(0.06)}


def test_a_host_that_runs_code_without_operators_launches_nothing_meanwhile(tmp_path) -> None:
    """The GPU works until 45 ms; then the host logs, or sleeps, until 85 ms."""
    trace = Writer()
    for number in range(4):
        at = 85.0 * number
        trace.note(f"ProfilerStep#{number}", at, at + 85)
        for place in range(10):
            start = at + 0.5 * place
            trace.op("aten::linear", start, start + 0.5, **{"Sequence number": 1})
            trace.kernel("sgemm", start + 0.1, at + 1 + 4.4 * place, at + 5 + 4.4 * place)
    found = costs_of(trace.write(tmp_path / "a.json"))
    assert found.get("launches", 0.0) < 0.005
    assert found["unattributed"] == pytest.approx(0.04, abs=0.001)


def test_data_parallel_has_its_phases_on_every_device(tmp_path) -> None:
    trace = Writer()
    trace.note("ProfilerStep#1", 0, 100)
    trace.note("DataParallel.forward", 0, 50)
    for name, begin, end in (("Scatter", 0, 5), ("Broadcast", 5, 15), ("Gather", 40, 45)):
        trace.op(name, begin, end)
        trace.kernel("Memcpy PtoP (Device -> Device)", begin + 1, begin + 1, end)
    for device in range(2):
        trace.op("aten::linear", 16, 18, tid=10 + device, **{"Sequence number": 1})
        trace.kernel("sgemm", 17, 17, 30 + 10 * device, tid=10 + device, device=device)
    trace.op(
        "autograd::engine::evaluate_function: AddmmBackward0", 50, 60, tid=2, **{"Fwd thread id": 1}
    )
    trace.kernel("sgemm", 51, 51, 70, tid=2, device=1)
    trace.op(
        "autograd::engine::evaluate_function: BroadcastBackward",
        60,
        70,
        tid=2,
        **{"Fwd thread id": 1},
    )
    trace.kernel("Memcpy PtoP (Device -> Device)", 61, 70, 80, tid=2)
    trial = loop_of(trace.write(tmp_path / "a.json")).trial
    assert trial.case.devices == 2
    assert trial.case.traits.parallelism is Parallelism.THREADS
    spans = {
        (span.phase, span.device): span.end_s - span.start_s
        for span in trial.spans
        if span.device != HOST
    }
    assert spans == {
        (Phase.SCATTER, 0): pytest.approx(0.004),
        (Phase.REPLICATE, 0): pytest.approx(0.009),
        (Phase.FORWARD, 0): pytest.approx(0.013),
        (Phase.FORWARD, 1): pytest.approx(0.023),
        (Phase.GATHER, 0): pytest.approx(0.004),
        (Phase.BACKWARD, 1): pytest.approx(0.019),
        (Phase.REDUCE, 0): pytest.approx(0.010),
    }
    assert trial.readings("kernel_busy_s") == {0: [pytest.approx(0.013)], 1: [pytest.approx(0.042)]}
    facts = trial.facts.loop
    assert facts is not None
    assert facts.wrapper == "DataParallel"


def test_a_host_without_devices_computes_itself(tmp_path) -> None:
    trace = Writer()
    trace.note("ProfilerStep#1", 0, 100)
    trace.op("aten::linear", 10, 30, **{"Sequence number": 1})
    trial = loop_of(trace.write(tmp_path / "a.json")).trial
    assert trial.case.device_kind == "cpu"
    assert [(s.phase, s.device) for s in trial.spans] == [(Phase.FORWARD, 0)]


# -- several ranks


def rank_of(tmp_path, rank, *, late_ms=0.0, skew_ms=0.0, world=2):
    """Write the trace of a rank that is late to each all-reduce; its clock differs by `skew_ms`."""
    trace = Writer(distributedInfo={"backend": "nccl", "rank": rank, "world_size": world})
    for number in range(4):
        at = skew_ms + 100.0 * number
        trace.note(f"ProfilerStep#{number}", at, at + 100)
        trace.op(
            "autograd::engine::evaluate_function: AddmmBackward0",
            at + 1,
            at + 40,
            tid=2,
            **{"Fwd thread id": 1},
        )
        trace.kernel("sgemm", at + 2, at + 3, at + 40 + late_ms, tid=2, device=rank)
        trace.kernel(
            "ncclDevKernel_AllReduce_Sum",
            at + 5,
            at + 40 + late_ms,
            at + 60,
            tid=2,
            device=rank,
            stream=20,
        )
    return trace.write(tmp_path / f"rank{rank}.json")


@pytest.mark.parametrize("skew_ms", [0.0, 2345.678, 5e9])
def test_clocks_of_ranks_are_aligned_by_the_ends_of_collectives(tmp_path, skew_ms) -> None:
    found = loop_of(rank_of(tmp_path, 1, late_ms=15, skew_ms=skew_ms), rank_of(tmp_path, 0))
    first, second = found.traces
    assert first.aligned is None
    assert second.aligned is not None
    assert second.aligned.shift_s == pytest.approx(-skew_ms / 1e3, abs=1e-5)
    assert second.aligned.uncertainty_s < 1e-5
    assert second.aligned.collectives == 4
    # the first step begins with its first kernel, the others with the end of the all-reduce before
    expected_s = [0.057, 0.1, 0.1, 0.1]
    assert [step.seconds for step in found.trial.steps] == pytest.approx(expected_s, abs=1e-5)
    assert found.trial.steps[0].end_s == pytest.approx(0.06, abs=1e-5)
    # the reduction begins when the last rank arrives, and the time before is its backward
    assert found.trial.ledger.phases[1] == {
        "backward": pytest.approx(0.054, abs=2e-3),
        "reduce": pytest.approx(0.005, abs=1e-5),
        "unattributed": pytest.approx(0.041, abs=2e-3),
    }
    busy_s = found.trial.readings("kernel_busy_s")
    assert {device: statistics.median(values) for device, values in busy_s.items()} == {
        0: pytest.approx(0.037, abs=1e-5),
        1: pytest.approx(0.052, abs=1e-5),
    }


@pytest.mark.parametrize("skew_ms", [0.0, 2345.678])
def test_waits_of_ranks_are_no_part_of_exposed_communication(tmp_path, skew_ms) -> None:
    """Each rank waits 15 ms at one of two collectives, whose transfers take 5 ms."""

    def rank(number):
        facts = {"backend": "nccl", "rank": number, "world_size": 2}
        trace = Writer(distributedInfo=facts)
        for step in range(4):
            at = skew_ms * number + 100.0 * step
            trace.note(f"ProfilerStep#{step}", at, at + 100)
            for place, begins in enumerate((at + 10, at + 50)):
                arrives = begins + 15 * (place == number)
                trace.kernel("sgemm", begins - 5, begins - 4, arrives, device=number)
                reduces = begins - 3, arrives, begins + 20
                trace.kernel("ncclDevKernel_AllReduce", *reduces, device=number, stream=20)
        return trace.write(tmp_path / f"rank{number}.json")

    found = loop_of(rank(0), rank(1)).trial
    assert found.readings("exposed_communication_s") == {
        device: pytest.approx([0.01] * 4, abs=1e-5) for device in (0, 1)
    }
    (alone,) = imported.load([rank(0)])
    assert alone.trial.readings("exposed_communication_s")[0] == pytest.approx([0.025] * 4)


def test_clocks_that_collectives_do_not_align_are_named() -> None:
    found = loop_of(EXCERPTS / "x128-rank0.json.gz", EXCERPTS / "x128-rank1.json.gz")
    assert found.traces[1].aligned is None
    facts = found.trial.facts.loop
    assert facts is not None
    assert amounts(facts.unknown[0].problem)[0] == "1", "its rank"
    missing, *problems = found.notes
    assert amounts(missing) == ["126", "128"]
    assert problems == [one.problem for one in facts.unknown]


def test_two_traces_of_one_rank_are_refused(tmp_path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    paths = [rank_of(one, 0), rank_of(other, 0)]
    with pytest.raises(ValueError, match="both of rank 0 of 2"):
        imported.load(paths)
    with pytest.raises(ValueError, match="given twice"):
        imported.load([paths[0], paths[0]])


# -- real traces


def waits_of(found):
    """Return the seconds that the device, in timed steps, and the host wait for data per step."""
    rows = zip(found.trial.steps, found.trial.ledger.phases, strict=True)
    return (
        [phases.get("data", 0.0) for step, phases in rows if not step.warmup],
        [phases.get("data", 0.0) for phases in found.traces[0].attributed.host],
    )


def test_waits_of_real_loaders_are_found() -> None:
    without, host = waits_of(loop_of(EXCERPTS / "v100-loader-workers-0.json.gz"))
    four, _ = waits_of(loop_of(EXCERPTS / "v100-loader-workers-4.json.gz"))
    # in the first 12 of the 69 ms, the device does the work of the step before
    assert 0.055 < statistics.median(without) < 0.060
    assert 0.067 < statistics.median(host) < 0.071
    assert statistics.median(four) < 0.005


@needs_whole_traces
def test_waits_of_whole_traces_are_found_and_all_traces_import() -> None:
    found = imported.load(sorted(WHOLE.glob("*.json.gz")))
    waits = {one.trial.case.model: waits_of(one)[0] for one in found}
    assert 0.055 < statistics.median(waits["v100-resnet50-loader-workers-0"]) < 0.060
    assert statistics.median(waits["v100-resnet50-loader-workers-4"]) < 0.005
    assert [len(one.trial.steps) for one in found] == [3, 1, 3, 6, 6, 2]


@pytest.mark.parametrize("path", sorted(EXCERPTS.glob("*.gz")), ids=lambda path: path.name)
def test_phases_of_real_traces_sum_to_the_steps_and_leave_little_unattributed(path) -> None:
    trial = loop_of(path).trial
    for step, phases in zip(trial.steps, trial.ledger.phases, strict=True):
        assert sum(phases.values()) == pytest.approx(step.seconds)
        assert phases["unattributed"] < 0.05 * step.seconds


# -- the command and the store


def run(*arguments, capsys):
    code = 0
    try:
        main([*map(str, arguments)])
    except SystemExit as ended:
        code = ended.code
    out, err = capsys.readouterr()
    return code, out, err


KEYS = {"span_s", "compute_s", "copies_s", "communication_s", "exposed_communication_s", "idle_s"}


def test_the_json_has_devices_and_steps_and_the_store_has_the_rounds(tmp_path, capsys) -> None:
    path, store = EXCERPTS / "a100-x2-ddp-rank0.json.gz", tmp_path / "dpbench.db"
    code, out, err = run(
        "import", path, "--store", store, "--name", "a100", "--json", capsys=capsys
    )
    assert (code, err) == (0, "")
    found = json.loads(out)
    (file,) = found["files"]
    assert file["path"] == str(path)
    (device,) = file["devices"]
    assert device["device"] == 0
    assert device["name"] == "NVIDIA A100-PG509-200"
    assert set(device) >= KEYS
    assert device["compute_s"] + device["idle_s"] < device["span_s"] < 0.5
    assert [step["name"] for step in file["steps"]] == ["ProfilerStep#4", "ProfilerStep#5"]
    for step in file["steps"]:
        assert set(step["phases"]) == {*(phase.value for phase in Phase), "unattributed"}
        assert sum(step["phases"].values()) == pytest.approx(step["seconds"])
    with Store.read(store) as opened:
        (stored,) = opened.runs()
        trials = opened.trials(stored.id)
    assert stored.id == found["run"]
    assert stored.naming.name == "a100"
    assert stored.provenance["gpus"]["gpus"][0]["name"] == "NVIDIA A100-PG509-200"
    assert stored.provenance["host"] == {}
    (one,) = trials
    assert (one.round, len(one.steps), one.source) == (0, 2, Source.IMPORTED)
    assert one.case.traits.role == Role.OBSERVED
    assert [step["partial"] for step in file["steps"]] == [True, False]
    assert one.timed == pytest.approx([file["steps"][1]["seconds"]])
    assert {span.step for span in one.spans} == {0, 1}
    assert len(one.readings("kernel_busy_s", timed=True)[0]) == 1


def test_the_text_names_devices_the_median_step_and_the_run(tmp_path, capsys) -> None:
    store = tmp_path / "dpbench.db"
    code, out, err = run(
        "import", EXCERPTS / "v100-loader-workers-0.json.gz", "--store", store, capsys=capsys
    )
    assert code == 0
    assert "2 steps on 1 device" in out
    assert "device 0 Tesla V100-DGXS-32GB" in out
    assert "data 57.0 ms" in out
    assert "dpbench explain --run" in err


def test_the_help_names_the_keys_of_the_json(capsys) -> None:
    code, out, _ = run("import", "--help", capsys=capsys)
    assert code == 0
    assert set(out.replace(",", " ").split()) >= KEYS
    assert "import" in cli.commands


def test_more_steps_make_up_to_five_rounds(tmp_path) -> None:
    trace = Writer()
    for number in range(12):
        step_of(trace, 100.0 * number, number=number)
    trial = loop_of(trace.write(tmp_path / "a.json")).trial
    parts = observe.parts(trial)
    assert [len(part.steps) for part in parts] == [3, 2, 2, 2, 3]
    assert [step for part in parts for step in part.steps] == list(trial.steps)
    assert sum(len(part.spans) for part in parts) == len(trial.spans)
    assert sum(len(part.samples) for part in parts) == len(trial.samples)


# -- files that are no traces, or are damaged

WHOLE_EVENT = {
    "ph": "X",
    "cat": "cpu_op",
    "name": "aten::mm",
    "pid": 1,
    "tid": 1,
    "ts": 1,
    "dur": 2,
}


def with_events(*events):
    return json.dumps({"traceEvents": events}).encode()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"hello", "is not JSON"),
        (b"\x80\x81", "is not JSON"),
        (with_events(WHOLE_EVENT)[:-9], "is not JSON, or is cut off"),
        (gzip.compress(with_events(WHOLE_EVENT) * 50, mtime=0)[:-20], "damaged or incomplete"),
        (gzip.compress(b"x", mtime=0)[:5], "damaged or incomplete"),
        (b"{}", "none of its 0 events"),
        (b"[]", "none of its 0 events"),
        (b"3", "not a trace"),
        (b'{"traceEvents": 3}', "not a trace"),
        (with_events({"ph": "M", "name": "process_name"}), "none of its 1 events"),
        (with_events(WHOLE_EVENT, WHOLE_EVENT | {"ts": "soon"}), "$.traceEvents[1].ts`"),
        (with_events(WHOLE_EVENT | {"dur": -1}), "event 0, 'aten::mm' (ts 1.0, dur -1.0)"),
        (with_events({k: v for k, v in WHOLE_EVENT.items() if k != "ts"}), "(ts None, dur 2.0)"),
    ],
)
def test_a_file_that_is_no_trace_is_named_with_the_place(tmp_path, capsys, content, said) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    code, out, err = run("import", path, "--store", tmp_path / "dpbench.db", capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {path}")
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "dpbench.db").exists()


@pytest.mark.parametrize("filling", [b" " * 10_000, b"{}," * 200], ids=["bytes", "objects"])
def test_a_file_that_decompresses_to_more_than_a_trace_is_refused_within_bounded_memory(
    tmp_path, monkeypatch, capsys, filling
) -> None:
    limit = 2**22
    monkeypatch.setattr(kineto, "MOST_BYTES", limit, raising=False)
    path = tmp_path / "small.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + filling * 2000 + b"{}]}", 9, mtime=0))
    assert path.stat().st_size < 60_000
    tracemalloc.start()
    code, out, err = run("import", path, "--store", tmp_path / "db", capsys=capsys)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {path}: its ")
    assert err.count("\n") == 1
    assert f"{words.size(limit)} and {limit // 64:,} objects" in err
    assert "gunzip" in err
    assert peak < 2**23


def test_a_compressed_trace_within_the_limit_of_its_own_size_is_read(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(kineto, "MOST_BYTES", 1000, raising=False)
    path = EXCERPTS / "h100-x1-vgg13.json.gz"
    assert len(gzip.decompress(path.read_bytes())) > 100_000
    assert len(kineto.read(path).device) == 325


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "compressed"])
def test_a_byte_order_mark_is_no_part_of_a_trace(tmp_path, compress) -> None:
    path = tmp_path / "marked.json"
    path.write_bytes(compress(codecs.BOM_UTF8 + with_events(WHOLE_EVENT)))
    assert [event.name for event in kineto.read(path).host] == ["aten::mm"]


def test_a_name_that_is_no_text_is_read_with_a_sign_in_place_of_its_bytes(tmp_path) -> None:
    path = tmp_path / "named.json"
    content = with_events(WHOLE_EVENT, WHOLE_EVENT | {"name": "net.py(3): forward"})
    path.write_bytes(content.replace(b"net.py", b"n\xe9t.py"))
    assert [event.name for event in kineto.read(path).host] == [
        "aten::mm",
        "n\ufffdt.py(3): forward",
    ]


def test_a_trace_of_the_profiler_without_work_is_refused_for_that(tmp_path) -> None:
    path = Writer().write(tmp_path / "idle.json")
    with pytest.raises(kineto.UnreadableFile, match="recorded no work") as caught:
        kineto.read(path)
    assert "export_chrome_trace" not in str(caught.value)


@pytest.mark.parametrize("name", [{}, {"name": ""}, {"name": None}], ids=["none", "empty", "null"])
def test_a_gpu_without_a_name_is_unknown(tmp_path, name) -> None:
    facts = {"deviceProperties": [{"id": 0, "totalGlobalMem": 2**34, "numSms": 104, **name}]}
    path = tmp_path / "amd.json"
    path.write_bytes(json.dumps({**facts, "traceEvents": [WHOLE_EVENT]}).encode())
    (gpu,) = kineto.read(path).gpus
    assert (gpu.name, gpu.memory_bytes) == ("", 2**34)


def test_a_trace_whose_own_name_is_no_text_is_imported(tmp_path, capsys) -> None:
    path = tmp_path / "tr\udcff.json"
    trace = Writer()
    for number in range(4):
        step_of(trace, 100.0 * number, number=number)
    trace.write(path)
    for options in ((), ("--json",)):
        code, out, err = run("import", path, "--store", tmp_path / "db", *options, capsys=capsys)
        assert (code, "udcff" in out) == (0, True), err


def test_the_findings_of_a_trace_in_a_folder_that_a_shell_would_quote(tmp_path) -> None:
    folder = tmp_path / "d'arcy 1"
    folder.mkdir()
    trace = Writer()
    for number in range(4):
        at = 200.0 * number
        trace.note(f"ProfilerStep#{number}", at, at + 200)
        trace.op("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", at, at + 137.5)
        trace.op("aten::linear", at + 138, at + 199, **{"Sequence number": 1})
    path = trace.write(folder / "trace.json")
    facts = loop_of(path).trial.facts.loop
    assert facts is not None
    assert facts.words == [str(path)]
    assert "loading" in costs_of(path)


def test_missing_files_and_folders_are_named(tmp_path, capsys) -> None:
    assert (
        "No such file"
        in run("import", tmp_path / "no.json", "--store", tmp_path / "db", capsys=capsys)[2]
    )
    assert "is a folder" in run("import", tmp_path, "--store", tmp_path / "db", capsys=capsys)[2]


def test_numbers_that_json_does_not_know_and_broken_events_are_left_out_with_a_note(
    tmp_path,
) -> None:
    bad = [
        WHOLE_EVENT | {"dur": None},
        WHOLE_EVENT | {"ts": 1e308, "dur": 1e308},
        WHOLE_EVENT | {"cat": "overhead"},
    ]
    text = with_events(WHOLE_EVENT, *bad).replace(
        b'"dur": 2}', b'"dur": 2, "args": {"rate": inf, "other": NaN}}', 1
    )
    path = tmp_path / "odd.json"
    path.write_bytes(text)
    found = kineto.read(path)
    assert len(found.host) == 1
    (note,) = found.notes
    assert "odd.json" in note
    assert amounts(note)[:2] == ["2", "4"]
    assert "event 1, 'aten::mm'" in note


def test_a_kernel_without_a_launch_is_busy_and_has_no_phase(tmp_path) -> None:
    trace = Writer()
    trace.note("ProfilerStep#1", 0, 100)
    trace.kernel("sgemm", 1, 10, 30)
    trace.events = [event for event in trace.events if event["cat"] != "cuda_runtime"]
    trial = loop_of(trace.write(tmp_path / "a.json")).trial
    assert trial.readings("kernel_busy_s") == {0: [pytest.approx(0.02)]}
    assert trial.spans == ()
    facts = trial.facts.loop
    assert facts is not None
    assert "launch" in facts.unknown[0].problem
    assert amounts(facts.unknown[0].problem)[:2] == ["1", "1"]


@pytest.mark.parametrize("lost", [0, 2])
def test_launches_whose_kernels_the_profiler_lost_are_counted(lost, tmp_path) -> None:
    trace = Writer()
    for step in range(3):
        trace.note(f"ProfilerStep#{step}", 10 * step, 10 * step + 9)
        for number in range(4):
            at_ms = 10 * step + number
            trace.kernel("gemm", at_ms, at_ms + 0.5, at_ms + 1)
    kernels = [event for event in trace.events if event["cat"] == "kernel"]
    trace.events = [event for event in trace.events if event not in kernels[:lost]]
    notes = loop_of(trace.write(tmp_path / "a.json")).notes
    assert [f"the kernels of {lost} launches" in note for note in notes].count(True) == bool(lost)
    assert any("the profiler lost" in note for note in notes) is bool(lost)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_batch_of_a_step_is_that_of_all_its_backward_passes(accumulated, tmp_path) -> None:
    trace = Writer()
    shaped = {"Input type": ["float"], "Sequence number": 1}
    rows = 64 // accumulated
    for step in range(3):
        trace.note(f"ProfilerStep#{step}", 100 * step, 100 * step + 99)
        for number in range(accumulated):
            at_ms = 100 * step + 40 * number
            trace.kernel("Memcpy HtoD (Pinned -> Device)", at_ms + 1, at_ms + 2, at_ms + 3)
            trace.events[-1]["args"]["bytes"] = rows * 12
            trace.op("aten::linear", at_ms + 3, at_ms + 4, **{"Sequence number": 1})
            dims = {"Input Dims": [[rows, 10]]}
            trace.op("aten::cross_entropy_loss", at_ms + 5, at_ms + 6, **shaped, **dims)
            backward = {"tid": 2, "Fwd thread id": 1}
            trace.op("AddmmBackward0", at_ms + 7, at_ms + 9, **backward, **shaped)
            kind, dims = "torch::autograd::AccumulateGrad", {"Input Dims": [[10, 3]]}
            trace.op(kind, at_ms + 10, at_ms + 11, **backward, **shaped, **dims)
        trace.note("Optimizer.step#SGD.step", 100 * step + 90, 100 * step + 95)
    (loop,) = imported.load([trace.write(tmp_path / "a.json")], 64)
    facts = loop.trial.facts.loop
    assert facts is not None
    assert facts.updates == accumulated
    model = loop.trial.provenance["model"]
    assert (model["parameter_tensors"], model["parameter_bytes"]) == (1, 10 * 3 * 4)
    assert (model["input_bytes"], model["output_bytes"]) == (12, 10 * 4)


def test_a_trace_without_steps_has_busy_devices_and_no_step(tmp_path) -> None:
    trace = Writer()
    trace.op("aten::mm", 0, 1)
    trace.kernel("sgemm", 0, 1, 3)
    found = loop_of(trace.write(tmp_path / "a.json"))
    assert found.trial.steps == ()
    assert busy(found.traces[0].attributed.activities)[0].compute_s == pytest.approx(0.002)
    assert imported.store(tmp_path / "db", [found], Naming())
