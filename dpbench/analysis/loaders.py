"""Loaders: the rate of a DataLoader over its number of workers, its knee, and whether the step or loading is slower.

The knee is the least number of workers whose rate is at most 5 % below the best rate of the curve. The ratio of two
rates is computed in each round. The interval of the knee lists every number of workers that may be the true knee,
judged by the 95 % intervals of these ratios.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from dpbench.records import Status, words
from dpbench.records.trial import Doubt, Estimate

CLOSE = 0.95
"""The least fraction of the best rate at which a rate counts as equal to the best."""
Rounds = Mapping[int, Sequence[float]]
"""Seconds by round: for a DataLoader, the mean time of a batch; for a training step, the time of each step."""


@dataclass(frozen=True, kw_only=True, order=True)
class Setting:
    """The arguments of a DataLoader that a sweep varies.

    Without workers, `prefetch_factor` and `persistent_workers` have no effect.
    """

    workers: int
    pin_memory: bool = False
    prefetch_factor: int | None = None
    persistent_workers: bool = False

    @property
    def turn(self) -> int:
        """Return the number of batches in one turn, in which each worker delivers one batch."""
        return max(1, self.workers)

    @property
    def ahead(self) -> int:
        """Return the number of batches that workers load ahead."""
        return self.workers * (self.prefetch_factor or 0)

    @property
    def fill(self) -> int:
        """Return the number of batches before the steady part, from which the rate is computed.

        They are the first turn and the batches loaded ahead in the meantime. The first turn ends when the last worker
        has started. Until then, the other workers have loaded batches ahead, which arrive at once.
        """
        return self.turn + self.ahead

    def batches(self, batch_size: int, examples: int) -> int:
        """Return the number of batches of a measurement whose steady part has at least `examples` examples."""
        turns = -(-examples // (batch_size * self.turn))
        return self.fill + self.turn * turns + self.ahead

    @property
    def others(self) -> tuple[bool, int, bool]:
        """Return pin_memory, prefetch_factor (0 if not given) and persistent_workers."""
        return self.pin_memory, self.prefetch_factor or 0, self.persistent_workers

    @property
    def family(self) -> str:
        """Return the arguments except the number of workers, as Python text; empty if all have their defaults."""
        said = {"pin_memory": self.pin_memory, "persistent_workers": self.persistent_workers}
        parts = [f"{name}=True" for name, given in said.items() if given]
        usual = self.prefetch_factor in (None, 2)
        return ", ".join(parts + ([] if usual else [f"prefetch_factor={self.prefetch_factor}"]))

    def __str__(self) -> str:
        return ", ".join(filter(None, (f"num_workers={self.workers}", self.family)))


@dataclass(frozen=True, kw_only=True)
class LoaderReading:
    """One measurement of a DataLoader in one process.

    `waits_s` has the seconds that the consumer waited for each batch; the first wait includes the start of the workers.
    `next_epoch_s` is the wait for the first batch of a second epoch. `length` is the number of examples of the dataset.
    """

    setting: Setting
    round: int
    batch_size: int
    status: Status
    reason: str = ""
    length: int = 0
    waits_s: tuple[float, ...] = ()
    next_epoch_s: float = 0.0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the reading that `asdict` wrote."""
        return cls(**{**data, "setting": Setting(**data["setting"]), "status": Status(data["status"]),
                      "waits_s": tuple(data["waits_s"])})  # fmt: skip

    @property
    def batch_s(self) -> float:
        """Return the mean seconds per batch of the steady part, which begins after `Setting.fill` batches."""
        steady = self.waits_s[self.setting.fill :]
        return sum(steady) / len(steady)


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


@dataclass(frozen=True)
class Least:
    """The least number of workers that is enough; `workers` is None if no measured number is enough.

    `possible` has every measured number that may be the true least one, judged by intervals. `open` is True if even the
    largest measured number may not be enough.
    """

    workers: int | None
    possible: tuple[int, ...]
    open: bool


@dataclass(frozen=True, kw_only=True)
class LoaderResult:
    """The results for one setting.

    `batch` is the time per batch of the steady part in seconds. `first` is the wait for the first batch, including the
    start of the workers, and `next_epoch` the wait for the first batch of the next epoch. `of_best` is the rate divided
    by the best rate of the curve. `demand` is the step time divided by `batch`: the DataLoader is fast enough if
    `demand` is at least 1. `reason` says why measurements failed; if all of them failed, the estimates are None.
    """

    setting: Setting
    batch_size: int
    batch: Estimate | None = None
    first: Estimate | None = None
    next_epoch: Estimate | None = None
    of_best: Estimate | None = None
    demand: Estimate | None = None
    reason: str = ""

    @property
    def rate(self) -> Estimate | None:
        """Return the examples loaded per second; None if all measurements failed."""
        b, size = self.batch, self.batch_size
        return Estimate(size / b.value, size / b.high, size / b.low, b.n) if b else None

    @property
    def bound(self) -> Bound:
        """Return the slower one of the DataLoader and the step; UNDECIDED without a step or with too few rounds."""
        if self.demand is None or self.demand.doubt is Doubt.ROUNDS or self.demand.low < 1 <= self.demand.high:
            return Bound.UNDECIDED
        return Bound.STEP if self.demand.low >= 1 else Bound.LOADER


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The points whose settings differ only in the number of workers, in ascending order of that number.

    `enough` is the least number of workers with which the DataLoader is as fast as the step, None without a step.
    """

    points: tuple[LoaderResult, ...]
    shape: Shape
    knee: Least
    enough: Least | None = None

    @property
    def counts(self) -> list[int]:
        """Return the numbers of workers that were measured."""
        return [point.setting.workers for point in self.points if point.batch]

    @property
    def family(self) -> str:
        """Return, as text, the arguments that all points have in common; empty if they have their defaults."""
        return self.points[-1].setting.family


def curves(readings: Iterable[LoaderReading], step: Rounds | float | None = None) -> list[Curve]:
    """Return the curves of a sweep, compared with `step`: the seconds of a step by round, or one number of seconds.

    A measurement without workers belongs to each curve with the same `pin_memory`.
    """
    by_setting: dict[Setting, list[LoaderReading]] = {}
    for reading in readings:
        by_setting.setdefault(reading.setting, []).append(reading)
    settings = sorted(by_setting, key=lambda one: (one.workers, *one.others))
    families: dict[tuple[bool, int, bool], list[Setting]] = {}
    for one in settings:
        if one.workers:
            families.setdefault(one.others, []).append(one)
    without = [one for one in settings if not one.workers]
    groups = [[one for one in without if one.pin_memory is key[0]] + rest for key, rest in families.items()]
    return [curve({one: by_setting[one] for one in group}, step) for group in groups or [[one] for one in without]]


def curve(measured: Mapping[Setting, Sequence[LoaderReading]], step: Rounds | float | None = None) -> Curve:
    """Return one curve from the readings of each setting; the settings are in order of their numbers of workers."""
    series = {one: rounds for one, readings in measured.items() if (rounds := _series(readings))}
    of_best = _of_best(series)
    demand = {one: _demand(rounds, step) for one, rounds in series.items()} if step is not None else {}
    points = tuple(_point(one, readings, of_best.get(one), demand.get(one)) for one, readings in measured.items())
    knee = least({one.workers: ratio for one, ratio in of_best.items()}, CLOSE)
    enough = least({one.workers: ratio for one, ratio in demand.items()}, 1.0) if demand else None
    return Curve(points=points, shape=_shape(knee, [one.workers for one in series]), knee=knee, enough=enough)


def _series(readings: Iterable[LoaderReading]) -> dict[int, list[float]]:
    return {one.round: [one.batch_s] for one in readings if one.status is Status.OK}


def _of_best(series: Mapping[Setting, Rounds]) -> dict[Setting, Estimate]:
    """Return, for each setting, the ratio of its rate to the best rate.

    The best rate of the measurement is not necessarily the true best. Each rate is therefore divided by every rate. The
    result is the smallest of these ratios, and each end of its interval is the smallest such end of their intervals.
    """
    from dpbench.analysis import stats

    found = {}
    for one, rounds in series.items():
        against = [stats.ratio(others, rounds) for others in series.values()]
        value, low, high = (min(getattr(each, part) for each in against) for part in ("value", "low", "high"))
        found[one] = Estimate(value, low, high, len(rounds))
    return found


def _demand(rounds: Rounds, step: Rounds | float) -> Estimate:
    """Return the ratio of the step time to the time in which the DataLoader delivers a batch."""
    from dpbench.analysis import stats

    if isinstance(step, float):
        return stats.median({number: [step / each for each in batch] for number, batch in rounds.items()})
    return stats.ratio(step, rounds)


def _point(
    one: Setting, readings: Sequence[LoaderReading], of_best: Estimate | None, demand: Estimate | None
) -> LoaderResult:
    from dpbench.analysis import stats

    good = [each for each in readings if each.status is Status.OK]
    reason = next((f"{each.status.value}: {each.reason}" for each in readings if each.status is not Status.OK), "")
    if not good:
        return LoaderResult(setting=one, batch_size=readings[0].batch_size, reason=reason)
    return LoaderResult(
        setting=one, batch_size=good[0].batch_size, batch=stats.median(_series(good)), of_best=of_best, demand=demand,
        first=stats.median({each.round: [each.waits_s[0]] for each in good}),
        next_epoch=stats.median({each.round: [each.next_epoch_s] for each in good}), reason=reason,
    )  # fmt: skip


def step_time(step: Rounds | float | None) -> Estimate | None:
    """Return the step time in seconds, None without a step; for a step time that the user gave, `n` is 0."""
    from dpbench.analysis import stats

    if step is None or isinstance(step, float):
        return Estimate(step, step, step, 0) if step else None
    return stats.median(step)


def least(ratios: Mapping[int, Estimate], threshold: float) -> Least:
    """Return the least number of workers whose ratio is at least the threshold.

    A number may be the true least one (`Least.possible`) if the upper end of its ratio's interval reaches the
    threshold, and if no smaller number has an interval that is entirely at or above the threshold. A ratio from fewer
    than three rounds proves nothing: its number may be the least one, and no larger number is excluded because of it.
    """
    counts = sorted(ratios)
    unsure = {count for count in counts if ratios[count].doubt is Doubt.ROUNDS}
    sure = [count for count in counts if count not in unsure and ratios[count].low >= threshold]
    reached = [count for count in counts if ratios[count].value >= threshold]
    possible = [count for count in counts if count in unsure or ratios[count].high >= threshold]
    return Least(
        reached[0] if reached else None, tuple(count for count in possible if not sure or count <= sure[0]), not sure
    )


def _shape(knee: Least, counts: Sequence[int]) -> Shape:
    """Return the form of a curve; its last point is never a knee, because the rate may rise beyond it."""
    if len(counts) < 2 or knee.possible == tuple(counts):
        return Shape.UNDECIDED
    if knee.possible == (counts[0],):
        return Shape.FLAT
    if knee.possible == (counts[-1],):
        return Shape.RISING
    return Shape.KNEE if knee.workers != counts[-1] else Shape.UNDECIDED


def said(curves: Sequence[Curve], step: Estimate | None = None) -> list[str]:
    """Return lines of text: the verdicts on all curves, and the DataLoader call to use if `advice` recommends one."""
    lines = []
    for one in curves:
        prefix = f"{one.family}: " if one.family else ""
        lines.append(f"{prefix}{_knee_said(one)}")
        if step and one.enough:
            lines.append(f"{prefix}{_bound_said(one, one.enough, step)}")
    advised = advice(curves)
    return [*lines, f"use: DataLoader(..., {advised})"] if advised else lines


def _knee_said(one: Curve) -> str:
    if not one.counts:
        return "cannot tell: no measurement succeeded"
    first, last = one.counts[0], one.counts[-1]
    if len(one.counts) < 2:
        return "cannot tell where the knee is from a single number of workers; give several with --workers"
    if one.shape is Shape.FLAT:
        return f"flat: the rate with up to {workers_said([last])} is not clearly higher than with {first}"
    if one.shape is Shape.RISING:
        return f"no knee up to {workers_said([last])}: the rate still rises; give more with --workers"
    if one.shape is Shape.KNEE:
        return f"knee: {workers_said([one.knee.workers or 0])} (95 %: {among(one.knee.possible)})"
    possible = workers_said(one.knee.possible)
    return f"cannot tell where the knee is: it may be at {possible}; {words.REMEDY} would help"


def workers_said(counts: Sequence[int]) -> str:
    """Return numbers of workers as text with the noun, such as "2 or 4 workers"."""
    return f"{among(counts)} {words.verb(counts[-1], 'worker', 'workers')}"


def among(counts: Sequence[int]) -> str:
    """Return numbers as text, such as "1, 2 or 4"."""
    return str(counts[0]) if len(counts) == 1 else f"{', '.join(map(str, counts[:-1]))} or {counts[-1]}"


def _bound_said(one: Curve, enough: Least, step: Estimate) -> str:
    """Return, as text, with which numbers of workers loading is slower than the step, and which number is enough."""
    by_bound = {bound: [p.setting.workers for p in one.points if p.batch and p.bound is bound] for bound in Bound}
    parts = [f"{bound.value} with {workers_said(counts)}" for bound, counts in by_bound.items() if counts]
    verdict = f"against the step ({_ms(step)}): {'; '.join(parts)}"
    if not enough.possible:
        return f"{verdict}; not enough with up to {workers_said([one.counts[-1]])}: loading is slower than the step"
    more = " or more" if enough.open else ""
    if enough.workers is None:
        return f"{verdict}; cannot tell which number is enough: it may be {workers_said(enough.possible)}{more}"
    return f"{verdict}; enough: {workers_said([enough.workers])} (95 %: {among(enough.possible)}{more})"


def _ms(step: Estimate) -> str:
    return f"{words.number(step.value * 1e3)} ms" if step.n == 0 else words.ms(step)


def advice(curves: Sequence[Curve]) -> str:
    """Return the DataLoader arguments to use, as text; "" if no curve recommends a number of workers.

    A curve recommends the least number that is surely enough for the step. If no number is, it recommends the knee, or
    nothing if the form of the curve is undecided. The first curve with a recommendation is used, unless the best rate
    of a later one is certainly higher.
    """
    decided = [(one, count) for one in curves if (count := _advised(one)) is not None]
    if not decided:
        return ""
    best, count = decided[0]
    for one, other in decided[1:]:
        if _best(one).low > _best(best).high:
            best, count = one, other
    return str(next(point.setting for point in best.points if point.setting.workers == count))


def _advised(one: Curve) -> int | None:
    sure = [point.setting.workers for point in one.points if point.bound is Bound.STEP]
    if sure:
        return sure[0]
    if one.shape is Shape.UNDECIDED:
        return None
    return one.knee.workers


def _best(one: Curve) -> Estimate:
    return max((point.rate for point in one.points if point.rate), key=lambda rate: rate.value)
