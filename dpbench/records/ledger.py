"""Ledger: the split of a step's time into phases, so that the parts sum to the whole step.

The algorithm goes back in time from the end of the step: it chooses a span (see `walk`), charges it
for the time since its start, and continues from there. The charged stretches are the critical path
of the step. Time that no span covers is charged as `unattributed`; it is not computed as a
difference, so it is never negative.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Self

from dpbench.records.activity import Interval, length, union
from dpbench.records.case import HOST, MOVING, UNATTRIBUTED, Phase
from dpbench.records.grouping import summed
from dpbench.records.series import Span, Step, Value

PHASES = (*(phase.value for phase in Phase), UNATTRIBUTED)
"""The names of the parts of a step, in their order."""


class Ledger:
    """The seconds of one trial's steps by phase, computed on first use."""

    def __init__(self, steps: Sequence[Step], spans: Sequence[Span]) -> None:
        self._steps = steps
        self._spans = spans

    @classmethod
    def recorded(cls, steps: Sequence[Step], phases: Sequence[dict[str, float]]) -> Self:
        """Return the ledger of a trial without spans, from the seconds of each step by phase.

        It has no seconds by device.
        """
        ledger = cls(steps, ())
        properties = {
            "phases": tuple(phases),
            "charged": ({},) * len(phases),
            "moved": {},
            "occupied": {},
            "concurrency": {},
        }
        ledger.__dict__.update(properties)
        return ledger

    @cached_property
    def charged(self) -> tuple[Mapping[tuple[str, int], float], ...]:
        """Return the result of `charge` for every step, including warm-up."""
        rows = by_step(self._spans, len(self._steps))
        return tuple(charge(step, spans) for step, spans in zip(self._steps, rows, strict=True))

    @cached_property
    def moved(self) -> Mapping[tuple[Phase, int], array[float]]:
        """Return, by (phase, device), the seconds of each timed step of moving data.

        The phases are those of `MOVING`. The seconds are the union of the device's own spans, also
        where the critical path goes through another device, without the waits for other devices.
        """
        rows = by_step(self._spans, len(self._steps))
        each = [_moved(row) for s, row in zip(self._steps, rows, strict=True) if not s.warmup]
        keys = sorted({key for one in each for key in one})
        return {key: array("d", (one.get(key, 0.0) for one in each)) for key in keys}

    @cached_property
    def phases(self) -> tuple[dict[str, float], ...]:
        """Return the result of the function `phases` for every step, including warm-up."""
        return tuple(_by_phase(charged) for charged in self.charged)

    @cached_property
    def seconds(self) -> Mapping[str, Sequence[float]]:
        """Return, by phase or `unattributed`, the seconds of every step, including warm-up."""
        names = dict.fromkeys(name for phases in self.phases for name in phases)
        return {name: [phases.get(name, 0.0) for phases in self.phases] for name in names}

    @cached_property
    def timed(self) -> Mapping[str, float]:
        """Return, by phase, the total seconds over all timed steps, which sum to their time."""
        parts = zip(self._steps, self.phases, strict=True)
        return summed(pair for step, phases in parts if not step.warmup for pair in phases.items())

    def typical(self) -> dict[str, float]:
        """Return, by phase, the mean seconds over the middle half of the timed steps.

        The fastest and the slowest quarter may have been disturbed. The means sum to the mean step;
        medians would not sum to the median step.
        """
        from statistics import mean  # every command imports this module

        rows = _middle(self._steps, self.phases)
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: mean(row.get(name, 0.0) for row in rows) for name in names}

    @cached_property
    def occupied(self) -> Mapping[int, array[float]]:
        """Return, by device, the seconds of each timed step in which a span was open on it.

        Spans of the next step count too: a GPU that has finished its part of a step begins the next
        step while another GPU still works.
        """
        timed = [step for step in self._steps if not step.warmup]
        seconds: dict[int, array[float]] = {}
        for device in sorted({span.device for span in self._spans} - {HOST}) if timed else ():
            before = _open_before(span for span in self._spans if span.device == device)
            seconds[device] = array(
                "d", (min(s.seconds, before(s.end_s) - before(s.start_s)) for s in timed)
            )
        return seconds

    @cached_property
    def concurrency(self) -> Mapping[Phase, tuple[float, float]]:
        """Return, by phase, the sum and the union of its spans, in seconds over all timed steps.

        The sum counts the time in which spans of several devices overlap once per span. Joint spans
        on the host's clock count as one span: one thread computes for one device after the other.
        Joint spans on a GPU's clock are left out, because they do not show when each device
        computed: autograd has a thread per GPU. Spans of the host are left out too.
        """
        return {
            phase: self._concurrency(phase)
            for phase in dict.fromkeys(span.phase for span in self._spans)
        }

    def _concurrency(self, phase: Phase) -> tuple[float, float]:
        warm = {number for number, step in enumerate(self._steps) if step.warmup}
        spans = [
            s for s in self._spans if s.phase is phase and s.device != HOST and s.step not in warm
        ]
        joint = union((s.start_s, s.end_s) for s in spans if s.joint and s.on_host)
        each = [*((s.start_s, s.end_s) for s in spans if not s.joint), *joint]
        return length(each), length(union(each))

    @cached_property
    def median_step(self) -> tuple[int, tuple[Span, ...]] | None:
        """Return the index and the spans of the step that `typical_step` chooses; None without one.

        Spans of other steps that are open during it, or after its first span began, are included:
        they show that a device works on another step, and is not idle.
        """
        number = typical_step(self._steps, self._spans)
        if number is None:
            return None
        step = self._steps[number]
        starts_s = [span.start_s for span in self._spans if span.step == number]
        start_s = min([step.start_s, *starts_s])
        return number, tuple(
            span
            for span in self._spans
            if span.step == number or (span.start_s < step.end_s and span.end_s > start_s)
        )

    def close(self) -> Ledger:
        """Compute all properties, and release all spans but those of the median step."""
        _ = self.timed, self.moved, self.occupied, self.concurrency, self.median_step
        self._spans = ()
        return self


class Part(NamedTuple):
    """A part of the critical path, with the span that is charged; None for unattributed time.

    Times are in seconds on the clock of the step.
    """

    span: Span | None
    start_s: float
    end_s: float


_NEEDS = {
    Phase.REPLICATE: Phase.SCATTER,
    Phase.GATHER: Phase.FORWARD,
    Phase.BACKWARD: Phase.LOSS,
    Phase.REDUCE: Phase.BACKWARD,
}
"""The phases that wait for other devices, and the phases that these must first complete.

Replicate waits because a collective begins when all devices have reached it. Backward waits only on
a device that computes no loss: its gradients come from the loss of another device.
"""


def walk(step: Step, spans: Iterable[Span]) -> Iterator[Part]:
    """Yield the critical path of a step, from its end back to its start, without gaps or overlaps.

    If several spans are open at the time that it has reached, the algorithm charges the one that
    ends first, or among equal ends the one that began last. A device may open a phase that needs
    results of other devices (a key of `_NEEDS`), and then wait for them. Such a span is charged
    back to the time at which the last of these results arrived; its wait is charged only where no
    other span is open.
    """
    inside = [
        span for span in spans if max(span.start_s, step.start_s) < min(span.end_s, step.end_s)
    ]
    tie_s = _tie_s(inside)
    began = [_began(span, inside, tie_s) for span in inside]
    works = [
        Part(span, works_from_s, span.end_s)
        for span, works_from_s in zip(inside, began, strict=True)
    ]
    waits = [
        Part(span, span.start_s, works_from_s)
        for span, works_from_s in zip(inside, began, strict=True)
        if works_from_s > span.start_s
    ]
    for part in _walk(step.start_s, step.end_s, works, tie_s):
        if part.span is None:
            yield from _walk(part.start_s, part.end_s, waits, tie_s)
        else:
            yield part


TIE_S = 5e-6
"""The largest difference of two ends of spans, in seconds, that counts as equal with GPU clocks.

GPU clocks round their times, and their relation to the host's clock is known only within a few
microseconds.
"""


def _tie_s(spans: Iterable[Span]) -> float:
    """Return the seconds within which two ends of `spans` count as equal."""
    return 0.0 if all(span.on_host for span in spans) else TIE_S


def _walk(start_s: float, end_s: float, parts: Sequence[Part], tie_s: float) -> Iterator[Part]:
    """Yield the critical path over `parts`; ends within `tie_s` seconds count as equal."""
    now = end_s
    while now > start_s:
        parts = [part for part in parts if part.start_s < now]
        last = max(parts, key=lambda p: (min(p.end_s, now), -p.end_s, p.start_s), default=None)
        until = max(start_s, min(last.end_s, now)) if last else start_s
        if until < now:
            yield Part(None, until, now)
        if last is None or until <= start_s:
            break
        reached_s = last.start_s
        if tie_s:
            tied = [part for part in parts if until - tie_s <= part.end_s <= until + tie_s]
            tied = tied or [part for part in parts if until < part.end_s <= last.end_s + tie_s]
            begun = max(tied, key=lambda p: p.start_s)
            if begun.end_s < until:
                reached_s = max(reached_s, begun.end_s)  # `begun` comes next
            else:
                last = begun
                reached_s = begun.start_s
        now = max(start_s, reached_s)
        yield Part(last.span, now, until)


def _began(span: Span, spans: Iterable[Span], tie_s: float) -> float:
    """Return the time in seconds from which `span` works, and no longer waits for other devices.

    This is the latest end on another device of the phase that it needs (see `_NEEDS`), or its start
    if that is later. Only ends more than `tie_s` seconds before the end of `span` count.
    """
    if (needed := _NEEDS.get(span.phase)) is None:
        return span.start_s
    needed_spans = [s for s in spans if s.phase is needed and s.device != HOST]
    if needed is Phase.LOSS and any(s.device == span.device for s in needed_spans):
        return span.start_s
    return max(
        (
            span.start_s,
            *(
                s.end_s
                for s in needed_spans
                if s.device != span.device and s.end_s < span.end_s - tie_s
            ),
        )
    )


def charge(step: Step, spans: Iterable[Span]) -> dict[tuple[str, int], float]:
    """Return a step's seconds by (phase, device) on the critical path, which sum to its duration.

    Time that no span covers has the key (UNATTRIBUTED, -1).
    """
    charged: dict[tuple[str, int], float] = {}
    for span, start_s, end_s in walk(step, spans):
        key = (span.phase.value, span.device) if span else (UNATTRIBUTED, -1)
        charged[key] = charged.get(key, 0.0) + (end_s - start_s)
    return charged


def _moved(spans: Sequence[Span]) -> dict[tuple[Phase, int], float]:
    """Return one step's seconds of moving data by (phase, device), without waits for others.

    The spans of a device that has run ahead count too: they may lie before the step.
    """
    tie_s = _tie_s(spans)
    works: dict[tuple[Phase, int], list[Interval]] = {}
    for span in spans:
        if span.phase in MOVING:
            interval = _began(span, spans, tie_s), span.end_s
            works.setdefault((span.phase, span.device), []).append(interval)
    return {key: length(union(intervals)) for key, intervals in works.items()}


def typical_step(steps: Sequence[Step], spans: Iterable[Span]) -> int | None:
    """Return the index of the timed step that is closest to the medians; None if no step was timed.

    The medians over the timed steps are those of the step's duration, and of the total and the
    begin of each phase on each device, relative to the begin of the step. The largest difference of
    the chosen step from them, in seconds, is the smallest of all steps. A step of median duration
    alone may be one in which a rank had run ahead, or in which one phase took the time that another
    one saved. For an even number of steps, a median is the lower middle value.
    """
    from statistics import median_low  # every command imports this module

    timed = {number: step.start_s for number, step in enumerate(steps) if not step.warmup}
    lasted: dict[tuple[Phase, int], dict[int, float]] = {}
    began: dict[tuple[Phase, int], dict[int, float]] = {}
    for span in spans:
        if span.step not in timed:
            continue
        key = (span.phase, span.device)
        number = span.step
        lasted.setdefault(key, dict.fromkeys(timed, 0.0))[number] += span.end_s - span.start_s
        begins = began.setdefault(key, {})
        after_s = span.start_s - timed[number]
        begins[number] = min(after_s, begins.get(number, after_s))
    if not timed:
        return None
    durations = {number: steps[number].seconds for number in timed}
    farthest = dict.fromkeys(timed, 0.0)
    for values in (durations, *lasted.values(), *began.values()):
        middle_s = median_low(values.values())
        for number, value in values.items():
            farthest[number] = max(farthest[number], abs(value - middle_s))
    return min(timed, key=lambda number: (farthest[number], durations[number]))


def _open_before(spans: Iterable[Span]) -> Callable[[float], float]:
    """Return a function from a time to the seconds before it in which any of `spans` was open."""
    disjoint = union((span.start_s, span.end_s) for span in spans)
    starts = [start for start, _ in disjoint]
    sums = [0.0, *accumulate(end - start for start, end in disjoint)]

    def before(time_s: float) -> float:
        place = bisect_right(starts, time_s)
        return sums[place] - max(0.0, disjoint[place - 1][1] - time_s) if place else 0.0

    return before


def by_step(spans: Iterable[Span], steps: int) -> list[list[Span]]:
    """Return the spans of each of `steps` steps."""
    rows: list[list[Span]] = [[] for _ in range(steps)]
    for span in spans:
        if 0 <= span.step < steps:
            rows[span.step].append(span)
    return rows


def phases(step: Step, spans: Sequence[Span]) -> dict[str, float]:
    """Return a step's seconds by phase, which sum to it, in the order of `Phase`.

    Unattributed time is last; phases without time are left out.
    """
    return _by_phase(charge(step, spans))


def _by_phase(charged: Mapping[tuple[str, int], float]) -> dict[str, float]:
    total = dict.fromkeys(PHASES, 0.0)
    for (phase, _), seconds in charged.items():
        total[phase] += seconds
    return {name: seconds for name, seconds in total.items() if seconds or name == UNATTRIBUTED}


def _middle(steps: Sequence[Step], phases: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    timed = [
        (step.seconds, parts) for step, parts in zip(steps, phases, strict=True) if not step.warmup
    ]
    return [parts for _, parts in middle_half(sorted(timed, key=lambda one: one[0]))]


def middle_half(ordered: Sequence[Value]) -> Sequence[Value]:
    """Return a sorted series without its lowest and its highest quarter, rounded down."""
    aside = len(ordered) // 4
    return ordered[aside : len(ordered) - aside]


def gaps(step: Step, spans: Iterable[Span]) -> dict[tuple[str, str], float]:
    """Return a step's seconds without an open span, by (phase before, phase after).

    At the start and the end of the step, the phase is "".
    """
    seconds: dict[tuple[str, str], float] = {}
    reach = step.start_s
    before = ""
    for start_s, end_s, phase in [
        *sorted((s.start_s, s.end_s, s.phase.value) for s in spans),
        (step.end_s, step.end_s, ""),
    ]:
        if start_s > reach:
            seconds[before, phase] = seconds.get((before, phase), 0.0) + start_s - reach
        if end_s > reach:
            reach = end_s
            before = phase
    return seconds
