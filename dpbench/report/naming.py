"""Naming: cases, panels and labels as text for the page and for Markdown."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence

from dpbench.analysis.ladder import short
from dpbench.analysis.summary import Row
from dpbench.records import Case, Source, words
from dpbench.records.estimate import Estimate

_PLAIN = Case(model="", strategy="", batch_size=0)


def drawable(estimate: Estimate | None) -> bool:
    """Tell whether an estimate may be drawn: it is there, may be shown, and has finite ends."""
    finite = estimate and all(map(math.isfinite, (estimate.value, estimate.low, estimate.high)))
    return bool(estimate and finite and not estimate.doubt)


def withheld(estimates: Iterable[Estimate | None]) -> str:
    """Say how many cases are not drawn because their estimate may not be shown; empty for none."""
    number = sum(1 for estimate in estimates if estimate and estimate.doubt)
    verb = "is" if number == 1 else "are"
    return f"{words.count(number, 'case')} {verb} not drawn: {words.NOT_ENOUGH}." if number else ""


def strategy(case: Case) -> str:
    """Name a strategy with its schedule."""
    if case.traits.all_cores:
        return "single, all cores"
    return f"{case.strategy}[{short(case.schedule)}]" if case.schedule else case.strategy


def setting(case: Case) -> list[str]:
    """Name what a model was run with: its size, and all that is not the default."""
    extra = [getattr(case, name) for name in ("precision", "optimizer")]
    usual = [getattr(_PLAIN, name) for name in ("precision", "optimizer")]
    bound = [f"within {words.size(case.device_memory_bytes)}"] if case.device_memory_bytes else []
    return [case.size, *(value for value, default in zip(extra, usual, strict=True) if value != default), *bound]


def labels(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return every label that one of the rows carries, in order of appearance."""
    return tuple(dict.fromkeys(label for row in rows for label in row.labels))


def rounds(rows: Sequence[Row]) -> str:
    """Say how many rounds stand behind the numbers."""
    counts = sorted({row.rounds for row in rows if row.source is Source.MEASURED})
    if not counts:
        return "Predicted, with 80% intervals: nothing here was measured."
    least = f"{counts[0]}–" if len(counts) > 1 else ""
    return f"Medians with 95% intervals over {least}{words.count(counts[-1], 'round')}."


def plain(text: str) -> str:
    """Return one line without control characters, which SVG cannot hold."""
    spaced = " ".join(text.split())
    return "".join(c for c in spaced if unicodedata.category(c) not in ("Cc", "Cs", "Cn", "Co"))


def clip(text: str, columns: int) -> str:
    """Cut one line to a number of columns; wide characters count as two."""
    text, used = plain(text), 0
    for index, character in enumerate(text):
        used += _columns(character)
        if used > columns:
            return text[: max(0, index - 1)].rstrip() + "…"
    return text


def _columns(character: str) -> int:
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
