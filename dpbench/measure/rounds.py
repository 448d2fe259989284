"""Rounds: choose the cases that need another round, from the precision that the rounds so far have reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dpbench.analysis import stats, summary
from dpbench.records import Case, Trial
from dpbench.records.estimate import Estimate
from dpbench.records.words import count

AUTO = "auto"
LEAST, MOST = 3, 200
PRECISION = 0.01


@dataclass
class UntilPrecise:
    """The rule that adds rounds until every speed-up is precise.

    A speed-up is precise if the half-width of its 95 % interval is at most the fraction `precision` of its value.

    A case without a speed-up, such as a baseline, is measured as long as another case needs it. If no case has a
    speed-up, the step itself must reach the precision. No case gets more than `most` rounds.
    """

    precision: float = PRECISION
    least: int = LEAST
    most: int = MOST
    _series: dict[Case, dict[int, list[float]]] = field(default_factory=dict)

    def add(self, trial: Trial) -> None:
        """Add the timed steps of a trial; an untrusted trial adds none."""
        self._series.setdefault(trial.case, {}).update(summary.measured([trial]))

    @property
    def name(self) -> str:
        """Return the name of the rule with its precision."""
        return f"{AUTO} {self.precision:g}"

    def wanted(self, cases: Sequence[Case], number: int) -> list[Case]:
        """Return the cases for round `number`: first all of them, then the imprecise ones and their baselines."""
        if number < self.least:
            return list(cases)
        if number >= self.most:
            return []
        open_ = {case: base for case, base, found in self._judged(cases) if half_width(found) > self.precision}
        needed = {*open_, *filter(None, open_.values())}
        return [case for case in cases if case in needed]

    def reasons(self, cases: Sequence[Case]) -> dict[str, str]:
        """Return, by case label, the precision that each judged case reached and the reason why it got no more rounds.

        The reason is the first word: `precise`, `rounds` or `budget`.
        """
        found = {}
        for case, base, estimate in self._judged(cases):
            width, quantity = half_width(estimate), "speed-up" if base else "step"
            ended = "precise" if width <= self.precision else "rounds" if estimate.n >= self.most else "budget"
            found[case.label] = (
                f"{ended}: {quantity} known to {width:.1%} after {count(estimate.n, 'round')}"
                + _outlook(estimate if base and ended != "precise" else None)
            )
        return found

    def _judged(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Case | None, Estimate]]:
        """Yield (case, baseline, speed-up) for each case whose interval decides when to stop.

        If no case has a baseline, yield (case, None, duration of a step).
        """
        series = {case: found for case, found in self._series.items() if found}
        bases = {case: base for case in cases if case in series and (base := summary.baseline_in(case, series))}
        for case, base in bases.items():
            yield case, base, stats.ratio(series[base], series[case])
        if not bases:
            for case in cases:
                if case in series:
                    yield case, None, stats.median(series[case])


def _outlook(ratio: Estimate | None) -> str:
    """Return the verdict on a ratio, or the number of rounds that would decide it, as text."""
    if ratio is None:
        return ""
    said = stats.verdict(ratio)
    if said != "undecided":
        return f", {said}"
    more = stats.rounds_to_decide(ratio) - ratio.n
    return f", undecided: about {count(more, 'more round')} would decide" if more < MOST else ", undecided"


def half_width(estimate: Estimate) -> float:
    """Return half the width of an estimate's interval as a fraction of its value; infinity for a single round."""
    return (estimate.high - estimate.low) / 2 / estimate.value if estimate.n > 1 else float("inf")
