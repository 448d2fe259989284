"""Tables: format the results of a run as plain tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpbench.analysis import ladder
from dpbench.records import Case, plan, words
from dpbench.records.trial import Estimate
from dpbench.records.words import aligned

COLUMNS = (
    "model",
    "strategy",
    "devices",
    "batch",
    "ms/step",
    "95 % interval",
    "samples/s",
    "speed-up",
    "95 %",
    "effic.",
    "dev-0 imb.",
    "unattr.",
    "verified",
    "labels",
)
COMPARED = ("speed-up", "95 %", "effic.", "verified")
"""Columns that observed loops lack, which have no baseline and no reference."""
TEXT = ("model", "strategy", "verified", "labels")
"""The columns that contain text, and not numbers."""


def table(rows: Sequence[Any], ladders: Sequence[ladder.Ladder] = ()) -> str:
    """Return the rows of an analysis as a table with one line per case.

    A case without a measured step time shows its status. Each ladder's fastest rung is marked.
    """
    best = [found.fastest.row for found in ladders]
    lines = [COLUMNS, *(_cells(row, any(row is one for one in best)) for row in rows)]
    if all(row.case.traits.observed for row in rows):
        kept = [i for i, name in enumerate(COLUMNS) if name not in COMPARED]
        lines = [tuple(line[i] for i in kept) for line in lines]
    return "\n".join(aligned(lines, left=[i for i, name in enumerate(lines[0]) if name in TEXT]))


def _name(case: Case, best: bool = False) -> tuple[str, ...]:
    """Return the cells of the model, strategy and settings (`Case.habits`), devices and batch."""
    schedule = f"[{case.schedule}]" if case.schedule not in ("", "reference") else ""
    name = ("single, all cores" if case.traits.all_cores else case.strategy) + schedule
    name += ", limit" if case.options == plan.LIMIT else " (best rung)" if best else ""
    return case.model, ", ".join([name, *case.habits]), case.extent, case.batch


def _cells(row: Any, best: bool) -> tuple[str, ...]:
    case = row.case
    head = _name(case, best)
    if row.step is None:
        return (*head, row.outcome, *[""] * (len(COLUMNS) - 6), " ".join(row.labels))
    efficiency = row.efficiency
    weak = " weak" if row.scaling == "weak" else ""
    return (
        *head,
        *_estimate(row.step, 1e3),
        words.number(row.throughput.value) if row.throughput and not row.throughput.doubt else "",
        *_estimate(row.speedup, unit=f"x{weak}"),
        words.percent(efficiency.value) if efficiency and not efficiency.doubt else "",
        _estimate(row.imbalance)[0],
        words.percent(row.unattributed_share),
        f"{row.verified.value}{'' if case.trains else ' (outputs)'}" if row.verified else "",
        " ".join(row.labels),
    )


LATENCY = (
    "model",
    "strategy",
    "devices",
    "batch",
    "rounds, steps",
    "p50 ms",
    "95 % interval",
    "p95 ms",
    "95 %",
    "p99 ms",
    "95 %",
    "labels",
)


def latencies(rows: Sequence[Any]) -> str:
    """Return a table of the latencies of cases that run the forward alone; "" without any."""
    lines = [_latency(row) for row in rows if row.step and not row.case.trains]
    return "\n".join(aligned([LATENCY, *lines], left=(0, 1, len(LATENCY) - 1))) if lines else ""


def _latency(row: Any) -> tuple[str, ...]:
    cells = [
        (
            (words.NOT_ENOUGH_STEPS, "")
            if percentile.doubt
            else (
                words.number(percentile.value * 1e3),
                f"{words.number(percentile.low * 1e3)}–{words.number(percentile.high * 1e3)}",
            )
        )
        for percentile in row.percentiles.values()
    ]
    return (
        *_name(row.case),
        f"{row.rounds}, {row.steps}",
        *_estimate(row.step, 1e3),
        *(cell for pair in cells for cell in pair),
        " ".join(row.labels),
    )


def _estimate(estimate: Estimate | None, scale: float = 1.0, unit: str = "") -> tuple[str, str]:
    """Return the cells of an estimate's value and of its interval; both empty for None.

    `scale` is a factor. If the estimate has a `doubt`, the cells are `words.withheld` and empty.
    """
    if estimate is None:
        return "", ""
    if estimate.doubt:
        return words.withheld(estimate), ""
    return words.number(estimate.value * scale) + unit, words.interval(estimate, scale)
