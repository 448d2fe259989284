"""Tables: format the results of a run as plain tables of at most about 120 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpbench.analysis import ladder
from dpbench.records import Case, Verified, plan, words
from dpbench.records.trial import Doubt, Estimate
from dpbench.records.words import aligned

HEAD = ("model", "strategy", "devices", "batch")
COLUMNS = (
    *HEAD,
    "ms/step (95 %)",
    "samples/s",
    "speed-up (95 %)",
    "effic.",
    "dev-0 imb.",
    "verified",
    "labels",
)
TEXT = ("model", "strategy", "verified", "labels")
"""The columns that contain text, and not numbers."""
UNCERTAIN, WITHHELD = "~", "—"
FOOTNOTES = {
    UNCERTAIN: f"uncertain, because it is from fewer than {Estimate.ROUNDS} rounds",
    WITHHELD: f"not shown: the interval spans more than a factor of {Estimate.WIDEST:.0f}, or fewer"
    f" than {Estimate.ROUNDS} rounds are without the label NOISY",
}


def table(rows: Sequence[Any], ladders: Sequence[ladder.Ladder] = ()) -> str:
    """Return the rows of an analysis as a table with one line per case.

    A case without a measured step time shows its status. Each ladder's fastest rung is marked.
    Columns without any value are left out, and labels that all rows share stand below the table.
    """
    best = [found.fastest.row for found in ladders]
    lines = [_cells(row, any(row is one for one in best)) for row in rows]
    shared = " ".join(rows[0].labels) if len({row.labels for row in rows}) == 1 else ""
    if shared:
        lines = [(*line[:-1], "") for line in lines]
    return "\n".join([*_aligned(COLUMNS, lines), *_below(lines, shared)])


def _aligned(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    kept = [i for i, name in enumerate(columns) if name in HEAD or any(line[i] for line in lines)]
    left = [place for place, i in enumerate(kept) if columns[i] in TEXT]
    return aligned([[line[i] for i in kept] for line in (columns, *lines)], left=left)


def _below(lines: Sequence[Sequence[str]], shared: str) -> list[str]:
    cells = [cell for line in lines for cell in line]
    notes = [
        f"{sign}: {why}"
        for sign, why in FOOTNOTES.items()
        if any(cell.startswith(sign) for cell in cells)
    ]
    return ["", *([f"all cases: {shared}"] if shared else []), *notes] if shared or notes else []


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
        _estimate(row.step, 1e3),
        words.number(row.throughput.value) if row.throughput and not row.throughput.doubt else "",
        _estimate(row.speedup, unit=f"×{weak}"),
        words.percent(efficiency.value) if efficiency and not efficiency.doubt else "",
        _estimate(row.imbalance).partition(" ")[0],
        _verified(row),
        " ".join(row.labels),
    )


def _verified(row: Any) -> str:
    if row.verified in (None, Verified.NOT_APPLICABLE):
        return ""
    return f"{row.verified.value}{'' if row.case.trains else ' (outputs)'}"


LATENCY = (*HEAD, "rounds, steps", "p50 ms (95 %)", "p95 ms (95 %)", "p99 ms (95 %)", "labels")


def latencies(rows: Sequence[Any]) -> str:
    """Return a table of the latencies of cases that run the forward alone; "" without any."""
    lines = [_latency(row) for row in rows if row.step and not row.case.trains]
    return "\n".join(_aligned(LATENCY, lines)) if lines else ""


def _latency(row: Any) -> tuple[str, ...]:
    return (
        *_name(row.case),
        f"{row.rounds}, {row.steps}",
        _estimate(row.step, 1e3),
        *(
            words.NOT_ENOUGH_STEPS
            if percentile.doubt
            else f"{words.number(percentile.value * 1e3)} ({words.number(percentile.low * 1e3)}–"
            f"{words.number(percentile.high * 1e3)})"
            for percentile in row.percentiles.values()
        ),
        " ".join(row.labels),
    )


def _estimate(estimate: Estimate | None, scale: float = 1.0, unit: str = "") -> str:
    """Return the cell of an estimate times `scale`, with its interval; "" for None.

    An estimate from few rounds is marked as uncertain; one in another doubt is withheld.
    """
    if estimate is None:
        return ""
    if estimate.doubt not in (None, Doubt.ROUNDS):
        return WITHHELD
    value = f"{words.number(estimate.value * scale)}{unit}"
    return UNCERTAIN + value if estimate.doubt else f"{value} ({words.interval(estimate, scale)})"
