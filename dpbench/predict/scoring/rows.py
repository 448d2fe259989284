"""Rows: convert a row, a published measurement with its baseline, into a case, and predict the duration of its step."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from dpbench.predict import features, profiles, quick, simulation
from dpbench.predict.constants import DEFAULT, Constants
from dpbench.predict.scoring.described import Described, describe
from dpbench.predict.scoring.published import NAMED, Matched, PublishedRow
from dpbench.predict.simulation import PLAIN, Loop
from dpbench.records import Case, Phase, Profile, registry
from dpbench.records.traits import Role

PUBLISHED_HOST = 3.1
"""The host factor assumed for published runs of 2019-21 with torch 1.4-1.7; three such machines have 2.8-3.6."""
LATE = ("replicated", "server_gpu", "server_cpu")
"""Strategies that presumably move gradients only after backward has ended."""
BATCH = 32
"""The assumed samples per device if a table does not state the batch."""


EPOCH_STEP_S = 0.2
"""The assumed seconds of a step if a table gives seconds per epoch but not the steps."""


@dataclass(frozen=True)
class Question:
    """A published row as a case to simulate: its profile, its machine and the phases that were timed."""

    row: PublishedRow
    case: Case
    profile: Profile
    machine: Described
    phases: frozenset[Phase]
    scale: float
    """The factor that converts the duration of a predicted step in seconds to the unit of the table."""
    accumulated: float = 1.0
    """The number of backward passes in one step; only the last one reduces gradients."""
    known: str = "traced"
    """The origin of the model's counts: traced, public or estimated."""
    exact: bool = True
    """Whether the baseline has this row's batch per device."""
    loop: Loop = PLAIN


def timed(row: PublishedRow) -> frozenset[Phase]:
    """Return the phases that a measurement includes, according to the columns `timed` and `optimizer`."""
    phases = set(Phase)
    words = row.timed.lower()
    if words and "backward" not in words and "step" not in words and "forward" in words:
        phases -= {Phase.BACKWARD, Phase.REDUCE, Phase.OPTIMIZER, Phase.LOSS}
    if row.optimizer.lower() == "none":
        phases -= {Phase.OPTIMIZER}
    if "h2d" not in words:  # loaders copy concurrently, and synthetic batches are on the GPU
        phases -= {Phase.SCATTER}
    return frozenset(phases)


def loop_of(row: PublishedRow, known: features.Features) -> Loop:
    """Return the training loop that the columns of a row describe."""
    kind = NAMED[row.strategy]
    return Loop(
        batch_first=kind == "dp" and "h2d" in row.timed.lower(),
        late_reduction=kind in LATE or ("DeepLearningExamples" in row.notes and not known.overlap),
    )


def question(matched: Matched, constants: Constants = DEFAULT, host: float = PUBLISHED_HOST) -> Question:
    """Return a matched row as a case to simulate."""
    row = matched.row
    known = features.find(row.model, row.parameters or None, row.precision)
    each = max(1, round(row.batch or BATCH))
    machine = describe(row.gpu, row.interconnect, row.devices, host, one_node=NAMED[row.strategy] == "dp")
    phases = timed(row)
    samples = max(1, round(matched.one_samples)) if row.batch else each
    other = matched.other if row.batch and matched.other and matched.other[1] >= 1 else None
    # without the number of steps, an epoch is treated as a multiple of a usual step
    scale = matched.one_s / EPOCH_STEP_S if row.metric == "epoch_s" and not row.steps else 1.0
    profile = profiles.given(
        known.profile, matched.one_s / scale, samples, machine.machine, constants, other=other, phases=phases
    )
    case = Case(
        model=row.model, device_kind="cuda",
        strategy=registry.of_role(Role.WRAPPER if NAMED[row.strategy] == "dp" else Role.CONTROL),
        devices=row.devices, batch_size=each * row.devices,
    )  # fmt: skip
    return Question(
        row, case, profile, machine, phases, scale, _accumulated(row, known, each), known.known, samples == each,
        loop_of(row, known),
    )  # fmt: skip


def _accumulated(row: PublishedRow, known: features.Features, each: int) -> float:
    """Return the number of backward passes per update, for a script with a fixed number of samples per update."""
    update = known.update_samples if "DeepLearningExamples" in row.notes else 0
    return max(1.0, update / (each * row.devices))


def predicted_s(asked: Question, constants: Constants = DEFAULT) -> float:
    """Return the predicted duration of a row's step, in the unit of its table."""
    machine = asked.machine.machine
    step = simulation.step(asked.case, asked.profile, machine, constants, phases=asked.phases, loop=asked.loop)
    if asked.accumulated == 1:
        return asked.scale * step.seconds
    return (asked.scale * step.seconds + (asked.accumulated - 1) * linear_s(asked, constants)) / asked.accumulated


def linear_s(asked: Question, constants: Constants = DEFAULT) -> float:
    """Return the duration of a step under linear scaling: that of one device alone with its share of the batch."""
    case, machine = asked.case, asked.machine.machine
    alone = replace(case, strategy=registry.of_role(Role.BASELINE), devices=1, batch_size=case.rows[0])
    return asked.scale * quick.seconds(alone, asked.profile, machine, constants, phases=asked.phases)


FILE = Path(__file__).parents[1] / "data" / "fitted.toml"


@lru_cache(maxsize=1)
def _sections() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = tomllib.loads(FILE.read_text())
    return found


@lru_cache(maxsize=64)
def without(group: str) -> tuple[Constants, float]:
    """Return the constants and the host factor fitted without a group; the defaults if the group was not fitted."""
    section = dict(_sections().get(group, {}))
    host = section.pop("host", PUBLISHED_HOST)
    return DEFAULT.changed(**section), host
