"""Steps of imported traces: the times between their ends on the devices, whatever the host does.

The ends are found here by a second reader of the files, which shares no code with dpbench.
"""

from __future__ import annotations

import gzip
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dpbench.cli import main
from dpbench.observe import imported
from dpbench.observe.imported import ImportedLoop
from dpbench.records import HOST, Phase
from dpbench.store import Naming, Store
from tests.amounts import amounts
from tests.observe.kineto_files import EXCERPTS, WHOLE, Writer, loop_of, needs_whole_traces

EVERY_WHOLE = sorted(WHOLE.glob("*.json.gz")) if WHOLE.is_dir() else []


def notes_of(loop: ImportedLoop) -> list[str]:
    facts = loop.trial.facts.loop
    assert facts is not None
    return [one.problem for one in facts.unknown]


# -- the second reader


def events_of(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()).decode()
    text = re.sub(r"(?<=[:,\[\s])-?(?:nan|inf)(?=\s*[,}\]])", "null", text, flags=re.IGNORECASE)
    return [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]


def end_of(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]


def work_of(path: Path) -> tuple[list[list[dict[str, Any]]], list[dict[str, Any]]]:
    """Return the device activities that each step launched, and those whose launch is missing."""
    events = events_of(path)
    calls = {
        int(event["args"]["correlation"]): event["ts"]
        for event in events
        if event["cat"].lower().endswith("runtime") or event["cat"] == "cuda_driver"
        if "correlation" in event.get("args", {})
    }
    kinds = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset")
    work = [event for event in events if event["cat"].lower() in kinds]
    hosts = ("user_annotation", "cpu_op", "operator")
    marked = [
        (event["ts"], end_of(event))
        for event in events
        if event["name"].startswith("ProfilerStep") and event["cat"].lower() in hosts
    ]
    if not marked:  # one step, which ends with the optimizer's
        marked = [(0.0, end_of(event)) for event in events if "Optimizer.step#" in event["name"]]
    launched = [(calls.get(int(event["args"]["correlation"])), event) for event in work]
    steps = [
        [event for at, event in launched if at is not None and start <= at < end]
        for start, end in sorted(marked)
    ]
    return steps, [event for at, event in launched if at is None]


@pytest.mark.parametrize(
    "path", [*sorted(EXCERPTS.glob("*.json.gz")), *EVERY_WHOLE], ids=lambda path: path.name
)
def test_a_step_lasts_from_one_last_activity_of_the_devices_to_the_next(path: Path) -> None:
    steps, unlaunched = work_of(path)
    ends = [max(map(end_of, step)) for step in steps]
    trial = loop_of(path).trial
    found = [step.seconds for step in trial.steps]
    assert len(found) == len(steps)
    for seconds, (before, end) in zip(found[1:], pairwise(ends), strict=True):
        assert seconds == pytest.approx((end - before) / 1e6, rel=0.01)
    began = max(map(end_of, unlaunched), default=min(event["ts"] for event in steps[0]))
    assert found[0] == pytest.approx((ends[0] - began) / 1e6, rel=0.01)
    # without the work of the step before, the first step has no known beginning
    assert [step.warmup for step in trial.steps] == [not unlaunched] + [False] * (len(steps) - 1)


def test_steps_of_devices_that_lag_by_two_steps_are_not_those_of_the_host() -> None:
    found = loop_of(EXCERPTS / "mi300x-x8-ddp-rank0.json.gz")
    assert [round(1e3 * step.seconds, 2) for step in found.trial.steps] == [18.98, 18.98, 18.55]
    (trace,) = found.traces
    assert [round(1e3 * one, 1) for one in trace.attributed.ahead_s] == [32.3, 35.3, 37.9]
    # the trace began while the devices did the work of the steps before: it lacks no launch
    assert trace.attributed.unlaunched == 0
    assert notes_of(found) == []


def test_a_step_that_the_host_launched_in_59_ms_takes_the_347_ms_of_the_device() -> None:
    found = loop_of(EXCERPTS / "h100-x1-vgg13.json.gz")
    (step,) = found.trial.steps
    assert step.seconds == pytest.approx(0.347, abs=5e-4)
    assert step.warmup
    (phases,) = found.trial.ledger.phases
    assert phases["backward"] == pytest.approx(0.233, abs=5e-4)
    assert phases["forward"] == pytest.approx(0.110, abs=5e-4)
    assert phases["unattributed"] < 1e-4


@needs_whole_traces
@pytest.mark.slow
def test_whole_traces_have_the_steps_of_their_excerpts() -> None:
    for whole, excerpt in (
        ("mi300x-x8-resnet-ddp-rank0", "mi300x-x8-ddp-rank0"),
        ("h100-x1-vgg13-train", "h100-x1-vgg13"),
    ):
        steps = [
            loop_of(path).trial
            for path in (WHOLE / f"{whole}.json.gz", EXCERPTS / f"{excerpt}.json.gz")
        ]
        one, other = ([step.seconds for step in trial.steps] for trial in steps)
        assert one == pytest.approx(other, abs=1e-9)


# -- traces that are written by hand


def lagging(tmp_path: Path, *, numbers: tuple[int, ...] = (1, 2, 3), **facts: Any) -> Path:
    """Write steps of 10 ms on the host, 30 on the device: forward 12, backward 15, optimizer 3."""
    trace = Writer(**facts)
    for place, number in enumerate(numbers):
        at, device_at = 10.0 * place, 5 + 30.0 * place
        trace.note(f"ProfilerStep#{number}", at, at + 10)
        trace.op("aten::linear", at + 1, at + 3, **{"Sequence number": number})
        trace.kernel("sgemm", at + 2, device_at, device_at + 12)
        trace.op("AddmmBackward0", at + 4, at + 6, tid=2, **{"Fwd thread id": 1})
        trace.kernel("sgemm_backward", at + 5, device_at + 12, device_at + 27, tid=2)
        trace.note("Optimizer.step#SGD.step", at + 7, at + 9)
        trace.kernel("sgd", at + 8, device_at + 27, device_at + 30)
    return trace.write(tmp_path / "lagging.json")


def test_work_counts_for_the_step_and_the_phase_that_launched_it(tmp_path) -> None:
    found = loop_of(lagging(tmp_path))
    assert [step.seconds for step in found.trial.steps] == pytest.approx([0.03] * 3)
    assert [step.end_s for step in found.trial.steps] == pytest.approx([0.035, 0.065, 0.095])
    for phases in found.trial.ledger.phases:
        assert phases == {
            "forward": pytest.approx(0.012),
            "backward": pytest.approx(0.015),
            "optimizer": pytest.approx(0.003),
            "unattributed": pytest.approx(0, abs=1e-9),
        }
    (trace,) = found.traces
    assert trace.attributed.ahead_s == pytest.approx((0.025, 0.045, 0.065))
    # what the host did in each step is its own time
    assert trace.attributed.host[2]["forward"] == pytest.approx(0.002)


def test_work_that_overlaps_two_steps_counts_for_the_step_that_launched_it(tmp_path) -> None:
    trace = Writer()
    for number in range(2):
        at = 10.0 * number
        trace.note(f"ProfilerStep#{number}", at, at + 10)
        trace.op("aten::linear", at + 1, at + 3, **{"Sequence number": number})
        trace.kernel("sgemm", at + 2, 20 + 30 * number, 50 + 30 * number)
    trace.op("aten::cross_entropy_loss", 14, 16, **{"Sequence number": 3})
    trace.kernel("nll_loss", 15, 30, 70, stream=8)  # begins within the work of the step before
    spans = loop_of(trace.write(tmp_path / "a.json")).trial.spans
    (loss,) = [span for span in spans if span.phase is Phase.LOSS]
    assert (loss.step, loss.end_s - loss.start_s) == (1, pytest.approx(0.02))


def test_the_devices_wait_for_data_only_where_they_do_no_work(tmp_path) -> None:
    trace = Writer()
    for number in range(3):
        at = 100.0 * number
        trace.note(f"ProfilerStep#{number}", at, at + 100)
        trace.op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, at + 60)
        trace.op("aten::linear", at + 60, at + 70, **{"Sequence number": number})
        trace.kernel("sgemm", at + 65, at + 65, at + 120)
    found = loop_of(trace.write(tmp_path / "a.json"))
    for phases in found.trial.ledger.phases[1:]:
        # 20 of the 60 ms pass beside the work of the step before
        assert phases["data"] == pytest.approx(0.04)
        assert phases["forward"] == pytest.approx(0.06)
    assert found.traces[0].attributed.host[1]["data"] == pytest.approx(0.06)
    assert {span.phase for span in found.trial.spans if span.device == HOST} == {
        Phase.DATA,
        Phase.FORWARD,
    }


def test_the_first_step_is_whole_if_the_devices_still_did_the_work_before_it(tmp_path) -> None:
    path = lagging(tmp_path)
    trace = json.loads(path.read_text())
    before = {
        "ph": "X",
        "cat": "kernel",
        "name": "earlier",
        "pid": 0,
        "tid": 7,
        "ts": 100,
        "dur": 4400,
    }
    trace["traceEvents"].append(before | {"args": {"device": 0, "stream": 7, "correlation": 999}})
    path.write_text(json.dumps(trace))
    found = loop_of(path)
    assert [step.warmup for step in found.trial.steps] == [False] * 3
    assert found.trial.steps[0].seconds == pytest.approx(0.0305)  # from 4.5 ms on
    assert found.traces[0].attributed.unlaunched == 0
    # the same kernel after the first launched one lacks its launch
    trace["traceEvents"][-1]["ts"] = 5100
    path.write_text(json.dumps(trace))
    later = loop_of(path)
    assert later.traces[0].attributed.unlaunched == 1
    assert later.trial.steps[0].warmup
    (lacks,) = (note for note in notes_of(later) if "launch" in note)
    assert amounts(lacks)[:2] == ["1", "10"]


def test_a_step_after_steps_that_were_not_recorded_is_not_timed(tmp_path) -> None:
    found = loop_of(lagging(tmp_path, numbers=(1, 2, 7, 8, 1)))
    assert [step.warmup for step in found.trial.steps] == [True, False, True, False, True]
    (note,) = notes_of(found)
    assert "ProfilerStep#1, ProfilerStep#7, ProfilerStep#1 (2)" in note


def test_a_step_that_launched_no_work_is_left_out_and_named(tmp_path) -> None:
    path = lagging(tmp_path)
    trace = json.loads(path.read_text())
    empty = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#4", "pid": 100, "tid": 1}
    trace["traceEvents"].append(empty | {"ts": 30000, "dur": 20})
    path.write_text(json.dumps(trace))
    found = loop_of(path)
    assert found.traces[0].attributed.names == (
        "ProfilerStep#1",
        "ProfilerStep#2",
        "ProfilerStep#3",
    )
    assert "ProfilerStep#4" in notes_of(found)[1]


def without_launches(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["cat"] != "cuda_runtime"]


def without_devices(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in without_launches(events) if event["cat"] != "kernel"]


def with_a_late_copy(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Let the first step launch work that ends after all the work of the second."""
    copy = next(event for event in events if event["name"] == "sgemm")
    return [copy | {"ts": 5000, "dur": 70000} if event is copy else event for event in events]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_devices, "no work of a device"),
        (without_launches, "no launch"),
        (with_a_late_copy, "the work of ProfilerStep#1 after that of ProfilerStep#2"),
    ],
)
def test_a_trace_that_does_not_show_the_ends_of_its_steps_keeps_those_of_the_host(
    tmp_path, change, said
) -> None:
    path = lagging(tmp_path)
    trace = json.loads(path.read_text())
    path.write_text(json.dumps(trace | {"traceEvents": change(trace["traceEvents"])}))
    found = loop_of(path)
    assert [step.seconds for step in found.trial.steps] == pytest.approx([0.01] * 3)
    assert found.traces[0].attributed.ahead_s == ()
    assert any(said in note and "intervals of the host" in note for note in notes_of(found))
    imported.store(tmp_path / "db", [found], Naming())
    with Store.read(tmp_path / "db") as opened:
        (run,) = opened.runs()
        (file,) = opened.trials(run.id)[0].provenance["trace"]["files"]
    assert file["steps"] == "host"


def test_the_lead_of_the_host_is_in_the_json_and_on_a_line_of_its_own(tmp_path, capsys) -> None:
    path = lagging(tmp_path)
    main(["import", str(path), "--store", str(tmp_path / "db"), "--json"])
    (file,) = json.loads(capsys.readouterr().out)["files"]
    assert [step["host_ahead_s"] for step in file["steps"]] == pytest.approx([0.025, 0.045, 0.065])
    assert [step["partial"] for step in file["steps"]] == [True, False, False]
    main(["import", str(path), "--store", str(tmp_path / "db")])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " host: " in line]
    assert "45.0 ms" in line
