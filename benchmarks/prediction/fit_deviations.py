"""Fit what machines lose beyond the model of a step, using published step times.

    python -m benchmarks.prediction.fit_deviations FILE.csv

log(published / predicted) of a row of an owner, with a strategy and a kind of link, is the sum of a
mean of all owners, the differences of its strategy and of its link, and the owner's deviation. The
deviations have Student's t distribution with `constants.FREEDOM` degrees of freedom and one scale.
A difference has a normal prior with the same scale: a strategy or a link moves away from the mean
of all as far as owners do, and one owner alone moves it half of the way.

Every owner has the same weight, which its rows share, because they share machines and harness. The
spread of the prediction's own draws is known and adds to the scale, which is thus only what the
model does not explain. The scale has the largest marginal likelihood (Laplace's approximation). The
prior of a new owner's step also has the uncertainty of the mean and the differences.

The fit to all owners is written to `deviations.FILE`, and those without each owner, by which the
owner's rows are scored, to `score.LEFT_OUT`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from benchmarks.prediction import published, score
from benchmarks.prediction.published import NAMED
from benchmarks.prediction.score import Modelled
from dpbench.predict import deviations
from dpbench.predict.constants import END, FREEDOM
from dpbench.predict.deviations import Deviation, Table
from dpbench.predict.network import LINK_KINDS
from dpbench.records.files import write
from dpbench.records.registry import Parallelism
from dpbench.records.work import middle_draws

STRATEGIES = tuple(dict.fromkeys(NAMED.values()))
PREDICTED = {Parallelism.THREADS: "dp", Parallelism.RANKS: "ddp"}
"""The published strategy whose deviations predicted steps of each kind of parallelism have."""
FLAT = 1e-4
"""The precision of the prior of the mean of all owners: nothing is known before."""
SCALES = (0.005, 1.0)
"""The limits of the scale."""
STEPS = 100
"""The most steps of the reweighting, which ends when no parameter moves by `SETTLED`."""
SETTLED = 1e-7


def features(strategy: str, link: str) -> list[float]:
    """Return the coefficients of the mean of all, of each strategy and of each kind of link."""
    return [
        1.0,
        *(float(one == strategy) for one in STRATEGIES),
        *(float(one == link) for one in LINK_KINDS),
    ]


@dataclass(frozen=True)
class Fit:
    """The fitted scale, parameters in the order of `features`, and their covariance."""

    scale: float
    parameters: Any
    covariance: Any
    evidence: float
    """The logarithm of the marginal likelihood, up to a constant."""

    def deviation(self, strategy: str, link: str) -> Deviation:
        """Return the prior of a step of an owner that nobody has seen."""
        x = np.array(features(strategy, link))
        mean = x @ self.parameters
        spread = math.sqrt(self.scale**2 + x @ self.covariance @ x)
        return Deviation(round(float(mean), 4), round(spread, 4))

    def table(self) -> Table:
        """Return the priors of all strategies and kinds of links."""
        return {
            strategy: {link: self.deviation(strategy, link) for link in LINK_KINDS}
            for strategy in STRATEGIES
        }


def fit(rows: Sequence[Modelled]) -> Fit:
    """Return the fit to published rows."""
    shared = Counter(one.matched.row.owner for one in rows)
    weights = np.array([1 / shared[one.matched.row.owner] for one in rows])
    design = np.array([features(NAMED[one.matched.row.strategy], one.link) for one in rows])
    values = np.array([math.log(one.matched.row.step_s / one.seconds) for one in rows])
    known = np.array([_spread(one.draws) ** 2 for one in rows])

    def at(log_scale: float) -> Fit:
        return _with_scale(math.exp(log_scale), design, values, known, weights)

    bounds = tuple(map(math.log, SCALES))
    best = minimize_scalar(lambda x: -at(x).evidence, bounds=bounds, method="bounded")
    return at(best.x)


def _with_scale(scale: float, design: Any, values: Any, known: Any, weights: Any) -> Fit:
    """Return the fit with a given scale: Student's t by reweighted least squares."""
    differences = design.shape[1] - 1
    prior = np.diag([FLAT, *[scale**-2] * differences])
    variance = known + scale**2
    parameters = np.zeros(design.shape[1])
    for _ in range(STEPS):
        z2 = (values - design @ parameters) ** 2 / variance
        precision = weights * (FREEDOM + 1) / (FREEDOM + z2) / variance
        normal = design.T @ (precision[:, None] * design) + prior
        before, parameters = parameters, np.linalg.solve(normal, design.T @ (precision * values))
        if np.abs(parameters - before).max() < SETTLED:
            break
    z2 = (values - design @ parameters) ** 2 / variance
    information = weights * (FREEDOM + 1) / (FREEDOM + 3) / variance
    normal = design.T @ (information[:, None] * design) + prior
    likelihood = weights @ (-np.log(variance) / 2 - (FREEDOM + 1) / 2 * np.log1p(z2 / FREEDOM))
    prior_of_differences = -differences * math.log(scale) - parameters @ prior @ parameters / 2
    evidence = likelihood + prior_of_differences - np.linalg.slogdet(normal)[1] / 2
    return Fit(scale, parameters, np.linalg.inv(normal), float(evidence))


def _spread(draws: Sequence[float]) -> float:
    """Return the standard deviation of a normal distribution with the middle 80 % of draws."""
    low, high = middle_draws(draws)
    return (max(0.0, high) - min(0.0, low)) / (2 * END)


def without_each(rows: Sequence[Modelled]) -> dict[str, Fit]:
    """Return the fit without each owner, by the owner, and that to all of them as ""."""
    owners = sorted({one.matched.row.owner for one in rows})
    found = {"": fit(rows)}
    for owner in owners:
        found[owner] = fit([one for one in rows if one.matched.row.owner != owner])
    return found


def modelled(path: Path) -> list[Modelled]:
    """Return the predictions of a table's rows by the model alone."""
    table, _ = published.read(path)
    return [score.modelled(one) for one in published.match(table)[0]]


def stored(table: Table) -> dict[str, dict[str, list[float]]]:
    """Return deviations as pairs of a centre and a scale."""
    return {
        strategy: {link: [one.mean, one.scale] for link, one in by_link.items()}
        for strategy, by_link in table.items()
    }


def main(path: Path) -> None:
    """Write the fit to all owners and those without each owner."""
    rows = modelled(path)
    fits = without_each(rows)
    full = fits[""]
    used = {kind: full.table()[strategy] for kind, strategy in PREDICTED.items()}
    facts = {
        "made": "python -m benchmarks.prediction.fit_deviations tests/data/published.csv",
        "owners": len(fits) - 1,
        "rows": len(rows),
        "scale": round(full.scale, 4),
        "mean": round(float(full.parameters[0]), 4),
        "deviations": stored(used),
    }
    write(deviations.FILE, json.dumps(facts, indent=1) + "\n")
    left = {owner: stored(found.table()) for owner, found in fits.items()}
    write(score.LEFT_OUT, json.dumps(left) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "file", metavar="FILE.csv", type=Path, help="a table of published step times"
    )
    main(parser.parse_args().file)
