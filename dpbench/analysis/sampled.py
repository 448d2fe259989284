"""Sampled: what the readings of NVML say about a trial's timed steps.

Clocks, memory and the reasons of throttling are momentary, energy is a counter, and utilisation is
an average over a time that ends with the reading and may lie before the timed steps. Each function
leaves a GPU out if fewer than `READINGS` readings belong to the timed steps alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np

from dpbench.hardware.samplers.nvml import BUFFERED
from dpbench.records import Trial
from dpbench.records.series import Series

READINGS = 3
"""The least number of readings in the timed steps for a statement about them."""
AVERAGED_S = 1.0
"""The longest time over which a driver averages the utilisation of a GPU."""
NOT_CHECKED = "not checked"
"""The text in place of a statement for which there are too few readings."""
AVERAGE = "utilization_ratio"
"""The metric of a GPU's utilisation that is an average of the driver."""

Covered = tuple[float, float, float]
"""The start and the end of the time that a reading covers, and its value."""


def momentary(trial: Trial, metric: str) -> dict[int, list[float]]:
    """Return the readings of a momentary value in the timed steps, by device."""
    found = {device: list(series.values) for device, series in trial.within(metric).items()}
    return {device: values for device, values in found.items() if len(values) >= READINGS}


def utilisation_within(trial: Trial) -> dict[int, Series]:
    """Return each GPU's readings of utilisation in the timed steps, from the best source."""
    return {**trial.within(AVERAGE), **trial.within(BUFFERED)}


def utilisation(trial: Trial) -> dict[int, float]:
    """Return the share of the timed steps in which each GPU ran any kernel.

    It is from the driver's buffer where there is one, otherwise from its averages.
    """
    series = trial.grouped.series
    covered = {device: _averages(one) for device, one in series(AVERAGE).items()}
    covered |= {device: _between(one) for device, one in series(BUFFERED).items()}
    means = {device: _mean(readings, trial.window) for device, readings in covered.items()}
    return {device: mean for device, mean in means.items() if mean is not None}


def _averages(series: Series) -> Iterator[Covered]:
    for time_s, value in zip(*series, strict=True):
        yield time_s - AVERAGED_S, time_s, value


def _between(series: Series) -> Iterator[Covered]:
    """Each sample of the buffer covers the time since the sample before it."""
    times = pairwise(series.times)
    for (start_s, end_s), value in zip(times, series.values[1:], strict=True):
        yield start_s, end_s, value


def _mean(readings: Iterable[Covered], window: tuple[float, float]) -> float | None:
    """Return the mean over the readings that cover a part of the window and nothing else."""
    inside = [
        (end_s - start_s, value)
        for start_s, end_s, value in readings
        if window[0] <= start_s < end_s <= window[1]
    ]
    if len(inside) < READINGS:
        return None
    lengths, values = zip(*inside, strict=True)
    return float(np.average(values, weights=lengths))


def energy_j(trial: Trial) -> dict[int, float]:
    """Return the energy that each GPU used during the timed steps, in joules.

    It is the rise of the energy counter from their start to their end; at each, the counter is
    interpolated between the readings before and after.
    """
    series = trial.grouped.series("energy_j")
    return {
        device: float(np.diff(np.interp(trial.window, *series[device]))[0])
        for device in momentary(trial, "energy_j")
    }


def mean_clock_hz(trial: Trial) -> dict[int, float]:
    """Return the mean clock of each GPU's multiprocessors during the timed steps."""
    every = momentary(trial, "sm_clock_hz")
    return {device: statistics.mean(readings) for device, readings in every.items()}
