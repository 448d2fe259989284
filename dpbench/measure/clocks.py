"""Clocks: time the steps of a training loop and the phases of each step, on one time base.

A mark is a context manager around one phase on one device. It records a span, which has the times
of both ends:

    with clock.block():                      back-to-back steps
        for ...:
            with clock.step(warmup=False):   one training step
                ... engine code calls clock.mark(phase, device) ...
    clock.steps(), clock.spans(), clock.samples()

The time base is `time.perf_counter`, which on Linux is the monotonic clock that all processes
share.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

from dpbench.hardware.device import Device
from dpbench.records import HOST, Phase, Sample, Span, Step
from dpbench.records.series import JOINT

BUSY, OUTLASTING = "busy_s", "outlasting_ratio"
"""Metrics: a device's busy seconds in one step, and work that outlasts the steps."""

READ_EACH_S, READ_EACH = 0.1, 32
"""The longest interval between readings of CPU time, in seconds and steps; the shorter applies."""


Opened = tuple[int, Phase, int, int, float, float]
"""The step, phase, device, thread id, begin and end of a mark.

Begin and end are times, or numbers in the order in which marks began and ended.
"""


def _joint(marks: Sequence[Opened]) -> set[int]:
    """Return the indices of the marks that belong to a joint phase.

    In a joint phase, a thread has opened the phase on several devices at the same time. Marks
    without a thread (0) and marks of the host are never joint.
    """
    groups: dict[tuple[int, Phase, int], list[tuple[float, float, int, int]]] = {}
    for index, (step, phase, device, thread, begin, end) in enumerate(marks):
        if thread and device != HOST:
            groups.setdefault((step, phase, thread), []).append((begin, end, device, index))
    joint: set[int] = set()
    for group in groups.values():
        still_open: list[tuple[float, float, int, int]] = []
        for opened in sorted(group):
            begin, _, device, index = opened
            still_open = [other for other in still_open if other[1] > begin]
            if beside := [other[3] for other in still_open if other[2] != device]:
                joint.update((index, *beside))
            still_open.append(opened)
    return joint


class HostClock:
    """A clock that reads the host's time, for devices whose operators return when complete.

    It also measures the CPU time of the thread during each span; the sum over a device's spans is
    the device's busy time. If a thread has several open spans (as in a joint backward, which
    computes for all replicas), its CPU time is divided equally among them, and they are stored as
    joint. Reading CPU time is a system call, which raises the cost of a mark from 0.3 µs to 2.1 µs.
    CPU time is therefore read in only about one step per `read_each_s` seconds. The number of steps
    from one reading to the next is a power of two, so that ranks with similar step times read CPU
    time in the same steps.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.thread_time,
        read_each_s: float = READ_EACH_S,
    ) -> None:
        self._now = now
        self._cpu = cpu
        self.read_each_s = read_each_s
        self._steps: list[tuple[float, bool, float]] = []
        self._spans: list[Opened] = []
        self._turns: list[tuple[int, int, int, bool, float]] = []
        self._reads = True
        self._apart = 1

    def mark(self, phase: Phase, device: int) -> AbstractContextManager[None]:
        """Return a context manager that records a span and, in some steps, the CPU time."""
        return _HostMark(self, phase, device)

    def add(self, phase: Phase, device: int, start_s: float, end_s: float) -> None:
        """Add a span to the last step; `start_s` and `end_s` are seconds on the host's clock."""
        self._spans.append((len(self._steps) - 1, phase, device, 0, start_s, end_s))

    @contextmanager
    def block(self) -> Iterator[None]:
        """Return a context manager without effect: this clock times each step separately."""
        yield

    def step(self, *, warmup: bool) -> AbstractContextManager[None]:
        """Return a context manager that times one step from entry to exit."""
        return _HostStep(self, warmup)

    def steps(self) -> tuple[Step, ...]:
        """Return the steps timed so far, in order."""
        return tuple(Step(*step) for step in self._steps)

    def spans(self) -> tuple[Span, ...]:
        """Return the spans recorded so far."""
        joint = _joint(self._spans)
        return tuple(
            Span(step, phase, device, f"host{JOINT}" if index in joint else "host", start, end)
            for index, (step, phase, device, _, start, end) in enumerate(self._spans)
        )

    def samples(self) -> tuple[Sample, ...]:
        """Return the busy CPU seconds of each device in each step in which CPU time was read.

        The CPU time of a thread between two readings is divided equally among its spans that were
        open between them.
        """
        total: dict[tuple[int, int], float] = {}
        threads: dict[int, tuple[tuple[int, ...], float]] = {}
        for step, thread, device, opens, cpu_s in self._turns:
            spans, at_s = threads.get(thread, ((), 0.0))
            for one in spans:
                total[step, one] = total.get((step, one), 0.0) + (cpu_s - at_s) / len(spans)
            threads[thread] = (*spans, device) if opens else _without(spans, device), cpu_s
        return tuple(
            Sample(self._steps[step][2], device, BUSY, seconds)
            for (step, device), seconds in sorted(total.items())
            if device != HOST and step < len(self._steps)
        )


def _without(spans: tuple[int, ...], device: int) -> tuple[int, ...]:
    at = spans.index(device)
    return spans[:at] + spans[at + 1 :]


class _HostStep:
    """A class, because a generator-based context manager is slower."""

    __slots__ = ("_clock", "_start", "_warmup")

    def __init__(self, clock: HostClock, warmup: bool) -> None:
        self._clock = clock
        self._warmup = warmup

    def __enter__(self) -> None:
        self._start = self._clock._now()

    def __exit__(self, kind: object, *error: object) -> None:
        clock = self._clock
        end = clock._now()
        if kind is None:
            clock._steps.append((end - self._start, self._warmup, end))
            if clock._reads:
                clock._apart = _apart(clock.read_each_s, end - self._start)
            clock._reads = len(clock._steps) % clock._apart == 0


def _apart(each_s: float, step_s: float) -> int:
    """Return the number of steps between readings: a power of two, at most `READ_EACH`."""
    steps = int(each_s / step_s) if step_s > 0 else READ_EACH
    return min(READ_EACH, 1 << max(0, steps.bit_length() - 1))


class _HostMark:
    """A class, because a generator-based context manager costs 1.5 times as much.

    It records plain tuples, which the clock converts to `Span` objects outside the timed steps.
    """

    __slots__ = ("_clock", "_device", "_phase", "_reads", "_start", "_step", "_thread")

    def __init__(self, clock: HostClock, phase: Phase, device: int) -> None:
        self._clock = clock
        self._phase = phase
        self._device = device

    def __enter__(self) -> None:
        clock = self._clock
        self._step = len(clock._steps)
        self._thread = threading.get_ident()
        self._reads = clock._reads
        if self._reads:
            clock._turns.append((self._step, self._thread, self._device, True, clock._cpu()))
        self._start = clock._now()

    def __exit__(self, *error: object) -> None:
        clock = self._clock
        end = clock._now()
        if self._reads:
            clock._turns.append((self._step, self._thread, self._device, False, clock._cpu()))
        clock._spans.append((self._step, self._phase, self._device, self._thread, self._start, end))


class _CudaMark:
    """Records one span with two CUDA events, reusing the clock's unused ones."""

    __slots__ = (
        "_at",
        "_began",
        "_clock",
        "_index",
        "_phase",
        "_start",
        "_step",
        "_thread",
        "_unused",
    )

    def __init__(self, clock: CudaClock, phase: Phase, index: int) -> None:
        self._clock = clock
        self._phase = phase
        self._index = index
        self._at, self._unused = clock._own[index]

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._began = next(self._clock._order)
        self._step = self._clock._count
        self._start = self._event()

    def __exit__(self, *error: object) -> None:
        order = self._thread, self._began, next(self._clock._order)
        mark = (self._step, self._phase, self._index, *order)
        self._clock._marks.append((mark, self._start, self._event()))

    def _event(self) -> Any:
        try:
            return self._at.event(self._unused.pop())
        except IndexError:
            # no event is unused: in the first blocks, or after another thread took the last one
            return self._at.event()


@dataclass
class _Block:
    """The events of one block of steps, in lists by device, and one warm-up flag per step."""

    begin: list[Any]
    idle_s: float = 0.0  # the host's time at which all devices were idle after the block
    ends: list[list[Any]] = field(default_factory=list)
    warmup: list[bool] = field(default_factory=list)


class CudaClock:
    """A clock that uses CUDA events, without a synchronisation inside a block.

    A step begins at the end of the previous step; the first step of a block begins at the beginning
    of the block. The end of a step is the latest of its end events on all devices. An anchor is an
    event together with the host's time at the same moment, taken while the device is idle. Two
    anchors per device, before the first block and after the last, map the device's events to the
    host's time base. Long times are sums of the differences between neighbouring events, because
    `elapsed_time` returns milliseconds as float32, which is inexact for long times.

    The events of marks are read at the end of their block and reused. A later block with as many
    marks on each device therefore usually creates no events for its marks.
    """

    def __init__(
        self, devices: Sequence[Device], now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._devices = list(devices)
        self._now = now
        self._position = {device.index: position for position, device in enumerate(devices)}
        self._added: list[Span] = []
        self._blocks: list[_Block] = []
        self._own: dict[int, tuple[Device, list[Any]]] = {
            device.index: (device, []) for device in devices
        }
        self._order = itertools.count()
        self._marks: list[tuple[Opened, Any, Any]] = []
        self._read: list[tuple[Opened, float, float]] = []
        self._first = list[tuple[Any, float]]()
        self._last = list[tuple[Any, float]]()
        # the seconds from the first anchor to each event, by device: no event is compared twice
        self._raw: list[list[float]] = [[] for _ in devices]
        self._count = 0
        self._idle_s = 0.0
        self.drift = tuple[float, ...]()

    def mark(self, phase: Phase, device: int) -> AbstractContextManager[None]:
        """Return a context manager that records a span, with CUDA events unless it is `HOST`'s."""
        return self._host_mark(phase) if device == HOST else _CudaMark(self, phase, device)

    @contextmanager
    def _host_mark(self, phase: Phase) -> Iterator[None]:
        step = self._count
        began = self._now()
        try:
            yield
        finally:
            self._added.append(Span(step, phase, HOST, "host", began, self._now()))

    def add(self, phase: Phase, device: int, start_s: float, end_s: float) -> None:
        """Add a span to the last step; `start_s` and `end_s` are seconds on the host's clock."""
        self._added.append(Span(self._count - 1, phase, device, "host", start_s, end_s))

    @contextmanager
    def block(self) -> Iterator[None]:
        """Take anchors before and after the steps, to relate device clocks to the host's."""
        anchors = self._anchors()
        self._first = self._first or anchors
        self._blocks.append(_Block([device.event() for device in self._devices]))
        yield
        self._last = self._anchors()
        self._blocks[-1].idle_s = self._idle_s
        self._read_marks()

    def _read_marks(self) -> None:
        """Read the marks of all steps that have ended, and keep their events for later marks.

        Store the milliseconds from the step's beginning to the mark's start, and from its start to
        its end. The devices must have finished the steps.
        """
        begins = [events for block in self._blocks for events in (block.begin, *block.ends)[:-1]]
        ended = [one for one in self._marks if one[0][0] < len(begins)]
        self._marks = [one for one in self._marks if one[0][0] >= len(begins)]
        for mark, start, end in ended:
            step, _, device, *_ = mark
            begin = begins[step][self._position[device]]
            self._read.append((mark, begin.elapsed_time(start), start.elapsed_time(end)))
            self._own[device][1].extend((start, end))

    @contextmanager
    def step(self, *, warmup: bool) -> Iterator[None]:
        """Record an event on every device at the end of the step."""
        block = self._blocks[-1]
        yield
        block.ends.append([device.event() for device in self._devices])
        block.warmup.append(warmup)
        self._count += 1

    def _anchors(self) -> list[tuple[Any, float]]:
        """Return one anchor per idle device: an event and its host time in seconds."""
        anchors = []
        # creating takes longer than recording
        created = [device.event() for device in self._devices]
        for device in self._devices:
            device.synchronize()
        self._idle_s = self._now()
        for device, event in zip(self._devices, created, strict=True):
            before = self._now()
            device.event(event)
            # the idle device records the event at once
            anchors.append((event, (before + self._now()) / 2))
            device.synchronize()
        return anchors

    def steps(self) -> tuple[Step, ...]:
        """Return the steps in order; each begins when the previous one ends, or with its block."""
        steps = list[Step]()
        for block, (begin, ends) in zip(self._blocks, self._ends(), strict=True):
            times = pairwise([max(begin), *map(max, ends)])
            steps += [
                Step(end - start, warm, end)
                for warm, (start, end) in zip(block.warmup, times, strict=True)
            ]
        return tuple(steps)

    def _ends(self) -> list[tuple[list[float], list[list[float]]]]:
        """Return each block's host times by device: of its beginning, and of its steps' ends."""
        if not self._blocks:
            return []
        rows = map(list, zip(*(self._chain(i) for i in range(len(self._devices))), strict=True))
        return [(next(rows), [next(rows) for _ in block.ends]) for block in self._blocks]

    def _chain(self, i: int) -> list[float]:
        """Return the host times in seconds of block begins and step ends on the `i`-th device.

        The times between the events are scaled so that the first and the last anchor get their
        measured host times.
        """
        events = [
            event
            for block in self._blocks
            for event in (block.begin[i], *(end[i] for end in block.ends))
        ]
        (first, first_s), (last, last_s) = self._first[i], self._last[i]
        raw = self._raw[i]
        chain = (first, *events, last)
        for one, other in pairwise(chain[len(raw) : -1]):
            raw.append((raw[-1] if raw else 0.0) + one.elapsed_time(other) / 1e3)
        whole_s = (raw[-1] if raw else 0.0) + chain[-2].elapsed_time(last) / 1e3
        stretch = (last_s - first_s) / whole_s if whole_s > 0 else 1.0
        self.drift = (*self.drift[:i], stretch - 1.0)
        return [first_s + seconds * stretch for seconds in raw]

    def spans(self) -> tuple[Span, ...]:
        """Return the spans, converted to the host's time base.

        On each device, a span's start is measured from the end of the previous step, or from the
        beginning of the block.
        """
        begins = [seconds for _, seconds in self._begins()]
        host_s_per_ms = [(1 + drift) / 1e3 for drift in self.drift]
        spans = [span for span in self._added if span.step < len(begins)]
        joint = _joint([mark for mark, _, _ in self._read])
        for index, ((step, phase, device, *_), after_ms, lasts_ms) in enumerate(self._read):
            position = self._position[device]
            start_s = begins[step][position] + after_ms * host_s_per_ms[position]
            end_s = start_s + lasts_ms * host_s_per_ms[position]
            clock = f"cuda_event{JOINT}" if index in joint else "cuda_event"
            spans.append(Span(step, phase, device, clock, start_s, end_s))
        return tuple(spans)

    def events(self, devices: Sequence[int] | None = None) -> dict[int, Any]:
        """Queue a timing event on each device, and return the events by device index.

        `devices` are indices of devices; None means all.
        """
        return {
            device.index: device.event()
            for device in self._devices
            if devices is None or device.index in devices
        }

    def placing(self) -> Callable[[int, int, Any], float]:
        """Return a function that converts a CUDA event to the host's time of it in seconds.

        Its arguments are the index of the step in which the event was recorded, the device index,
        and the event.
        """
        begins = self._begins()

        def place(step: int, device: int, event: Any) -> float:
            events, seconds = begins[step]
            i = self._position[device]
            return float(seconds[i] + events[i].elapsed_time(event) / 1e3 * (1 + self.drift[i]))

        return place

    def _begins(self) -> list[tuple[list[Any], list[float]]]:
        """Return each step's begin events and their host times in seconds, both by device."""
        begins: list[tuple[list[Any], list[float]]] = []
        for block, (begin, ends) in zip(self._blocks, self._ends(), strict=True):
            begins.extend([(block.begin, begin), *zip(block.ends, ends, strict=True)][:-1])
        return begins

    def samples(self) -> tuple[Sample, ...]:
        """Return one sample of `OUTLASTING` per block, stored for the clock's first device.

        Its value is the time from the end of the block's last step until all devices were idle,
        less the duration of that step, as a fraction of the block's duration. It is above 0 if the
        devices have work for which the steps do not wait.
        """
        samples = list[Sample]()
        for block, (begin, ends) in zip(self._blocks, self._ends(), strict=True):
            times = [max(begin), *map(max, ends)]
            if len(times) > 1 and times[-1] > times[0]:
                over_s = max(0.0, block.idle_s - times[-1] - (times[-1] - times[-2]))
                samples.append(
                    Sample(
                        block.idle_s,
                        self._devices[0].index,
                        OUTLASTING,
                        over_s / (times[-1] - times[0]),
                    )
                )
        return tuple(samples)


Clock: TypeAlias = HostClock | CudaClock
"""A clock, with which the measuring loop times steps and phases."""


def choose(devices: Sequence[Device]) -> Clock:
    """Return a `CudaClock` if the devices have timing events, otherwise a `HostClock`."""
    return HostClock() if devices[0].event() is None else CudaClock(devices)
