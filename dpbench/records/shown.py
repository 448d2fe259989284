"""Shown: estimates as text, or that there are not enough rounds to show them."""

from __future__ import annotations

from dpbench.records import words
from dpbench.records.estimate import Doubt, Estimate

INTERVALS = (
    "Intervals of measurements are 95% intervals by Student's t over the rounds; their spread comes from a "
    "hierarchical bootstrap, which resamples rounds and then the steps in each."
)
WITHHELD = (
    f"An estimate of fewer than {Estimate.ROUNDS} rounds, or whose interval spans more than a factor of "
    f"{Estimate.WIDEST:.0f}, is replaced by “{words.NOT_ENOUGH}” and drawn nowhere: {words.REMEDY} would help."
)


def interval(estimate: Estimate, scale: float = 1.0) -> str:
    """Say the interval from its low to its high end."""
    return f"{words.number(estimate.low * scale)}–{words.number(estimate.high * scale)}"


def duration(estimate: Estimate) -> str:
    """Say a duration in seconds with its interval, both in one unit; or that there are not enough rounds."""
    if estimate.doubt:
        return words.NOT_ENOUGH
    scale, unit = words.time_unit(estimate.value)
    return f"{words.number(estimate.value / scale)} {unit} ({interval(estimate, 1 / scale)})"


def ms(estimate: Estimate) -> str:
    """Say a duration in seconds as milliseconds with its interval; or that there are not enough rounds."""
    return (
        words.NOT_ENOUGH if estimate.doubt else f"{words.number(estimate.value * 1e3)} ms ({interval(estimate, 1e3)})"
    )


def times(estimate: Estimate) -> str:
    """Say a ratio with its interval; or that there are not enough rounds."""
    return words.NOT_ENOUGH if estimate.doubt else f"{words.number(estimate.value)}× ({interval(estimate)})"


def doubt(estimate: Estimate) -> str:
    """Say why an estimate is not shown; empty where it is."""
    if estimate.doubt is Doubt.ROUNDS:
        return f"{words.count(estimate.n, 'round')}, and fewer than {Estimate.ROUNDS} do not tell how rounds differ"
    if estimate.doubt is Doubt.WIDTH:
        return f"its interval spans more than a factor of {words.exact(Estimate.WIDEST)}"
    return ""
