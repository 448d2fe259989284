"""Deviations: how much longer than predicted published steps on several GPUs took.

Real machines lose more than a model of a step names. `data/deviations.json` has the prior of
log(duration / predicted duration) for each kind of parallelism and of link. It was fitted to
published steps of many owners (`benchmarks/prediction/fit_deviations.py`), and is not fitted again
here. A step is multiplied by the exponential of its centre, and its interval widened by its scale.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dpbench.predict import network
from dpbench.predict.constants import column
from dpbench.predict.machine import Machine
from dpbench.predict.tasks import Unpredictable
from dpbench.records import Case

FILE = Path(__file__).parent / "data" / "deviations.json"


@dataclass(frozen=True)
class Deviation:
    """The prior of log(duration / predicted duration): a centre, and the scale of Student's t."""

    mean: float = 0.0
    scale: float = 0.0

    def of_step(self, step_s: float, draws: Sequence[float]) -> tuple[float, tuple[float, ...]]:
        """Return the seconds of a step and its draws with this deviation.

        `draws` are those of log(duration / step_s). The machine of a draw deviates alike in all
        predictions, so that the deviation hardly affects the ratio of two steps on several GPUs.
        """
        moved = zip(draws, column("deviation"), strict=True)
        return step_s * math.exp(self.mean), tuple(one + self.scale * t for one, t in moved)


NONE = Deviation()
Table = Mapping[str, Mapping[str, Deviation]]
"""Deviations by how several devices are used, and by kind of link."""


def read(stored: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    """Return the deviations that a JSON file stores as pairs of a centre and a scale."""
    return {
        kind: {link: Deviation(*pair) for link, pair in by_link.items()}
        for kind, by_link in stored.items()
    }


@lru_cache(maxsize=1)
def published() -> Table:
    """Return the deviations of the published steps of all owners, by kind of parallelism."""
    return read(json.loads(FILE.read_text(encoding="utf-8"))["deviations"])


def of(case: Case, machine: Machine) -> Deviation:
    """Return the deviation of a case on a machine, `NONE` if nothing is left to the prior.

    That is so on one device, and on a machine whose host and all-reduce were both measured. Raises
    Unpredictable if no steps of the case's parallelism were published.
    """
    measured = machine.collective is not None and machine.host.launch_s is not None
    if case.devices == 1 or measured:
        return NONE
    how = case.traits.parallelism
    if how not in published():
        raise Unpredictable(
            f"the strategy {case.strategy} cannot be predicted on several devices: how much longer"
            f" than predicted steps take is known for {' and '.join(published())}, and not for its"
            f" parallelism, {how.value}; measure the strategy instead"
        )
    return published()[how][network.link_kind(machine, case.devices)]
