"""Loaders: a DataLoader's rate over its number of workers, its knee, and what limits the step.

The knee is the least number of workers whose rate is at most 5 % below the best rate; its interval
lists every number that may be the true one, by the 95 % intervals of the ratios. The rates of a
round are those of its mean steps. NOISY rounds decide nothing (see `stats.Timed`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dpbench.analysis import stats
from dpbench.analysis.summary import Row
from dpbench.records import words
from dpbench.records.loading import Loading
from dpbench.records.trial import Doubt, Estimate

CLOSE = 0.95
"""The least fraction of the best rate at which a rate counts as equal to the best."""
UNSURE = (Doubt.ROUNDS, Doubt.NOISY)
"""The doubts because of which a ratio decides nothing."""


class Shape(StrEnum):
    """The form of a curve of the rate over the number of workers."""

    KNEE = "knee"
    FLAT = "flat"
    RISING = "rising"
    UNDECIDED = "cannot tell"


class Bound(StrEnum):
    """The slower one of the DataLoader and the step."""

    LOADER = "loader-bound"
    STEP = "compute-bound"
    UNDECIDED = "cannot tell"


@dataclass(frozen=True, kw_only=True)
class LoaderPoint:
    """The results with one number of workers.

    `of_best` is the rate over the best rate. `demand` is the step time over the time of a batch,
    None without a step: the DataLoader is fast enough if it is at least 1.
    """

    row: Row
    of_best: Estimate
    demand: Estimate | None = None

    @property
    def workers(self) -> int:
        """Return the number of workers."""
        return self.row.case.loader

    @property
    def bound(self) -> Bound:
        """Return the slower one of the DataLoader and the step; UNDECIDED if unknown."""
        if (
            self.demand is None
            or self.demand.doubt in UNSURE
            or self.demand.low < 1 <= self.demand.high
        ):
            return Bound.UNDECIDED
        return Bound.STEP if self.demand.low >= 1 else Bound.LOADER


@dataclass(frozen=True, kw_only=True)
class LoaderCurve:
    """The results by number of workers, in ascending order.

    `knee` is None if unknown; `possible` has every measured number that may be the true one. `step`
    is the step time to compare with in seconds, None without a step, and with `n` = 0 if the user
    gave it.
    """

    points: tuple[LoaderPoint, ...]
    shape: Shape
    knee: int | None
    possible: tuple[int, ...]
    step: Estimate | None = None

    @property
    def counts(self) -> list[int]:
        """Return the numbers of workers that were measured."""
        return [point.workers for point in self.points]

    @property
    def bounds(self) -> dict[int, str]:
        """Return the slower one of the DataLoader and the step, by number of workers."""
        return {point.workers: point.bound.value for point in self.points if point.demand}

    @property
    def advised(self) -> int | None:
        """Return the least number of workers that surely suffices for the step, else the knee.

        The end of a flat or a rising curve counts as its knee. None if unknown.
        """
        sure = [point.workers for point in self.points if point.bound is Bound.STEP]
        if sure:
            return sure[0]
        return None if self.shape is Shape.UNDECIDED else self.knee


def curve(rows: Sequence[Row]) -> LoaderCurve | None:
    """Return the curve of the DataLoader in a run, None without one.

    It is compared with the step of the run's other case, or the one that the user gave.
    """
    loaders = sorted(
        (row for row in rows if row.case.traits.loads), key=lambda row: row.case.loader
    )
    if not loaders:
        return None
    measured = [row for row in loaders if row.step]
    step, steps = _step(loaders[0], rows)
    points = []
    for row in measured:
        ratios = [stats.mean_ratio(other.series, row.series) for other in measured]
        given = {number: [step.value] for number in row.series} if step else {}
        demand = stats.mean_ratio(steps or given, row.series) if step else None
        points.append(LoaderPoint(row=row, of_best=_least(ratios), demand=demand))
    knee, possible = _knee({point.workers: point.of_best for point in points})
    shape = _shape(knee, possible, [point.workers for point in points])
    return LoaderCurve(points=tuple(points), shape=shape, knee=knee, possible=possible, step=step)


def _step(loader: Row, rows: Sequence[Row]) -> tuple[Estimate | None, stats.Rounds]:
    """Return the step time to compare with, and its durations by round, if it was not given."""
    given_s = Loading.of(loader.case).step_s
    if given_s:
        return Estimate(given_s, given_s, given_s, 0), {}
    trained = next((row for row in rows if not row.case.traits.loads and row.step), None)
    return (trained.mean, trained.series) if trained else (None, {})


def _least(ratios: Sequence[Estimate]) -> Estimate:
    """Return the least of the ratios of a rate to every rate.

    The best measured rate is not necessarily the true best, so each end of the interval is the
    smallest such end of all intervals.
    """
    value, low, high = (
        min(getattr(ratio, part) for ratio in ratios) for part in ("value", "low", "high")
    )
    return Estimate(
        value,
        low,
        high,
        min(ratio.n for ratio in ratios),
        noisy=any(ratio.noisy for ratio in ratios),
    )


def _knee(of_best: Mapping[int, Estimate]) -> tuple[int | None, tuple[int, ...]]:
    """Return the knee, None if it is unknown, and every number of workers that may be the true one.

    `of_best` has the ratio to the best rate by number of workers. A number may be the knee if the
    upper end of its interval reaches `CLOSE`, and no smaller number has its interval entirely at or
    above `CLOSE`. A ratio from fewer than three rounds, or from NOISY rounds, proves nothing: its
    number may be the knee, excludes no larger one, and the knee is unknown.
    """
    counts = sorted(of_best)
    unsure = {count for count in counts if of_best[count].doubt in UNSURE}
    sure = [count for count in counts if count not in unsure and of_best[count].low >= CLOSE]
    reached = [count for count in counts if of_best[count].value >= CLOSE]
    possible = [count for count in counts if count in unsure or of_best[count].high >= CLOSE]
    knee = reached[0] if reached and not unsure else None
    return knee, tuple(count for count in possible if not sure or count <= sure[0])


def _shape(knee: int | None, possible: Sequence[int], counts: Sequence[int]) -> Shape:
    """Return the form of a curve, whose last point is no knee: the rate may rise beyond it."""
    if len(counts) < 2 or list(possible) == list(counts):
        return Shape.UNDECIDED
    if list(possible) == [counts[0]]:
        return Shape.FLAT
    if list(possible) == [counts[-1]]:
        return Shape.RISING
    return Shape.UNDECIDED if knee in (None, counts[-1]) else Shape.KNEE


def said(curve: LoaderCurve) -> list[str]:
    """Return the verdicts on a curve as sentences, and the number of workers to use, if known."""
    against = [_bound_said(curve, curve.step)] if curve.step and curve.points else []
    use = [] if curve.advised is None else [f"Use num_workers={curve.advised}."]
    return [_knee_said(curve), *against, *use]


def _knee_said(curve: LoaderCurve) -> str:
    if not curve.counts:
        return "Cannot tell where the knee is: no measurement of the DataLoader succeeded."
    first, last = curve.counts[0], curve.counts[-1]
    if len(curve.counts) < 2:
        return (
            "Cannot tell where the knee is from a single number of workers: give several with"
            " --workers."
        )
    if curve.shape is Shape.FLAT:
        return (
            f"Flat: the rate with up to {workers_said([last])} is not clearly higher than with"
            f" {first}."
        )
    if curve.shape is Shape.RISING:
        return (
            f"No knee up to {workers_said([last])}: the rate still rises; give more with --workers."
        )
    possible = among(curve.possible)
    if curve.shape is Shape.KNEE and curve.knee is not None:
        return f"Knee: {workers_said([curve.knee])} (95 %: {possible})."
    return (
        f"Cannot tell where the knee is: it may be at {possible} workers; {words.REMEDY} would"
        " help."
    )


def _bound_said(found: LoaderCurve, step: Estimate) -> str:
    by_bound = {
        bound: [point.workers for point in found.points if point.bound is bound] for bound in Bound
    }
    parts = [
        f"{bound.value} with {workers_said(counts)}" for bound, counts in by_bound.items() if counts
    ]
    return (
        f"Against the step ({words.ms(step) if step.n else words.time(step.value)}):"
        f" {'; '.join(parts)}."
    )


def workers_said(counts: Sequence[int]) -> str:
    """Return numbers of workers as text with the noun, such as "2 or 4 workers"."""
    return f"{among(counts)} {words.verb(counts[-1], 'worker', 'workers')}"


def among(counts: Sequence[int]) -> str:
    """Return numbers as text, such as "1, 2 or 4"."""
    *others, last = map(str, counts)
    return f"{', '.join(others)} or {last}" if others else last
