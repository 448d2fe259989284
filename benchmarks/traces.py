"""Seconds and memory to import a profiler trace of 200,000 events.

Importing does not load torch.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from . import module

STEPS, OPERATORS, EVENTS = 100, 666, 200_000


def events() -> list[dict[str, Any]]:
    """Return steps of 666 operators, each of which launches one kernel."""
    found = []
    for step in range(STEPS):
        at_us = step * 100_000.0
        found.append(_event("user_annotation", f"ProfilerStep#{step}", 1, at_us, 100_000.0))
        for number in range(OPERATORS):
            start_us, correlation = (
                at_us + 140.0 * number,
                {"correlation": step * OPERATORS + number, "device": 0},
            )
            found += [
                _event("cpu_op", "aten::linear", 1, start_us, 90.0),
                _event("cuda_runtime", "cudaLaunchKernel", 1, start_us + 10.0, 5.0, **correlation),
                _event("kernel", "volta_sgemm_128x64_nn", 7, start_us + 30.0, 100.5, **correlation),
            ]
    assert len(found) >= EVENTS - STEPS
    return found


def _event(cat: str, name: str, tid: int, ts: float, dur: float, **args: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 1,
        "tid": tid,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


class Traces:
    """The benchmarks of imports."""

    timeout = 60.0

    def setup(self) -> None:
        self.load = module("observe.imported").load
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "trace.json"
        self.path.write_text(json.dumps({"traceEvents": events()}))

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    def time_200000_events(self) -> None:
        self.load([self.path])

    def peakmem_200000_events(self) -> None:
        self.load([self.path])
