"""Words: format numbers as text for terminals, pages and messages.

This is the only module that rounds numbers, scales them or chooses their units for a reader.
Numbers have three significant digits, unless a function states another precision, and never an
exponent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal

from dpbench.records.case import UNATTRIBUTED
from dpbench.records.estimate import Doubt, Estimate
from dpbench.records.spelling import dashed

MISSING = "–"
_NOT_ENOUGH = "not enough rounds"
_NOT_ENOUGH_QUIET = "not enough quiet rounds"
NOT_ENOUGH_STEPS = "not enough steps"
"""The text in place of a percentile of too few steps."""
REMEDY = (
    f"more rounds ({dashed('rounds', 'N')}, or {dashed('rounds', 'auto')}) and a machine without"
    " other work"
)
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
RESIDUE_S = 1e-12
"""Shorter durations are residues of rounding, written as 0: no clock is finer than a nanosecond."""
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_JOULES = ((1.0, "J"), (1e-3, "mJ"), (1e-6, "µJ"))


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with `digits` significant digits, but at least its whole integer part.

    `MISSING` for None, NaN and infinity.
    """
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits}g}")  # 0.9999 is 1.00, not 1.000
    places = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{value:,.{max(0, places)}f}"


def exact(value: float) -> str:
    """Return a number, such as a limit, with up to six significant digits and no trailing zeros."""
    return f"{Decimal(f'{value:.6g}'):f}" if math.isfinite(value) else MISSING


def signed(value: float) -> str:
    """Return a number with its sign."""
    return f"{'−' if value < 0 else '+'}{number(abs(value))}"


def count(number: int, noun: str, plural: str = "") -> str:
    """Return a count and its noun, such as "3 cases"; the default plural ends in s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def verb(number: int, singular: str, plural: str) -> str:
    """Return the form of a verb that agrees with a count."""
    return singular if number == 1 else plural


def without_rows(kind: str) -> str:
    """Return the clause that an object of this type in a batch cannot be split, and the way out."""
    return (
        f"{kind}, whose rows cannot be split; give tensors (torch.from_numpy for arrays) in tuples,"
        " lists or dicts"
    )


def percent(share: float) -> str:
    """Return a fraction as a percentage, with one decimal below 10 %."""
    if not math.isfinite(share):
        return MISSING
    return f"{share:.1%}" if abs(share) < 0.0995 else f"{share:.0%}"


def measurable(value: float) -> float:
    """Return a duration in seconds, or 0 for a residue of rounding."""
    return 0.0 if abs(value) < RESIDUE_S else value


def time(value: float) -> str:
    """Return a duration in seconds as text in a suitable unit, from ns to s."""
    value = measurable(value)
    scale, unit = time_unit(value)
    return f"{number(value / scale)} {unit}" if math.isfinite(value) else MISSING


def long_time(value: float) -> str:
    """Return a duration in seconds as text, in hours from 2 h and in minutes from 2 min."""
    scale, unit = long_unit(value)
    return f"{number(value / scale)} {unit}" if math.isfinite(value) else MISSING


def long_unit(value: float) -> tuple[float, str]:
    """Return the unit of `long_time` for a duration in seconds, as (seconds per unit, name)."""
    if not math.isfinite(value) or value < 120:
        return time_unit(value)
    return (60.0, "min") if value < 7200 else (3600.0, "h")


def long_duration(estimate: Estimate) -> str:
    """Return an estimated duration in seconds and its interval, in the unit of `long_time`."""
    if estimate.doubt:
        return withheld(estimate)
    scale, unit = long_unit(estimate.value)
    return f"{number(estimate.value / scale)} {unit} ({interval(estimate, 1 / scale)})"


def signed_time(value: float) -> str:
    """Return a difference of durations in seconds, with its sign and in a suitable unit."""
    return f"{'−' if value < 0 else '+'}{time(abs(value))}"


def time_unit(value: float) -> tuple[float, str]:
    """Return the unit in which to show a duration in seconds, as (seconds per unit, name).

    It is the largest unit in which the rounded duration is at least 1; ns for shorter durations,
    and ms for 0.
    """
    return _unit(value, _TIMES)


def _unit(value: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    rounded = float(f"{abs(value):.3g}") if value else 1e-3
    return next((pair for pair in units if rounded >= pair[0]), units[-1])


def day(seconds: float) -> str:
    """Return the day of a time in seconds since the epoch as text, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")


def minute(seconds: float) -> str:
    """Return a time in seconds since the epoch as text, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def size(number_of_bytes: float) -> str:
    """Return a number of bytes in a binary unit, such as "1.50 MiB"."""
    unit, scale = binary(number_of_bytes)
    return (
        f"{number_of_bytes:,.0f} B" if scale == 1 else f"{number(number_of_bytes / scale)} {unit}"
    )


def binary(most: float) -> tuple[str, float]:
    """Return the largest binary unit up to `most` bytes, or B, as (name, bytes per unit)."""
    power = next((p for p in range(len(_BINARY) - 1, 0, -1) if most >= 1024**p), 0)
    return _BINARY[power], 1024.0**power


INTERVALS = (
    "Intervals of measurements are 95% intervals by Student's t over rounds; their standard error"
    " comes from a bootstrap, which resamples whole rounds."
)
TOGETHER = (
    "The intervals of all speed-ups over one baseline are wider, so that all of them contain the"
    " true values with 95% (Bonferroni). The interval that is shown decides: a case is faster or"
    " slower if its whole interval is above or below 1."
)


def interval(estimate: Estimate, scale: float = 1.0) -> str:
    """Return the ends of an estimate's interval, multiplied by `scale`."""
    return f"{number(estimate.low * scale)}–{number(estimate.high * scale)}"


def duration(estimate: Estimate) -> str:
    """Return an estimated duration in seconds and its interval in one unit; see `withheld`."""
    return _duration(estimate, *time_unit(measurable(estimate.value)))


def about(estimate: Estimate) -> str:
    """Return an estimated duration as `duration` does, or after "~" if it has too few rounds."""
    few = estimate.doubt is Doubt.ROUNDS
    return f"~{time(estimate.value)}" if few else duration(estimate)


def ms(estimate: Estimate) -> str:
    """Return an estimated duration in seconds and its interval in ms; see `withheld`."""
    return _duration(estimate, 1e-3, "ms")


def _duration(estimate: Estimate, scale: float, unit: str) -> str:
    if estimate.doubt:
        return withheld(estimate)
    value, low, high = (
        number(measurable(seconds) / scale)
        for seconds in (estimate.value, estimate.low, estimate.high)
    )
    return f"{value} {unit} ({low}–{high})"


def joules(estimate: Estimate) -> str:
    """Return an estimated energy in joules and its interval in one unit; see `withheld`."""
    if estimate.doubt:
        return withheld(estimate)
    scale, unit = _unit(estimate.value, _JOULES)
    return f"{number(estimate.value / scale)} {unit} ({interval(estimate, 1 / scale)})"


def part(phase: str) -> str:
    """Return how a sentence names a part of a step: a phase, or unattributed time."""
    return "Python code between the phases" if phase == UNATTRIBUTED else phase


def times(estimate: Estimate) -> str:
    """Return an estimated ratio and its interval; see `withheld`.

    Of an interval that is too wide for a value, return the ends.
    """
    if estimate.doubt is Doubt.WIDTH and 1e-3 < estimate.low < estimate.high < 1e3:
        return f"between {number(estimate.low)}× and {number(estimate.high)}×"
    return (
        withheld(estimate)
        if estimate.doubt
        else f"{number(estimate.value)}× ({interval(estimate)})"
    )


def about_times(estimate: Estimate) -> str:
    """Return an estimated ratio as `times` does, or the ratio alone after "~" if it is in doubt."""
    return f"~{number(estimate.value)}×" if estimate.doubt else times(estimate)


def withheld(*estimates: Estimate | None) -> str:
    """Return the text in place of estimates of which at least one is in doubt."""
    noisy = any(estimate and estimate.doubt is Doubt.NOISY for estimate in estimates)
    return _NOT_ENOUGH_QUIET if noisy else _NOT_ENOUGH


def doubt(estimate: Estimate) -> str:
    """Return the reason why an estimate is in doubt as a clause; "" if it is not."""
    if estimate.doubt is Doubt.ROUNDS:
        return (
            f"{count(estimate.n, 'round')}, but at least {Estimate.ROUNDS} are needed to show how"
            " rounds differ"
        )
    if estimate.doubt is Doubt.NOISY:
        return (
            "other processes used too much of the machine (NOISY), and fewer than"
            f" {Estimate.ROUNDS} rounds without them are left"
        )
    if estimate.doubt is Doubt.WIDTH:
        return f"the estimate's interval spans more than a factor of {exact(Estimate.WIDEST)}"
    return ""


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines with left-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def aligned(lines: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Return rows of cells as the lines of a text table, with a rule below the first line.

    `left` has the indices of the left-aligned columns.
    """
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]

    def text(cells: Sequence[str]) -> str:
        padded = (
            c.ljust(w) if i in left else c.rjust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return [text(lines[0]), "  ".join("-" * width for width in widths), *map(text, lines[1:])]


def dumps(
    value: object, *, default: type[str] | None = None, separators: tuple[str, str] | None = None
) -> str:
    """Return plain data as JSON, with null for NaN and infinity.

    `default`, such as `str`, converts values of types that JSON lacks.
    """
    return json.dumps(_finite(value), allow_nan=False, default=default, separators=separators)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
