"""Busy times of imported traces equal those of Holistic Trace Analysis to the microsecond.

The figures were computed by HolisticTraceAnalysis 0.5.0 (`get_temporal_breakdown` and
`get_comm_comp_overlap`) from the same files. Its rules: it leaves out the work launched after the
last `ProfilerStep` has begun; it rounds the fractions of microseconds inwards; and it counts fills
of memory apart from compute.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from dpbench.observe import kineto
from dpbench.observe.kineto import TraceEvents
from dpbench.records.activity import length, union
from tests.observe.kineto_files import EXCERPTS, WHOLE, costs_of, needs_whole_traces


class Figures(NamedTuple):
    """Whole microseconds of one trace, and the percentage of communication that overlaps."""

    idle: int
    compute: int
    other: int
    total: int
    overlap: float | None


OF_EXCERPTS = {
    "a100-x2-ddp-rank0.json.gz": Figures(167510, 37625, 10633, 215768, 14.76),
    "v100-loader-workers-0.json.gz": Figures(18243, 98598, 2031, 118872, None),
    "v100-loader-workers-4.json.gz": Figures(33832, 99778, 3704, 137314, None),
    "x128-rank0.json.gz": Figures(321378, 106252, 172428, 600058, 11.81),
    "x128-rank1.json.gz": Figures(328671, 135548, 136455, 600674, 20.05),
}
OF_WHOLE_TRACES = {
    "a100-x2-resnet50-ddp-rank0.json.gz": Figures(338781, 75169, 21636, 435586, 14.31),
    "v100-resnet50-loader-workers-0.json.gz": Figures(327463, 492891, 10140, 830494, None),
    "v100-resnet50-loader-workers-4.json.gz": Figures(164699, 495912, 16562, 677173, None),
    "x128-sampled-rank0.json.gz": Figures(321378, 106252, 172428, 600058, 11.81),
    "x128-sampled-rank1.json.gz": Figures(328671, 135548, 136455, 600674, 20.05),
}


def ours(profile: TraceEvents) -> Figures:
    """Return the figures of a trace under HTA's rules, by dpbench's arithmetic of intervals."""
    last = max(
        math.ceil(event.start_us) for event in profile.host if event.name.startswith("ProfilerStep")
    )
    launched = {
        number for number, one in profile.launches.items() if math.ceil(one.start_us) < last
    }
    kinds: dict[str, list[tuple[float, float]]] = {"communication": [], "memory": [], "compute": []}
    for event in profile.device:
        if event.correlation in launched:
            of_memory = re.match("Memcpy|Memset|dma", event.name)
            kind = (
                "communication"
                if re.match("nccl.*Kernel", event.name)
                else "memory"
                if of_memory
                else "compute"
            )
            kinds[kind].append((math.ceil(event.start_us), math.floor(event.end_us)))
    every = union(one for found in kinds.values() for one in found)
    compute, communication = union(kinds["compute"]), union(kinds["communication"])
    total = every[-1][1] - every[0][0]
    idle = total - length(every)
    both = union([*compute, *communication])
    overlap = length(compute) + length(communication) - length(both)
    share = round(100 * overlap / length(communication), 2) if communication else None
    return Figures(
        int(idle), int(length(compute)), int(total - idle - length(compute)), int(total), share
    )


@pytest.mark.parametrize("name", OF_EXCERPTS)
def test_figures_of_the_excerpts_are_those_of_hta(name: str) -> None:
    assert ours(kineto.read(EXCERPTS / name)) == OF_EXCERPTS[name]


@needs_whole_traces
@pytest.mark.parametrize("name", OF_WHOLE_TRACES)
def test_figures_of_whole_traces_are_those_of_hta(name: str) -> None:
    assert ours(kineto.read(WHOLE / name)) == OF_WHOLE_TRACES[name]


EXPOSED_US = {
    "a100-x2-ddp-rank0.json.gz": [10591],
    "mi300x-x8-ddp-rank0.json.gz": [12309, 12386, 11879],
    "x128-rank0.json.gz": [164724],
    "x128-rank1.json.gz": [169187],
}
"""The microseconds of communication that no kernel hides in each timed step of a trace.

They are the sums of `get_gpu_kernel_breakdown` for COMMUNICATION, alone and overlapping MEMORY, of
a file with the events of one step and one more `ProfilerStep` after it.
"""


@pytest.mark.parametrize("name", EXPOSED_US)
def test_the_finding_on_communication_has_the_seconds_of_hta(name: str) -> None:
    expected_s = statistics.median(EXPOSED_US[name]) / 1e6
    assert costs_of(EXCERPTS / name)["reduction"] == pytest.approx(expected_s, rel=0.1)


ANALYSE = """
import json, sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]})
(times,) = analysis.get_temporal_breakdown(visualize=False).to_dict("records")
(overlap,) = analysis.get_comm_comp_overlap(visualize=False).to_dict("records")
names = ("idle_time(us)", "compute_time(us)", "non_compute_time(us)", "kernel_time(us)")
figures = [*(times[name] for name in names), overlap["comp_comm_overlap_pctg"]]
print(json.dumps(figures, default=float))
"""
OPENED = [
    *(EXCERPTS / name for name in OF_EXCERPTS),
    *(WHOLE / name for name in OF_WHOLE_TRACES if WHOLE.is_dir()),
]


@pytest.mark.skipif(
    not importlib.util.find_spec("hta"),
    reason="HolisticTraceAnalysis is not installed: pip install '.[hta]'",
)
@pytest.mark.slow
@pytest.mark.parametrize("path", OPENED, ids=lambda path: path.name)
def test_hta_itself_gives_these_figures(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ANALYSE, path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *times, overlap = json.loads(done.stdout.splitlines()[-1])
    assert ours(kineto.read(path)) == Figures(
        *map(int, times), None if math.isnan(overlap) else overlap
    )
