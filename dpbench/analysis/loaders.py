"""Loaders: a DataLoader's rate over its number of workers, its knee, and the number to use.

The knee is the least number of workers whose rate is at most 5 % below the best rate; its interval
lists every number that may be the true one, by the 95 % intervals of the ratios. The rates of a
round are those of its mean steps. NOISY rounds decide nothing (see `stats.Timed`).

The number to use is the same of the training loop, as computed from what was measured:

    iteration_s = batch_s + step_s         without workers, because nothing overlaps
                  max(batch_s, step_s)     with workers
    epoch_s     = wait_s + (batches - 1) * iteration_s + step_s

`wait_s` is the wait for the first batch of an epoch, in which workers start unless they persist,
and `step_s` is 0 without a step.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from dpbench.analysis import stats, summary
from dpbench.analysis.summary import Row
from dpbench.records import Trial, words
from dpbench.records.estimate import Doubt, Estimate
from dpbench.records.grouping import grouped
from dpbench.records.loading import NEXT_EPOCH, Loading
from dpbench.records.spelling import dashed
from dpbench.records.trial import by_key

CLOSE = 0.95
"""The least fraction of the best rate at which a rate counts as equal to the best.

A wait for batches counts from 1 - `CLOSE` of a loop's time on.
"""
UNSURE = (Doubt.ROUNDS, Doubt.NOISY)
"""The doubts because of which a ratio decides nothing."""


class Shape(StrEnum):
    """The form of a curve of the rate over the number of workers."""

    KNEE = "knee"
    FLAT = "flat"
    RISING = "rising"
    UNDECIDED = "cannot tell"


class Bound(StrEnum):
    """What limits the training loop.

    It is the step if the loop waits for batches for at most 5 % of its time, else the DataLoader.
    """

    LOADER = "loader-bound"
    STEP = "compute-bound"
    UNDECIDED = "cannot tell"


@dataclass(frozen=True, kw_only=True)
class LoaderPoint:
    """The results with one number of workers.

    `of_best` is the rate over the best rate. `busy` is the share of the step in an iteration of the
    training loop, None without a step. `epoch` are the seconds of an epoch of this loop, and
    `waiting` is the share of the wait for its first batch; None and 0 if the size of the dataset is
    unknown.
    """

    row: Row
    of_best: Estimate
    busy: Estimate | None = None
    epoch: Estimate | None = None
    waiting: float = 0.0

    @property
    def workers(self) -> int:
        """Return the number of workers."""
        return self.row.case.loader

    @property
    def bound(self) -> Bound:
        """Return what limits the training loop; UNDECIDED if unknown."""
        if (
            self.busy is None
            or self.busy.doubt in UNSURE
            or self.busy.low < CLOSE <= self.busy.high
        ):
            return Bound.UNDECIDED
        return Bound.STEP if self.busy.low >= CLOSE else Bound.LOADER

    @property
    def restarts(self) -> bool:
        """Return whether the start of workers in each epoch takes a share of it that counts."""
        starting = self.workers and not Loading.of(self.row.case).persistent_workers
        return bool(starting and self.waiting > 1 - CLOSE)


@dataclass(frozen=True, kw_only=True)
class LoaderCurve:
    """The results by number of workers, in ascending order.

    `knee` is None if unknown; `possible` has every measured number that may be the true one.
    `advised` is the knee of the training loop, None if unknown; the end of a flat or a rising curve
    counts as its knee. `step` is the step time in seconds of this loop, None without a step, and
    with `n` = 0 if the user gave it. `batches` is the number of batches of an epoch, 0 if unknown.
    `failed` has the outcome of each number of workers without a result, such as "timeout".
    """

    points: tuple[LoaderPoint, ...]
    shape: Shape
    knee: int | None
    possible: tuple[int, ...]
    advised: int | None = None
    step: Estimate | None = None
    batches: int = 0
    failed: Mapping[int, str] = field(default_factory=dict)

    @property
    def counts(self) -> list[int]:
        """Return the numbers of workers that were measured."""
        return [point.workers for point in self.points]

    @property
    def bounds(self) -> dict[int, str]:
        """Return what limits the training loop, by number of workers."""
        return {point.workers: point.bound.value for point in self.points if point.busy}

    @property
    def epochs(self) -> dict[int, Estimate]:
        """Return the seconds of an epoch of the training loop, by number of workers."""
        return {point.workers: point.epoch for point in self.points if point.epoch}


def curve(rows: Sequence[Row], trials: Sequence[Trial] = ()) -> LoaderCurve | None:
    """Return the curve of the DataLoader in a run, None without one.

    The training loop has the step of the run's other case, or the one that the user gave. Its
    epochs are unknown without the trials of the rows.
    """
    loaders = sorted(
        (row for row in rows if row.case.traits.loads), key=lambda row: row.case.loader
    )
    if not loaders:
        return None
    measured = [row for row in loaders if row.step]
    step, steps = _step(loaders[0], rows)
    alike = by_key(trials)
    shown = [summary.shown(alike.get(row.key, ())) for row in measured]
    batches = _batches(trial for group in shown for trial in group)
    loops = [
        _loop(row, group, step, steps, batches) for row, group in zip(measured, shown, strict=True)
    ]
    points = tuple(
        LoaderPoint(
            row=row,
            of_best=_of_best(row.series, [other.series for other in measured]),
            busy=stats.mean_ratio(loop.step, loop.iteration) if step else None,
            epoch=stats.mean(loop.epoch) if batches else None,
            waiting=_waiting(loop, group) if batches else 0.0,
        )
        for row, loop, group in zip(measured, loops, shown, strict=True)
    )
    counts = [point.workers for point in points]
    knee, possible = _knee({point.workers: point.of_best for point in points})
    times = [loop.epoch if batches else loop.iteration for loop in loops]
    use, suitable = _knee(
        {count: _of_best(mine, times) for count, mine in zip(counts, times, strict=True)}
    )
    return LoaderCurve(
        points=points,
        shape=_shape(knee, possible, counts),
        knee=knee,
        possible=possible,
        advised=None if _shape(use, suitable, counts) is Shape.UNDECIDED else use,
        step=step,
        batches=batches,
        failed={row.case.loader: row.outcome for row in loaders if not row.step},
    )


def _step(loader: Row, rows: Sequence[Row]) -> tuple[Estimate | None, stats.Timed]:
    """Return the step time to compare with, and its durations by round, if it was not given."""
    given_s = Loading.of(loader.case).step_s
    if given_s:
        return Estimate(given_s, given_s, given_s, 0), stats.Timed()
    trained = next((row for row in rows if not row.case.traits.loads and row.step), None)
    return (trained.mean, trained.series) if trained else (None, stats.Timed())


def _batches(trials: Iterable[Trial]) -> int:
    """Return the number of batches of an epoch, 0 if a trial of an earlier version lacks it."""
    return min((trial.facts.batches_per_epoch for trial in trials), default=0)


class _Loop(NamedTuple):
    """The mean seconds of the training loop with one number of workers, by round."""

    step: stats.Timed
    iteration: stats.Timed
    epoch: stats.Timed


def _loop(
    row: Row, trials: Sequence[Trial], step: Estimate | None, steps: stats.Timed, batches: int
) -> _Loop:
    """Return the training loop with the number of workers of a row; see the top of this file.

    A round in which no step was measured has the mean step.
    """
    noisy = row.series.noisy | steps.noisy
    taken = {**steps.taken, **row.series.taken}
    loop = _Loop(*(stats.Timed((), noisy, taken) for _ in _Loop._fields))
    combined = max if row.case.loader else operator.add
    waits = {trial.round: trial.setup.get(NEXT_EPOCH, 0.0) for trial in trials}
    for number, batches_s in row.series.items():
        step_s = statistics.fmean(steps.get(number, [step.value if step else 0.0]))
        iteration_s = combined(statistics.fmean(batches_s), step_s)
        epoch_s = waits.get(number, 0.0) + (batches - 1) * iteration_s + step_s
        for series, seconds in zip(loop, (step_s, iteration_s, epoch_s), strict=True):
            series[number] = [seconds]
    return loop


def _waiting(loop: _Loop, trials: Sequence[Trial]) -> float:
    return statistics.fmean(
        trial.setup[NEXT_EPOCH] / loop.epoch[trial.round][0] for trial in trials
    )


def _of_best(times: stats.Rounds, every: Sequence[stats.Rounds]) -> Estimate:
    """Return the rate of a series of durations over the best rate.

    The best measured rate is not necessarily the true best, so each end of the interval is the
    smallest such end of the intervals of all ratios.
    """
    ratios = [stats.mean_ratio(other, times) for other in every]
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
    return [_knee_said(curve), *_failed_said(curve), *against, *_use_said(curve)]


def _knee_said(curve: LoaderCurve) -> str:
    if not curve.counts:
        return "Cannot tell where the knee is: no measurement of the DataLoader succeeded."
    first, last = curve.counts[0], curve.counts[-1]
    if len(curve.counts) < 2:
        more = "" if curve.failed else f": give several with {dashed('workers')}"
        return f"Cannot tell where the knee is from a single number of workers{more}."
    if curve.shape is Shape.FLAT:
        return (
            f"Flat: the rate with up to {workers_said([last])} is not clearly higher than with"
            f" {first}."
        )
    if curve.shape is Shape.RISING:
        enough = curve.advised != last or max(curve.failed, default=0) > last
        more = "" if enough else f"; give more with {dashed('workers')}"
        return f"No knee up to {workers_said([last])}: the rate still rises{more}."
    possible = among(curve.possible)
    if curve.shape is Shape.KNEE and curve.knee is not None:
        return f"Knee: {workers_said([curve.knee])} (95 %: {possible})."
    return (
        f"Cannot tell where the knee is: it may be at {possible} workers; {words.REMEDY} would"
        " help."
    )


def _failed_said(curve: LoaderCurve) -> list[str]:
    """Return a sentence on the numbers of workers without a result."""
    counts = grouped((outcome, workers) for workers, outcome in curve.failed.items())
    parts = [f"{workers_said(alike)} ({outcome})" for outcome, alike in counts.items()]
    return [f"No result with {', '.join(parts)}."] if parts else []


def _undecided(point: LoaderPoint) -> str:
    """Return in brackets why it is unknown what limits the loop; "" if it is known."""
    busy = point.busy
    if busy is None or point.bound is not Bound.UNDECIDED:
        return ""
    if busy.doubt in UNSURE:
        return f" ({words.withheld(busy)})"
    # the estimate of a share may have an interval that ends above 1
    return (
        f" (the step takes {busy.low:.1%} to {min(1.0, busy.high):.1%} of an iteration;"
        f" {Bound.STEP.value} from {words.percent(CLOSE)} on)"
    )


def _bound_said(found: LoaderCurve, step: Estimate) -> str:
    points = sorted(found.points, key=lambda point: [*Bound].index(point.bound))
    counts = grouped(((point.bound.value, _undecided(point)), point.workers) for point in points)
    parts = [f"{bound} with {workers_said(alike)}{why}" for (bound, why), alike in counts.items()]
    return (
        f"Against the step ({words.ms(step) if step.n else words.time(step.value)}):"
        f" {'; '.join(parts)}."
    )


def _use_said(curve: LoaderCurve) -> list[str]:
    """Return the number of workers to use, and what the start of workers costs without reuse."""
    every = words.count(curve.batches, "batch", "batches")
    sentences = []
    if curve.advised is not None:
        epoch = curve.epochs.get(curve.advised)
        lasts = f": an epoch of {every} takes {words.duration(epoch)}" if epoch else ""
        sentences.append(f"Use num_workers={curve.advised}{lasts}.")
    slow = max(
        (point for point in curve.points if point.restarts),
        key=lambda point: point.waiting,
        default=None,
    )
    if slow:
        sentences.append(
            f"With {workers_said([slow.workers])}, {words.percent(slow.waiting)} of an epoch of"
            f" {every} is the wait for its first batch, in which workers start:"
            " persistent_workers=True starts them once, which"
            f" {dashed('persistent_workers')} measures."
        )
    return sentences


def workers_said(counts: Sequence[int]) -> str:
    """Return numbers of workers as text with the noun, such as "2 or 4 workers"."""
    return f"{among(counts)} {words.verb(counts[-1], 'worker', 'workers')}"


def among(counts: Sequence[int]) -> str:
    """Return numbers as text, such as "1, 2 or 4"."""
    *others, last = map(str, counts)
    return f"{', '.join(others)} or {last}" if others else last
