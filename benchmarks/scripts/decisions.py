"""Decisions: how often a run that stops once its answers are settled is wrong, in simulated runs.

    python benchmarks/scripts/decisions.py [--runs 10000]

A simulated run measures one model on one device, on one device with all cores, and with dp and ddp
on two. `UntilDecided`, the rule of `dpbench run`, chooses its looks and cases; a run without an
answer ends after `ROUNDS` rounds. The true speed-ups of each run are drawn from `SPEEDS`, and the
noise of each round and case from the stored runs in reports/. A run may have slow rounds of single
cases (slower by a factor of 2 to 50), and a drift, which slows all cases of the last round by up to
a third. A settled answer is wrong if a candidate, or the baseline, is truly faster than the
recommended case by more than 5 %. An interval is wrong if it does not contain the true speed-up;
`one wrong` is the share of runs in which any of the three is. The script prints a Markdown table;
its seed is fixed. 10,000 runs per line take about ten minutes on one core.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.scripts import coverage
from dpbench.analysis import decision, stats, summary
from dpbench.analysis.decision import WORTH, Choice, Question
from dpbench.analysis.summary import BLANK, Row
from dpbench.records import Case, plan
from dpbench.records.trial import Estimate

ROUNDS = 21
"""The rounds that a run has time for."""
SPEEDS = (0.3, 0.6, 0.85, 0.95, 1.0, 1.03, 1.07, 1.15, 1.3, 1.45, 1.8)
SLOWEST_DRIFT = 1 / 3
KINDS = {
    "noise alone": (0.0, False),
    "drift of all cases": (0.0, True),
    "5 % slow rounds": (0.05, False),
    "5 % slow rounds, drift": (0.05, True),
}
"""For each kind of run, the share of slow rounds, and whether the cases drift."""
SEED = 34
HOME = Case(model="m", strategy="single", batch_size=64)
CASES = (
    replace(HOME, strategy="single_all_cores"),
    replace(HOME, strategy="dp", schedule="reference", devices=2),
    replace(HOME, strategy="ddp", devices=2),
)


@dataclass(frozen=True)
class Result:
    """The end of one simulated run; `settled` without `right` is a wrong decision."""

    settled: bool
    right: bool
    rounds: int
    covered: bool


def simulate(
    noise: coverage.Noise, rate: float, drifts: bool, generator: np.random.Generator
) -> Result:
    """Return the end of one run."""
    truth = dict(zip(CASES, generator.choice(SPEEDS, len(CASES)), strict=True)) | {HOME: 1.0}
    drift = generator.uniform(0, SLOWEST_DRIFT) if drifts else 0.0
    series = {
        case: {
            number: [seconds / truth[case] * (1 + drift * number / ROUNDS) for seconds in steps]
            for number, steps in coverage.drawn(noise, ROUNDS, rate, generator).items()
        }
        for case in truth
    }
    seen: dict[Case, int] = dict.fromkeys(truth, stats.LOOKS[0])
    for look, after in zip(stats.LOOKS, (*stats.LOOKS[1:], 0), strict=True):
        question = asked({case: _first(series[case], n) for case, n in seen.items()})
        made = decision.decide(question)
        needed = decision.unsettled(question, made)
        if not needed or look >= ROUNDS:
            break
        seen |= dict.fromkeys(needed, min(after, ROUNDS))
    chosen = made.row.case if made.row else HOME
    settled = not needed and made.choice is not Choice.UNKNOWN
    return Result(
        settled=settled,
        right=max(truth.values()) <= truth[chosen] * WORTH or _stays(made.choice, chosen, truth),
        rounds=max(seen.values()),
        covered=all(
            row.speedup is None or row.speedup.low <= truth[row.case] <= row.speedup.high
            for row in question.rows
        ),
    )


def _stays(choice: Choice, chosen: Case, truth: Mapping[Case, float]) -> bool:
    """Return whether the answer is one device, rightly, however many cores that device uses."""
    best = max(truth[case] for case in truth if case.devices > 1)
    return choice is Choice.STAY and chosen == HOME and best <= WORTH


def asked(series: Mapping[Case, stats.Rounds]) -> Question:
    """Return the question of a run whose cases have these rounds."""
    speedups = summary.speedups(series, len(stats.LOOKS))
    rows = [_row(case, rounds, speedups.get(case)) for case, rounds in series.items()]
    baseline = next(row for row in rows if row.case == HOME)
    others = tuple(row for row in rows if row.case != HOME)
    return Question(
        home=plan.alone(HOME, 64), source=BLANK.source, baseline=baseline, others=others
    )


def _row(case: Case, rounds: stats.Rounds, speedup: Estimate | None) -> Row:
    step = Estimate(1.0, 1.0, 1.0, len(rounds))
    return replace(BLANK, case=case, series=rounds, step=step, speedup=speedup)


def _first(rounds: stats.Rounds, count: int) -> stats.Rounds:
    return {number: steps for number, steps in rounds.items() if number < count}


def lines(noise: coverage.Noise, runs: int) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| runs with | settled | rounds, median | wrong decisions | one wrong interval |"
    yield "|---|---:|---:|---:|---:|"
    for kind, (rate, drifts) in KINDS.items():
        generator = np.random.default_rng(SEED)
        found = [simulate(noise, rate, drifts, generator) for _ in range(runs)]
        settled = [one for one in found if one.settled]
        wrong = sum(not one.right for one in settled) / max(1, len(settled))
        missed = sum(not one.covered for one in found) / len(found)
        rounds = np.median([one.rounds for one in settled]) if settled else math.nan
        yield f"| {kind} | {len(settled) / runs:.1%} | {rounds:.0f} | {wrong:.2%} | {missed:.2%} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10_000)
    given = parser.parse_args()
    stats.RESAMPLES = coverage.RESAMPLES
    noise = coverage.recorded(coverage.REPORTS / path for path in coverage.STORED)
    for line in lines(noise, given.runs):
        print(line, flush=True)


if __name__ == "__main__":
    main()
