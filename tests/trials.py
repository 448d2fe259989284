"""Trials made by hand, of steps of known duration, and reports on runs with such trials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dpbench.analysis.report import Report
from dpbench.records import Case, Phase, Span, Step, Trial, Verified
from dpbench.store import FINISHED, StoredRun

Part = tuple[Phase, int, float, float]
"""A phase, its device, and where in a step it begins and ends, as shares of the step."""
BUSY = {"foreign_load": {"foreign": 0.9, "steal": 0.0, "cores": 2, "seconds": 1.0}}
"""What a trial states if other processes used the cores: it is NOISY."""


def trial_of(
    case: Case,
    seconds: Iterable[float],
    *,
    warmup: int = 0,
    begin_s: float = 100.0,
    parts: Iterable[Part] = (),
    clock: str = "host",
    **changes: Any,
) -> Trial:
    """Return a verified trial whose steps take these seconds, one after the other.

    The first `warmup` steps are warm-up. Every step has the phases `parts`, by this clock.
    """
    steps, spans, end_s = [], [], begin_s
    parts = tuple(parts)
    for index, took_s in enumerate(seconds):
        start_s, end_s = end_s, end_s + took_s
        steps.append(Step(took_s, index < warmup, end_s))
        spans += [
            Span(index, phase, device, clock, start_s + took_s * begin, start_s + took_s * end)
            for phase, device, begin, end in parts
        ]
    given = {"verified": Verified.BITWISE, "steps": tuple(steps), "spans": tuple(spans)}
    return Trial(case=case, **given | changes)


def report_on(trials: Sequence[Trial], provenance: Mapping[str, Any] = {}) -> Report:
    """Return the report of a finished run with these trials."""
    return Report.of(finished(provenance), trials)


def finished(provenance: Mapping[str, Any] = {}, **changes: Any) -> StoredRun:
    """Return a finished run, or one with other fields."""
    given = {"id": "7f" * 16, "status": FINISHED, "started": 1.7e9, "rounds": 3, **changes}
    return StoredRun(provenance=provenance, **given)


def of_run(report: Report, **changes: Any) -> Report:
    """Return a report on a run with these fields."""
    return replace(report, run=replace(report.run, **changes))
