"""Words: numbers as text, for terminals, pages and messages alike.

No other module rounds, scales or picks units for a reader: three significant digits, never an exponent.
"""

from __future__ import annotations

import math
from decimal import Decimal

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
