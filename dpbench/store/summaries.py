"""Summaries: the steps and the ledger of a trial as one value, so that a report reads no spans.

A trial has thousands of spans, and going through them takes most of the time of a report. The
summary is computed when the trial ends, and can be computed again from the spans.
"""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Sequence
from functools import cached_property

import msgspec

from dpbench.records import UNATTRIBUTED, Phase, Span, Trial
from dpbench.records.ledger import Ledger
from dpbench.records.series import Steps
from dpbench.records.visible import visible

VERSION = 4
"""The version of the ledger's rules; raise it if a rule changes.

Summaries of other versions are computed again.
"""


class _Packed(msgspec.Struct, array_like=True):
    """The columns of the trial's steps, and values of the properties of its `Ledger`.

    `warmup` has one byte per step; all other series are little-endian doubles, one per step, or one
    per timed step in `occupied` and `moved`. `charged` has one series for each (phase, device) in
    `keys`, with NaN for a step without this key. `median` is the index of the median step, `spans`
    its spans as (phase, device, clock, start, end), and `places` their steps relative to `median`,
    which versions before 3 lack. `moved` has (phase, device, series), which those before 4 lack.
    """

    version: int
    seconds: bytes
    ends: bytes
    warmup: bytes
    keys: list[tuple[str, int]]
    charged: list[bytes]
    timed: dict[str, float]
    occupied: dict[int, bytes]
    concurrency: dict[str, tuple[float, float]]
    median: int | None
    spans: list[tuple[str, int, str, float, float]]
    places: list[int] = []
    moved: list[tuple[str, int, bytes]] = []


_DECODER = msgspec.msgpack.Decoder(_Packed)


class StoredLedger(Ledger):
    """A ledger whose properties were stored; each series is decoded on first use."""

    def __init__(self, packed: _Packed) -> None:
        warmup = tuple(map(bool, packed.warmup))
        self.steps = Steps(_numbers(packed.seconds), warmup, _numbers(packed.ends))
        super().__init__(self.steps, ())
        self._packed = packed

    @cached_property
    def charged(self) -> tuple[dict[tuple[str, int], float], ...]:
        """Return, for every step, the stored seconds by (phase, device)."""
        columns = [_numbers(column) for column in self._packed.charged]
        if not columns:
            return ({},) * len(self.steps)
        return tuple(
            {
                key: seconds
                for key, seconds in zip(self._packed.keys, row, strict=True)
                if not math.isnan(seconds)
            }
            for row in zip(*columns, strict=True)
        )

    @cached_property
    def seconds(self) -> dict[str, array[float]]:
        """Return, by phase, the seconds of every step, summed over the devices."""
        by_phase: dict[str, array[float]] = {}
        for (phase, _), column in zip(self._packed.keys, self._packed.charged, strict=True):
            values = _numbers(column)
            if math.isnan(sum(values)):  # a step lacks this phase
                values = array("d", (0.0 if math.isnan(seconds) else seconds for seconds in values))
            by_phase[phase] = (
                array("d", map(operator.add, by_phase[phase], values))
                if phase in by_phase
                else values
            )
        return by_phase

    @cached_property
    def timed(self) -> dict[str, float]:
        """Return, by phase, the stored total seconds over all timed steps."""
        return self._packed.timed

    @cached_property
    def moved(self) -> dict[tuple[Phase, int], array[float]]:
        """Return, by (phase, device), the stored seconds of each timed step of moving data."""
        return {
            (Phase(phase), device): _numbers(column) for phase, device, column in self._packed.moved
        }

    @cached_property
    def occupied(self) -> dict[int, array[float]]:
        """Return, by device, the stored seconds of each timed step with an open span on it."""
        return {device: _numbers(column) for device, column in self._packed.occupied.items()}

    @cached_property
    def concurrency(self) -> dict[Phase, tuple[float, float]]:
        """Return, by phase, the stored sum and union of its spans, in seconds."""
        return {Phase(phase): pair for phase, pair in self._packed.concurrency.items()}

    @cached_property
    def median_step(self) -> tuple[int, tuple[Span, ...]] | None:
        """Return the index and the stored spans of the median step."""
        number = self._packed.median
        if number is None:
            return None
        return number, tuple(
            Span(number + place, Phase(phase), device, visible(clock), start_s, end_s)
            for (phase, device, clock, start_s, end_s), place in zip(
                self._packed.spans, self._packed.places, strict=True
            )
        )


def packed(trial: Trial) -> bytes:
    """Return the summary of a trial, for the column `summary` of its row."""
    ledger = trial.ledger
    steps = trial.by_column
    keys = list(dict.fromkeys(key for charged in ledger.charged for key in charged))
    number, spans = ledger.median_step or (None, ())
    return msgspec.msgpack.encode(
        _Packed(
            version=VERSION,
            seconds=_column(steps.seconds),
            ends=_column(steps.ends),
            warmup=bytes(steps.warmup),
            keys=keys,
            charged=[
                _column([charged.get(key, math.nan) for charged in ledger.charged]) for key in keys
            ],
            timed=dict(ledger.timed),
            occupied={device: _column(values) for device, values in ledger.occupied.items()},
            concurrency={phase.value: pair for phase, pair in ledger.concurrency.items()},
            median=number,
            spans=[(s.phase.value, s.device, s.clock, s.start_s, s.end_s) for s in spans],
            places=[s.step - number for s in spans] if number is not None else [],
            moved=[(*key, _column(values)) for key, values in ledger.moved.items()],
        )
    )


def unpacked(summary: bytes | None) -> StoredLedger | None:
    """Return the ledger of a summary; None if it is missing, damaged or of another `VERSION`."""
    try:
        decoded = _DECODER.decode(summary or b"")
        return (
            StoredLedger(decoded) if decoded.version == VERSION and _consistent(decoded) else None
        )
    except (ValueError, TypeError):
        return None


def _consistent(summary: _Packed) -> bool:
    """Return whether phases are known and sum to the steps, and the parts fit together."""
    charged = {phase for phase, _ in summary.keys}
    spanned = {one[0] for one in (*summary.spans, *summary.moved)}
    if not charged | {*summary.timed} <= {*Phase, UNATTRIBUTED}:
        return False
    if not spanned | {*summary.concurrency} <= {*Phase}:
        return False
    steps = len(summary.warmup)
    timed = summary.warmup.count(0)
    return (
        all(
            len(column) == 8 * steps for column in (summary.seconds, summary.ends, *summary.charged)
        )
        and all(
            len(column) == 8 * timed
            for column in (*summary.occupied.values(), *(one[-1] for one in summary.moved))
        )
        and len(summary.keys) == len(summary.charged)
        and len(summary.places) == len(summary.spans)
        and (summary.median is None or 0 <= summary.median < steps)
        and math.isclose(
            sum(map(_total, summary.charged)),
            sum(_numbers(summary.seconds)),
            # the ends of steps are rounded, so that those of short steps differ slightly
            rel_tol=0.01,
        )
    )


def _total(column: bytes) -> float:
    """Return the sum of a series without NaN."""
    values = _numbers(column)
    total = sum(values)
    return total if not math.isnan(total) else sum(one for one in values if not math.isnan(one))


def _column(values: Sequence[float]) -> bytes:
    return array("d", values).tobytes()


def _numbers(column: bytes) -> array[float]:
    values = array("d")
    values.frombytes(column)
    return values
