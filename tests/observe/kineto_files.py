"""Traces of torch.profiler for tests: excerpts, whole real traces, and hand-written files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dpbench import observe
from dpbench.analysis import findings, summary
from dpbench.observe import imported
from dpbench.records.resources import Resources

EXCERPTS = Path(__file__).parents[1] / "data" / "traces"
VARIABLE = "DPBENCH_TRACES"
WHOLE = Path(os.environ.get(VARIABLE) or "missing")
needs_whole_traces = pytest.mark.skipif(
    not WHOLE.is_dir(), reason=f"{VARIABLE} names no folder with the whole traces"
)


def loop_of(*paths: Path) -> imported.ImportedLoop:
    """Return the only loop that some traces describe."""
    (found,) = imported.load(paths)
    return found


def costs_of(path: Path) -> dict[str, float]:
    """Return the seconds of each finding on the loop of a trace, by its rule, the largest first."""
    trials = observe.parts(loop_of(path).trial)
    (diagnosis,) = findings.diagnose(summary.rows(trials), trials, Resources())
    sizes = {one.rule.key: one.evidence.size_s for one in diagnosis.findings}
    return {name: size.value for name, size in sizes.items() if size}


class Writer:
    """A trace that a test writes event by event, with times in milliseconds."""

    def __init__(self, **facts: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.facts, self._correlation = facts, 0

    def op(
        self,
        name: str,
        start_ms: float,
        end_ms: float,
        *,
        tid: int = 1,
        cat: str = "cpu_op",
        **args: Any,
    ) -> None:
        self._add(cat, name, 100, tid, start_ms, end_ms, args)

    def note(self, name: str, start_ms: float, end_ms: float, **given: Any) -> None:
        self.op(name, start_ms, end_ms, cat="user_annotation", **given)

    def call(self, name: str, start_ms: float, end_ms: float) -> None:
        """Add a call of the CUDA runtime that launches nothing."""
        self._correlation += 1
        number = {"correlation": self._correlation}
        self._add("cuda_runtime", name, 100, 1, start_ms, end_ms, number)

    def kernel(
        self,
        name: str,
        at_ms: float,
        start_ms: float,
        end_ms: float,
        *,
        tid: int = 1,
        device: int = 0,
        stream: int = 7,
    ) -> None:
        """Add the call that launches a kernel `at_ms`, and the kernel."""
        self._correlation += 1
        number = {"correlation": self._correlation}
        copies = name.startswith("Memcpy")
        self._add("cuda_runtime", "cudaLaunchKernel", 100, tid, at_ms, at_ms + 0.001, number)
        self._add(
            "gpu_memcpy" if copies else "kernel",
            name,
            device,
            stream,
            start_ms,
            end_ms,
            {**number, "device": device, "stream": stream},
        )

    def _add(
        self, cat: str, name: str, pid: int, tid: int, start_ms: float, end_ms: float, args: dict
    ) -> None:
        ts, dur = round(start_ms * 1e3, 3), round((end_ms - start_ms) * 1e3, 3)
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": pid,
                "tid": tid,
                "ts": ts,
                "dur": dur,
                "args": args,
            }
        )

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps({"schemaVersion": 1, **self.facts, "traceEvents": self.events}))
        return path
