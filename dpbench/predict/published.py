"""Published: step times that others measured and published, for beside a prediction.

`data/published.csv` has some hundreds of them, one a line: figures and their sources, no more
(`benchmarks/scripts/published_steps.py` made it). Nobody of dpbench repeated a measurement.
"""

from __future__ import annotations

import csv
import math
import re
from functools import lru_cache
from pathlib import Path

import msgspec

from dpbench.predict import counts
from dpbench.records import Case, registry
from dpbench.records.gpu_names import same_gpu
from dpbench.records.registry import Parallelism, Role

FILE = Path(__file__).parent / "data" / "published.csv"
LABEL = "PUBLISHED"
SIMILAR = 2.0
"""How many times as many parameters a model may have that is similar to another one."""
MOST = 2
"""The most measurements beside one prediction."""


class PublishedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step time that others measured: its case, the machine as its source describes it, seconds.

    `link` is the kind of the slowest link between the GPUs by these words, and "alone" for one GPU.
    `parameters` is the number of the model's parameters, and `batch` the samples per device; both
    are 0 if the source states none.
    """

    model: str
    strategy: str
    gpu: str
    devices: int
    interconnect: str
    link: str
    precision: str
    parameters: float
    batch: float
    step_s: float
    source: str
    label: str = LABEL

    @property
    def parallelism(self) -> Parallelism:
        """Return how the strategy uses several devices; all but DataParallel run a rank on each."""
        known = {
            registry.of_role(Role.BASELINE): Parallelism.NONE,
            registry.of_role(Role.WRAPPER): Parallelism.THREADS,
        }
        return known.get(self.strategy, Parallelism.RANKS)


def bits(precision: str) -> int:
    """Return the bits of the values that a step mostly computes with, by words such as "amp"."""
    return 16 if re.search(r"16|amp|half|mixed", precision.lower()) else 32


COLUMNS = PublishedStep.__struct_fields__[:-1]
"""The columns of the file: all fields but the label."""


@lru_cache(maxsize=1)
def steps() -> tuple[PublishedStep, ...]:
    """Return all published steps of the package."""
    with FILE.open(newline="", encoding="utf-8") as file:
        return tuple(
            msgspec.convert(line, PublishedStep, strict=False) for line in csv.DictReader(file)
        )


def nearest(case: Case, gpu: str, link: str, parameters: float) -> list[PublishedStep]:
    """Return the published steps nearest to a case, at most `MOST`, the nearest first.

    Each is of the same or a similar model, used several devices in the same way, and has the same
    GPU or the same kind of link. `gpu` and `link` are those of the case's machine, and `parameters`
    the number of parameters of its model.
    """
    alone = case.devices == 1
    parallelism = Parallelism.NONE if alone else case.traits.parallelism
    of_kind = [one for one in steps() if one.parallelism is parallelism]
    same = {name for name in {one.gpu for one in of_kind} if same_gpu(name, gpu)}
    found = []
    for one in of_kind:
        model = _apart_in_model(one, case, parameters)
        other_gpu, other_link = one.gpu not in same, one.link != link
        if model > math.log(SIMILAR) or (other_gpu and (other_link or alone)):
            continue
        devices = abs(math.log(one.devices / case.devices))
        other_bits = bits(one.precision) != bits(case.precision)
        batch = abs(math.log(max(one.batch, 1.0) * case.devices / case.batch_size))
        found.append(((other_gpu, other_link, model, devices, other_bits, batch), one))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])[:MOST]]


def _apart_in_model(one: PublishedStep, case: Case, parameters: float) -> float:
    """Return 0 for the same model, else by how much the numbers of parameters differ (log)."""
    if counts.plain(one.model) == counts.plain(case.model):
        return 0.0
    if not (one.parameters and parameters):
        return math.inf
    return abs(math.log(one.parameters / parameters))
