"""Spans account for the work of GPUs, as a log that knows nothing of spans shows it.

Fake GPUs log every operation that they book on their clock. They must keep time: see
`tests/gpu/test_times.py`.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from dpbench.hardware.devices import open_devices
from dpbench.records import Case, Phase
from dpbench.records.activity import length
from dpbench.records.case import MOVING
from dpbench.records.schedule import Schedule
from tests.commands import ROOT
from tests.gpu.accounts import ROWS, Account, Launched, Recorded, TooSlow, in_log, steps_of
from tests.gpu.test_times import computes

GPUS = 3
BUSY_S = (0.3, 1.0, 4.0)
"""How long the GPUs are busy while the host launches the steps; a slow host gets longer."""
EXACT_NS = 1000.0
PHASES = {
    "Broadcast": Phase.REPLICATE,
    "AllGather": Phase.REPLICATE,
    "Reduce": Phase.REDUCE,
    "AllReduce": Phase.REDUCE,
    "ReduceScatter": Phase.REDUCE,
}
"""The phase of each of NCCL's kernels in the schedules of dpbench."""

WORK = {
    "HtoD": {Phase.SCATTER},
    "gemm": {Phase.FORWARD, Phase.BACKWARD},
    "SoftMax": {Phase.LOSS, Phase.BACKWARD},
}
"""The phases of copies from the host, products and the loss's kernels, by a part of their names."""

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or computes() or "Fake" not in torch.cuda.get_device_name(),
        reason="needs fake GPUs that keep time: FAKECUDA_NUMERICS=0 FAKECUDA_DATA=0",
    ),
]


IN_PROCESS = {
    "single": ("single", 1, ""),
    **{f"dp-{schedule}": ("dp", GPUS, schedule.value) for schedule in Schedule},
    "torch_dp": ("torch_dp", GPUS, ""),
}
"""The strategy, the number of GPUs and the schedule, by name."""
RANKS = ("ddp", "fsdp")

every_strategy = pytest.mark.parametrize("name", [*IN_PROCESS, *RANKS])


def in_process(name: str, folder: Path, busy_s: float) -> list[Recorded]:
    strategy, count, schedule = IN_PROCESS[name]
    case = Case(
        model="mlp",
        strategy=strategy,
        devices=count,
        batch_size=ROWS * count,
        device_kind="cuda",
        schedule=schedule,
    )
    devices = open_devices("cuda", count)
    return [steps_of(case, devices, folder / "log", busy_s)]


def in_ranks(name: str, folder: Path, busy_s: float) -> list[Recorded]:
    text = f"""
from pathlib import Path
from tests.gpu.accounts import of_ranks
of_ranks({name!r}, Path({str(folder)!r}), {busy_s})
"""
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return [pickle.loads(Path(file).read_bytes()) for file in done.stdout.split()]


@cache
def accounts(name: str) -> list[tuple[Recorded, Account]]:
    """Return what dpbench recorded in each process, beside what the log shows."""
    record = in_ranks if name in RANKS else in_process
    for busy_s in BUSY_S:
        with TemporaryDirectory() as folder:
            recorded = record(name, Path(folder), busy_s)
        try:
            count = 1 if name in RANKS else IN_PROCESS[name][1]
            return [(one, Account(one.log, count)) for one in recorded]
        except TooSlow as slow:
            late = slow
    raise late


def told(one: Launched) -> str:
    """Return a description of an operation for messages."""
    line = one.line
    return (
        f"step {one.step}: {line.name} on GPU {line.gpu}, stream {line.stream},"
        f" {line.start_ns}-{line.end_ns}, launched in"
        f" {[(m.phase.value, m.device, m.begin.end_ns, m.end.end_ns) for m in one.marks]}"
    )


@every_strategy
def test_a_span_has_the_times_of_its_events(name: str) -> None:
    for recorded, account in accounts(name):
        marks: dict[tuple[int, Phase, int], list[tuple[float, float]]] = {}
        spans: dict[tuple[int, Phase, int], list[tuple[float, float]]] = {}
        for mark in account.marks:
            times = account.on_host(mark.begin), account.on_host(mark.end)
            marks.setdefault((mark.step, mark.phase, mark.device), []).append(times)
        for span in recorded.spans:
            if span.device >= 0:
                times = span.start_s * 1e9, span.end_s * 1e9
                spans.setdefault((span.step, span.phase, span.device), []).append(times)
        assert {key: len(times) for key, times in spans.items()} == {
            key: len(times) for key, times in marks.items()
        }
        for key, times in spans.items():
            for found, expected in zip(sorted(times), sorted(marks[key]), strict=True):
                assert found == pytest.approx(expected, rel=0, abs=EXACT_NS), key


@every_strategy
def test_a_mark_is_on_the_gpu_of_its_device(name: str) -> None:
    """Rank i has GPU i, and so has device i of a process."""
    for _, account in accounts(name):
        assert account.marks
        for mark in account.marks:
            assert {mark.begin.gpu, mark.end.gpu} == {mark.device}, mark
            assert mark.begin.stream == mark.end.stream, mark


@every_strategy
def test_a_span_covers_the_operations_that_were_launched_in_it(name: str) -> None:
    """Those of its own stream run within it; those of others, for which it waits, end within it."""
    for _, account in accounts(name):
        for one in account.operations:
            line = one.line
            here = (line.gpu, line.stream)
            own = [mark for mark in one.marks if (mark.begin.gpu, mark.begin.stream) == here]
            assert all(mark.covers(line) for mark in own), told(one)
            if one.marks:
                on_its_gpu = [mark for mark in one.marks if mark.begin.gpu == line.gpu]
                latest = max(mark.end.end_ns for mark in on_its_gpu or one.marks)
                assert line.end_ns <= latest, told(one)


@every_strategy
def test_what_runs_within_a_span_on_its_stream_was_launched_in_it(name: str) -> None:
    for _, account in accounts(name):
        for one in account.operations:
            here = (one.line.gpu, one.line.stream)
            within = [
                mark
                for mark in account.marks
                if (mark.begin.gpu, mark.begin.stream) == here and mark.covers(one.line)
            ]
            assert {*within} <= {*one.marks}, told(one)


@every_strategy
def test_a_transfer_of_a_phase_that_moves_data_is_on_the_lanes_of_both_gpus(name: str) -> None:
    for _, account in accounts(name):
        for one in account.operations:
            if one.line.kind == "copy" and one.marks and one.marks[0].phase in MOVING:
                ends = {one.line.source, one.line.target} - {-1}
                assert ends <= {mark.begin.gpu for mark in one.marks}, told(one)


@pytest.mark.parametrize("name", RANKS)
def test_the_gpu_of_a_rank_is_the_current_one(name: str) -> None:
    for rank, (recorded, _) in enumerate(accounts(name)):
        assert {line.current for line in recorded.log} == {rank}


@every_strategy
def test_time_outside_spans_is_unattributed_to_the_microsecond(name: str) -> None:
    for recorded, account in accounts(name):
        for step, unattributed_s in enumerate(recorded.unattributed_s):
            expected = length(account.uncovered(step, account.on_host))
            assert unattributed_s * 1e9 == pytest.approx(expected, rel=0, abs=EXACT_NS), step


@every_strategy
def test_without_waits_for_the_host_only_operations_are_outside_spans(name: str) -> None:
    for recorded, account in accounts(name):
        for step in range(1, len(recorded.steps)):
            assert length(account.uncovered(step, in_log)) == length(account.outside(step))


OUTSIDE: dict[str, Counter[str]] = {}


@every_strategy
def test_every_operation_is_launched_in_a_phase(name: str) -> None:
    for _, account in accounts(name):
        outside = Counter(one.line.name for one in account.operations if not one.marks)
        assert outside == OUTSIDE.get(name, Counter())


@pytest.mark.parametrize("name", [*IN_PROCESS, "ddp"])
def test_work_that_its_name_tells_is_launched_in_its_phase(name: str) -> None:
    """Torch's fsdp copies lists of addresses from the host in forward and backward, too."""
    for _, account in accounts(name):
        seen = set()
        for one in account.operations:
            for text, phases in WORK.items():
                if text in one.line.name:
                    assert {mark.phase for mark in one.marks} <= phases, told(one)
                    seen |= {(text, mark.phase) for mark in one.marks}
        assert seen == {(text, phase) for text, phases in WORK.items() for phase in phases}


@every_strategy
def test_a_kernel_runs_on_the_gpu_of_its_phase(name: str) -> None:
    for _, account in accounts(name):
        for one in account.operations:
            gpus = {mark.begin.gpu for mark in one.marks}
            if gpus and one.line.kind == "kernel":
                assert one.line.gpu in gpus, told(one)


@pytest.mark.parametrize("name", [*IN_PROCESS, *RANKS])
def test_a_collective_runs_on_the_gpu_of_its_rank(name: str) -> None:
    for _, account in accounts(name):
        for one in account.operations:
            if one.line.kind == "collective":
                assert one.line.gpu == one.line.source, told(one)


@pytest.mark.parametrize("name", [name for name in IN_PROCESS if name.startswith("dp-")])
def test_a_collective_ends_within_its_phase(name: str) -> None:
    for _, account in accounts(name):
        collectives = [one for one in account.operations if one.line.kind == "collective"]
        for one in collectives:
            phase = PHASES[one.line.name.removeprefix("ncclDevKernel_").split("_")[0]]
            ends_ns = [
                mark.end.end_ns
                for mark in account.marks
                if (mark.step, mark.phase, mark.begin.gpu) == (one.step, phase, one.line.gpu)
            ]
            assert one.line.end_ns <= max(ends_ns, default=0), told(one)
            assert all(mark.phase is phase for mark in one.marks), told(one)
