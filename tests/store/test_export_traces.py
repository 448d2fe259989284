"""Traces: Chrome traces hold every span, step and sample and nest legally.

HTA reads the split ones.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpbench import cli
from dpbench.analysis.summary import labels
from dpbench.records import HOST, Phase, Source, Span, Status, Trial, Verified, observed
from dpbench.records.registry import Parallelism
from dpbench.store import export
from dpbench.store.export.traces import TICKS, lanes
from tests import exported
from tests.exported import DP, PLANNED, PROVENANCE, STEP_S, made, stored


@pytest.fixture
def dpbench(tmp_path, monkeypatch, capfd):
    return exported.command(tmp_path, monkeypatch, capfd)


def drawn(*trials: Trial) -> dict[str, Any]:
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(
        "".join(export.trace("f" * 32, PROVENANCE, trials, labels)), parse_constant=refuse
    )


def tracks(trace: dict[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return complete events by the names of their process and track."""
    names: dict[tuple[str, int, int], str] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"].endswith("_name"):
            names[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            process = names["process_name", event["pid"], 0]
            found[process, names["thread_name", event["pid"], event["tid"]]].append(event)
    return dict(found)


def check_nesting(events: Iterable[dict[str, Any]]) -> None:
    """Check that any two events on one track are disjoint or nested."""
    ends: list[float] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        end = event["ts"] + event["dur"]  # in floating point, as readers add them
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        assert not ends or end <= ends[-1], event
        ends.append(end)


def test_every_span_and_step_is_one_event_in_its_place_and_counters_are_the_samples():
    trial = made()
    found = tracks(drawn(trial))
    name = "mlp dp[reference] x2 batch 64 round 0 [MEASURED CPU-ONLY]"
    wanted = Counter(
        (("host" if s.device == HOST else f"device {s.device}") + f" {s.phase}", s.step)
        for s in trial.spans
    )
    seen = Counter(
        (track, event["args"]["step"])
        for (process, track), events in found.items()
        if track != "steps"
        for event in events
    )
    assert {process for process, _ in found} == {name}
    assert seen == wanted
    zero_s = trial.steps[0].start_s
    for span in trial.spans:
        place = "host" if span.device == HOST else f"device {span.device}"
        (event,) = [
            e for e in found[name, f"{place} {span.phase}"] if e["args"]["step"] == span.step
        ]
        assert event["name"] == span.phase
        assert event["cat"] == "host"
        assert event["ts"] == pytest.approx((span.start_s - zero_s) * 1e6, abs=0.003)
        assert event["dur"] == pytest.approx((span.end_s - span.start_s) * 1e6, abs=0.003)
    steps = found[name, "steps"]
    assert [e["name"] for e in steps] == [f"step {i}" for i in range(6)]
    assert [e["args"] for e in steps] == [
        {"seconds": s.seconds, "warmup": s.warmup} for s in trial.steps
    ]
    assert [e["ts"] for e in steps] == pytest.approx(
        [i * STEP_S * 1e6 for i in range(6)], abs=0.003
    )
    counters = [e for e in drawn(trial)["traceEvents"] if e["ph"] == "C"]
    assert Counter(e["name"] for e in counters) == {
        "host power_w": 6,
        "device 0 power_w": 6,
        "device 1 power_w": 6,
    }
    read_s = {s.time_s - zero_s for s in trial.samples if s.time_s > 0}
    assert sorted({e["ts"] for e in counters}) == pytest.approx(
        [at_s * 1e6 for at_s in sorted(read_s)], abs=0.003
    )
    assert {(e["name"], e["args"]["power_w"]) for e in counters} >= {
        ("device 1 power_w", 101.5),
        ("host power_w", 99.5),
    }


def test_what_has_no_place_in_time_and_whence_it_comes_stand_beside_the_events():
    trace = drawn(made(), made(number=1, at_s=9000.0))
    facts = trace["otherData"]
    assert facts["run_id"] == "f" * 32
    assert facts["provenance"]["host"] == {
        key: value for key, value in PROVENANCE["host"].items() if key != "name"
    }
    assert "secret-host" not in json.dumps(trace)
    assert [one["pid"] for one in facts["trials"]] == [1, 2]
    assert facts["trials"][0]["untimed"] == [[1, "kernel_busy_s", 0.25]]
    assert facts["trials"][0]["labels"] == ["MEASURED", "CPU-ONLY"]
    assert facts["trials"][0]["memory"] == [[0, 2**20, "allocator"]]
    assert facts["trials"][0]["provenance"] == {"torch": "2.13.0"}
    first = {
        pid: min(e["ts"] for e in trace["traceEvents"] if e["pid"] == pid and e["ph"] == "X")
        for pid in (1, 2)
    }
    assert first == {1: 0.0, 2: pytest.approx(4e9, abs=1)}, "one zero for all"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device_kind": "cuda"}, "[MEASURED]"),
        ({"device_kind": "cuda", "placement": "colocated"}, "[MEASURED COLOCATED]"),
        ({"device_kind": "emulated"}, "[MEASURED EMULATED]"),
    ],
)
def test_the_name_of_a_process_says_the_labels(changes, said):
    (process, _), *_ = tracks(drawn(made(replace(DP, **changes))))
    assert process.endswith(said)


def test_a_predicted_or_unverified_trial_says_so():
    trial = made(source=Source.PREDICTED, verified=Verified.NO)
    (process, _), *_ = tracks(drawn(trial))
    assert process.endswith("[PREDICTED EXPERIMENTAL CPU-ONLY UNVERIFIED]")


def test_spans_that_overlap_go_on_further_tracks_and_those_within_one_another_do_not():
    at = 5000.0
    rough = [(0.0, 4.0), (1.0, 2.0), (2.0, 3.0), (3.0, 5.0), (5.0, 6.0)]
    spans = tuple(Span(0, Phase.REPLICATE, 1, "host", at + a / 1e3, at + b / 1e3) for a, b in rough)
    found = tracks(drawn(made(steps=1, spans=spans)))
    lanes = {
        track: [(e["ts"], e["dur"]) for e in events]
        for (_, track), events in found.items()
        if track != "steps"
    }
    assert lanes == {
        "device 1 replicate": [(0, 4000), (1000, 1000), (2000, 1000), (5000, 1000)],
        "device 1 replicate #2": [(3000, 2000)],
    }


NS = st.integers(0, 10**12)
INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=40)


@given(INTERVALS, st.booleans(), NS)
def test_lanes_keep_all_intervals_apart_or_nested_and_are_no_more_than_overlap(
    found, nested, offset
):
    tick_s = 1e-6 / TICKS
    timed = [
        ((offset + a) * tick_s, (offset + a + length) * tick_s, i)
        for i, (a, length) in enumerate(found)
    ]
    laid = lanes(timed, 0.0, nested=nested)
    assert sorted(what for *_, what in laid) == list(range(len(found)))
    for number in {lane for lane, *_ in laid}:
        mine = [(start, end) for lane, start, end, _ in laid if lane == number]
        for i, (a, b) in enumerate(mine):
            for c, d in mine[i + 1 :]:
                assert b <= c or (nested and a <= c <= d <= b)
    depth = max(
        (sum(a <= c < a + max(1, length) for a, length in found) for c, _ in found), default=0
    )
    assert len({lane for lane, *_ in laid}) <= depth


@given(st.lists(st.tuples(st.integers(0, 10**11), st.integers(0, 10**9)), min_size=1, max_size=20))
def test_events_that_meet_do_not_overlap_when_their_ends_are_added_up_in_floating_point(found):
    starts = sorted({a for a, _ in found})
    met = [Span(0, Phase.LOSS, 0, "host", a * 1e-9, b * 1e-9) for a, b in pairwise(starts)]
    trial = made(steps=0, spans=tuple(met), samples=())
    for events in tracks(drawn(trial)).values():
        check_nesting(events)


def test_every_track_nests_when_spans_lie_anywhere_and_gpu_steps_abut():
    trial = made(replace(DP, device_kind="cuda"), steps=300, at_s=86_400.123456789)
    late = [s for s in trial.spans if s.phase is Phase.BACKWARD]
    shifted = tuple(
        replace(s, start_s=s.start_s + STEP_S / 10, end_s=s.end_s + STEP_S / 10) for s in late
    )
    found = tracks(drawn(replace(trial, spans=(*trial.spans, *shifted))))
    for events in found.values():
        check_nesting(events)
    names = {track for _, track in found}
    assert "steps #2" not in names, "steps that meet share a track"
    assert "device 1 backward #2" in names


# -- the command


def processes(text: str) -> list[str]:
    events = json.loads(text)["traceEvents"]
    return [e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"]


def test_by_default_the_first_good_trial_of_each_case_is_drawn_and_with_all_every_trial(
    dpbench, tmp_path
):
    other = replace(DP, model="lstm")
    bad = Trial(case=other, status=Status.FAILED, reason="it\n'broke'")
    stored(
        tmp_path / "dpbench.db",
        bad,
        made(),
        made(other, number=1, at_s=6000.0),
        made(number=1, at_s=7000.0),
    )
    code, out, err = dpbench("export", "trace")
    assert (code, err) == (0, "")
    assert [name.partition(" [")[0] for name in processes(out)] == [
        f"{other.label} round 1",
        f"{DP.label} round 0",
    ]
    code, out, _ = dpbench("export", "trace", "--all", "--output", "all.json")
    assert (code, out) == (0, "")
    names = processes(Path("all.json").read_text())
    assert len(names) == 4
    assert names[0] == f"{other.label} round 0 failed [MEASURED CPU-ONLY]"


@pytest.mark.parametrize(
    ("part", "models"),
    [
        ("2", ["lstm"]),
        ("lstm", ["lstm"]),
        ("dp[reference]", ["mlp", "lstm"]),
        ("mlp dp[reference] x2 batch 6", ["mlp"]),
        ("seed=7", ["mlp"]),
        ("mlp dp[reference] x2 batch 64", ["mlp"]),
    ],
)
def test_a_case_is_named_by_its_number_or_part_of_its_name(dpbench, tmp_path, part, models):
    stored(
        tmp_path / "dpbench.db",
        made(replace(DP, seed=7 if part == "seed=7" else 0)),
        made(replace(DP, model="lstm")),
    )
    names = processes(dpbench("export", "trace", "--case", part)[1])
    assert [name.split()[0] for name in names] == models


def test_a_whole_name_is_that_case_alone(dpbench, tmp_path):
    stored(tmp_path / "dpbench.db", made(replace(DP, batch_size=640)), made())
    assert len(processes(dpbench("export", "trace", "--case", "batch 64")[1])) == 2
    (name,) = processes(dpbench("export", "trace", "--case", DP.label)[1])
    assert "batch 64 " in name


def test_a_case_that_is_not_there_is_named_with_those_that_are(dpbench, tmp_path):
    other = replace(DP, model="lstm")
    stored(tmp_path / "dpbench.db", made(), made(other))
    for part in ("vgg", "3", "0"):
        code, out, err = dpbench("export", "trace", "--case", part)
        assert (code, out) == (64, "")
        assert f"no case {part}: give --case" in err
        assert err.endswith(f": 1 {DP.label}; 2 {other.label}\n")


def test_cases_that_differ_in_what_the_label_leaves_out_have_names_of_their_own():
    limit = replace(DP, options=(("role", "limit"),), device_ids=(1, 0))
    assert export.name(DP) == DP.label == limit.label
    assert export.name(limit) == f"{DP.label} device_ids=1,0 options=role:limit"
    assert export.name(replace(DP, optimizer="adam")) == f"{DP.label} adam optimizer"
    loop = replace(DP, strategy="script", declared=observed.traits(Parallelism.NONE))
    assert export.name(loop) == loop.label


def test_a_run_without_a_measured_trial_says_so(dpbench, tmp_path):
    stored(
        tmp_path / "dpbench.db",
        Trial(case=DP, status=Status.OOM),
        made(verified=Verified.NO, number=1),
    )
    code, out, err = dpbench("export", "trace")
    assert (code, out) == (64, "")
    assert "no measured trial" in err
    assert "oom" in err
    assert "unverified" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("jsonl", "--case", "1"), ["--case", "trace"]),
        (("csv", "--split", "x"), ["--split", "trace"]),
        (("trace", "--split", "x", "--all"), ["--all"]),
        (("trace", "--split", "x", "--output", "y"), ["--output"]),
        (("pyperf", "--all"), ["--all", "--run"]),
        (("parquet",), ["--output"]),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_anything_is_read(
    dpbench, tmp_path, arguments, words
):
    code, out, err = dpbench("export", *arguments)
    assert (code, out, err.count("\n")) == (64, "", 1)
    assert all(word in err for word in words)
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_leaves_ends_the_export_as_a_closed_pipe_does(tmp_path):
    stored(tmp_path / "dpbench.db", made(steps=2000))
    root = Path(cli.__file__).parents[2]
    command = [
        sys.executable,
        "-m",
        "dpbench",
        "export",
        "trace",
        "--store",
        str(tmp_path / "dpbench.db"),
    ]
    with subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read().decode() == "the output was closed\n"


# -- Holistic Trace Analysis

needs_hta = pytest.mark.skipif(
    not importlib.util.find_spec("hta"),
    reason="HolisticTraceAnalysis is not installed: pip install '.[hta]'",
)
ANALYSE = """
import json, sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_dir=sys.argv[1])
ranks = analysis.t.get_ranks()
kernels = analysis.get_gpu_kernel_breakdown(visualize=False)[1]
print(json.dumps({
    "ranks": ranks,
    "temporal": analysis.get_temporal_breakdown(visualize=False).to_dict("records"),
    "idle": [
        analysis.get_idle_time_breakdown(ranks=[r], visualize=False)[0].to_dict("records")
        for r in ranks
    ],
    "overlap": analysis.get_comm_comp_overlap(visualize=False).to_dict("records"),
    "kernels": kernels.to_dict("records"),
    "iterations": [len(analysis.t.get_iterations(r)) for r in ranks],
}, default=float))
"""


def analysed(folder: Path) -> dict[str, Any]:
    """Return the result of HTA in a separate process, because it forks and warns about its code."""
    done = subprocess.run(
        [sys.executable, "-c", ANALYSE, folder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def covered_us(trial: Trial, device: int, phases: set[Phase]) -> float:
    """Return the union of a device's spans of some phases, in timed steps."""
    timed = [
        s
        for s in trial.spans
        if s.device == device and s.phase in phases and not trial.steps[s.step].warmup
    ]
    total, reach = 0.0, float("-inf")
    for span in sorted(timed, key=lambda s: s.start_s):
        total += max(0.0, span.end_s - max(span.start_s, reach))
        reach = max(reach, span.end_s)
    return total * 1e6


COMPUTE = {Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER}


@needs_hta
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_hta_reads_a_split_trace_and_its_numbers_are_ours(dpbench, tmp_path, kind):
    trial = made(replace(DP, device_kind=kind), steps=40, warmup=10)
    stored(tmp_path / "dpbench.db", trial)
    code, out, err = dpbench("export", "trace", "--split", "ranks")
    assert (code, err) == (0, "")
    assert out.splitlines() == ["ranks/rank-0.json", "ranks/rank-1.json"]
    found = analysed(tmp_path / "ranks")
    assert found["ranks"] == [0, 1]
    assert found["iterations"] == [30, 30], "all timed steps, no warm-up"
    for device, row in enumerate(found["temporal"]):
        # whole microseconds: each end of each span may be half of one off
        compute, all_us = covered_us(trial, device, COMPUTE), covered_us(trial, device, set(Phase))
        assert row["compute_time(us)"] == pytest.approx(compute, abs=30 * 4)
        assert row["non_compute_time(us)"] == pytest.approx(all_us - compute, abs=30 * 4)
        assert row["kernel_time(us)"] == pytest.approx(row["idle_time(us)"] + all_us, abs=30 * 8)
    # half of device 0's reduce lies under its backward: 0.1 of the 0.05 + 0.04 + 0.05 + 0.2 that
    # move data
    assert found["overlap"] == [
        {"rank": 0, "comp_comm_overlap_pctg": pytest.approx(100 * 0.10 / 0.34, abs=0.5)},
        {"rank": 1, "comp_comm_overlap_pctg": 0.0},
    ]
    types = {(row["name"], row["kernel_type"]) for row in found["kernels"]}
    moving = {Phase.SCATTER, Phase.REPLICATE, Phase.GATHER, Phase.REDUCE}
    assert types == {(f"ncclKernel_{phase}", "COMMUNICATION") for phase in moving} | {
        (phase.value, "COMPUTATION") for phase in COMPUTE
    }
    # device 0 computes nothing in 0.07 + 0.10 of a step, and in 0.12 from one to the next
    within, between = 30 * 0.17 * STEP_S * 1e6, 29 * 0.12 * STEP_S * 1e6
    idle = {
        row["idle_category"]: row["idle_time"] for row in found["idle"][0] if row["stream"] == 10
    }
    if kind == "cpu":
        assert idle["host_wait"] == pytest.approx(within + between, abs=120)
        assert idle.get("other", 0) + idle.get("kernel_wait", 0) == 0
    else:  # when the host launched is not known, and is not blamed
        assert idle["host_wait"] == pytest.approx(between, abs=60)
        assert idle["other"] == pytest.approx(within, abs=120)


@needs_hta
def test_hta_reads_a_trial_of_one_device_without_communication(tmp_path):
    one = made(replace(DP, strategy="single", schedule="", devices=1), steps=12)
    bare = replace(one, spans=tuple(s for s in one.spans if s.phase in COMPUTE))
    export.split_ranks("f" * 32, {}, bare, labels, tmp_path)
    found = analysed(tmp_path)
    assert found["ranks"] == [0]
    assert found["temporal"][0]["non_compute_time(us)"] == 0
    assert found["temporal"][0]["compute_time(us)"] == pytest.approx(
        covered_us(bare, 0, COMPUTE), abs=40
    )


def test_split_files_say_rank_labels_and_what_was_made_up(tmp_path):
    paths = export.split_ranks("f" * 32, PROVENANCE, made(), labels, tmp_path / "deep" / "ranks")
    for device, path in enumerate(paths):
        text = path.read_text()
        trace = json.loads(text)
        assert "secret-host" not in text
        assert f'"rank": {device},' in text.splitlines()[1]
        assert trace["distributedInfo"] == {"backend": "dpbench", "rank": device, "world_size": 2}
        assert trace["otherData"]["labels"] == ["MEASURED", "CPU-ONLY"]
        assert "ncclKernel" in trace["otherData"]["note"]
        kernels = [e for e in trace["traceEvents"] if e.get("cat") == "kernel"]
        launches = {
            e["args"]["correlation"] for e in trace["traceEvents"] if e.get("cat") == "cuda_runtime"
        }
        assert {e["args"]["correlation"] for e in kernels} == launches
        assert all(
            isinstance(e[key], int) and e[key] >= 0 for e in kernels for key in ("ts", "dur")
        )
        for stream in {e["tid"] for e in kernels}:
            mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in kernels if e["tid"] == stream)
            assert all(b <= c for (_, b), (c, _) in pairwise(mine)), "a stream runs one at a time"
    assert any(e.get("cat") == "cpu_op" for e in json.loads(paths[0].read_text())["traceEvents"])
    assert not any(
        e.get("cat") == "cpu_op" for e in json.loads(paths[1].read_text())["traceEvents"]
    )


def test_split_wants_one_case_and_a_folder_without_traces(dpbench, tmp_path):
    stored(
        tmp_path / "dpbench.db",
        made(),
        made(replace(DP, model="lstm")),
        made(replace(DP, model="vgg16"), spans=()),
    )
    code, out, err = dpbench("export", "trace", "--split", "ranks")
    assert (code, out) == (64, "")
    assert f": 1 {DP.label}; 2 lstm" in err
    assert not (tmp_path / "ranks").exists()
    code, out, err = dpbench("export", "trace", "--split", "ranks", "--case", "vgg16")
    assert (code, out) == (64, "")
    assert "no span" in err
    assert dpbench("export", "trace", "--split", "ranks", "--case", "2")[0] == 0
    code, out, err = dpbench("export", "trace", "--split", "ranks", "--case", "1")
    assert (code, out) == (64, "")
    assert "rank-0.json" in err


# -- time


@pytest.mark.slow
def test_a_long_run_is_exported_in_seconds():
    trials = [made(steps=300, number=i, at_s=5000.0 + 10 * i) for i in range(50)]
    began = time.process_time()
    size = sum(map(len, export.trace("f" * 32, {}, export.pick(trials, every=True), labels)))
    assert time.process_time() - began < 10
    assert size > 50 * 300 * len(PLANNED) * 80
