"""Naming: the names of cases and panels, and their labels, as text for the page and for Markdown."""

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
    """Return whether an estimate may be drawn: it exists, may be shown, and its value and interval are finite."""
    finite = estimate and all(map(math.isfinite, (estimate.value, estimate.low, estimate.high)))
    return bool(estimate and finite and not estimate.doubt)


def withheld(estimates: Iterable[Estimate | None]) -> str:
    """Return a sentence on the number of cases that are not drawn because their estimates are in doubt, or ""."""
    number = sum(1 for estimate in estimates if estimate and estimate.doubt)
    verb = "is" if number == 1 else "are"
    return f"{words.count(number, 'case')} {verb} not drawn: {words.NOT_ENOUGH}." if number else ""


def strategy(case: Case) -> str:
    """Return a strategy's name with its schedule."""
    if case.traits.all_cores:
        return "single, all cores"
    return f"{case.strategy}[{short(case.schedule)}]" if case.schedule else case.strategy


def setting(case: Case) -> list[str]:
    """Return the settings of a model in a case: its size, and every setting that differs from the default."""
    extra = [getattr(case, name) for name in ("precision", "optimizer")]
    usual = [getattr(_PLAIN, name) for name in ("precision", "optimizer")]
    bound = [f"within {words.size(case.device_memory_bytes)}"] if case.device_memory_bytes else []
    return [case.size, *(value for value, default in zip(extra, usual, strict=True) if value != default), *bound]


def labels(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the labels of all rows, each one once, in order of appearance."""
    return tuple(dict.fromkeys(label for row in rows for label in row.labels))


def rounds(rows: Sequence[Row]) -> str:
    """Return the number of rounds behind the numbers, as a sentence."""
    counts = sorted({row.rounds for row in rows if row.source is Source.MEASURED})
    if not counts:
        return "Predicted, not measured; intervals are 80% intervals."
    least = f"{counts[0]}–" if len(counts) > 1 else ""
    return f"Medians with 95% intervals over {least}{words.count(counts[-1], 'round')}."


def plain(text: str) -> str:
    """Return the text as one line without control characters, which SVG does not allow."""
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
