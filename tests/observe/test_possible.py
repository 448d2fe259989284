"""A trace that no machine can have recorded is refused, or labelled and not judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpbench.analysis import findings, summary
from dpbench.analysis.decision import Choice
from dpbench.cli import main
from dpbench.observe import imported, kineto, parts, possible, verdict
from dpbench.observe.attribution import attribute
from dpbench.records import UNATTRIBUTED
from dpbench.records.activity import CLOCKS_AGREE_S
from dpbench.records.files import UnreadableFile
from dpbench.records.resources import Resources
from tests.observe.kineto_files import EXCERPTS, WHOLE, Writer, loop_of, needs_whole_traces

Event = dict[str, Any]
STEPS = 12
BEGINS_MS = 5000.0
"""Later than `kineto.FIRST_US`: the clock of the profiler does not begin with the trace."""


def plain() -> Writer:
    """Write steps of 10 ms on host and device: forward 3, backward 5, optimizer 1, idle 1."""
    trace = Writer()
    for number in range(STEPS):
        at = BEGINS_MS + 10.0 * number
        trace.note(f"ProfilerStep#{number}", at, at + 9.99)
        trace.op("aten::linear", at + 0.1, at + 2.9, **{"Sequence number": number})
        trace.kernel("gemm_forward", at + 0.12, at + 0.2, at + 3.2)
        name = "autograd::engine::evaluate_function: AddmmBackward0"
        trace.op(name, at + 3.2, at + 8, tid=2, **{"Fwd thread id": 1, "Sequence number": number})
        trace.kernel("gemm_backward", at + 3.21, at + 3.3, at + 8.3, tid=2)
        trace.note("Optimizer.step#SGD.step", at + 8.3, at + 9.5)
        trace.kernel("sgd", at + 8.32, at + 8.4, at + 9.4)
    return trace


def written(tmp_path: Path, change: Callable[[list[Event]], object] = lambda events: None) -> Path:
    """Write the plain trace after a change of its list of events."""
    trace = plain()
    change(trace.events)
    return trace.write(tmp_path / "trace.json")


def doubts_of(path: Path) -> list[possible.Doubt]:
    profile = kineto.read(path)
    return possible.judged(profile, attribute(profile))


def verdict_of(path: Path) -> verdict.Answer:
    trials = parts(loop_of(path).trial)
    rows = summary.rows(trials)
    diagnoses = findings.diagnose(rows, trials, Resources())
    (answer,) = verdict.answers(rows, trials, diagnoses, Resources())
    return answer


def kernels(events: list[Event], name: str = "") -> list[Event]:
    return [
        event for event in events if event["cat"] == "kernel" and event["name"].startswith(name)
    ]


def test_a_plain_trace_is_beyond_doubt(tmp_path) -> None:
    path = written(tmp_path)
    assert doubts_of(path) == []
    found = loop_of(path).trial
    assert found.timed == pytest.approx([0.01] * (STEPS - 1))
    assert found.ledger.phases[1]["backward"] == pytest.approx(0.0051)
    assert "UNCLEAR" not in summary.labels(found)


# -- files of which no number can be right


def second_process(events: list[Event]) -> None:
    copies = [event | {"ts": event["ts"] + 300, "args": {**event["args"]}} for event in events]
    for event in copies:
        if event["cat"] == "kernel":
            event["args"]["device"] = event["pid"] = 1
        else:
            event["pid"] = 200
    events += copies


def second_process_of_the_same_number(events: list[Event]) -> None:
    second_process(events)
    for event in events:
        if event["cat"] != "kernel":
            event["pid"] = 1


def second_rank_with_ids_of_its_own(events: list[Event]) -> None:
    second_process_of_the_same_number(events)
    for event in events[len(events) // 2 :]:
        if "correlation" in event["args"]:
            event["args"]["correlation"] += 1000


def nanoseconds(events: list[Event]) -> None:
    for event in kernels(events):
        event["ts"], event["dur"] = event["ts"] * 1e3, event["dur"] * 1e3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (second_process, "2 processes (100, 200)"),
        (second_process_of_the_same_number, "processes"),
        (second_rank_with_ids_of_its_own, "do not end within"),
        (nanoseconds, "one clock, in one unit"),
    ],
)
def test_a_file_of_several_processes_or_clocks_is_refused_by_reason(
    tmp_path, capsys, change, said
) -> None:
    path = written(tmp_path, change)
    with pytest.raises(UnreadableFile, match=r"trace\.json") as refused:
        imported.load([path])
    assert said in str(refused.value)
    store = tmp_path / "dpbench.db"
    with pytest.raises(SystemExit) as ended:
        main(["import", str(path), "--store", str(store)])
    assert ended.value.code == 2
    assert not store.exists()


def test_calls_within_a_call_are_parts_of_it(tmp_path) -> None:
    def nested(events: list[Event]) -> None:
        calls = [event for event in events if event["cat"] == "cuda_runtime"]
        events += [call | {"cat": "cuda_driver", "name": "cuLaunchKernel"} for call in calls]

    assert doubts_of(written(tmp_path, nested)) == []


# -- traces whose phases are unknown


def overflowing(events: list[Event]) -> None:
    kernels(events, "gemm_backward")[0]["dur"] = 1.6e7


def overlapping(events: list[Event]) -> None:
    for event in kernels(events, "gemm_forward"):
        event["dur"] += 1000


def without_lengths(events: list[Event]) -> None:
    for event in kernels(events):
        event["dur"] = 0


def without_times(events: list[Event]) -> None:
    for event in events[len(events) // 2 :]:
        event["ts"] = event["dur"] = 0.0


def before_launch(events: list[Event]) -> None:
    for event in kernels(events):
        event["ts"] -= 300 + 1e6 * CLOCKS_AGREE_S


def without_kernels(events: list[Event]) -> None:
    events[:] = [event for event in events if event["cat"] != "kernel"]


def without_backward(events: list[Event]) -> None:
    for event in events:
        if event["name"].startswith("autograd"):
            event["name"] = "aten::mm"
            event["args"] = {}


def recorded_for_half(events: list[Event]) -> None:
    window = {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": ""}
    events.append(window | {"ts": 1e3 * BEGINS_MS, "dur": 1e4 * STEPS / 2})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (overflowing, "begin before an earlier one on their stream has ended, by up to 5.00 ms"),
        (overlapping, "by up to 900 µs"),
        (without_lengths, "take no time"),
        (without_times, "left out"),
        (before_launch, "begin before the call that launched them"),
        (without_kernels, "recorded no work of a GPU"),
        (without_backward, "tells backward from forward"),
        (recorded_for_half, "outside the time in which the profiler recorded"),
    ],
)
def test_an_impossible_or_incomplete_trace_has_a_label_and_no_verdict_on_phases(
    tmp_path, capsys, change, said
) -> None:
    path = written(tmp_path, change)
    (doubt,) = [one for one in doubts_of(path) if said in one.says]
    assert doubt.hides_phases
    trial = loop_of(path).trial
    assert trial.case.device_kind == "cuda"
    assert "UNCLEAR" in summary.labels(trial)
    assert "CPU-ONLY" not in summary.labels(trial)
    assert all(set(phases) == {UNATTRIBUTED} for phases in trial.ledger.phases)
    answer = verdict_of(path)
    assert answer.choice is Choice.UNKNOWN
    assert said in answer.certainty
    main(["import", str(path), "--store", str(tmp_path / "db"), "--json"])
    (file,) = json.loads(capsys.readouterr().out)["files"]
    assert {step["phases"] for step in file["steps"]} == {None}
    assert any(said in note for note in file["notes"])
    main(["import", str(path), "--store", str(tmp_path / "db")])
    assert "phases are unknown" in capsys.readouterr().out


def test_a_trace_without_launches_is_one_of_a_cpu(tmp_path) -> None:
    def only_host(events: list[Event]) -> None:
        events[:] = [event for event in events if event["cat"] not in ("kernel", "cuda_runtime")]

    trial = loop_of(written(tmp_path, only_host)).trial
    assert trial.case.device_kind == "cpu"
    assert "UNCLEAR" not in summary.labels(trial)


# -- what real profilers do


def test_one_event_without_a_time_is_left_out_and_noted(tmp_path) -> None:
    def one(events: list[Event]) -> None:
        events.append(events[0] | {"cat": "cpu_op", "name": "aten::empty", "ts": 0.0, "dur": 0.0})

    path = written(tmp_path, one)
    (doubt,) = doubts_of(path)
    assert not doubt.hides_phases
    assert "left out 1 of" in doubt.says
    found = loop_of(path).trial
    assert found.timed == pytest.approx([0.01] * (STEPS - 1))
    assert found.ledger.phases[1]["forward"] == pytest.approx(0.0031)


def test_times_of_a_clock_that_begins_with_the_trace_are_times(tmp_path) -> None:
    trace = plain()
    for event in trace.events:
        event["ts"] -= 1e3 * BEGINS_MS
    assert trace.events[0]["ts"] == 0
    assert doubts_of(trace.write(tmp_path / "trace.json")) == []


def test_rounding_and_the_clocks_of_host_and_device_are_tolerated(tmp_path) -> None:
    def rounded(events: list[Event]) -> None:
        for event in kernels(events, "gemm_forward"):
            event["ts"] -= 50 + 1e6 * CLOCKS_AGREE_S  # it was 80 µs after its launch
            event["dur"] += 50 + 1e6 * CLOCKS_AGREE_S + 100 + 2  # the next one was 100 µs later

    assert doubts_of(written(tmp_path, rounded)) == []


@pytest.mark.parametrize("call", ["cudaLaunchKernelExC", "cudaGraphLaunch"])
def test_kernels_of_graphs_and_of_programmatic_launches_may_overlap(tmp_path, call) -> None:
    def early(events: list[Event]) -> None:
        overlapping(events)
        for event in events:
            if event["cat"] == "cuda_runtime":
                event["name"] = call

    assert doubts_of(written(tmp_path, early)) == []


def test_doubts_about_one_rank_leave_the_phases_of_its_loop_unknown(tmp_path) -> None:
    def rank(number: int, change: Callable[[list[Event]], object]) -> Path:
        trace = plain()
        change(trace.events)
        trace.facts["distributedInfo"] = {"backend": "nccl", "rank": number, "world_size": 2}
        return trace.write(tmp_path / f"rank{number}.json")

    trial = loop_of(rank(0, lambda events: None), rank(1, before_launch)).trial
    assert trial.spans == ()
    assert "UNCLEAR" in summary.labels(trial)


@pytest.mark.parametrize("path", sorted(EXCERPTS.glob("*.gz")), ids=lambda path: path.name)
def test_excerpts_of_real_traces_are_beyond_doubt(path: Path) -> None:
    assert doubts_of(path) == []


@needs_whole_traces
def test_whole_real_traces_are_beyond_doubt() -> None:
    assert {path.name: doubts_of(path) for path in sorted(WHOLE.glob("*.json.gz"))} == {
        path.name: [] for path in sorted(WHOLE.glob("*.json.gz"))
    }
