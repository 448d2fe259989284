"""Uneven: cases whose mean step differs from their median step.

Throughput and the time of an epoch come from the mean step, because all steps take time. Step times
and speed-ups are medians, which a disturbance of a few steps does not change.
"""

from __future__ import annotations

from dpbench.analysis import stats, summary
from dpbench.analysis.summary import Row
from dpbench.records import Source
from dpbench.records.trial import Estimate

LEAST = 0.05
"""The least difference of mean and median that is reported, as a fraction of the median."""


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
