"""Estimates: numbers with intervals, and whether the rounds behind them are enough to show them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar


class Doubt(StrEnum):
    """Why an estimate is not shown as a result."""

    ROUNDS = "too few rounds"
    WIDTH = "interval too wide"


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval and the count of rounds behind it.

    A prediction has no rounds: its `n` is 0, and its interval is the one that was stated. A `signed` estimate is a
    difference, which may be 0 or negative: no factor lies between the ends of its interval.
    """

    value: float
    low: float
    high: float
    n: int
    signed: bool = False
    ROUNDS: ClassVar[int] = 3
    """Rounds below which nothing is shown: two do not tell how rounds differ."""
    WIDEST: ClassVar[float] = 4.0
    """The factor from low to high beyond which nothing is shown."""

    @property
    def doubt(self) -> Doubt | None:
        """Return why the estimate must not be shown as a result; None where it may."""
        if self.n == 0:
            return None
        if self.n < self.ROUNDS:
            return Doubt.ROUNDS
        # also true of a low end at 0 and of what is not a number
        return None if self.signed or self.high <= self.WIDEST * self.low else Doubt.WIDTH
