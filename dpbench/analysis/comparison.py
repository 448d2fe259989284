"""Comparison: two runs of the same cases, with the speed ratio, its verdict, and the phase that changed most."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dpbench.analysis import stats
from dpbench.analysis.summary import measured
from dpbench.records import Case, Trial, ledger
from dpbench.records.trial import Estimate


@dataclass(frozen=True)
class Comparison:
    """One case compared between two runs: the speed ratio, its verdict, and the phase that changed most.

    `ratio` is above 1 if the second run is faster. `phase_s` is the change of the phase `phase` in seconds per step; it
    is negative if the phase became shorter.
    """

    case: Case
    ratio: Estimate
    verdict: str
    phase: str
    phase_s: float


def compare(before: Sequence[Trial], after: Sequence[Trial], *, margin: float = 0.01) -> list[Comparison]:
    """Return the comparison of every case with results in both runs; a ratio above 1 means that `after` is faster.

    `margin` is the relative difference up to which two cases count as the same. The verdicts are corrected for multiple
    comparisons.
    """
    both = {}
    for case in dict.fromkeys(trial.case for trial in before):
        sides = [[trial for trial in side if trial.case == case] for side in (before, after)]
        if all(measured(side) for side in sides):
            both[case] = sides
    ratios = [stats.ratio(*map(measured, sides), paired=False) for sides in both.values()]
    return [
        Comparison(case, ratio, verdict, *blame(*both[case]))
        for case, ratio, verdict in zip(both, ratios, stats.verdicts(ratios, margin=margin), strict=True)
    ]


def uncompared(before: Sequence[Trial], after: Sequence[Trial]) -> dict[Case, str]:
    """Return the cases that are in both runs but have no result in at least one of them, each with the reason."""
    found = {}
    for case in dict.fromkeys(trial.case for trial in before):
        for name, side in (("before", before), ("after", after)):
            mine = [trial for trial in side if trial.case == case]
            if not measured(mine) and any(trial.case == case for trial in after):
                found[case] = f"no result {name}: {mine[-1].refusal.partition(chr(10))[0]}"
    return found


def blame(before: Sequence[Trial], after: Sequence[Trial]) -> tuple[str, float]:
    """Return the phase whose time changed most from `before` to `after`, and the change in seconds per step.

    The change is negative if the phase became shorter.
    """
    first, second = (_phase_medians(trials) for trials in (before, after))
    moved = {name: second.get(name, 0.0) - first.get(name, 0.0) for name in {*first, *second}}
    name = max(sorted(moved), key=lambda phase: abs(moved[phase]))
    return name, moved[name]


def _phase_medians(trials: Sequence[Trial]) -> dict[str, float]:
    """Return the seconds of each phase: the median over rounds of the median over each round's timed steps."""
    medians: dict[str, list[float]] = {}
    for trial in (trial for trial in trials if trial.trusted):
        ledgers = [phases for step, phases in zip(trial.steps, ledger.of_trial(trial), strict=True) if not step.warmup]
        for name in {name for phases in ledgers for name in phases}:
            medians.setdefault(name, []).append(statistics.median(phases.get(name, 0.0) for phases in ledgers))
    return {name: statistics.median(values) for name, values in medians.items()}
