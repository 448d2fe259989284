"""Observed: the facts about a training loop of the user that dpbench watched, or whose profiler
trace it imported.

The case of an observed loop has the strategy `SCRIPT` and declares the traits of this strategy. Its
model is the name of the script or of the trace file. Its batch size is the number of rows that all
devices process together, or 0 if the number is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from dpbench.records.case import Case
from dpbench.records.registry import Parallelism, Reduction, Role, Traits
from dpbench.records.trial import Estimate, Trial

SCRIPT = "script"
"""The name of the strategy of every observed training loop."""
OBSERVED = "observed"
"""The key of a trial's provenance for the facts about an observed loop."""
WITHOUT_LOADER = -1
"""The number of workers of a loop without a DataLoader."""


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """A part of a loop that dpbench did not understand: `problem` describes it, and it affects
    `steps` steps.

    `steps` is 0 for an unknown fact that changes no phase, such as the number of workers in a
    trace. It is also 0 for a note on how dpbench has defined a phase, such as `data` in a loop
    without a DataLoader.
    """

    problem: str
    steps: int

    def __str__(self) -> str:
        """Return the problem as text, after "not understood:" if it affects steps."""
        return f"not understood: {self.problem}" if self.steps else self.problem


@dataclass(frozen=True, kw_only=True)
class Held:
    """The memory that a rank's process holds on one GPU at the end of its loop: `held_bytes` bytes,
    as NVML reports.

    `gpu` is the GPU's number in nvidia-smi on the machine of the rank. `uuid` is the GPU's UUID,
    which is unique over all machines. `own` is whether the rank trains on this GPU.
    """

    rank: int
    gpu: int
    uuid: str
    held_bytes: int
    own: bool


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The facts about one observed training loop.

    `command` is the command that ran the script, or the path of the trace. `wrapper` is the name of
    the class that makes the module data-parallel; it is empty if no class does. `updates` is the
    number of calls of `backward` per step, and `skipped_updates` the number of updates that a
    GradScaler skipped. `loader_workers` is the number of workers of the DataLoader,
    `WITHOUT_LOADER` without a DataLoader, and None if the number is unknown. `pinned` is whether
    the batches were in pinned memory, or None if no batch was copied to a GPU. `reads` maps a place
    in the script, such as `train.py:31 item`, to the number of timed steps in which the host waited
    there for a value of a device. `evaluation_s` and `checkpoint_s` are the seconds, between the
    first and the last step, in which the script evaluated and saved checkpoints; no step includes
    them. `held` has the memory of GPUs by process; a rank has no entry if NVML does not list its
    process.
    """

    command: str
    wrapper: str = ""
    updates: int = 1
    skipped_updates: int = 0
    loader_workers: int | None = WITHOUT_LOADER
    pinned: bool | None = None
    reads: Mapping[str, int]
    evaluation_s: float = 0.0
    checkpoint_s: float = 0.0
    unknown: tuple[Unknown, ...] = ()
    held: tuple[Held, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the facts from the data that `to_dict` returned, also after a conversion to JSON
        and back.
        """
        records = {"unknown": Unknown, "held": Held}
        return cls(
            **{
                **data,
                **{
                    name: tuple(kind(**one) for one in data.get(name, ()))
                    for name, kind in records.items()
                },
            }
        )


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A prediction for an observed loop, as if its work ran with one process per device.

    `step` is the predicted time of a step in seconds, with its 80 % interval. `basis` is a phrase
    that names the machine of the prediction.
    """

    step: Estimate
    basis: str


Alternatives = Mapping[Case, Alternative | str]
"""The prediction for each observed loop in which one process runs several devices, or the reason
why there is none.
"""


def observed(trial: Trial) -> Observed | None:
    """Return the facts about the observed loop of a trial.

    None if dpbench ran the loop of the trial itself.
    """
    found = trial.provenance.get(OBSERVED)
    return Observed.from_dict(found) if found else None


def traits(parallelism: Parallelism, reduction: Reduction = Reduction.OVERLAPPED) -> Traits:
    """Return the traits that the case of an observed loop declares."""
    return Traits(parallelism=parallelism, reduction=reduction, role=Role.OBSERVED, strategy=SCRIPT)
