"""Intervals: what a prediction's own ignorance makes of it, by drawing what nobody measured from stated priors.

The step is worked out one standard deviation up and down in each prior; 200 draws then combine these responses, which
add up in the logarithm. An interval holds the middle 80 % of the draws.
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
"""The prior that scales a machine's host factor rather than a constant."""
STATED = {
    HOST: 0.25, "bus_scale": 0.2, "forward_share": 0.2, "pageable_bytes_per_s": 0.3, "slowdown": 0.7,
    "variation": 0.7, "launch_s": 0.3,
}  # fmt: skip
"""Standard deviations of logarithms, where a machine says what it is."""
APART = {Parallelism.RANKS: ("launch_s",), Parallelism.THREADS: ("slowdown", "variation"), Parallelism.NONE: ()}
"""The priors on which a strategy's step does not depend, or hardly, by its parallelism."""
ASSUMED = {"bus_scale": 0.6}
"""The same where the text behind a row left links or peer access open."""
ESTIMATED = {"features": 0.6}
"""The same for a model whose counts are estimated from its parameters."""
RESIDUAL = {"measured": 0.02, "given": 0.03, "traced": 0.3, "counted": 0.6}
"""What is wrong with one device's own step, by where it comes from. Traced: within 34 % on four published steps.
Counted: of 161 published steps half are off by more than a factor of two (light nets on hosts of 2019-21, taken to be
too fast), of 33 that keep a GPU busy a fifth by more than 32 %."""

ON_HOST = 0.2
"""The same for a whole step on logical CPU devices, whose phases are put together from measured figures: nine steps in
reports/cpu-truth are off by 8 % at most in the median of ten probes; one probe alone by less than 20 % in four of five
cases, and by up to 65 %."""


@lru_cache(maxsize=8)
def _normal(columns: int) -> tuple[tuple[float, ...], ...]:
    """Return the draws, the same every time."""
    source = random.Random(20250607)
    return tuple(tuple(source.gauss(0.0, 1.0) for _ in range(columns)) for _ in range(DRAWS))


def interval(
    step_s: float, evaluate: Callable[[str, float], float], priors: Mapping[str, float], residual: float
) -> tuple[float, float]:
    """Return the 80 % interval of a step; `evaluate(name, factor)` is the step with one prior's figure scaled."""
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
    """Return the priors on which a case's step depends."""
    apart = APART[case.traits.parallelism]
    return {name: deviation for name, deviation in STATED.items() if name not in apart}


def scaled(constants: Constants, name: str, factor: float) -> Constants:
    """Return the constants with one of them scaled; shares stay below one."""
    if name == "slowdown":
        return constants.changed(
            slowdown=constants.slowdown * factor, staged_slowdown=constants.staged_slowdown * factor
        )
    value = getattr(constants, name) * factor
    return constants.changed(**{name: min(0.9, value) if name.endswith("_share") else value})
