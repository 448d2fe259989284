"""Coverage: how often 95 % intervals include the true value and reports withhold an estimate.

    python benchmarks/scripts/coverage.py [--experiments 10000]

Each experiment draws the noise of its rounds from the stored runs in reports/, slows down some
rounds, and computes the median of one case and the ratio of two with `dpbench.analysis.stats`. The
true value is always 1: the step time of a round that was not slowed down. A slow round is slower by
a factor of 2 to 50 in all of its steps. The script prints a Markdown table; its seed is fixed.
10,000 experiments per line take two to three minutes on one core.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpbench.analysis import stats
from dpbench.records.trial import Estimate

REPORTS = Path(__file__).parents[2] / "reports"
STORED = (
    "cpu-2-cores/trials.jsonl.gz",
    "ladder-2-cores/trials.jsonl.gz",
    "fastest-2-cores/trials.jsonl",
)
ROUNDS = (3, 5, 10)
RATES = (0.0, 0.1)
SLOWEST = (2.0, 50.0)
STEPS = 9
"""The number of steps drawn per round."""
RESAMPLES = 200
"""A tenth of the resamples of a report: the spread is uncertain by 5 %, and the script runs ten
times as fast.
"""
SEED = 20

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Noise:
    """The variation of the stored runs, on a logarithmic scale.

    `between` has the deviations of the rounds' medians from the mean of their case, for all cases
    and centred on 0. It mixes calm and noisy cases, so its tails are heavier than those of a single
    case. `within` has an array for each round: its steps relative to the round's median.
    """

    between: Array
    within: tuple[Array, ...]


@dataclass(frozen=True)
class Line:
    """The results of one kind of estimate in the experiments of one setting.

    The last three fields are fractions.
    """

    rounds: int
    rate: float
    kind: str
    withheld: float
    covered_shown: float
    covered_all: float


def recorded(paths: Iterable[Path]) -> Noise:
    """Return the noise of stored runs, from cases with at least three rounds."""
    cases = [case for path in paths for case in _cases(path) if len(case) >= Estimate.ROUNDS]
    between: list[float] = []
    for case in cases:
        levels = np.log([statistics.median(steps) for steps in case])
        # each round shifts the mean of the few rounds towards itself, which shrinks the deviations
        # by this factor
        between += list((levels - levels.mean()) * math.sqrt(len(case) / (len(case) - 1)))
    within = tuple(
        np.log(steps) - np.log(statistics.median(steps)) for case in cases for steps in case
    )
    return Noise(np.array(between) - np.median(between), within)


def _cases(path: Path) -> list[list[list[float]]]:
    """Return the timed steps' seconds by case and round, from an export as JSON lines."""
    found: dict[str, dict[int, list[float]]] = {}
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in map(json.loads, lines):
            steps = [step["seconds"] for step in line["steps"] if not step["warmup"]]
            if steps:
                found.setdefault(json.dumps(line["case"], sort_keys=True), {})[line["round"]] = (
                    steps
                )
    return [list(rounds.values()) for rounds in found.values()]


def drawn(noise: Noise, rounds: int, rate: float, generator: np.random.Generator) -> stats.Rounds:
    """Return the rounds of one case with a true step time of 1, some of them slowed down."""
    levels = generator.choice(noise.between, rounds)
    slow = np.exp(generator.uniform(*np.log(SLOWEST), rounds))
    levels += np.where(generator.random(rounds) < rate, np.log(slow), 0.0)
    chosen = generator.integers(len(noise.within), size=rounds)
    return {
        number: list(np.exp(level + generator.choice(noise.within[one], STEPS)))
        for number, (level, one) in enumerate(zip(levels, chosen, strict=True))
    }


def experiment(
    noise: Noise, rounds: int, rate: float, number: int, generator: np.random.Generator
) -> dict[str, Estimate]:
    """Return the estimates of one experiment, by kind."""
    one, other = (drawn(noise, rounds, rate, generator) for _ in range(2))
    return {"median": stats.median(one, seed=number), "ratio": stats.ratio(one, other, seed=number)}


def simulated(noise: Noise, experiments: int) -> Iterator[Line]:
    """Yield a line for each number of rounds, rate of slow rounds and kind of estimate."""
    for rounds in ROUNDS:
        for rate in RATES:
            generator = np.random.default_rng(SEED)
            found = [
                experiment(noise, rounds, rate, number, generator) for number in range(experiments)
            ]
            for kind in found[0]:
                yield counted(rounds, rate, kind, [one[kind] for one in found])


def counted(rounds: int, rate: float, kind: str, estimates: list[Estimate]) -> Line:
    """Return the share of withheld estimates and the share of intervals that include 1."""
    holds = np.array([one.low <= 1 <= one.high for one in estimates])
    shown = np.array([one.doubt is None for one in estimates])
    covered = float(holds[shown].mean()) if shown.any() else math.nan
    return Line(rounds, rate, kind, 1 - float(shown.mean()), covered, float(holds.mean()))


def table(lines: Iterable[Line]) -> str:
    """Return the lines as a Markdown table."""
    head = (
        "rounds",
        "slow rounds",
        "estimate",
        "withheld",
        "coverage of those shown",
        "coverage of all",
    )
    cells = [
        (
            str(one.rounds),
            f"{one.rate:.0%}",
            one.kind,
            f"{one.withheld:.1%}",
            f"{one.covered_shown:.1%}",
            f"{one.covered_all:.1%}",
        )
        for one in lines
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--experiments", type=int, default=10_000, help="experiments per line of the table"
    )
    given = parser.parse_args()
    stats.RESAMPLES = RESAMPLES
    noise = recorded(REPORTS / name for name in STORED)
    print(table(simulated(noise, given.experiments)))


if __name__ == "__main__":
    main()
