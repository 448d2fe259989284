"""Words: numbers as text, for terminals, pages and messages alike.

No other module rounds, scales or picks units for a reader: three significant digits, never an exponent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal

from dpbench.records.estimate import Doubt, Estimate

MISSING = "–"
NOT_ENOUGH = "not enough rounds"
"""The text in the place of an estimate that may not be shown."""
REMEDY = "more rounds (--rounds N, or --rounds auto) and a machine without other work"
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def number(value: float | None, digits: int = 3) -> str:
    """Say a number with three significant digits or, of a thousand or more, without decimals."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits}g}")  # 0.9999 is 1.00, not 1.000
    places = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{value:,.{max(0, places)}f}"


def exact(value: float) -> str:
    """Say a number with up to six significant digits and no zeros at its end: a limit, a tick of an axis."""
    return f"{Decimal(f'{value:.6g}'):f}" if math.isfinite(value) else MISSING


def signed(value: float, digits: int = 3) -> str:
    """Say a number with its sign."""
    return f"{'−' if value < 0 else '+'}{number(abs(value), digits)}"


def count(number: int, noun: str, plural: str = "") -> str:
    """Say how many there are of something; the plural adds an s unless it is given."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def verb(number: int, one: str, several: str) -> str:
    """Choose the verb that agrees with a count."""
    return one if number == 1 else several


def percent(share: float) -> str:
    """Say a fraction as a percentage, with one decimal below ten."""
    if not math.isfinite(share):
        return MISSING
    return f"{share:.1%}" if abs(share) < 0.0995 else f"{share:.0%}"


def time(value: float) -> str:
    """Say a duration in the unit that fits it, from ns to s."""
    scale, unit = time_unit(value)
    return f"{number(value / scale)} {unit}" if math.isfinite(value) else MISSING


def signed_time(value: float) -> str:
    """Say a difference of durations with its sign, in the unit that fits it."""
    return f"{'−' if value < 0 else '+'}{time(abs(value))}"


def time_unit(value: float) -> tuple[float, str]:
    """Return the largest unit in which a duration, rounded, is not below 1; the smallest for anything below 1 ns."""
    rounded = float(f"{abs(value):.3g}") if value else 1e-3
    return next((pair for pair in _TIMES if rounded >= pair[0]), _TIMES[-1])


def size(number_of_bytes: float) -> str:
    """Say a number of bytes in binary units; whole below 1 KiB."""
    unit, scale = binary(number_of_bytes)
    return f"{number_of_bytes:,.0f} B" if scale == 1 else f"{number(number_of_bytes / scale)} {unit}"


def binary(most: float) -> tuple[str, float]:
    """Return the binary unit that fits a number of bytes, and how many bytes it is."""
    power = next((p for p in range(len(_BINARY) - 1, 0, -1) if most >= 1024**p), 0)
    return _BINARY[power], 1024.0**power


INTERVALS = (
    "Intervals of measurements are 95% intervals by Student's t over the rounds; their spread comes from a "
    "hierarchical bootstrap, which resamples rounds and then the steps in each."
)
WITHHELD = (
    f"An estimate of fewer than {Estimate.ROUNDS} rounds, or whose interval spans more than a factor of "
    f"{Estimate.WIDEST:.0f}, is replaced by “{NOT_ENOUGH}” and drawn nowhere: {REMEDY} would help."
)


def interval(estimate: Estimate, scale: float = 1.0) -> str:
    """Say the interval from its low to its high end."""
    return f"{number(estimate.low * scale)}–{number(estimate.high * scale)}"


def duration(estimate: Estimate) -> str:
    """Say a duration in seconds with its interval, both in one unit; or that there are not enough rounds."""
    if estimate.doubt:
        return NOT_ENOUGH
    scale, unit = time_unit(estimate.value)
    return f"{number(estimate.value / scale)} {unit} ({interval(estimate, 1 / scale)})"


def ms(estimate: Estimate) -> str:
    """Say a duration in seconds as milliseconds with its interval; or that there are not enough rounds."""
    return NOT_ENOUGH if estimate.doubt else f"{number(estimate.value * 1e3)} ms ({interval(estimate, 1e3)})"


def times(estimate: Estimate) -> str:
    """Say a ratio with its interval; or that there are not enough rounds."""
    return NOT_ENOUGH if estimate.doubt else f"{number(estimate.value)}× ({interval(estimate)})"


def doubt(estimate: Estimate) -> str:
    """Say why an estimate is not shown; empty where it is."""
    if estimate.doubt is Doubt.ROUNDS:
        return f"{count(estimate.n, 'round')}, and fewer than {Estimate.ROUNDS} do not tell how rounds differ"
    if estimate.doubt is Doubt.WIDTH:
        return f"its interval spans more than a factor of {exact(Estimate.WIDEST)}"
    return ""


def aligned(lines: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Return cells in columns as wide as their widest, a rule below the first line; `left` columns begin alike."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]

    def text(cells: Sequence[str]) -> str:
        padded = (c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return "  ".join(padded).rstrip()

    return [text(lines[0]), "  ".join("-" * width for width in widths), *map(text, lines[1:])]


def dumps(value: object, *, default: type[str] | None = None, separators: tuple[str, str] | None = None) -> str:
    """Return plain data as JSON without NaN and Infinity; `default` converts what JSON has no type for."""
    return json.dumps(_finite(value), allow_nan=False, default=default, separators=separators)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
