"""Score: the errors of predictions against published measurements, compared with the errors of linear scaling."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dpbench.predict import intervals, quick
from dpbench.predict.constants import DEFAULT, Constants
from dpbench.predict.scoring import published, rows
from dpbench.predict.scoring.published import Excluded, Matched
from dpbench.predict.scoring.rows import Question

HARD = 1.1
"""A case counts as hard from this ratio of the measured step to the step under linear scaling."""


@dataclass(frozen=True)
class Scored:
    """The duration of a row's step: measured, predicted with its interval, and under linear scaling.

    All values are in the unit of `PublishedRow.step_s`.
    """

    matched: Matched
    measured_s: float
    predicted_s: float
    low_s: float
    high_s: float
    linear_s: float

    @property
    def error(self) -> float:
        """Return the relative error of the prediction: predicted over measured, minus 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def linear_error(self) -> float:
        """Return the relative error of linear scaling: linearly scaled over measured, minus 1."""
        return self.linear_s / self.measured_s - 1

    @property
    def covered(self) -> bool:
        """Return whether the interval contains the measured step."""
        return self.low_s <= self.measured_s <= self.high_s

    @property
    def hard(self) -> bool:
        """Return whether the measured step takes at least `HARD` times as long as under linear scaling."""
        return self.measured_s >= HARD * self.linear_s


@dataclass(frozen=True, kw_only=True)
class ScoreLine:
    """One line of the scoreboard; ratios are fractions.

    `mape` is the mean absolute relative error. `skill` is 1 minus the ratio of the MAPE to that of linear scaling.
    `coverage` is the share of intervals that contain the measured step, None without intervals. `overhead` is the error
    of T(n) - T(1), summed over the rows and divided by the sum of the measured values.
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
    excluded: int
    overhead: float
    hard_n: int
    hard_mape: float | None


def predict(matched: Matched, constants: Constants = DEFAULT, host: float = rows.PUBLISHED_HOST) -> Scored:
    """Return the prediction of one row, by simulation, with its interval."""
    asked = rows.question(matched, constants, host)
    seconds = rows.predicted_s(asked, constants)
    base = _quick(asked, constants)

    def evaluate(name: str, factor: float) -> float:
        changed, other = constants, asked
        if name == intervals.HOST:
            machine = asked.machine.machine
            slower = replace(machine, host=replace(machine.host, factor=machine.host.factor * factor))
            other = replace(asked, machine=replace(asked.machine, machine=slower))
        elif name == "features":
            other = replace(asked, profile=_scaled_counts(asked, factor))
        elif name == "forward_share":  # the profile depends on it
            changed = intervals.scaled(constants, name, factor)
            other = rows.question(matched, changed, host)
        else:
            changed = intervals.scaled(constants, name, factor)
        return _quick(other, changed) / base * seconds

    low, high = intervals.interval(seconds, evaluate, priors(asked), residual(asked))
    return Scored(matched, matched.row.step_s, seconds, low, high, rows.linear_s(asked, constants))


def _quick(asked: Question, constants: Constants) -> float:
    machine = asked.machine.machine
    return quick.seconds(asked.case, asked.profile, machine, constants, phases=asked.phases, loop=asked.loop)


def _scaled_counts(asked: Question, factor: float) -> Any:
    """Return a row's profile with scaled numbers of modules, tensors and launches."""
    p = asked.profile
    return replace(
        p, modules=round(p.modules * factor), parameter_tensors=max(1, round(p.parameter_tensors * factor)),
        forward_launches=round(p.forward_launches * factor), backward_launches=round(p.backward_launches * factor),
    )  # fmt: skip


def priors(asked: Question) -> dict[str, float]:
    """Return the prior uncertainty of each constant that a row depends on: the deviation of its logarithm, by name."""
    found = intervals.of(asked.case)
    if asked.machine.assumed:
        found |= intervals.ASSUMED
    if asked.known == "estimated":
        found |= intervals.ESTIMATED
    return found


def residual(asked: Question) -> float:
    """Return the standard deviation of the logarithm of the duration of the baseline's step."""
    return intervals.RESIDUAL["given"] * (1 if asked.exact else 3)


def score(path: Path, *, all_rows: bool = False) -> tuple[list[Scored], list[Excluded]]:
    """Return the rows of a table with their predictions, and the excluded rows.

    The prediction of a group never uses constants that were fitted to that group.
    """
    table, unread = published.read(path)
    matched, excluded = published.match(table, all_rows=all_rows)
    return [predict(one, *rows.without(one.row.group)) for one in matched], [*unread, *excluded]


def lines(scored: Iterable[Scored], excluded: Sequence[Excluded] = ()) -> list[ScoreLine]:
    """Return one line for each group, strategy and metric, in the order of the table.

    Rows whose baseline has another batch size get a separate line, because the extrapolation adds to their error.
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
    """Return the line for rows with the same `key`: group, strategy and metric."""
    errors = sorted(abs(one.error) for one in group)
    linear = statistics.mean(abs(one.linear_error) for one in group)
    hard = [abs(one.error) for one in group if one.hard]
    mape = statistics.mean(errors)
    # relative to each row's own step, so that slow models do not dominate the sums
    extra = sum(one.measured_s / one.linear_s - 1 for one in group)
    missed = sum(one.predicted_s / one.linear_s - one.measured_s / one.linear_s for one in group)
    coverage = statistics.mean(one.covered for one in group) if any(one.high_s for one in group) else None
    return ScoreLine(
        group=key[0], strategy=key[1], metric=key[2], n=len(group), mape=mape, median=statistics.median(errors),
        p90=quantile(errors, 0.9), bias=statistics.mean(one.error for one in group),
        skill=1 - mape / linear if linear else 0.0, coverage=coverage,
        excluded=excluded, overhead=missed / extra if abs(extra) > 1e-9 else 0.0, hard_n=len(hard),
        hard_mape=statistics.mean(hard) if hard else None,
    )  # fmt: skip


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the quantile `q` of sorted values, interpolated linearly."""
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def as_json(found: Iterable[ScoreLine]) -> list[dict[str, Any]]:
    """Return lines as plain data for JSON, with ratios as fractions."""
    return [
        {key: round(value, 6) if isinstance(value, float) else value for key, value in asdict(one).items()}
        for one in found
    ]
