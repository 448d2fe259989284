"""What a trace does not show is unknown: it is not 0, and no other phase."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpbench import observe
from dpbench.analysis import findings, summary
from dpbench.cli import main
from dpbench.observe.imported import ImportedLoop
from dpbench.records.resources import Resources
from tests.observe.kineto_files import EXCERPTS, Writer, loop_of

Event = dict[str, Any]
REDUCTION = "void sum_of_peers_kernel<float, 16, 8, false>(float**)"
"""A kernel of torch's symmetric memory, which is not named after NCCL."""


def diagnosis_of(loop: ImportedLoop) -> findings.Diagnosis:
    trials = observe.parts(loop.trial)
    (found,) = findings.diagnose(summary.rows(trials), trials, Resources())
    return found


def said(path: Path, *command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command prints about a trace that has just been imported."""
    store = ["--store", str(path.with_name("dpbench.db"))]
    for arguments in (["import", str(path)], [*command]):
        capsys.readouterr()
        main([*arguments, *store])
    return capsys.readouterr().out


# -- a device without readings of a metric


def changed(path: Path, change: Callable[[Event], Event | None]) -> Path:
    """Write the a100's trace of DistributedDataParallel with other events."""
    trace = json.loads(gzip.decompress((EXCERPTS / "a100-x2-ddp-rank0.json.gz").read_bytes()))
    events = [found for event in trace["traceEvents"] if (found := change(event))]
    path.write_text(json.dumps(trace | {"traceEvents": events}))
    return path


def unnamed(event: Event) -> Event | None:
    """Return an event without what tells a collective: torch's operators and all names of it."""
    name = event["name"]
    if name.startswith(("nccl:", "c10d::", "record_param_comms")):
        return None
    if "nccl" in name and event["cat"] == "kernel":
        own = {key: event["args"][key] for key in ("device", "stream", "correlation")}
        return event | {"name": REDUCTION, "args": own}
    return event


def unsynchronized(event: Event) -> Event | None:
    return None if "nccl" in event["name"] else event


@pytest.mark.parametrize("change", [unnamed, unsynchronized])
@pytest.mark.parametrize("command", ["explain", "report"])
def test_ranks_whose_trace_shows_no_collective_are_diagnosed_without_their_reduction(
    tmp_path, capsys, change, command
) -> None:
    path = changed(tmp_path / "ddp.json", change)
    assert said(path, command, capsys=capsys)
    found = diagnosis_of(loop_of(path))
    assert "reduction" not in {one.rule.key for one in found.findings}
    (question,) = [text for text in found.unjudged if "communication" in text]
    assert "device 0 shows no collective" in question


def two_devices(tmp_path: Path, *, idle: tuple[int, ...] = (), reduces: bool = False) -> Path:
    """Write steps of 10 ms in which device 0 works for 8 and device 1 for 2, but not in `idle`.

    The host launches for 1 ms, and runs no operator in the last one.
    """
    trace = Writer()
    for number in range(6):
        at = 10.0 * number
        trace.note(f"ProfilerStep#{number}", at, at + 10)
        trace.op("aten::linear", at, at + 1, **{"Sequence number": number})
        trace.kernel("sgemm", at, at + 1, at + 9)
        if number not in idle:
            trace.kernel("sgemm", at, at + 1, at + 3, device=1)
            if reduces:
                trace.kernel("ncclDevKernel_AllReduce", at, at + 3, at + 4, device=1, stream=20)
    return trace.write(tmp_path / "two.json")


def test_a_device_that_is_idle_in_a_step_has_a_reading_of_0_there(tmp_path) -> None:
    trial = loop_of(two_devices(tmp_path, idle=(2, 3))).trial
    busy_s = trial.readings("kernel_busy_s")
    assert busy_s[0] == pytest.approx([0.008] * 6)
    assert busy_s[1] == pytest.approx([0.002, 0.002, 0, 0, 0.002, 0.002])


def test_the_work_of_a_step_is_that_of_its_busiest_device(tmp_path) -> None:
    found = diagnosis_of(loop_of(two_devices(tmp_path)))
    (launches,) = [one.evidence for one in found.findings if one.rule.key == "launches"]
    assert launches.size_s is not None
    assert launches.size_s.value == pytest.approx(0.001)
    assert "the GPU needs 8.00 ms" in launches.numbers


# -- one step, whose beginning no device shows


@pytest.mark.parametrize("marked", [True, False])
def test_a_host_that_ends_its_only_step_after_the_devices_shows_the_step(
    tmp_path, capsys, marked
) -> None:
    trace = Writer()
    if marked:
        trace.note("ProfilerStep#1", 0, 500)
    trace.op("aten::linear", 1, 2, **{"Sequence number": 1})
    trace.kernel("tiny", 1, 2, 2.001)
    trace.op("AddmmBackward0", 3, 4, tid=2, **{"Fwd thread id": 1})
    trace.note("Optimizer.step#SGD.step", 5, 499)
    path = trace.write(tmp_path / "one.json")
    found = loop_of(path)
    (step,) = found.trial.steps
    assert step.seconds == pytest.approx(0.5, abs=0.003)
    assert step.warmup is not marked  # where no annotation marks it, it may have begun before
    assert found.traces[0].attributed.ahead_s == ()
    main(["import", str(path), "--store", str(tmp_path / "dpbench.db")])
    assert ("median step 500 ms" in capsys.readouterr().out) is marked


# -- backward without its marks


def old_kineto(tmp_path: Path, *, named: bool = True) -> Path:
    """Write a trace as torch 1.8 did: 30 ms of forward and 60 of backward, without the marks."""
    trace = Writer()
    for number in range(5):
        at = 100.0 * number
        trace.op("aten::conv2d", at, at + 29, cat="Operator")
        trace.kernel("conv_forward", at + 0.1, at + 0.2, at + 30.2)
        name = "CudnnConvolutionBackward" if named else "aten::convolution_backward"
        trace.op(name, at + 30.3, at + 89.3, tid=2, cat="Operator")
        trace.kernel("conv_backward", at + 30.3, at + 30.4, at + 90.4, tid=2)
        if named:
            trace.op("torch::autograd::AccumulateGrad", at + 89.4, at + 89.9, tid=2)
        trace.op("Optimizer.step#SGD.step", at + 90.5, at + 92.5, cat="Operator")
        trace.kernel("sgd", at + 90.5, at + 90.6, at + 92.5)
    return trace.write(tmp_path / "old.json")


def test_backward_of_a_trace_without_its_marks_is_told_by_the_names_of_its_operators(
    tmp_path,
) -> None:
    trial = loop_of(old_kineto(tmp_path)).trial
    for step, phases in [*zip(trial.steps, trial.ledger.phases, strict=True)][1:]:
        assert step.seconds == pytest.approx(0.1)
        assert phases["backward"] == pytest.approx(0.06, abs=5e-4)
        assert phases["forward"] == pytest.approx(0.03, abs=5e-4)
        assert phases["unattributed"] < 0.01
