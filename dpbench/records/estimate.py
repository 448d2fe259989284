"""Estimates: numbers with intervals, and the test whether they may be shown as results."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar


class Doubt(StrEnum):
    """The reason why an estimate is not shown as a result."""

    ROUNDS = "too few rounds"
    WIDTH = "interval too wide"


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval and the number of rounds that it was estimated from.

    A prediction has no rounds: its `n` is 0, and its interval is the stated prediction interval. A `signed` estimate
    is a difference. It may be 0 or negative, so the ratio of the ends of its interval has no meaning.
    """

    value: float
    low: float
    high: float
    n: int
    signed: bool = False
    ROUNDS: ClassVar[int] = 3
    """The least number of rounds of an estimate that is shown: two do not show how rounds differ."""
    WIDEST: ClassVar[float] = 4.0
    """The largest ratio of the high to the low end of an interval that is shown."""

    @property
    def doubt(self) -> Doubt | None:
        """Return the reason why the estimate must not be shown as a result; None if it may be shown."""
        if self.n == 0:
            return None
        if self.n < self.ROUNDS:
            return Doubt.ROUNDS
        # a low end of 0 or NaN also counts as too wide
        return None if self.signed or self.high <= self.WIDEST * self.low else Doubt.WIDTH
