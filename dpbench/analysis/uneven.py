"""Uneven: cases whose mean step differs from their median step.

Phases, throughput and the time of an epoch come from the mean step, because all steps take time.
Step times and speed-ups are medians, which a disturbance of a few steps does not change.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from dpbench.analysis import stats, summary
from dpbench.analysis.summary import Row
from dpbench.records import Trial, words
from dpbench.records.estimate import Estimate
from dpbench.records.grouping import grouped

LEAST = 0.05
"""The least difference of mean and median that is reported, as a fraction of the median."""


def differs(row: Row) -> bool:
    """Return whether the mean step decidedly differs from the median step, by `LEAST` or more."""
    if not row.source.timed or not row.step or not row.mean or row.step.doubt:
        return False
    if abs(row.mean.value / row.step.value - 1) < LEAST:
        return False
    if all(len(steps) == 1 for steps in row.series.values()):  # too few rounds: each step is one
        return row.mean.low > row.step.high or row.mean.high < row.step.low
    # within a round, so that differences between rounds cancel
    apart = stats.average({n: [excess_s(steps)] for n, steps in row.series.items()})
    return apart.low > 0 or apart.high < 0


def excess_s(seconds: Sequence[float]) -> float:
    """Return the mean of a series of steps minus its median."""
    return statistics.fmean(seconds) - statistics.median(seconds)


def excess(trials: Iterable[Trial]) -> dict[str, float]:
    """Return the seconds by which the mean of each phase exceeds its median, the largest first."""
    found = grouped(
        (name, excess_s(trial.by_column.timed(seconds)))
        for trial in summary.shown(trials)
        for name, seconds in trial.ledger.seconds.items()
    )
    means = {name: statistics.fmean(of_trials) for name, of_trials in found.items()}
    return dict(sorted(means.items(), key=lambda pair: -pair[1]))


def where(trials: Iterable[Trial]) -> str:
    """Return a clause on the phase with most of the difference of mean and median, or ""."""
    found = excess(trials)
    if not found:
        return ""
    phase, seconds = next(iter(found.items()))
    return f"{words.time(seconds)} of the difference is in {words.part(phase)}"


def gain_of_means(row: Row, baseline: Row | None) -> Estimate | None:
    """Return the speed of `row` over its baseline's by the means of all timed steps, or None."""
    if baseline is None or not row.series or not baseline.series or not row.source.timed:
        return None
    ratio = stats.mean_ratio(baseline.series, row.series)
    return ratio.scaled(row.case.batch_size / baseline.case.batch_size)
