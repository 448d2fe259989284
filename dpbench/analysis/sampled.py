"""Sampled: what the readings of NVML say about a trial's timed steps.

Clocks, memory and the reasons of throttling are momentary, energy is a counter, and utilisation is
an average over a time that ends with the reading and may lie before the timed steps. Each function
leaves a GPU out if fewer than `READINGS` readings belong to the timed steps alone. Utilisation and
energy are also left out if their readings do not reach from the start to the end of these steps, or
are impossible.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from dpbench.records import Trial
from dpbench.records.series import BUFFERED, Series

READINGS = 3
"""The least number of readings in the timed steps for a statement about them."""
AVERAGED_S = 1.0
"""The longest time over which a driver averages the utilisation of a GPU; it may be 1/6 s."""
SHORTEST_S = 10 * AVERAGED_S
"""The least seconds of timed steps for a mean of such averages, which omits `AVERAGED_S`."""
MOST_W = 3000.0
"""A power that no GPU reaches, for GPUs whose power limit is unknown."""
NOT_CHECKED = "not checked"
"""The text in place of a statement for which there are too few readings."""
AVERAGE = "utilization_ratio"
"""The metric of a GPU's utilisation that is an average of the driver."""
ENERGY = "energy_j"
"""The metric of a GPU's energy since the driver was loaded."""
COVERED = 0.98
"""The least share of the time from the first to the last timed step that the steps must fill.

Blocks of other cases lie between the steps of cases that are timed together.
"""
POWER_LIMIT = "power_limit_w"
"""The metric of the power limit that the driver enforces."""


class Stretch(NamedTuple):
    """The seconds between two readings, the mean of a quantity in them, and its largest mean."""

    start_s: float
    end_s: float
    value: float
    most: float = 1.0

    def within(self, window: tuple[float, float]) -> float:
        """Return the seconds that the stretch has in common with a window."""
        return max(0.0, min(self.end_s, window[1]) - max(self.start_s, window[0]))


def momentary(trial: Trial, metric: str) -> dict[int, list[float]]:
    """Return the readings of a momentary value in the timed steps, by device."""
    found = {device: list(series.values) for device, series in trial.within(metric).items()}
    return {device: values for device, values in found.items() if len(values) >= READINGS}


def utilisation_within(trial: Trial) -> dict[int, Series]:
    """Return each GPU's readings of utilisation in the timed steps, from the best source."""
    return {**trial.within(AVERAGE), **trial.within(BUFFERED)}


def utilisation(trial: Trial) -> dict[int, float]:
    """Return the share of the timed steps in which each GPU ran any kernel.

    It is from the driver's buffer where there is one. Otherwise it is from its averages, if the
    steps take at least `SHORTEST_S` seconds, without the first `AVERAGED_S` of them.
    """
    series, (start_s, end_s) = trial.grouped.series, trial.window
    means = {device: _mean(_ratios(one), trial.window) for device, one in series(BUFFERED).items()}
    if end_s - start_s >= SHORTEST_S:
        late = start_s + AVERAGED_S, end_s
        means = {d: _mean(_ratios(one), late) for d, one in series(AVERAGE).items()} | means
    return {device: mean for device, mean in sorted(means.items()) if mean is not None}


def energy_j(trial: Trial) -> dict[int, float]:
    """Return the energy that each GPU used during the timed steps, in joules.

    It is the rise of the energy counter from their start to their end; at each, the counter is
    interpolated between the readings before and after.
    """
    limits = {device: max(one.values) for device, one in trial.grouped.series(POWER_LIMIT).items()}
    window = trial.window
    means_w = {
        device: _mean(_powers(one, limits.get(device, MOST_W)), window)
        for device, one in trial.grouped.series(ENERGY).items()
    }
    return {
        device: mean_w * (window[1] - window[0])
        for device, mean_w in means_w.items()
        if mean_w is not None
    }


def joules_per_sample(trial: Trial) -> float | None:
    """Return the energy that all GPUs of a case used for a sample during the timed steps.

    None if the energy of one of them or the number of samples is unknown, if the GPUs did much
    between the steps, and for hosts that are one machine, which may share GPUs.
    """
    case, (start_s, end_s) = trial.case, trial.window
    samples = len(trial.timed) * case.batch_size
    if case.device_kind != "cuda" or not samples or trial.facts.hosts_share:
        return None
    used = energy_j(trial)
    known = all(device in used for device in range(case.gpu_count))
    if not known or sum(trial.timed) < COVERED * (end_s - start_s):
        return None
    return sum(used[device] for device in range(case.gpu_count)) / samples


def _ratios(series: Series) -> Iterator[Stretch]:
    """Each reading is the mean since the reading before it."""
    times = pairwise(series.times)
    for (start_s, end_s), value in zip(times, series.values[1:], strict=True):
        yield Stretch(start_s, end_s, value)


def _powers(series: Series, limit_w: float) -> list[Stretch]:
    """Return the mean power between the readings that differ from those before them.

    Equal readings are one state of a counter that the driver has not yet updated. As a state may be
    as old as the longest of these stretches, a stretch may have the energy of this time in addition
    to its own.
    """
    readings = [*zip(*series, strict=True)]
    new = [*readings[:1], *(after for before, after in pairwise(readings) if after[1] != before[1])]
    oldest_s = max((end_s - start_s for (start_s, _), (end_s, _) in pairwise(new)), default=0.0)
    return [
        Stretch(
            start_s,
            end_s,
            (after_j - before_j) / (end_s - start_s),
            most=limit_w * (1 + oldest_s / (end_s - start_s)),
        )
        for (start_s, before_j), (end_s, after_j) in pairwise(new)
        if end_s > start_s
    ]


def _mean(stretches: Iterable[Stretch], window: tuple[float, float]) -> float | None:
    """Return the mean over a window, to which stretches at its ends add their part in it.

    None if they do not reach from its start to its end, are impossible, or if fewer than `READINGS`
    end in it.
    """
    start_s, end_s = window
    inside = [one for one in stretches if one.within(window)]
    if sum(one.end_s <= end_s for one in inside) < READINGS:
        return None
    if inside[0].start_s > start_s or inside[-1].end_s < end_s:
        return None
    if not all(0 <= one.value <= one.most for one in inside):  # NaN is impossible, too
        return None
    lengths = [one.within(window) for one in inside]
    return statistics.fmean((one.value for one in inside), weights=lengths)


def mean_clock_hz(trial: Trial) -> dict[int, float]:
    """Return the mean clock of each GPU's multiprocessors during the timed steps."""
    every = momentary(trial, "sm_clock_hz")
    return {device: statistics.mean(readings) for device, readings in every.items()}
