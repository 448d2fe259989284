"""Intervals: the uncertainty of a prediction, from priors of the constants that were not measured.

The duration of the step is calculated one standard deviation above and below the centre of each prior. 200 random draws
then combine these responses, whose logarithms add up. The interval contains the middle 80 % of the draws.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from functools import lru_cache

from dpbench.predict.constants import Constants
from dpbench.records import Case
from dpbench.records.traits import Parallelism

DRAWS = 200
LOW, HIGH = 0.1, 0.9
HOST = "host"
"""The name of the prior that scales a machine's host factor instead of a constant."""
STATED = {
    HOST: 0.25, "bus_scale": 0.2, "forward_share": 0.2, "pageable_bytes_per_s": 0.3, "slowdown": 0.7,
    "variation": 0.7, "launch_s": 0.3,
}  # fmt: skip
"""For a machine that is fully described: the standard deviation of each constant's logarithm, by name."""
APART = {Parallelism.RANKS: ("launch_s",), Parallelism.THREADS: ("slowdown", "variation"), Parallelism.NONE: ()}
"""For each kind of parallelism, the priors that have little or no effect on the duration of a step."""
ASSUMED = {"bus_scale": 0.6}
"""Standard deviations that replace those above if a published measurement does not state links or peer access."""
ESTIMATED = {"features": 0.6}
"""Additional standard deviations for a model whose counts are estimated from its number of parameters."""
RESIDUAL = {"measured": 0.02, "given": 0.03, "traced": 0.3, "counted": 0.6}
"""The standard deviation of the logarithm of the duration of a step on one device, by the source of the profile.

Durations from traces are within 34 % for four published steps. Of those from counts, compared with 161 published steps,
half are off by more than a factor of two (light nets on hosts of 2019-21, predicted too fast). Of the 33 steps that
keep a GPU busy, a fifth is off by more than 32 %.
"""

ON_HOST = 0.2
"""The standard deviation of the logarithm of the duration of a step on logical CPU devices.

For the nine steps in reports/cpu-truth, the median of the predictions from ten probes is off by 8 % at most. The
prediction from a single probe is off by less than 20 % in four of five cases, and by 65 % at worst.
"""


@lru_cache(maxsize=8)
def _normal(columns: int) -> tuple[tuple[float, ...], ...]:
    """Return `DRAWS` rows of standard normal numbers, the same at every call."""
    source = random.Random(20250607)
    return tuple(tuple(source.gauss(0.0, 1.0) for _ in range(columns)) for _ in range(DRAWS))


def interval(
    step_s: float, evaluate: Callable[[str, float], float], priors: Mapping[str, float], residual: float
) -> tuple[float, float]:
    """Return the 80 % interval of the duration of a step, in seconds.

    `evaluate(name, factor)` returns the duration of the step with one constant multiplied by `factor`. `priors` maps
    the names of constants to the standard deviations of their logarithms. `residual` is the standard deviation of the
    duration's logarithm from all other causes.
    """
    responses = []
    for name, deviation in priors.items():
        down, up = (math.log(max(1e-12, evaluate(name, math.exp(sign * deviation))) / step_s) for sign in (-1, 1))
        if abs(down) > 1e-9 or abs(up) > 1e-9:
            responses.append((down, up))
    found = []
    for draw in _normal(1 + len(STATED) + len(ESTIMATED)):
        moved = draw[0] * residual
        for (down, up), z in zip(responses, draw[1:], strict=False):
            moved += z * up if z > 0 else -z * down
        found.append(moved)
    found.sort()
    low, high = found[int(LOW * DRAWS)], found[int(HIGH * DRAWS) - 1]
    return step_s * math.exp(min(0.0, low)), step_s * math.exp(max(0.0, high))


def of(case: Case) -> dict[str, float]:
    """Return the priors that affect the duration of a case's step."""
    apart = APART[case.traits.parallelism]
    return {name: deviation for name, deviation in STATED.items() if name not in apart}


def scaled(constants: Constants, name: str, factor: float) -> Constants:
    """Return the constants with one of them scaled; a share is limited to 0.9."""
    if name == "slowdown":
        return constants.changed(
            slowdown=constants.slowdown * factor, staged_slowdown=constants.staged_slowdown * factor
        )
    value = getattr(constants, name) * factor
    return constants.changed(**{name: min(0.9, value) if name.endswith("_share") else value})
