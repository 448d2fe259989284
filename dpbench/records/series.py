"""Series: the steps, the spans and the samples of a trial; steps and samples by column.

A long run has millions of steps and samples, but a report reads few of them one by one. One object
for each would take most of a report's time and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import compress
from typing import NamedTuple, Self, TypeVar, overload

from dpbench.records.case import Phase

Value = TypeVar("Value")


@dataclass(frozen=True)
class Step:
    """One training step: its duration, whether it was warm-up, and the time at which it ended."""

    seconds: float
    warmup: bool
    end_s: float

    @property
    def start_s(self) -> float:
        """Return the time at which the step began."""
        return self.end_s - self.seconds


class _ByColumn(Sequence[Value]):
    """A sequence whose objects are built on demand; it equals every sequence of equal objects."""

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))


class Steps(_ByColumn[Step]):
    """The steps of a trial, by column; the object of a step is built on demand."""

    def __init__(
        self, seconds: Sequence[float], warmup: Sequence[bool], ends: Sequence[float]
    ) -> None:
        self.seconds = seconds
        self.warmup = warmup
        self.ends = ends

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Self:
        """Return the same steps by column."""
        if isinstance(steps, cls):
            return steps
        rows = [(step.seconds, step.warmup, step.end_s) for step in steps]
        return cls(*zip(*rows, strict=True)) if rows else cls((), (), ())

    def timed(self, values: Iterable[Value]) -> list[Value]:
        """Return those of `values`, one per step, whose steps are not warm-up.

        Raises ValueError for another number of values.
        """
        columns = values if isinstance(values, Sequence) else [*values]
        if len(columns) != len(self):
            raise ValueError(
                f"expected one value per step, but got values: {len(columns)}, steps: {len(self)}"
            )
        return list(compress(columns, self._timed))

    @cached_property
    def _timed(self) -> tuple[bool, ...]:
        return tuple(not warm for warm in self.warmup)

    def __iter__(self) -> Iterator[Step]:
        return map(Step, self.seconds, self.warmup, self.ends)

    def __len__(self) -> int:
        return len(self.seconds)

    @overload
    def __getitem__(self, place: int) -> Step: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Step]: ...
    def __getitem__(self, place: int | slice) -> Step | Sequence[Step]:
        seconds, warmup, ends = self.seconds[place], self.warmup[place], self.ends[place]
        if isinstance(place, slice):
            return Steps(seconds, warmup, ends)  # type: ignore[arg-type]
        return Step(seconds, warmup, ends)  # type: ignore[arg-type]


BUFFERED = "buffered_utilization_ratio"
"""The metric of a driver's own samples of utilisation, with the driver's times."""
JOINT = "_joint"
"""The end of the name of a joint span's clock."""


@dataclass(frozen=True)
class Span:
    """One phase on one device, -1 for the host, in the step with the index `step`.

    `clock` measured the times, which are converted to the machine's monotonic clock.
    """

    step: int
    phase: Phase
    device: int
    clock: str  # "host" | "cuda_event" | "profiled_step", followed by `JOINT` if the span is joint
    start_s: float
    end_s: float

    @property
    def joint(self) -> bool:
        """Return whether one thread had opened the phase on several devices at once.

        It then runs one operation for all of them, such as the backward from a loss of the gathered
        batch. The span does not show when its device computed within this time. Trials that dpbench
        stored before it knew joint spans have none.
        """
        return self.clock.endswith(JOINT)

    @property
    def on_host(self) -> bool:
        """Return whether the host's clock measured the times."""
        return self.clock.removesuffix(JOINT) == "host"


@dataclass(frozen=True)
class Sample:
    """One reading of a metric, whose name ends with the unit of the value."""

    time_s: float
    device: int
    metric: str
    value: float


class Series(NamedTuple):
    """The readings of one metric of a device: their times in seconds, and their values."""

    times: Sequence[float]
    values: Sequence[float]


class Samples(_ByColumn[Sample]):
    """The samples of a trial, one series after the other; a metric is read on demand."""

    def __init__(self, readers: Mapping[tuple[int, str], Callable[[], Series]]) -> None:
        """Take a function that reads the series of each (device, metric)."""
        self._readers = readers
        self._read: dict[str, dict[int, Series]] = {}

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Self:
        """Return the same samples, grouped by device and metric."""
        if isinstance(samples, cls):
            return samples
        groups: dict[tuple[int, str], tuple[list[float], list[float]]] = {}
        for sample in samples:
            times, values = groups.setdefault((sample.device, sample.metric), ([], []))
            times.append(sample.time_s)
            values.append(sample.value)
        return cls({key: partial(Series, *columns) for key, columns in groups.items()})

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """Return the names of all metrics."""
        return tuple(dict.fromkeys(metric for _, metric in self._readers))

    def series(self, metric: str) -> Mapping[int, Series]:
        """Return the series of a metric by device; empty if no device has it."""
        if metric not in self._read:
            self._read[metric] = {
                device: read() for (device, name), read in self._readers.items() if name == metric
            }
        return self._read[metric]

    def __iter__(self) -> Iterator[Sample]:
        for device, metric in self._readers:
            for time_s, value in zip(*self.series(metric)[device], strict=True):
                yield Sample(time_s, device, metric, value)

    def __len__(self) -> int:
        return sum(
            len(found.times) for metric in self.metrics for found in self.series(metric).values()
        )

    @overload
    def __getitem__(self, place: int) -> Sample: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Sample]: ...
    def __getitem__(self, place: int | slice) -> Sample | Sequence[Sample]:
        return tuple(self)[place]
