"""Count how often the 95 % intervals that reports show hold the truth, and how often reports withhold them.

    python benchmarks/scripts/coverage.py [--experiments 10000]

Each experiment draws the noise of its rounds from the stored runs in reports/, plants slow rounds, and asks
`dpbench.analysis.stats` for the median of one case and for the ratio of two. The truth is 1 in all of them: the step
of a round without a planted slowdown. A planted round is 2 to 50 times as slow in all its steps. Prints a Markdown
table; the seed is fixed. 10,000 experiments for each line take between two and three minutes of one core.
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
from dpbench.records.estimate import Estimate

REPORTS = Path(__file__).parents[2] / "reports"
STORED = ("cpu-2-cores/trials.jsonl.gz", "ladder-2-cores/trials.jsonl.gz", "fastest-2-cores/trials.jsonl")
ROUNDS = (3, 5, 10)
RATES = (0.0, 0.1)
SLOWEST = (2.0, 50.0)
STEPS = 9
"""Steps drawn for each round."""
RESAMPLES = 200
"""A tenth of the resamples that reports use: the spread is then uncertain by 5 %, and the script ten times as fast."""
SEED = 20

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Noise:
    """What the stored runs vary by, on a logarithmic scale.

    `between` are the deviations of round medians from the mean of their case, of all cases together and around 0: calm
    and noisy cases mixed, so that its tails are heavier than those of one case. `within` are steps relative to their
    round's median, an array for each round.
    """

    between: Array
    within: tuple[Array, ...]


@dataclass(frozen=True)
class Line:
    """How one kind of estimate did in the experiments of one setting; shares of 1."""

    rounds: int
    rate: float
    kind: str
    withheld: float
    covered_shown: float
    covered_all: float


def recorded(paths: Iterable[Path]) -> Noise:
    """Read the noise of stored runs; a case needs three rounds."""
    cases = [case for path in paths for case in _cases(path) if len(case) >= Estimate.ROUNDS]
    between: list[float] = []
    for case in cases:
        levels = np.log([statistics.median(steps) for steps in case])
        # the mean of a few rounds follows each of them: their deviations are too small by this factor
        between += list((levels - levels.mean()) * math.sqrt(len(case) / (len(case) - 1)))
    within = tuple(np.log(steps) - np.log(statistics.median(steps)) for case in cases for steps in case)
    return Noise(np.array(between) - np.median(between), within)


def _cases(path: Path) -> list[list[list[float]]]:
    """Return the timed steps of each round of each case in an export of JSON lines."""
    found: dict[str, dict[int, list[float]]] = {}
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in map(json.loads, lines):
            steps = [step["seconds"] for step in line["steps"] if not step["warmup"]]
            if steps:
                found.setdefault(json.dumps(line["case"], sort_keys=True), {})[line["round"]] = steps
    return [list(rounds.values()) for rounds in found.values()]


def drawn(noise: Noise, rounds: int, rate: float, generator: np.random.Generator) -> stats.Rounds:
    """Return the rounds of one case whose step takes 1, some of them slowed down."""
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
    """Return the estimates of one experiment by kind."""
    one, other = (drawn(noise, rounds, rate, generator) for _ in range(2))
    return {"median": stats.median(one, seed=number), "ratio": stats.ratio(one, other, seed=number)}


def simulated(noise: Noise, experiments: int) -> Iterator[Line]:
    """Yield a line for each count of rounds, rate of slow rounds, and kind of estimate."""
    for rounds in ROUNDS:
        for rate in RATES:
            generator = np.random.default_rng(SEED)
            found = [experiment(noise, rounds, rate, number, generator) for number in range(experiments)]
            for kind in found[0]:
                yield counted(rounds, rate, kind, [one[kind] for one in found])


def counted(rounds: int, rate: float, kind: str, estimates: list[Estimate]) -> Line:
    """Count which estimates are withheld, and which intervals hold 1."""
    holds = np.array([one.low <= 1 <= one.high for one in estimates])
    shown = np.array([one.doubt is None for one in estimates])
    covered = float(holds[shown].mean()) if shown.any() else math.nan
    return Line(rounds, rate, kind, 1 - float(shown.mean()), covered, float(holds.mean()))


def table(lines: Iterable[Line]) -> str:
    """Return the lines as a Markdown table."""
    head = ("rounds", "slow rounds", "estimate", "withheld", "coverage of those shown", "coverage of all")
    cells = [
        (str(one.rounds), f"{one.rate:.0%}", one.kind, f"{one.withheld:.1%}", f"{one.covered_shown:.1%}",
         f"{one.covered_all:.1%}")
        for one in lines
    ]  # fmt: skip
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=10_000, help="for each line of the table")
    given = parser.parse_args()
    stats.RESAMPLES = RESAMPLES
    noise = recorded(REPORTS / name for name in STORED)
    print(table(simulated(noise, given.experiments)))


if __name__ == "__main__":
    main()
