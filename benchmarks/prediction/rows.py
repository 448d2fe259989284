"""Rows: convert a published row with its baseline into a case, and predict its step's duration.

The machine of a row is derived from the free text in the row's columns, by the reader of
`dpbench predict --machine`.
"""

from __future__ import annotations

import math
import re
import statistics
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from benchmarks.prediction import formula, named_models
from benchmarks.prediction.loops import PLAIN, LoopDifferences
from benchmarks.prediction.published import NAMED, Matched, PublishedRow
from dpbench.predict import described, profiles
from dpbench.predict.constants import DEFAULT, Constants
from dpbench.predict.machine import Machine, read
from dpbench.predict.work import Profile
from dpbench.records import Case, Phase, plan, registry
from dpbench.records.registry import Role

UNKNOWN = {"pcie": 4, "peer": True, "source": "assumed"}
"""The assumed figures of a GPU that no table knows."""
GB = 1e9


@lru_cache(maxsize=4096)
def describe(gpu: str, interconnect: str, count: int, *, one_node: bool = False) -> Machine:
    """Return the machine that a row's columns `gpu`, `interconnect` and `n_gpu` describe.

    `count` is the number of GPUs. `Machine.assumed` lists properties that the columns do not state;
    any assumption widens the interval of the prediction. With `one_node`, all GPUs are on one node
    regardless of the text, as strategies with a single process require.
    """
    assumed: tuple[str, ...] = ()
    figures: Mapping[str, Any] = {"name": gpu} | UNKNOWN
    for text in (interconnect, gpu):
        with suppress(LookupError):
            figures = described.figures(text)
    if figures["source"] == UNKNOWN["source"]:
        assumed = (f"the GPU {gpu!r} is unknown, so PCIe 4 with peer access is assumed",)
    words = f"{gpu}, {interconnect}"
    file = described.toml(words, count=count, gpu=figures, one_node=one_node)
    machine = read(tomllib.loads(file), words)
    return replace(machine, assumed=(*assumed, *machine.assumed))


PROCESSORS = ((12.0, 1.5), (24.0, 1.15))
"""How much slower one thread of a processor is than that of the constants, up to a PCIe rate.

The rates, in GB/s, are those of 16 lanes of PCIe 3 and 4. Later processors are as fast.
"""
TORCHES = (((1, 8), 1.7), ((2, 0), 1.4))
"""How much slower host operations are in versions of torch below the given one."""
TORCH = 1.5
"""How much slower they are if the version is not stated."""
LATE = ("replicated", "server_gpu", "server_cpu")
"""The strategies that are assumed to reduce gradients only after backward has ended."""
OVERLAP = "overlap"
"""The prior of the training loop, if it is unknown whether it overlaps reduction with backward."""
BATCH = 32
"""The assumed number of samples per device if a table does not state the batch size."""


@dataclass(frozen=True)
class PublishedCase:
    """A published row as a case to predict, with its profile, machine and timed phases."""

    row: PublishedRow
    case: Case
    profile: Profile
    machine: Machine
    phases: frozenset[Phase]
    accumulated: float = 1.0
    """The number of backward passes per optimizer step.

    Only the last backward pass reduces gradients.
    """
    known: str = "traced"
    """The origin of the model's counts: "traced", "public" or "estimated"."""
    exact: bool = True
    """Whether the baseline has the same batch size per device as the row."""
    loops: tuple[LoopDifferences, ...] = (PLAIN,)
    """The possible training loops, with the longest step first."""

    def step_s(self, seconds_of: Callable[..., float], constants: Constants = DEFAULT) -> float:
        """Return the duration of the row's step in seconds: between those of the possible loops.

        `seconds_of` has the parameters of `formula.seconds`.
        """
        machine = self.machine
        alone = linear_s(self, constants) if self.accumulated > 1 else 0.0
        logs = []
        for loop in self.loops:
            seconds = seconds_of(
                self.case, self.profile, machine, constants, phases=self.phases, loop=loop
            )
            mean = (seconds + (self.accumulated - 1) * alone) / self.accumulated
            logs.append(math.log(mean))
        return math.exp(statistics.mean(logs))


def timed(row: PublishedRow) -> frozenset[Phase]:
    """Return the phases in a published duration, by the row's columns `timed` and `optimizer`."""
    phases = set(Phase)
    words = row.timed.lower()
    if "forward only" in row.notes.lower():
        words = "forward"
    if words and "backward" not in words and "step" not in words and "forward" in words:
        phases -= {Phase.BACKWARD, Phase.REDUCE, Phase.OPTIMIZER, Phase.LOSS}
    if row.optimizer.lower() == "none":
        phases -= {Phase.OPTIMIZER}
    if "h2d" not in words:  # loaders copy concurrently, and synthetic batches are on the GPU
        phases -= {Phase.SCATTER}
    return frozenset(phases)


def loops_of(row: PublishedRow) -> tuple[LoopDifferences, ...]:
    """Return the training loops that a row may have.

    A script with a process per device may reduce gradients only after backward, for example if it
    is compiled or joins them itself; published tables do not tell.
    """
    kind = NAMED[row.strategy]
    if kind == "dp":
        return (LoopDifferences(batch_first="h2d" in row.timed.lower()),)
    late = LoopDifferences(late_reduction=True)
    return (late,) if kind in LATE else (late, PLAIN)


def host_of(row: PublishedRow) -> float:
    """Return the host factor of a row's machine, by the age of its processor and of torch."""
    links = describe(row.gpu, row.interconnect, row.devices).links
    pcie = max(link.bytes_per_s for link in links if link.kind == "pcie") / GB
    processor = next((slower for rate, slower in PROCESSORS if pcie <= rate), 1.0)
    found = re.search(r"\b(?:py)?torch (\d+)\.(\d+)", f"{row.framework} {row.notes}")
    if not found:
        return processor * TORCH
    version = (int(found[1]), int(found[2]))
    return processor * next((slower for below, slower in TORCHES if version < below), 1.1)


def question(
    matched: Matched, constants: Constants = DEFAULT, host: float | None = None
) -> PublishedCase:
    """Return a published row with its baseline as a case to predict.

    `host` is the host factor of the row's machine, `host_of` the row by default.
    """
    row = matched.row
    host = host_of(row) if host is None else host
    known = named_models.find(row.model, row.parameters or None, row.precision)
    counted = known.profile
    if row.data_set and "resized" not in row.notes:
        _, values = row.data_set
        counted = replace(counted, input_bytes=4.0 * values)
    each = max(1, round(row.batch or BATCH))
    machine = describe(row.gpu, row.interconnect, row.devices, one_node=NAMED[row.strategy] == "dp")
    machine = replace(machine, host=replace(machine.host, factor=host))
    phases = timed(row)
    samples = max(1, round(matched.one_samples)) if row.batch else each
    other = matched.other if row.batch and matched.other and matched.other[1] >= 1 else None
    profile = _profile(counted, matched.one_s, samples, machine, constants, other, phases)
    case = Case(
        model=row.model,
        device_kind="cuda",
        strategy=registry.of_role(Role.WRAPPER if NAMED[row.strategy] == "dp" else Role.CONTROL),
        devices=row.devices,
        batch_size=each * row.devices,
    )
    return PublishedCase(
        row,
        case,
        profile,
        machine,
        phases,
        max(1.0, known.update_samples / (each * row.devices)),
        known.known,
        samples == each,
        loops_of(row),
    )


def _profile(
    counted: Profile,
    step_s: float,
    samples: int,
    machine: Machine,
    constants: Constants,
    other: tuple[float, int] | None,
    phases: frozenset[Phase],
) -> Profile:
    """Return `counted` with timings such that a step's `phases` take `step_s` on one device.

    `other` is a known step at another batch size as (seconds, samples), which determines the part
    that does not depend on the batch size.
    """
    alone = plan.baseline(model=counted.model, batch_size=samples)

    def rest_s(idle: Profile) -> float:
        return formula.seconds(alone, idle, machine, constants, phases=phases)

    return profiles.split(
        counted,
        step_s,
        samples,
        rest_s,
        forward_share=constants.forward_share if Phase.BACKWARD in phases else 1.0,
        fixed_share=_fixed_share(step_s, samples, other),
    )


def _fixed_share(step_s: float, samples: int, other: tuple[float, int] | None) -> float:
    """Return the share of a step's duration that does not depend on the batch size."""
    if other is None or other[1] == samples:
        return profiles.FIXED_SHARE
    slope = (step_s - other[0]) / (samples - other[1])
    return min(1.0, max(0.0, 1 - slope * samples / step_s))


def linear_s(asked: PublishedCase, constants: Constants = DEFAULT) -> float:
    """Return a row's step duration in seconds under linear scaling.

    This is the duration of a step on a single device with one device's share of the batch.
    """
    case, machine = asked.case, asked.machine
    alone = replace(
        case, strategy=registry.of_role(Role.BASELINE), devices=1, batch_size=case.rows[0]
    )
    return formula.seconds(alone, asked.profile, machine, constants, phases=asked.phases)
