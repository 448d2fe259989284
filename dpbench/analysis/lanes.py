"""Lanes: the timeline of one typical step of a case, with a lane per device, idle time and the critical path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dpbench.records import Case, Phase, Source, Span, Step, Trial, ledger

if TYPE_CHECKING:
    from dpbench.analysis.summary import Row

Interval = tuple[float, float]
"""The start and the end of an interval, in seconds after the start of the step."""


@dataclass(frozen=True)
class Bar:
    """A phase on one device, from `start_s` to `end_s` in seconds after the start of the step.

    Spans of one phase that overlap or touch are one bar. `row` is the index of a row of the lane; bars of one row do
    not overlap.
    """

    phase: Phase
    start_s: float
    end_s: float
    row: int = 0


@dataclass(frozen=True)
class Lane:
    """The bars of one device, or of the host, and its idle intervals, in which no phase is open on it."""

    device: int
    bars: tuple[Bar, ...]
    idle: tuple[Interval, ...]

    @property
    def rows(self) -> int:
        """Return the number of rows that the bars of the lane need."""
        return 1 + max((bar.row for bar in self.bars), default=0)

    @property
    def idle_s(self) -> float:
        """Return the total of the idle intervals in seconds."""
        return sum(end - start for start, end in self.idle)


@dataclass(frozen=True)
class PathSegment:
    """A stretch of the critical path, from `start_s` to `end_s` in seconds after the start of the step.

    It is a part of `bar` in the lane of `device`. Both fields are None for time in which no phase is open anywhere.
    """

    device: int | None
    bar: Bar | None
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """The timeline of one step of a case, which is the median step of one round.

    `round` and `step` are indices; `step` counts the warm-up steps too, as the trace export does. `seconds` is the
    duration of the step, and `timed` the number of timed steps of the round. `path` is the critical path in the order
    of time, without gaps; its stretches add up to the step.
    """

    case: Case
    source: Source
    round: int
    step: int
    seconds: float
    timed: int
    lanes: tuple[Lane, ...]
    path: tuple[PathSegment, ...]


def of_rows(rows: Iterable[Row], trials: Iterable[Trial]) -> Mapping[tuple[Case, Source], Lanes]:
    """Return the timeline of each row with a step time whose trials have spans, by case and source.

    The step is the median step of the round whose median is closest to the row's step time.
    """
    groups: dict[tuple[Case, Source], list[Trial]] = {}
    for trial in trials:
        if trial.trusted and (found := trial.ledger.median_step) and found[1]:
            groups.setdefault((trial.case, trial.source), []).append(trial)
    return {
        key: _typical(groups[key], row.step.value)
        for row in rows
        if row.step and (key := (row.case, row.source)) in groups
    }


def _typical(trials: Sequence[Trial], step_s: float) -> Lanes:
    """Return the timeline of one trial's median step: of all `trials`, the one whose median is closest to `step_s`."""
    steps = []
    for trial in trials:
        assert trial.ledger.median_step
        number, spans = trial.ledger.median_step
        steps.append((abs(trial.steps[number].seconds - step_s), trial.round, number, trial, spans))
    _, _, number, trial, spans = min(steps, key=lambda one: one[:3])
    step = trial.steps[number]
    bars = {
        device: _bars(step, [s for s in spans if s.device == device]) for device in sorted({s.device for s in spans})
    }
    return Lanes(
        case=trial.case, source=trial.source, round=trial.round, step=number, seconds=step.seconds,
        timed=len(trial.timed), path=_path(step, spans, bars),
        lanes=tuple(_lane(device, bars[device], step.seconds) for device in sorted(bars, key=_place)),
    )  # fmt: skip


def _place(device: int) -> tuple[bool, int]:
    """Return the sort key of a lane: the hosts first, whose indices count down from -1, and then the devices."""
    return device >= 0, abs(device)


def _bars(step: Step, spans: Iterable[Span]) -> tuple[Bar, ...]:
    """Return the bars of one device in a step; each is on the first row with room, and cut at the ends of the step."""
    opened: dict[Phase, list[Interval]] = {}
    for span in sorted(spans, key=lambda s: s.start_s):
        start, end = max(span.start_s, step.start_s) - step.start_s, min(span.end_s, step.end_s) - step.start_s
        known = opened.setdefault(span.phase, [])
        if known and start <= known[-1][1]:
            known[-1] = known[-1][0], max(end, known[-1][1])
        elif start < end:
            known.append((start, end))
    found: list[Bar] = []
    ends: list[float] = []
    for start, end, phase in sorted((*interval, phase) for phase, known in opened.items() for interval in known):
        row = next((row for row, reach in enumerate(ends) if reach <= start), len(ends))
        ends[row : row + 1] = [end]
        found.append(Bar(phase, start, end, row))
    return tuple(found)


def _lane(device: int, bars: tuple[Bar, ...], seconds: float) -> Lane:
    """Return the lane of one device in a step of `seconds`; its idle intervals are the gaps between all its bars."""
    idle, reach = [], 0.0
    for bar in bars:
        if bar.start_s > reach:
            idle.append((reach, bar.start_s))
        reach = max(reach, bar.end_s)
    if reach < seconds:
        idle.append((reach, seconds))
    return Lane(device, bars, tuple(idle))


def _path(step: Step, spans: Iterable[Span], bars: Mapping[int, Sequence[Bar]]) -> tuple[PathSegment, ...]:
    """Return the critical path of a step in the order of time; `bars` has the bars of each device."""
    path: list[PathSegment] = []
    for span, start_s, end_s in reversed(list(ledger.walk(step, spans))):
        start, end = start_s - step.start_s, end_s - step.start_s
        device = span.device if span else None
        bar = _bar_at(bars[span.device], span.phase, start) if span else None
        if path and (path[-1].device, path[-1].bar) == (device, bar):
            path[-1] = replace(path[-1], end_s=end)
        else:
            path.append(PathSegment(device, bar, start, end))
    return tuple(path)


def _bar_at(bars: Sequence[Bar], phase: Phase, at_s: float) -> Bar:
    """Return the bar of a phase that is open at the time `at_s`, in seconds after the start of the step."""
    return next(bar for bar in reversed(bars) if bar.phase == phase and bar.start_s <= at_s)
