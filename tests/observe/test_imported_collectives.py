"""Collectives of traces: torch's records tell them, and not the names that libraries give kernels.

Neither do the order of the events in a file, the zero of the clock, or the traces of other ranks.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpbench.records.activity import EXPOSED, KERNELS, Kind, kind_of
from tests.observe.kineto_files import EXCERPTS, Writer, loop_of

Event = dict[str, Any]
DDP = EXCERPTS / "a100-x2-ddp-rank0.json.gz"
RCCL = EXCERPTS / "mi300x-x8-ddp-rank0.json.gz"


def changed(
    path: Path, to: Path, change: Callable[[list[Event]], list[Event]] = lambda events: events
) -> Path:
    """Write a trace with other events."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    to.write_text(json.dumps(trace | {"traceEvents": change(trace["traceEvents"])}))
    return to


def figures(path: Path) -> dict[tuple[str, int], float]:
    """Return what the trace of a rank says about each step, in seconds."""
    trial = loop_of(path).trial
    return {
        (name, step): seconds
        for step, phases in enumerate(trial.ledger.phases)
        for name, seconds in phases.items()
    } | {
        (metric, step): seconds
        for metric in (KERNELS, EXPOSED)
        for step, seconds in enumerate(*trial.readings(metric).values())
    }


def renamed(events: list[Event]) -> list[Event]:
    """Give each kernel a name that tells nothing."""
    return [
        event | {"name": f"kernel_{place}"} if event.get("cat") == "kernel" else event
        for place, event in enumerate(events)
    ]


def shuffled(events: list[Event]) -> list[Event]:
    return random.Random(0).sample(events, len(events))


def later(events: list[Event]) -> list[Event]:
    """Shift the clock of all events by 1,000 seconds."""
    return [event | {"ts": event["ts"] + 1e9} if "ts" in event else event for event in events]


@pytest.mark.parametrize("path", [DDP, RCCL])
@pytest.mark.parametrize("change", [renamed, shuffled, later])
def test_names_of_kernels_order_of_events_and_the_zero_of_the_clock_move_no_phase(
    path: Path, change: Callable[[list[Event]], list[Event]], tmp_path: Path
) -> None:
    expected = pytest.approx(figures(path), abs=1e-6)
    assert figures(changed(path, tmp_path / "ddp.json", change)) == expected


OPERATORS = ("c10d::", "record_param_comms", "nccl:")


@pytest.mark.parametrize("kept", ["", *OPERATORS])
def test_each_record_of_torch_suffices_to_tell_a_collective(kept: str, tmp_path: Path) -> None:
    """`kept` is the only operator that the trace keeps; without one, the kernels state it."""

    def only(events: list[Event]) -> list[Event]:
        left = [
            event
            for event in renamed(events)
            if event["name"].startswith(kept or "no") or not event["name"].startswith(OPERATORS)
        ]
        for event in left if kept else ():
            if event.get("cat") == "kernel":
                event["args"].pop("Collective name", None)
        return left

    found = figures(changed(DDP, tmp_path / "ddp.json", only))
    assert found == pytest.approx(figures(DDP), abs=1e-6)


def rank_of(
    folder: Path, rank: int, *, world: int = 1, operator: str = "", kernel: str = "k"
) -> Path:
    """Write steps of 100 ms: 40 ms of computing, then 20 ms of a collective."""
    trace = Writer(distributedInfo={"backend": "nccl", "rank": rank, "world_size": world})
    for number in range(4):
        at = 100.0 * number
        trace.note(f"ProfilerStep#{number}", at, at + 100)
        backward = "autograd::engine::evaluate_function: AddmmBackward0"
        trace.op(backward, at + 1, at + 8, tid=2, **{"Fwd thread id": 1})
        trace.op("aten::mm", at + 2, at + 3, tid=2)
        trace.kernel("gemm", at + 2.5, at + 3, at + 43, tid=2, device=rank)
        if operator:
            trace.op(operator, at + 4, at + 6, tid=2)
        trace.op("aten::empty", at + 4.5, at + 4.6, tid=2)
        trace.kernel(kernel, at + 5, at + 43, at + 63, tid=2, device=rank, stream=20)
    return trace.write(folder / f"rank{rank}.json")


@pytest.mark.parametrize(
    ("operator", "kernel"),
    [
        ("symm_mem::one_shot_all_reduce", "void one_shot_all_reduce_kernel<float, 16>(float**)"),
        ("symm_mem::multimem_all_reduce_", "void multimem_all_reduce_kernel<float, 8>(float*)"),
        ("nccl:all_reduce", "void msccl::executionKernel<float>(void*)"),
        ("c10d::allreduce_", "void mscclpp::collective::kernel<4>(int)"),
        ("xccl:all_reduce", "oneccl_main::sycl_kernel"),
        ("_C_custom_ar::all_reduce", "void vllm::cross_device_reduce_2stage<float, 8>(int)"),
        ("_c10d_functional::all_reduce_", "kernel"),
        ("", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)"),
        # a CUDA graph has no operators
        ("", "void vllm::cross_device_reduce_1stage<__half, 2>(vllm::RankData*)"),
        ("", "void c10d::(anonymous namespace)::multimem_all_reduce_kernel<float>(float*)"),
        ("", "mscclpp::allreduce<float>"),
    ],
)
def test_a_collective_of_any_library_is_communication(
    operator: str, kernel: str, tmp_path: Path
) -> None:
    trial = loop_of(rank_of(tmp_path, 0, operator=operator, kernel=kernel)).trial
    assert trial.readings(EXPOSED) == {0: pytest.approx([0.02] * 4, abs=1e-5)}
    assert trial.readings(KERNELS) == {0: pytest.approx([0.04] * 4, abs=1e-5)}
    assert trial.ledger.phases[1]["reduce"] == pytest.approx(0.02, abs=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(float)",
        "void (anonymous namespace)::softmax_warp<WarpAllReduce<float>>(float)",
        "void gather_all(ncclComm*)",
        "triton_red_fused_sum_broadcast_0",
    ],
)
def test_what_a_kernel_works_on_does_not_make_it_a_collective(name: str) -> None:
    assert kind_of(name) is Kind.COMPUTE


def test_what_a_collective_copies_by_another_operator_is_no_communication(tmp_path: Path) -> None:
    trace = Writer()
    trace.note("ProfilerStep#0", 0, 100)
    trace.op("c10d::allgather_", 0, 10)
    trace.op("aten::copy_", 1, 3)
    trace.kernel("unrolled_elementwise_kernel", 2, 20, 30)
    trace.kernel("kernel", 5, 30, 45)
    trace.op("all_reduce_of_mine", 50, 60)  # the user's own annotation
    trace.kernel("kernel", 55, 60, 61)
    trial = loop_of(trace.write(tmp_path / "t.json")).trial
    assert trial.readings(EXPOSED)[0] == pytest.approx([0.015])
    assert trial.readings(KERNELS)[0] == pytest.approx([0.011])


def test_the_trace_of_one_rank_more_or_less_moves_no_phase(tmp_path: Path) -> None:
    paths = [rank_of(tmp_path, rank, world=3, operator="nccl:all_reduce") for rank in range(3)]
    expected = {
        name: pytest.approx(s) for name, s in loop_of(*paths).trial.ledger.typical().items()
    }
    for left in range(3):
        loop = loop_of(*(path for rank, path in enumerate(paths) if rank != left))
        assert loop.trial.ledger.typical() == expected
