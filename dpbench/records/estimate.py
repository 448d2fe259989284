"""Estimate: a number with its interval, and whether it is in doubt and may decide."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar, Self


class Doubt(StrEnum):
    """The reason why an estimate is in doubt: tables mark it, and do not show its interval."""

    ROUNDS = "too few rounds"
    NOISY = "other processes used the cores or a GPU"
    WIDTH = "interval too wide"


@dataclass(frozen=True)
class Estimate:
    """A value from `n` rounds, with the low and the high end of its interval.

    `level` is the probability with which the interval contains the true value. It exceeds 0.95 for
    estimates that are judged together, so that all of their intervals contain the true values with
    95 %. For a prediction, `n` is 0 and the interval is the 80 % interval of the predictor. A
    `signed` estimate is a difference. It may be 0 or negative, so the ratio of its interval's ends
    has no meaning. A `noisy` estimate compares cases by rounds in which other processes used a GPU,
    or so much of the cores that no interval contains the error.
    """

    value: float
    low: float
    high: float
    n: int
    signed: bool = False
    level: float = 0.95
    noisy: bool = False
    ROUNDS: ClassVar[int] = 3
    """The least number of rounds that show how much rounds differ."""
    WIDEST: ClassVar[float] = 4.0
    """The largest ratio of the interval's ends with which an estimate is not in doubt."""

    @property
    def doubt(self) -> Doubt | None:
        """Return the reason why the estimate is in doubt; None if it is not."""
        if self.n == 0:
            return None
        if self.n < self.ROUNDS:
            return Doubt.ROUNDS
        if self.noisy:
            return Doubt.NOISY
        # a low end of 0 or NaN also counts as too wide
        return None if self.signed or self.high <= self.WIDEST * self.low else Doubt.WIDTH

    @property
    def decides(self) -> bool:
        """Return whether the interval may decide; one that is too wide holds, too."""
        return self.doubt in (None, Doubt.WIDTH)

    @property
    def withheld(self) -> str:
        """Return the reason why the estimate is in doubt as text; "" if it is not."""
        return self.doubt or ""

    @property
    def coverage(self) -> float:
        """Return the probability with which the interval contains the true value."""
        return 0.8 if self.n == 0 else self.level

    @property
    def inverse(self) -> Self:
        """Return 1 divided by a ratio."""
        return replace(self, value=1 / self.value, low=1 / self.high, high=1 / self.low)

    def scaled(self, factor: float) -> Self:
        """Return the estimate with its value and its interval multiplied by `factor`."""
        return replace(
            self, value=self.value * factor, low=self.low * factor, high=self.high * factor
        )
