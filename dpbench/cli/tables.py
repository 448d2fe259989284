"""Tables: format the results of a run as plain tables of at most about 120 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dpbench.analysis import ladder
from dpbench.records import Case, Source, names, plan, words
from dpbench.records.words import aligned
from dpbench.report.table import (
    FOOTNOTES,
    Cell,
    efficiency,
    estimate,
    footnotes,
    percentile,
    verified,
)

if TYPE_CHECKING:
    from dpbench.measure.batch_search import Found

HEAD = ("model", "strategy", "devices", "batch")
COLUMNS = (
    *HEAD,
    "ms/step (95 %)",
    "samples/s",
    "speed-up (95 %)",
    "effic.",
    "dev 0",
    "verified",
    "labels",
)
TEXT = ("model", "strategy", "verified", "labels")
"""The columns that contain text, and not numbers."""


def table(
    rows: Sequence[Any],
    ladders: Sequence[ladder.Ladder] = (),
    more: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> str:
    """Return the rows of an analysis as a table with one line per case.

    A case without a step time shows its status. Each ladder's fastest rung is marked. `more` has
    the cells of further columns with text, by heading. Columns without any value are left out, and
    labels that all rows share stand below the table.
    """
    best = [found.fastest.row for found in ladders]
    cells = [_cells(row, any(row is one for one in best)) for row in rows]
    shared = " ".join(rows[0].labels) if len({row.labels for row in rows}) == 1 else ""
    lines = [
        (*line[:-1], *(column[number] for column in more.values()), "" if shared else line[-1])
        for number, line in enumerate(cells)
    ]
    predicted = all(row.source is Source.PREDICTED for row in rows)
    headings = [name.replace("95 %", "80 %") if predicted else name for name in COLUMNS]
    columns = (*headings[:-1], *more, headings[-1])
    return "\n".join([*_aligned(columns, lines, (*TEXT, *more)), *_below(lines, shared)])


def _aligned(
    columns: Sequence[str], lines: Sequence[Sequence[str]], text: Sequence[str] = TEXT
) -> list[str]:
    kept = [i for i, name in enumerate(columns) if name in HEAD or any(line[i] for line in lines)]
    left = [place for place, i in enumerate(kept) if columns[i] in text]
    return aligned([[line[i] for i in kept] for line in (columns, *lines)], left=left)


def _below(lines: Sequence[Sequence[str]], shared: str) -> list[str]:
    notes = footnotes([[Cell(cell) for cell in line] for line in lines])
    return ["", *([f"all cases: {shared}"] if shared else []), *notes] if shared or notes else []


def _name(case: Case, best: bool = False) -> tuple[str, ...]:
    """Return the cells of the model, strategy and settings (`Case.habits`), devices and batch."""
    name = names.strategy(case)
    name += ", limit" if case.options == plan.LIMIT else " (best rung)" if best else ""
    return case.model, ", ".join([name, *case.habits]), case.extent, case.batch


def _cells(row: Any, best: bool) -> tuple[str, ...]:
    case = row.case
    head = _name(case, best)
    if row.step is None:
        return (*head, row.outcome, *[""] * (len(COLUMNS) - 6), " ".join(row.labels))
    weak = " weak" if row.scaling == "weak" else ""
    return (
        *head,
        _flat(estimate(row.step, 1e3)),
        words.number(row.throughput.value) if row.throughput and not row.throughput.doubt else "",
        _flat(estimate(row.speedup, unit=f"×{weak}")),
        efficiency(row.efficiency).text,
        estimate(row.imbalance).text,
        _flat(verified(row)),
        " ".join(row.labels),
    )


LATENCY = (*HEAD, "rounds, steps", "p50 ms (95 %)", "p95 ms (95 %)", "p99 ms (95 %)", "labels")


def latencies(rows: Sequence[Any]) -> str:
    """Return a table of the latencies of cases that run the forward alone; "" without any."""
    lines = [_latency(row) for row in rows if row.step and not row.case.trains]
    return "\n".join(_aligned(LATENCY, lines)) if lines else ""


def _latency(row: Any) -> tuple[str, ...]:
    return (
        *_name(row.case),
        f"{row.rounds}, {row.steps}",
        _flat(estimate(row.step, 1e3)),
        *(
            words.NOT_ENOUGH_STEPS if one.doubt else _flat(percentile(one))
            for one in row.percentiles.values()
        ),
        " ".join(row.labels),
    )


def _flat(cell: Cell) -> str:
    """Return a cell as one text; an estimate in doubt has no interval."""
    return (
        f"{cell.text} ({cell.small})" if cell.small and cell.text[0] not in FOOTNOTES else cell.text
    )


SEARCHED = (
    "model",
    "strategy",
    "devices",
    "largest batch",
    "per device",
    "smallest failed",
    "failed first",
    "tries",
)


def searches(results: Sequence[Found]) -> str:
    """Return the results of searches for the largest batch as a table, with one line per result.

    The line of a search that did not find the limit ends with the reason.
    """
    head, rule, *lines = aligned([SEARCHED, *map(_of_search, results)], left=(0, 1))
    rows = [
        f"{line}  {one.reason}" if one.reason else line
        for line, one in zip(lines, results, strict=True)
    ]
    return "\n".join([head, rule, *rows])


def _of_search(one: Found) -> tuple[str, ...]:
    case = one.case
    name = case.strategy + (f"[{case.schedule}]" if case.schedule not in ("", "reference") else "")
    per_device = "" if one.largest is None else words.exact(one.largest / case.devices)
    failed_first = (
        "" if one.failed is None else "unknown" if one.device is None else f"device {one.device}"
    )
    return (
        case.model,
        name,
        str(case.devices),
        "none" if one.largest is None else str(one.largest),
        per_device,
        "" if one.failed is None else str(one.failed),
        failed_first,
        str(one.tries),
    )
