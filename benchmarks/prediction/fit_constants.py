"""Fit the constants that microbenchmarks do not determine, using published step times.

    python -m benchmarks.prediction.fit_constants FILE.csv

The fit yields one set of constants for all machines and one host factor for each machine, not one
figure per row. Priors keep each constant close to its own microbenchmark.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scipy.optimize import minimize

from benchmarks.prediction import formula, published, rows
from benchmarks.prediction.published import Matched
from dpbench.predict.constants import Constants

PRIORS = {
    "launch_s": (10e-6, 0.4),
    "backward_launch_s": (6e-6, 0.5),
    "module_s": (16e-6, 0.25),
    "tensor_s": (1.4e-6, 0.4),
    "hand_off": (0.03, 1.0),
    "contention": (0.03, 1.0),
    "forward_share": (0.35, 0.2),
    "pageable_bytes_per_s": (4e9, 0.4),
    "call_s": (30e-6, 0.5),
    "staged_one_way": (1.4, 0.15),
}
"""The prior of each fitted constant: a centre from microbenchmarks or the literature, and the
standard deviation of the logarithm.
"""
HOST = (3.3, 0.3)
"""The prior of a host factor, in the same form."""
SOURCE = "RYU"
"""The prefix of the groups of the source to which the constants are fitted."""
FITTED_ON = ("RYU2080TI", "RYURTX")
"""Groups whose rows separate the cost of the host from that of the GPUs: 32 models each, on one to
four GPUs.
"""
WEIGHT = 0.01
"""The mean error that weighs as much as a deviation of every constant by one standard deviation of
its prior.
"""
WORST = 0.5
"""The cap on the absolute logarithm of predicted over measured time: an outlier adds no more than
this.
"""


@dataclass(frozen=True)
class Fit:
    """Fitted constants, the host factor of each group, and the value of the loss at the fit."""

    constants: Constants
    hosts: Mapping[str, float]
    error: float


def fit(
    groups: Mapping[str, Sequence[Matched]], start: Constants | None = None, evaluations: int = 700
) -> Fit:
    """Return the constants that fit the rows of these groups best.

    All groups have the same weight.
    """
    start = start or Constants()
    names = list(PRIORS)

    def unpack(point: Sequence[float]) -> tuple[Constants, dict[str, float]]:
        values = {
            name: PRIORS[name][0] * math.exp(PRIORS[name][1] * x)
            for name, x in zip(names, point, strict=False)
        }
        hosts = {
            group: HOST[0] * math.exp(HOST[1] * x)
            for group, x in zip(groups, point[len(names) :], strict=True)
        }
        return replace(start, **values), hosts

    def loss(point: Sequence[float]) -> float:
        constants, hosts = unpack(point)
        errors = [error(groups[group], constants, hosts[group]) for group in groups]
        return statistics.mean(errors) + WEIGHT * statistics.mean(x * x for x in point)

    best = minimize(
        loss,
        [0.0] * (len(names) + len(groups)),
        method="Powell",
        options={"maxfev": evaluations, "xtol": 1e-2, "ftol": 1e-4},
    )
    constants, hosts = unpack(best.x)
    return Fit(constants, hosts, float(best.fun))


def error(matched: Sequence[Matched], constants: Constants, host: float) -> float:
    """Return the mean absolute logarithm of predicted over measured, each row capped at `WORST`."""
    found = []
    for one in matched:
        asked = rows.question(one, constants, host)
        seconds = asked.step_s(formula.seconds, constants)
        found.append(min(WORST, abs(math.log(seconds / one.row.step_s))))
    return statistics.mean(found)


def main(path: Path) -> None:
    """Print the constants fitted to all groups of a table, then those fitted without each group."""
    table, _ = published.read(path)
    matched, _ = published.match(table)
    groups = {name: [one for one in matched if one.row.group == name] for name in FITTED_ON}
    found = fit(groups)
    print(f"mean error {found.error:.4f}; host factors {dict(found.hosts)}")
    for name in PRIORS:
        print(f"{name} = {getattr(found.constants, name):.4g}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "file", metavar="FILE.csv", type=Path, help="a table of published step times"
    )
    main(parser.parse_args().file)
