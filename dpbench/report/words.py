"""Words: how the numbers of a row are said. Scaling and rounding happen here and nowhere else."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence

from dpbench.analyse import Row
from dpbench.ladder import short
from dpbench.records import Case, Estimate, Source

MISSING = "–"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_PLAIN = Case(model="", strategy="", batch_size=0)


def number(value: float | None, digits: int = 3) -> str:
    """Say a number with three significant digits or, of a thousand or more, without decimals."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits}g}")  # 0.9999 is 1.00, not 1.000
    places = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{value:,.{max(0, places)}f}"


def interval(estimate: Estimate, scale: float = 1.0) -> str:
    """Say the 95% interval."""
    return f"{number(estimate.low * scale)}–{number(estimate.high * scale)}"


def signed(value: float, digits: int = 3) -> str:
    """Say a number with its sign."""
    return f"{'−' if value < 0 else '+'}{number(abs(value), digits)}"


def ms(estimate: Estimate) -> str:
    """Say a time with its interval."""
    return f"{number(estimate.value * 1e3)} ms ({interval(estimate, 1e3)})"


def times(estimate: Estimate) -> str:
    """Say a ratio with its interval."""
    return f"{number(estimate.value)}× ({interval(estimate)})"


def percent(share: float) -> str:
    """Say a fraction as a percentage."""
    return f"{share * 100:.0f}%" if math.isfinite(share) else MISSING


def size(count: float) -> str:
    """Say a number of bytes in binary units."""
    unit, scale = binary(count)
    return f"{number(count / scale)} {unit}"


def binary(most: float) -> tuple[str, float]:
    """Return the binary unit that fits a number of bytes, and its bytes."""
    power = min(len(_UNITS) - 1, max(0, int(math.log2(most) // 10))) if most > 0 else 0
    return _UNITS[power], 1024.0**power


def finite(estimate: Estimate | None) -> bool:
    """Tell whether an estimate can be drawn: it is there, and none of its parts is infinite."""
    return estimate is not None and all(map(math.isfinite, (estimate.value, estimate.low, estimate.high)))


def strategy(case: Case) -> str:
    """Name a strategy with its schedule."""
    if case.strategy == "single_all_cores":
        return "single, all cores"
    return f"{case.strategy}[{short(case.schedule)}]" if case.schedule else case.strategy


def setting(case: Case) -> list[str]:
    """Name what a model was run with: its size, and all that is not the default."""
    extra = [getattr(case, name) for name in ("precision", "mode", "optimizer")]
    usual = [getattr(_PLAIN, name) for name in ("precision", "mode", "optimizer")]
    bound = [f"within {size(case.device_memory_bytes)}"] if case.device_memory_bytes else []
    return [case.size, *(value for value, default in zip(extra, usual, strict=True) if value != default), *bound]


def labels(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return every label that one of the rows carries, in order of appearance."""
    return tuple(dict.fromkeys(label for row in rows for label in row.labels))


def rounds(rows: Sequence[Row]) -> str:
    """Say how many rounds stand behind the numbers."""
    counts = sorted({row.rounds for row in rows if row.source is Source.MEASURED})
    if not counts:
        return "Predicted, with 80% intervals: nothing here was measured."
    span = f"{counts[0]}–{counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    return f"Medians with 95% intervals over {span} round{'' if counts[-1] == 1 else 's'}."


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
