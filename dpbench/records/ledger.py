"""Ledger: split the time of a step into phases that sum to the whole step.

The algorithm goes backwards from the end of the step: the span that ended last is charged with the time back to its
start, and the algorithm continues from there. Time that no span covers is `unattributed`. The same algorithm finds this
time without a subtraction, so it is never negative.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from dpbench.records.case import HOST, UNATTRIBUTED, Phase

if TYPE_CHECKING:  # records.trial imports this module
    from dpbench.records.trial import Span, Step, Trial

Value = TypeVar("Value")


class Ledger:
    """The ledger of one trial, whose parts are computed on first use and then kept."""

    def __init__(self, steps: Sequence[Step], spans: Sequence[Span]) -> None:
        self._steps, self._spans = steps, spans

    @cached_property
    def charged(self) -> tuple[Mapping[tuple[str, int], float], ...]:
        """Return the result of `charge` for every step, warm-up included."""
        rows = by_step(self._spans, len(self._steps))
        return tuple(charge(step, spans) for step, spans in zip(self._steps, rows, strict=True))

    @cached_property
    def phases(self) -> tuple[dict[str, float], ...]:
        """Return the seconds by phase of every step, warm-up included, in the order of `Phase`, then `UNATTRIBUTED`."""
        return tuple(_by_phase(charged) for charged in self.charged)

    @cached_property
    def occupied(self) -> Mapping[int, list[float]]:
        """Return, by device and for each timed step, the seconds in which the device had at least one span open."""
        found: dict[int, list[float]] = {}
        used = sorted({span.device for span in self._spans} - {HOST})
        for step, spans in zip(self._steps, by_step(self._spans, len(self._steps)), strict=True):
            if not step.warmup:
                for device in used:
                    mine = [span for span in spans if span.device == device]
                    found.setdefault(device, []).append(step.seconds - phases(step, mine)[UNATTRIBUTED])
        return found

    @cached_property
    def concurrency(self) -> Mapping[Phase, tuple[float, float]]:
        """For each phase, return two durations in seconds over the timed steps.

        They are the sum of the durations of its device spans, and the length of their union (overlaps counted once).
        """
        return {phase: self._concurrency(phase) for phase in {span.phase for span in self._spans}}

    def _concurrency(self, phase: Phase) -> tuple[float, float]:
        warm = {number for number, step in enumerate(self._steps) if step.warmup}
        spans = [s for s in self._spans if s.phase is phase and s.device != HOST and s.step not in warm]
        union, reach = 0.0, float("-inf")
        for span in sorted(spans, key=lambda s: s.start_s):
            union += max(0.0, span.end_s - max(span.start_s, reach))
            reach = max(reach, span.end_s)
        return sum(span.end_s - span.start_s for span in spans), union

    def close(self) -> Ledger:
        """Compute every part, release the spans, and return the ledger."""
        _ = self.phases, self.occupied, self.concurrency
        self._spans = ()
        return self


def charge(step: Step, spans: Iterable[Span]) -> dict[tuple[str, int], float]:
    """Return seconds by (phase, device); they sum to the duration of the step.

    Uncovered time has the key (UNATTRIBUTED, -1). Where several spans cover a moment, the span that ends first takes
    precedence, and among equal ends the span that began last.
    """
    charged: dict[tuple[str, int], float] = {}
    pending = [span for span in spans if max(span.start_s, step.start_s) < min(span.end_s, step.end_s)]
    now = step.end_s
    while now > step.start_s:
        pending = [span for span in pending if span.start_s < now]
        span = max(pending, key=lambda s: (min(s.end_s, now), -s.end_s, s.start_s), default=None)
        until = max(step.start_s, min(span.end_s, now)) if span else step.start_s
        if until < now:
            _add(charged, (UNATTRIBUTED, -1), now - until)
        if span is None:
            break
        start = max(step.start_s, span.start_s)
        _add(charged, (span.phase.value, span.device), until - start)
        now = start
    return charged


def _add(charged: dict[tuple[str, int], float], key: tuple[str, int], seconds: float) -> None:
    charged[key] = charged.get(key, 0.0) + seconds


def by_step(spans: Iterable[Span], steps: int) -> list[list[Span]]:
    """Return the spans of each step, by the step's index."""
    rows: list[list[Span]] = [[] for _ in range(steps)]
    for span in spans:
        if 0 <= span.step < steps:
            rows[span.step].append(span)
    return rows


def phases(step: Step, spans: Sequence[Span]) -> dict[str, float]:
    """Return a step's seconds by phase, in the order of `Phase`, with unattributed time last; they sum to the step."""
    return _by_phase(charge(step, spans))


def _by_phase(charged: Mapping[tuple[str, int], float]) -> dict[str, float]:
    total = dict.fromkeys([*(phase.value for phase in Phase), UNATTRIBUTED], 0.0)
    for (phase, _), seconds in charged.items():
        total[phase] += seconds
    return {name: seconds for name, seconds in total.items() if seconds or name == UNATTRIBUTED}


def of_trial(trial: Trial) -> list[dict[str, float]]:
    """Return the result of `phases` for every step of a trial, warm-up included."""
    return list(trial.ledger.phases)


def joined(parts: Sequence[Trial]) -> tuple[tuple[Step, ...], tuple[Span, ...]]:
    """Return the merged steps and spans of all ranks; each step is taken from the rank that finished it last.

    A reduction starts only when the last rank arrives. Each rank's reduce span is therefore cut to begin at that time,
    so that waiting for the last rank counts towards the phase which that rank was still in.
    """
    steps = tuple(max(row, key=lambda step: step.end_s) for row in zip(*(part.steps for part in parts), strict=False))
    spans = [span for part in parts for span in part.spans]
    arrived: dict[int, float] = {}
    for span in spans:
        if span.phase is Phase.REDUCE:
            arrived[span.step] = max(span.start_s, arrived.get(span.step, span.start_s))
    return steps, tuple(
        replace(span, start_s=min(span.end_s, arrived[span.step])) if span.phase is Phase.REDUCE else span
        for span in spans
    )


def typical(trial: Trial) -> dict[str, float]:
    """Return the seconds of each phase in a typical step: the means over the middle half of the timed steps.

    Unlike the medians of the phases, these means sum to a step. Disturbed steps are left out, as in a median.
    """
    rows = middle(trial)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: statistics.mean(row.get(name, 0.0) for row in rows) for name in names}


def middle(trial: Trial) -> list[dict[str, float]]:
    """Return the result of `phases` for the middle half of a trial's timed steps, sorted by duration."""
    timed = [(step.seconds, parts) for step, parts in zip(trial.steps, of_trial(trial), strict=True) if not step.warmup]
    return [parts for _, parts in middle_half(sorted(timed, key=lambda one: one[0]))]


def middle_half(ordered: Sequence[Value]) -> Sequence[Value]:
    """Return a sorted series without its lowest and highest quarter; fewer than four values are returned unchanged."""
    aside = len(ordered) // 4
    return ordered[aside : len(ordered) - aside]
