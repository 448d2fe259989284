"""Rounds: which cases are worth another round, from what the rounds so far have decided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dpbench.analysis import stats, summary
from dpbench.records import Case, Trial
from dpbench.records.estimate import Estimate

AUTO = "auto"
LEAST, MOST = 3, 200
PRECISION = 0.01


@dataclass
class UntilPrecise:
    """Rounds until the 95 % interval of each speed-up is within `precision` of it, or nothing is left to spend.

    A case without a speed-up (a baseline, or a failed one's partner) is measured as long as another needs it; where no
    case has one, the step itself must be that precise.
    """

    precision: float = PRECISION
    least: int = LEAST
    most: int = MOST
    _series: dict[Case, dict[int, list[float]]] = field(default_factory=dict)

    def add(self, trial: Trial) -> None:
        """Take the timed steps of a trusted trial into account."""
        self._series.setdefault(trial.case, {}).update(summary.measured([trial]))

    @property
    def name(self) -> str:
        """Return the rule's name, and its precision."""
        return f"{AUTO} {self.precision:g}"

    def wanted(self, cases: Sequence[Case], number: int) -> list[Case]:
        """Return all cases for the first rounds, then those that are not precise yet, with their baselines."""
        if number < self.least:
            return list(cases)
        if number >= self.most:
            return []
        open_ = {case: base for case, base, found in self._judged(cases) if half_width(found) > self.precision}
        needed = {*open_, *filter(None, open_.values())}
        return [case for case in cases if case in needed]

    def reasons(self, cases: Sequence[Case]) -> dict[str, str]:
        """Return, for each case that is judged, how precise it got, and what ended it."""
        found = {}
        for case, base, estimate in self._judged(cases):
            width, what = half_width(estimate), "speed-up" if base else "step"
            ended = "precise" if width <= self.precision else "rounds" if estimate.n >= self.most else "budget"
            found[case.label] = f"{ended}: {what} known to {width:.1%} after {estimate.n} rounds" + _outlook(
                estimate if base and ended != "precise" else None
            )
        return found

    def _judged(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Case | None, Estimate]]:
        """Yield the cases whose precision counts, each with its baseline and its speed-up, or its step without one."""
        series = {case: found for case, found in self._series.items() if found}
        bases = {case: base for case in cases if case in series and (base := summary.baseline_in(case, series))}
        for case, base in bases.items():
            yield case, base, stats.ratio(series[base], series[case])
        if not bases:
            for case in cases:
                if case in series:
                    yield case, None, stats.median(series[case])


def _outlook(ratio: Estimate | None) -> str:
    """Say what a ratio decides, or how many rounds it would take."""
    if ratio is None:
        return ""
    said = stats.verdict(ratio)
    if said != "undecided":
        return f", {said}"
    more = stats.rounds_to_decide(ratio) - ratio.n
    return f", undecided: about {more} more rounds would decide" if more < MOST else ", undecided"


def half_width(estimate: Estimate) -> float:
    """Return half an estimate's interval as a fraction of it; a single round's tells nothing."""
    return (estimate.high - estimate.low) / 2 / estimate.value if estimate.n > 1 else float("inf")
