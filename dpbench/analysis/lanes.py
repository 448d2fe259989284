"""Lanes: the timeline of a typical step: a lane per device, idle time and the critical path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dpbench.analysis.summary import Row
from dpbench.analysis.transfers import Floors
from dpbench.records import Case, Phase, Source, Span, Step, Trial, ledger
from dpbench.records.activity import Interval, difference, union
from dpbench.records.grouping import grouped
from dpbench.records.trial import Key


@dataclass(frozen=True)
class Bar:
    """A phase on `device`, from `start_s` to `end_s` in seconds after the start of the step.

    Spans of one phase that overlap or touch are one bar. `row` is a row of the lane; bars of one
    row do not overlap. `step` is 0 for the drawn step, -1 for the one before, and so on; a bar of
    the drawn step may begin before it if the device had run ahead. If `joint`, the phase was open
    on several devices at once (`Span.joint`), so that the bar does not show how long this device
    computed.
    """

    device: int
    phase: Phase
    start_s: float
    end_s: float
    row: int = 0
    step: int = 0
    joint: bool = False


@dataclass(frozen=True)
class Lane:
    """The bars of one device, or of the host, and its idle intervals, without any open phase.

    Intervals are in seconds after the start of the step. The lane begins at `begin_s`: at the
    step's start (0), or earlier, with the device's first phase of the step. It ends with the step,
    `seconds` later.
    """

    device: int
    bars: tuple[Bar, ...]
    idle: tuple[Interval, ...]
    begin_s: float
    seconds: float

    @property
    def rows(self) -> int:
        """Return the number of rows that the bars of the lane need."""
        return 1 + max((bar.row for bar in self.bars), default=0)

    @property
    def idle_s(self) -> float:
        """Return the total of the idle intervals in seconds."""
        return sum(end - start for start, end in self.idle)

    @property
    def idle_share(self) -> float:
        """Return the idle time as a fraction of the lane."""
        return self.idle_s / self.seconds


@dataclass(frozen=True)
class PathSegment:
    """A stretch of the critical path, in seconds after the start of the step.

    It is a part of `bar`, None while no phase is open anywhere.
    """

    bar: Bar | None
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """The timeline of one step of a case: `ledger.typical_step` of one round.

    `step` counts the warm-up steps too, as the trace export does. `seconds` is the duration of the
    step, and `timed` the number of timed steps of the round. `path` is the critical path in the
    order of time; its stretches add up to the step. `floors` has the least seconds of a phase on a
    device where they are known; see `Row.floors`.
    """

    case: Case
    source: Source
    round: int
    step: int
    seconds: float
    timed: int
    lanes: tuple[Lane, ...]
    path: tuple[PathSegment, ...]
    floors: Floors = field(default_factory=dict)


def of_rows(rows: Iterable[Row], trials: Iterable[Trial]) -> Mapping[Key, Lanes]:
    """Return the timeline of each row with a step time and spans, by case and source.

    Of the rounds' typical steps, it is the one whose duration is closest to the row's step time.
    """
    rounds = grouped(
        (trial.key, found) for trial in trials if trial.trusted and (found := of_trial(trial))
    )
    return {
        row.key: replace(_closest(rounds[row.key], row.step.value), floors=row.floors)
        for row in rows
        if row.step and row.key in rounds
    }


def _closest(rounds: Sequence[Lanes], step_s: float) -> Lanes:
    return min(rounds, key=lambda one: (abs(one.seconds - step_s), one.round, one.step))


def of_trial(trial: Trial) -> Lanes | None:
    """Return the timeline of a trial's typical step, None without a timed step with spans."""
    number, spans = trial.ledger.median_step or (0, ())
    of_step = [span for span in spans if span.step == number]
    if not of_step:
        return None
    step = trial.steps[number]
    bars = {
        device: _bars(device, step, number, [span for span in spans if span.device == device])
        for device in sorted({span.device for span in of_step})
    }
    return Lanes(
        case=trial.case,
        source=trial.source,
        round=trial.round,
        step=number,
        seconds=step.seconds,
        timed=len(trial.timed),
        path=_path(step, of_step, bars),
        lanes=tuple(
            _lane(device, bars[device], step.seconds) for device in sorted(bars, key=_place)
        ),
    )


def _place(device: int) -> tuple[bool, int]:
    """Sort the hosts, whose indices count down from -1, before the devices."""
    return device >= 0, abs(device)


def _bars(device: int, step: Step, number: int, spans: Iterable[Span]) -> tuple[Bar, ...]:
    """Return the bars of one device in step `number`; each is on the first row with room.

    Phases of other steps are cut at the ends of the lane.
    """
    begin_s = min([step.start_s, *(span.start_s for span in spans if span.step == number)])

    def extent(span: Span) -> Interval:
        start, end = span.start_s, span.end_s
        if span.step != number:
            start, end = max(start, begin_s), min(end, step.end_s)
        return start - step.start_s, end - step.start_s

    opened = grouped(((span.phase, span.step - number, span.joint), extent(span)) for span in spans)
    bars: list[Bar] = []
    ends: list[float] = []
    intervals = sorted((*one, *key) for key, found in opened.items() for one in union(found))
    for start, end, phase, place, joint in intervals:
        row = next((row for row, reach in enumerate(ends) if reach <= start), len(ends))
        ends[row : row + 1] = [end]
        bars.append(Bar(device, phase, start, end, row, place, joint))
    return tuple(bars)


def _lane(device: int, bars: tuple[Bar, ...], step_s: float) -> Lane:
    begin_s = min([0.0, *(bar.start_s for bar in bars if not bar.step)])
    idle = difference([(begin_s, step_s)], union((bar.start_s, bar.end_s) for bar in bars))
    return Lane(device, bars, tuple(idle), begin_s, step_s - begin_s)


def _path(
    step: Step, spans: Iterable[Span], bars: Mapping[int, Sequence[Bar]]
) -> tuple[PathSegment, ...]:
    path: list[PathSegment] = []
    for span, start_s, end_s in reversed(list(ledger.walk(step, spans))):
        start, end = start_s - step.start_s, end_s - step.start_s
        bar = _bar_at(bars[span.device], span, start) if span else None
        if path and path[-1].bar == bar:
            path[-1] = replace(path[-1], end_s=end)
        else:
            path.append(PathSegment(bar, start, end))
    return tuple(path)


def _bar_at(bars: Sequence[Bar], span: Span, at_s: float) -> Bar:
    """Return the bar of a span of the step that is open at `at_s`, from the start of the step."""
    key = span.phase, 0, span.joint
    return next(
        bar
        for bar in reversed(bars)
        if (bar.phase, bar.step, bar.joint) == key and bar.start_s <= at_s
    )
