"""Samples: the readings of a trial's samplers, grouped into one series for each device and metric."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, Self, overload


@dataclass(frozen=True)
class Sample:
    """One reading of one metric of a device; the name of the metric ends with the unit of the value."""

    time_s: float
    device: int
    metric: str
    value: float


class Series(NamedTuple):
    """The readings of one metric of a device: their times in seconds, and their values."""

    times: Sequence[float]
    values: Sequence[float]


class Samples(Sequence[Sample]):
    """The samples of a trial, one series after the other; a series is read when a caller first asks for its metric.

    A trial of a long run has millions of samples, and a report draws few of them, so that objects of all of them would
    take most of a report's time and memory.
    """

    def __init__(self, readers: Mapping[tuple[int, str], Callable[[], Series]]) -> None:
        """Take a function for each device and metric that returns the series."""
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
        """Return the series of a metric by device."""
        if metric not in self._read:
            self._read[metric] = {device: read() for (device, name), read in self._readers.items() if name == metric}
        return self._read[metric]

    def __iter__(self) -> Iterator[Sample]:
        for device, metric in self._readers:
            for time_s, value in zip(*self.series(metric)[device], strict=True):
                yield Sample(time_s, device, metric, value)

    def __len__(self) -> int:
        return sum(len(found.times) for metric in self.metrics for found in self.series(metric).values())

    @overload
    def __getitem__(self, place: int) -> Sample: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Sample]: ...
    def __getitem__(self, place: int | slice) -> Sample | Sequence[Sample]:
        return tuple(self)[place]

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))
