"""Tables: format the results of a run as plain tables of at most about 120 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING

from dpbench.analysis.summary import PERCENTILES
from dpbench.records import names, words
from dpbench.records.words import aligned
from dpbench.report.table import (
    COLUMNS,
    TEXT_COLUMNS,
    UNCERTAIN,
    Cell,
    Column,
    estimate,
    percentiles,
    shown,
)

if TYPE_CHECKING:
    from dpbench.analysis import ladder
    from dpbench.analysis.summary import Row
    from dpbench.measure.batch_search import Found

LEVEL = "95 %"
OF_LATENCIES = ("model", "strategy", "devices", "batch", "rounds, steps")
"""The columns of the table of latencies that other tables have, too."""


def table(
    rows: Sequence[Row],
    ladders: Sequence[ladder.Ladder] = (),
    more: Mapping[str, Sequence[str]] = MappingProxyType({}),
    width: int = 0,
) -> str:
    """Return the rows of an analysis as a table with one line per case; see `report.table.shown`.

    Each ladder's fastest rung is marked. `more` has the cells of further columns with text, by
    heading. If the table is wider than `width` columns (0 for any width), those that yield are
    left out, as many as needed.
    """
    best = [found.fastest.row for found in ladders]
    printed = [column for column in COLUMNS if column.printed]
    lines, notes = _table(rows, printed, best, more)
    left_out: list[str] = []
    for next_out in sorted((one for one in printed if one.yields), key=attrgetter("yields")):
        if width and max(map(len, lines)) > width:
            left_out.append(next_out.heading)
            printed = [column for column in printed if column is not next_out]
            lines, notes = _table(rows, printed, best, more)
    if left_out:
        notes.append(f"left out in {width} columns: {', '.join(left_out)}")
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _table(
    rows: Sequence[Row],
    printed: Sequence[Column],
    best: Sequence[Row],
    more: Mapping[str, Sequence[str]],
) -> tuple[list[str], list[str]]:
    """Return the lines of the table with those of the `printed` columns that `shown` keeps."""
    columns, cells, notes = shown(rows, printed)
    predicted = not any(row.source.timed for row in rows)
    flat: dict[str, Sequence[str]] = {
        _heading(column, predicted): [
            line[place].text if column.brief else _flat(line[place]) for line in cells
        ]
        for place, column in enumerate(columns)
    }
    flat["strategy"] = [
        f"{name} (best rung)" if any(row is one for one in best) else name
        for row, name in zip(rows, flat["strategy"], strict=True)
    ]
    labels = {"labels": flat.pop("labels")} if "labels" in flat else {}
    text = [*(column.heading for column in columns if column.text), *more]
    return _aligned(flat | {**more, **labels}, text), notes


def _heading(column: Column, predicted: bool) -> str:
    level = "80 %" if predicted else LEVEL
    return f"{column.heading} ({level})" if column.interval else column.heading


def _aligned(columns: Mapping[str, Sequence[str]], text: Sequence[str]) -> list[str]:
    lines = zip(*columns.values(), strict=True)
    return aligned(
        [[*columns], *map(list, lines)],
        left=[place for place, name in enumerate(columns) if name in text],
    )


def latencies(rows: Sequence[Row]) -> str:
    """Return a table of the latencies of cases that run the forward alone; "" without any."""
    inferring = [row for row in rows if row.step and not row.case.trains]
    if not inferring:
        return ""
    kept = [column for column in COLUMNS if column.heading in OF_LATENCIES]
    columns = {column.heading: [_flat(column.cell(row)) for row in inferring] for column in kept}
    cells = [[estimate(row.step, 1e3), *percentiles(row)] for row in inferring]
    for place, number in enumerate((50, *PERCENTILES)):
        columns[f"p{number} ms ({LEVEL})"] = [_flat(line[place]) for line in cells]
    columns["labels"] = [" ".join(row.labels) for row in inferring]
    return "\n".join(_aligned(columns, TEXT_COLUMNS))


def _flat(cell: Cell) -> str:
    """Return a cell as one text; an estimate in doubt has no interval."""
    text = " ".join(cell.text.split())
    if not text or not cell.small or text.startswith(UNCERTAIN):
        return text or cell.small
    return f"{text} ({cell.small})"


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
    per_device = "" if one.largest is None else words.exact(one.largest / case.devices)
    failed_first = (
        "" if one.failed is None else "unknown" if one.device is None else f"device {one.device}"
    )
    return (
        case.model,
        names.strategy(case),
        str(case.devices),
        "none" if one.largest is None else str(one.largest),
        per_device,
        "" if one.failed is None else str(one.failed),
        failed_first,
        str(one.tries),
    )
