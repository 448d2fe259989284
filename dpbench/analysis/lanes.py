"""Lanes: the timeline of one typical step of a case, with a lane per device, idle time and the critical path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpbench.records import Case, Phase, Source, Span, Step, Trial, ledger

if TYPE_CHECKING:
    from dpbench.analysis.summary import Row

Interval = tuple[float, float]
"""The start and the end of an interval, in seconds after the start of the step."""


@dataclass(frozen=True)
class Bar:
    """A phase on one device, from `start_s` to `end_s` in seconds after the start of the step.

    `row` is the index of the row of the lane; bars of one row do not overlap.
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
class Stretch:
    """A stretch of the critical path, from `start_s` to `end_s` in seconds after the start of the step.

    It lies in the bar `bar` of the lane of `device`. Both are None for time in which no phase is open anywhere.
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
    path: tuple[Stretch, ...]


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
    """Return the timeline of the median step that is closest to `step_s` seconds among the trials of one case."""
    steps = []
    for trial in trials:
        assert trial.ledger.median_step
        number, spans = trial.ledger.median_step
        steps.append((abs(trial.steps[number].seconds - step_s), trial.round, number, trial, spans))
    _, _, number, trial, spans = min(steps, key=lambda one: one[:3])
    step = trial.steps[number]
    bars = {device: _bars(step, [s for s in spans if s.device == device]) for device in {s.device for s in spans}}
    return Lanes(
        case=trial.case, source=trial.source, round=trial.round, step=number, seconds=step.seconds,
        timed=len(trial.timed), path=_path(step, spans, bars),
        lanes=tuple(_lane(device, bars[device], step.seconds) for device in sorted(bars, key=_place)),
    )  # fmt: skip


def _place(device: int) -> tuple[bool, int]:
    """Return the sort key of a lane: the hosts first, whose indices count down from -1, and then the devices."""
    return device >= 0, abs(device)


def _bars(step: Step, spans: Iterable[Span]) -> dict[Span, Bar]:
    """Return the bar of each span of one device, cut at the ends of the step; each is on the first row with room."""
    found: dict[Span, Bar] = {}
    ends: list[float] = []
    for span in sorted(spans, key=lambda s: (s.start_s, -s.end_s)):
        start, end = max(span.start_s, step.start_s), min(span.end_s, step.end_s)
        if start >= end:
            continue
        row = next((row for row, reach in enumerate(ends) if reach <= start), len(ends))
        ends[row : row + 1] = [end]
        found[span] = Bar(span.phase, start - step.start_s, end - step.start_s, row)
    return found


def _lane(device: int, bars: Mapping[Span, Bar], seconds: float) -> Lane:
    """Return the lane of one device in a step of `seconds`; its idle intervals are the gaps between all its bars."""
    idle, reach = [], 0.0
    for bar in sorted(bars.values(), key=lambda bar: bar.start_s):
        if bar.start_s > reach:
            idle.append((reach, bar.start_s))
        reach = max(reach, bar.end_s)
    if reach < seconds:
        idle.append((reach, seconds))
    return Lane(device, tuple(bars.values()), tuple(idle))


def _path(step: Step, spans: Iterable[Span], bars: Mapping[int, Mapping[Span, Bar]]) -> tuple[Stretch, ...]:
    """Return the critical path of a step in the order of time; `bars` has the bar of each span, by device."""
    back = [
        Stretch(
            part.span.device if part.span else None, bars[part.span.device][part.span] if part.span else None,
            part.start_s - step.start_s, part.end_s - step.start_s,
        )
        for part in ledger.walk(step, spans)
    ]  # fmt: skip
    return tuple(reversed(back))
