"""Uneven: cases whose mean step differs from their median step, and the period of slow steps.

Throughput and the time of an epoch come from the mean step, because all steps take time. Step times
and speed-ups are medians, which a disturbance of a few steps does not change.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dpbench.analysis import stats, summary
from dpbench.analysis.summary import Row
from dpbench.records import Source, Trial
from dpbench.records.trial import Estimate

LEAST = 0.05
"""The least difference of mean and median that is reported, as a fraction of the median."""
REGULAR = 0.8
"""The least share of the distances between slow steps that must be equal for a period."""
FEWEST = 3
"""The least number of distances between slow steps from which a period is told."""


@dataclass(frozen=True)
class Period:
    """Every `steps`-th step takes `longer_s` seconds longer than the others."""

    steps: int
    longer_s: float


def differs(row: Row) -> bool:
    """Return whether the mean step differs from the median step by more than their intervals."""
    if (
        row.source is Source.PREDICTED
        or not row.step
        or not row.mean
        or row.step.doubt
        or row.mean.doubt
    ):
        return False
    apart = row.mean.low > row.step.high or row.mean.high < row.step.low
    return apart and abs(row.mean.value / row.step.value - 1) >= LEAST


def gain_of_means(row: Row, baseline: Row | None) -> Estimate | None:
    """Return the speed of `row` over its baseline's by the means of all timed steps, or None."""
    if baseline is None or not row.series or not baseline.series or row.source is Source.PREDICTED:
        return None
    ratio = stats.mean_ratio(baseline.series, row.series)
    return summary.scaled(ratio, row.case.batch_size / baseline.case.batch_size)


def period(trials: Sequence[Trial]) -> Period | None:
    """Return the period of the slow steps, which are longer than the mean; None if there is none.

    `trials` are those of one case whose steps count.
    """
    distances: Counter[int] = Counter()
    slow: list[float] = []
    usual: list[float] = []
    for series in (one for trial in trials for one in _unbroken(trial)):
        mean_s = statistics.mean(trial_s for trial_s in series)
        places = [place for place, seconds in enumerate(series) if seconds > mean_s]
        distances.update(after - before for before, after in pairwise(places))
        slow += [series[place] for place in places]
        usual += [seconds for seconds in series if seconds <= mean_s]
    total = distances.total()
    if total < FEWEST:
        return None
    steps, count = distances.most_common(1)[0]
    if steps < 2 or count < REGULAR * total:
        return None
    return Period(steps, statistics.median(slow) - statistics.median(usual))


def _unbroken(trial: Trial) -> Iterator[list[float]]:
    """Yield the durations of timed steps in series without missing steps.

    A recorder that kept only a sample of the steps leaves gaps, which would change the distances.
    """
    steps = trial.by_column
    middle_s = statistics.median(trial.timed)
    series: list[float] = []
    ended_s = None
    for seconds, end_s in zip(steps.timed(steps.seconds), steps.timed(steps.ends), strict=True):
        if ended_s is not None and end_s - seconds - ended_s > middle_s / 2:
            yield series
            series = []
        series.append(seconds)
        ended_s = end_s
    yield series
