"""Rounds: which cases a run measures in each of its rounds, and for which the budget has time."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dpbench.analysis import stats
from dpbench.measure.budget import SHARED, Budget, on_gpus
from dpbench.measure.stopping import RoundsRule
from dpbench.records import Case, plan

PLANNED = stats.LOOKS[3]
"""The rounds for which time is reserved in a run that ends with its answers.

More rounds of shorter trials settle more answers, because rounds differ more than steps.
"""


def needed_rounds(
    cases: Iterable[Case], least: int, joined: Mapping[str, int]
) -> dict[Case, range]:
    """Return the rounds in which each case is measured whatever the results are.

    These are the first `least` rounds or, for a model of which cases joined the run later, the
    `least` rounds from the one in `joined` (by fingerprint). The other cases of that model are then
    measured again, because a speed-up compares steps of the same round.
    """
    first: dict[str, int] = {}
    for case in cases:
        number = joined.get(case.fingerprint, 0)
        first[case.model] = max(number, first.get(case.model, 0))
    return {case: range(first[case.model], first[case.model] + least) for case in cases}


@dataclass(kw_only=True)
class RunRounds:
    """The rounds of one call of `run`."""

    cases: Sequence[Case]
    """The cases that are measured; one whose model fails its check is dropped."""
    needed: Mapping[Case, range]
    """The rounds in which each case is measured whatever the results are; see `needed_rounds`."""
    rule: RoundsRule
    budget: Budget
    paired: bool
    done: set[tuple[str, int]]
    """The pairs (case fingerprint, round) that earlier sessions have measured."""
    begun: set[tuple[str, int]]
    """Those that earlier sessions have begun."""
    ended: int = field(init=False)
    """The number of trials that have ended, including those of earlier sessions."""
    total: int = field(init=False)
    """The number of trials that have ended or are planned."""

    def __post_init__(self) -> None:
        needed = {(case.fingerprint, n) for case in self.cases for n in self.needed[case]}
        self.ended = len(self.done)
        self.total = len(needed | self.done)

    @property
    def last(self) -> int:
        """Return the number of the first round that no case needs."""
        return max((rounds.stop for rounds in self.needed.values()), default=0)

    def pending(self) -> Iterator[tuple[int, list[Case]]]:
        """Yield the number of each round that has cases to measure, and these cases."""
        number = 0
        while (wanted := self._wanted(number)) or number < self.last:
            if cases := self._unmeasured(wanted, number):
                yield number, cases
            number += 1

    def _wanted(self, number: int) -> list[Case]:
        """Return the cases of a round: those that need it, or later those that the rule adds.

        In a run that grew, the rule counts the rounds from the one in which cases joined.
        """
        if number < self.last:
            return [case for case in self.cases if number in self.needed[case]]
        return self.rule.wanted(self.cases, number - (self.last - self.rule.least))

    def _unmeasured(self, wanted: Sequence[Case], number: int) -> list[Case]:
        """Return the cases of a round that are still to be measured.

        A round of an earlier session has no baselines for a case that joins now.
        """
        latest = max((begun for _, begun in self.begun), default=-1)
        pending = [case for case in wanted if (case.fingerprint, number) not in self.done]
        if number > latest:
            return pending
        return [
            case
            for case in pending
            if number in self.needed[case] or (case.fingerprint, number) in self.begun
        ]

    def are_needed(self, cases: Iterable[Case], number: int) -> bool:
        """Return whether any of the cases needs the round, whatever the results are."""
        return any(number in self.needed[case] for case in cases)

    def leaves_out(self, cases: Sequence[Case], number: int) -> bool:
        """Return whether those cases of a round that do not fit into the budget are left out."""
        bounded = on_gpus(cases) and math.isfinite(self.budget.left_s) and not self.paired
        return bounded and self.budget.settles and self.are_needed(cases, number)

    def fitting(self, cases: Sequence[Case], number: int) -> list[Case]:
        """Return those of the cases for which the budget has time beside more needed ones.

        A case that has begun goes on if at all possible.
        """
        share = 1.0 if number else SHARED
        fitting = self.budget.fitting(plan.units(self.cases), share)
        return [case for case in cases if case in fitting]

    def expect(self, pending: Sequence[Case], number: int) -> None:
        """Tell the budget which trials are ahead, from the round `number` on."""
        ahead = [
            case
            for n in range(number, self.last)
            for case in self.cases
            if n in self.needed[case] and (case.fingerprint, n) not in self.done
        ]
        rounds = max(self.rule.least, PLANNED if self.budget.settles else 0)
        self.budget.ahead = Counter(ahead or pending)
        self.budget.reserved = max(len(ahead), len(pending) * (rounds - number))
        self.total = self.ended + self.budget.ahead.total()

    def shuffled(self, cases: Sequence[Case], number: int, run_id: str) -> list[Case]:
        """Return the cases in a random order that depends only on the run and the round.

        The first round has first what an answer needs, so that a budget that ends in it leaves
        answers.
        """
        generator = random.Random(f"{run_id} {number}")
        found = generator.sample(sorted(cases, key=lambda case: case.fingerprint), len(cases))
        return plan.by_need(found, self.cases) if number == 0 else found

    def groups(self, cases: Sequence[Case]) -> list[tuple[Case, ...]]:
        """Return the cases that one worker measures, for each worker."""
        return plan.side_by_side(cases) if self.paired else [(case,) for case in cases]

    def forget(self, cases: Collection[Case]) -> None:
        """Measure no further trial of the cases."""
        self.cases = [case for case in self.cases if case not in cases]
        for case in cases:
            self.budget.ahead.pop(case, None)
        self.total = self.ended + self.budget.ahead.total()
