"""Score: errors of predictions against published measurements, compared with linear scaling.

Linear scaling is the assumption that a step takes as long as a step on one device with one device's
share of the batch.

No row is predicted with constants that were fitted to its source, or with deviations that were
fitted to its owner. A calibration fits factors to the
published rows of some models on a machine, for each number of devices. The rows of other models on
that machine are then predicted with these factors. For DataParallel, the host factor and the bus
bandwidth are fitted, and each model is predicted from all other models. For DDP, the bus bandwidth
is fitted to a single model, and all other models are predicted from that model.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from scipy.special import stdtrit

from benchmarks.prediction import fit_constants, formula, loops, published, rows
from benchmarks.prediction.published import NAMED, Excluded, Matched
from benchmarks.prediction.rows import PublishedCase
from dpbench.predict import deviations, network
from dpbench.predict.constants import (
    DEFAULT,
    RESIDUAL,
    Constants,
    drawn,
    interval,
    priors_of,
    scaled,
)
from dpbench.predict.deviations import Deviation

ESTIMATED = {"features": 0.6}
"""An additional prior for a model whose counts are estimated from its number of parameters: the
standard deviation of the logarithm of a common factor on these counts.
"""
LESS_SURE = 4
"""The factor on the deviation of a step's residual without an exact baseline of PyTorch."""
HOSTS = tuple(0.5 * 1.12**k for k in range(13))
"""The host factors that a calibration tries, as ratios to that of `rows.host_of`."""
BUSES = tuple(0.12 * 1.25**k for k in range(16))
"""The bus bandwidths that a calibration tries, as ratios to the bandwidths of the described
machine.
"""
FEW = 3
"""The minimum number of models on a machine for a calibration that predicts each model from all
other models.
"""

DOUBT = 0.002
"""The penalty of a calibration per unit of a factor's absolute logarithm.

If a factor has no effect on the durations, the penalty keeps the factor near 1.
"""

Point = tuple[float, float]


def calibrated_lines(matched: Sequence[Matched]) -> list[ScoreLine]:
    """Return scoreboard lines for each group, calibrated on other models of the machine."""
    found = []
    for group in dict.fromkeys(one.row.group for one in matched):
        mine = [one for one in matched if one.row.group == group]
        for strategy, kinds in (
            ("dp, from all other models", ("dp",)),
            ("ddp, from one other model", ("ddp",)),
        ):
            of_kind = [one for one in mine if NAMED[one.row.strategy] in kinds]
            scored = list(_left_out(of_kind) if kinds == ("dp",) else _one_for_all(of_kind))
            if scored:
                found.append(line((group, strategy, of_kind[0].row.metric), scored))
    return found


def _machines(matched: Sequence[Matched]) -> list[list[Matched]]:
    """Return the rows of each combination of machine, precision and number of devices."""
    found: dict[tuple[object, ...], list[Matched]] = {}
    for one in matched:
        row = one.row
        found.setdefault((row.gpu, row.interconnect, row.precision, row.devices), []).append(one)
    return list(found.values())


def _left_out(matched: Sequence[Matched]) -> Iterator[Scored]:
    """Yield each model's rows, predicted with the best factors for the machine's other models.

    Machines with fewer than `FEW` models are left out.
    """
    for machine in _machines(matched):
        models = list(dict.fromkeys(one.row.model for one in machine))
        if len(models) < FEW:
            continue
        table = {
            (host, bus): [_step_s(one, host, bus) for one in machine]
            for host in HOSTS
            for bus in BUSES[4:13]
        }
        for model in models:
            others = [i for i, one in enumerate(machine) if one.row.model != model]
            best = _best(table, machine, others)
            yield from (
                _scored(one, table[best][i])
                for i, one in enumerate(machine)
                if one.row.model == model
            )


def _one_for_all(matched: Sequence[Matched]) -> Iterator[Scored]:
    """Yield rows, predicted with a bus bandwidth fitted to another model on the same machine.

    For each machine and device count, the bandwidth is fitted to the model with the largest
    overhead, and only the rows of the other models are yielded. Rows with an extrapolated baseline
    are left out. The bandwidth does not depend on the precision, so rows of all precisions are used
    together.
    """
    machines: dict[tuple[str, str], list[Matched]] = {}
    for one in matched:
        if not one.extrapolated:
            machines.setdefault((one.row.gpu, one.row.interconnect), []).append(one)
    for machine in machines.values():
        overhead: dict[str, float] = {}
        for one in machine:
            overhead[one.row.model] = max(
                overhead.get(one.row.model, 0.0), one.row.step_s / one.one_s
            )
        if len(overhead) < 2:
            continue
        teacher = max(overhead, key=lambda model: overhead[model])
        for count in dict.fromkeys(one.row.devices for one in machine):
            here = [one for one in machine if one.row.devices == count]
            known = [i for i, one in enumerate(here) if one.row.model == teacher]
            if known:
                table = {(1.0, bus): [_step_s(one, 1.0, bus) for one in here] for bus in BUSES}
                best = _best(table, here, known)
                yield from (
                    _scored(one, table[best][i])
                    for i, one in enumerate(here)
                    if one.row.model != teacher
                )


def _best(
    table: Mapping[Point, Sequence[float]], rows_: Sequence[Matched], use: Sequence[int]
) -> Point:
    """Return the pair (host factor, bus bandwidth) with the least penalized error.

    The error is the mean absolute relative error over the rows whose indices are in `use`. `table`
    maps each pair to the predicted durations of all rows. The penalty, which is added to the error,
    is `DOUBT` times the sum of the absolute logarithms of the pair.
    """

    def missed(point: Point) -> float:
        errors = [abs(table[point][i] / rows_[i].row.step_s - 1) for i in use]
        return sum(errors) / len(errors) + DOUBT * sum(abs(math.log(factor)) for factor in point)

    return min(table, key=missed)


def _asked(one: Matched, host: float, bus: float) -> tuple[PublishedCase, Constants]:
    """Return a row's case with factors on its host factor and on all bus bandwidths."""
    constants = replace(held_out(one.row.group), bus_scale=bus)
    return rows.question(one, constants, host * rows.host_of(one.row)), constants


def _step_s(one: Matched, host: float, bus: float) -> float:
    asked, constants = _asked(one, host, bus)
    return asked.step_s(formula.seconds, constants)


def _scored(one: Matched, seconds: float) -> Scored:
    asked, _ = _asked(one, 1.0, 1.0)
    return Scored(one, one.row.step_s, seconds, 0.0, 0.0, rows.linear_s(asked))


HARD = 1.1
"""The ratio of the measured step to the step under linear scaling, from which a row counts as
hard.
"""


@dataclass(frozen=True)
class Scored:
    """The duration of a row's step: measured, predicted, and under linear scaling.

    `low_s` and `high_s` are the ends of the interval of the prediction, 0 without an interval. All
    durations are in seconds.
    """

    matched: Matched
    measured_s: float
    predicted_s: float
    low_s: float
    high_s: float
    linear_s: float

    @property
    def error(self) -> float:
        """Return the relative error of the prediction: predicted / measured duration - 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def linear_error(self) -> float:
        """Return the relative error of linear scaling: its predicted / measured duration - 1."""
        return self.linear_s / self.measured_s - 1

    @property
    def covered(self) -> bool:
        """Return whether the interval of the prediction contains the measured duration."""
        return self.low_s <= self.measured_s <= self.high_s

    @property
    def interval_score(self) -> float:
        """Return the score of the 80 % interval, as defined in `Coverage`.

        Both of its ends must be positive.
        """
        low, measured, high = (
            math.log(seconds) for seconds in (self.low_s, self.measured_s, self.high_s)
        )
        return high - low + 10 * (max(0.0, low - measured) + max(0.0, measured - high))

    @property
    def hard(self) -> bool:
        """Return whether the step takes at least `HARD` times as long as under linear scaling."""
        return self.measured_s >= HARD * self.linear_s


@dataclass(frozen=True, kw_only=True)
class ScoreLine:
    """One line of the scoreboard: the errors of the predictions of `n` rows, as fractions.

    `mape`, `median` and `p90` are the mean, the median and the 90th percentile of the absolute
    relative errors; `bias` is the mean of the signed relative errors. `skill` is 1 minus the ratio
    of `mape` to the same mean for linear scaling. `coverage` is the share of intervals that contain
    the measured step, and `interval_score` the mean score of the intervals (see `Coverage`), both
    None without intervals. `excluded` is the number of excluded rows of the
    group. The overhead of a row is the ratio of its step to the step under linear scaling, minus 1;
    `overhead` is the relative error of the sum of the predicted overheads. `hard_n` is the number
    of hard rows (see `Scored.hard`), and `hard_mape` their mean absolute relative error.
    """

    group: str
    strategy: str
    metric: str
    n: int
    mape: float
    median: float
    p90: float
    bias: float
    skill: float
    coverage: float | None
    interval_score: float | None
    excluded: int
    overhead: float
    hard_n: int
    hard_mape: float | None


@dataclass(frozen=True)
class Coverage:
    """The share of intervals that contain the measured step: `rows` rows, `machines` machines.

    `low` and `high` are the ends of the 95 % interval of `share`. Rows of one machine share the
    errors of its description, so the interval comes from the variation between machines (Cochran,
    "Sampling Techniques", 1977, section 9A.1). `score` is the mean interval score of the logarithms
    of the steps; a lower score is better. The score of an interval is its width, plus ten times the
    distance by which it misses the step (Gneiting and Raftery, "Strictly Proper Scoring Rules",
    2007).
    """

    rows: int
    machines: int
    share: float
    low: float
    high: float
    score: float


@dataclass(frozen=True)
class ByOwner:
    """Means over owners, each with the same weight, of the mean errors of their rows.

    `bias` and `mape` are relative errors, and `coverage` is the share of intervals that contain the
    measured step, with the ends of its 95 % interval from the variation between owners.
    """

    owners: int
    bias: float
    mape: float
    coverage: float
    low: float
    high: float


def by_owner(scored: Sequence[Scored]) -> ByOwner:
    """Return the means over the owners of rows; there must be two or more owners."""
    rows_of: dict[str, list[Scored]] = {}
    for one in scored:
        rows_of.setdefault(one.matched.row.owner, []).append(one)
    lines_ = [line((owner, "", ""), mine) for owner, mine in rows_of.items()]
    shares = [one.coverage or 0.0 for one in lines_]
    n = len(shares)
    share = statistics.mean(shares)
    half = float(stdtrit(n - 1, 0.975)) * statistics.stdev(shares) / math.sqrt(n)
    return ByOwner(
        owners=n,
        bias=statistics.mean(one.bias for one in lines_),
        mape=statistics.mean(one.mape for one in lines_),
        coverage=share,
        low=max(0.0, share - half),
        high=min(1.0, share + half),
    )


def coverage(scored: Sequence[Scored]) -> Coverage | None:
    """Return the coverage of all rows together; None if they are from fewer than two machines."""
    machines: dict[tuple[str, str], list[bool]] = {}
    for one in scored:
        machines.setdefault((one.matched.row.gpu, one.matched.row.interconnect), []).append(
            one.covered
        )
    m = len(machines)
    if m < 2:
        return None
    share = statistics.mean(one.covered for one in scored)
    spread = sum((sum(mine) - share * len(mine)) ** 2 for mine in machines.values())
    half = float(stdtrit(m - 1, 0.975)) * math.sqrt(m / (m - 1) * spread) / len(scored)
    each = statistics.mean(one.interval_score for one in scored)
    return Coverage(len(scored), m, share, max(0.0, share - half), min(1.0, share + half), each)


def held_out(group: str) -> Constants:
    """Return the constants that were not fitted to the source of a group of rows.

    For the source to which they were fitted, these are the centres of their priors.
    """
    if not group.startswith(fit_constants.SOURCE):
        return DEFAULT
    return replace(DEFAULT, **{name: centre for name, (centre, _) in fit_constants.PRIORS.items()})


@dataclass(frozen=True)
class Modelled:
    """The step of a row as the model of steps predicts it, without what machines lose beyond it.

    `draws` are those of log(duration / seconds), and `link` the kind of the slowest link.
    """

    matched: Matched
    seconds: float
    draws: tuple[float, ...]
    linear_s: float
    link: str

    def scored(self, deviation: Deviation) -> Scored:
        """Return the prediction of the row, with what machines lose beyond the model."""
        seconds, draws = deviation.of_step(self.seconds, self.draws)
        low, high = interval(seconds, draws)
        measured = self.matched.row.step_s
        return Scored(self.matched, measured, seconds, low, high, self.linear_s)


def predict(matched: Matched) -> Scored:
    """Return the prediction of one row, with its interval."""
    return unseen(modelled(matched))


def unseen(found: Modelled) -> Scored:
    """Return the prediction of a row whose owner taught nothing of what machines lose."""
    row = found.matched.row
    return found.scored(left_out(row.owner)[NAMED[row.strategy]][found.link])


LEFT_OUT = Path(__file__).parent / "left_out.json"
"""The deviations that `fit_deviations` finds without each owner, and with all owners as ""."""


@lru_cache(maxsize=1)
def _fits() -> dict[str, deviations.Table]:
    stored = json.loads(LEFT_OUT.read_text(encoding="utf-8"))
    return {owner: deviations.read(table) for owner, table in stored.items()}


def left_out(owner: str) -> deviations.Table:
    """Return the deviations that were fitted without an owner; to all owners if it is new."""
    fits = _fits()
    return fits.get(owner, fits[""])


def modelled(matched: Matched) -> Modelled:
    """Return the prediction of one row by simulation alone."""
    constants = held_out(matched.row.group)
    asked = rows.question(matched, constants)
    seconds = asked.step_s(lambda *on, **kinds: loops.step(*on, **kinds).seconds, constants)
    base = asked.step_s(formula.seconds, constants)

    def evaluate(name: str, factor: float) -> float:
        changed, other = constants, asked
        if name == rows.OVERLAP:
            other = replace(asked, loops=asked.loops[:1] if factor > 1 else asked.loops[-1:])
        elif name == "features":
            other = replace(asked, profile=_scaled_counts(asked, factor))
        else:
            changed = scaled(constants, name, factor)
            if name == "forward_share":  # the profile depends on it
                other = rows.question(matched, changed)
        return other.step_s(formula.seconds, changed) / base * seconds

    draws = drawn(seconds, evaluate, priors(asked), residual(asked))
    link = network.link_kind(asked.machine, asked.case.devices)
    return Modelled(matched, seconds, draws, rows.linear_s(asked, constants), link)


def _scaled_counts(asked: PublishedCase, factor: float) -> Any:
    """Return a row's profile with its modules, parameter tensors and launches times `factor`."""
    p = asked.profile
    return replace(
        p,
        modules=round(p.modules * factor),
        parameter_tensors=max(1, round(p.parameter_tensors * factor)),
        forward_launches=round(p.forward_launches * factor),
        backward_launches=round(p.backward_launches * factor),
    )


def priors(asked: PublishedCase) -> dict[str, float]:
    """Return the prior of each constant that affects the row's step, by name.

    A prior is a standard deviation of the constant's logarithm.
    """
    found = priors_of(asked.case, asked.machine)
    if asked.known == "estimated":
        found |= ESTIMATED
    if len(asked.loops) > 1:
        found |= {rows.OVERLAP: 1.0}
    return found


def residual(asked: PublishedCase) -> float:
    """Return the standard deviation of log(duration) of the baseline's step.

    It is multiplied by `LESS_SURE` if the baseline has another batch size per device than the row,
    or if the step is not one of PyTorch, whose strategies are predicted. An epoch may have one step
    less than calculated, if its last batch is left out.
    """
    row = asked.row
    last = 0.5 / row.steps if row.metric == "epoch_s" else 0.0
    sure = asked.exact and "torch" in (row.framework or "torch")
    return math.hypot(RESIDUAL["given"] * (1 if sure else LESS_SURE), last)


def score(path: Path, *, all_rows: bool = False) -> tuple[list[Scored], list[Excluded]]:
    """Return the rows of a table with their predictions, and the excluded rows.

    `all_rows` also includes rows that repeat other rows or are not trusted.
    """
    table, unread = published.read(path)
    matched, excluded = published.match(table, all_rows=all_rows)
    return [predict(one) for one in matched], [*unread, *excluded]


def lines(scored: Iterable[Scored], excluded: Sequence[Excluded] = ()) -> list[ScoreLine]:
    """Return one scoreboard line for each group, strategy and metric, in the order of the rows.

    Rows whose baseline must be extrapolated from another batch size get a separate line, because
    the extrapolation adds to their error. `excluded` rows are counted by group.
    """
    found: dict[tuple[str, str, str], list[Scored]] = {}
    for one in scored:
        row = one.matched.row
        apart = ", one device at another batch" if one.matched.extrapolated else ""
        found.setdefault((row.group, row.strategy + apart, row.metric), []).append(one)
    left: dict[str, int] = {}
    for aside in excluded:
        group = aside.id.rpartition("-")[0]
        left[group] = left.get(group, 0) + 1
    return [line(key, group, left.get(key[0], 0)) for key, group in found.items()]


def line(key: tuple[str, str, str], group: Sequence[Scored], excluded: int = 0) -> ScoreLine:
    """Return the scoreboard line for rows with the same `key`: group, strategy and metric.

    `excluded` is the number of excluded rows of the group.
    """
    errors = sorted(abs(one.error) for one in group)
    linear = statistics.mean(abs(one.linear_error) for one in group)
    hard = [abs(one.error) for one in group if one.hard]
    mape = statistics.mean(errors)
    # relative to the step under linear scaling, so that slow models do not dominate the sums
    extra = sum(one.measured_s / one.linear_s - 1 for one in group)
    missed = sum(one.predicted_s / one.linear_s - one.measured_s / one.linear_s for one in group)
    ranged = any(one.high_s for one in group)
    return ScoreLine(
        group=key[0],
        strategy=key[1],
        metric=key[2],
        n=len(group),
        mape=mape,
        median=statistics.median(errors),
        p90=quantile(errors, 0.9),
        bias=statistics.mean(one.error for one in group),
        skill=1 - mape / linear if linear else 0.0,
        coverage=statistics.mean(one.covered for one in group) if ranged else None,
        interval_score=statistics.mean(one.interval_score for one in group) if ranged else None,
        excluded=excluded,
        overhead=missed / extra if abs(extra) > 1e-9 else 0.0,
        hard_n=len(hard),
        hard_mape=statistics.mean(hard) if hard else None,
    )


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the quantile `q`, from 0 to 1, of ascending values, interpolated linearly."""
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def as_json(found: Iterable[ScoreLine]) -> list[dict[str, Any]]:
    """Return scoreboard lines as dictionaries for JSON, with floats rounded to six decimals."""
    return [
        {
            key: round(value, 6) if isinstance(value, float) else value
            for key, value in asdict(one).items()
        }
        for one in found
    ]
