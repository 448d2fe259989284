"""Rounds: the interface of the rules that decide which cases of a run get another round, and the simplest rule.

The other rule is `stopping.UntilPrecise`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dpbench.records import Case, Trial, words


class RoundsRule(Protocol):
    """The rule that decides which cases get another round.

    The run adds every ended trial to the rule, first the trials of earlier sessions.
    """

    @property
    def name(self) -> int | str:
        """Return the number of rounds if it is fixed, otherwise the rule's name. The plan's hash contains `name`."""

    def add(self, trial: Trial) -> None:
        """Add an ended trial, so that later decisions of the rule can depend on it."""

    def wanted(self, cases: Sequence[Case], number: int) -> list[Case]:
        """Return the cases to measure in round `number`, which counts from 0; an empty list ends the run."""

    def reasons(self, cases: Sequence[Case]) -> dict[str, str]:
        """Return a dictionary from each case's label to the reason why the case got no more rounds."""


@dataclass(frozen=True)
class Fixed:
    """The rule that measures every case in the same number of rounds; `name` is this number."""

    name: int

    def add(self, trial: Trial) -> None:
        """Do nothing, because a fixed number of rounds does not depend on the trials."""

    def wanted(self, cases: Sequence[Case], number: int) -> list[Case]:
        """Return all cases if `number`, which counts from 0, is below the number of rounds; otherwise an empty list."""
        return list(cases) if number < self.name else []

    def reasons(self, cases: Sequence[Case]) -> dict[str, str]:
        """Return an empty dictionary, because the plan itself fixes the number of rounds."""
        return {}


LEAST_S = 0.05
"""The least duration in seconds of the timed steps of each trial, as long as the budget is not spent."""


def shortage(left_s: float, trials: int, overhead_s: float) -> str:
    """Return a warning that the rest of a budget is too short for `trials` trials; "" if it is long enough.

    `left_s` is the rest of the budget, and `overhead_s` is the measured time of a trial without its steps, in seconds.
    """
    needed_s = trials * (overhead_s + LEAST_S)
    if needed_s <= left_s:
        return ""
    return (
        f"the budget is too short: {words.count(trials, 'more trial')} would take at least {words.time(needed_s)} "
        f"({words.time(overhead_s)} each without steps), but {words.time(max(0.0, left_s))} of the budget is left; the "
        f"last trials will be skipped. Give a larger --budget, or fewer --devices or --models"
    )
