"""Observed: the facts about a user's training loop that was watched or imported as a trace.

The case of an observed loop has the strategy `SCRIPT` and declares its traits. Its model is the
name of the script or of the trace file. Its batch size is the number of rows that all devices
process together, or 0 if unknown.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from dpbench.records.registry import Parallelism, Reduction, Role, Traits
from dpbench.records.words import count

SCRIPT = "script"
"""The strategy of every observed training loop."""
WITHOUT_LOADER = -1
"""The number of workers of a loop without a DataLoader."""


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """A part of a loop that dpbench did not understand, and the number of steps that it affects.

    `steps` is 0 for an unknown fact that changes no phase, such as the number of workers in a
    trace, and for a note on how dpbench has defined a phase, such as `data` in a loop without a
    DataLoader. `hides_phases` is whether it leaves no phase known.
    """

    problem: str
    steps: int
    hides_phases: bool = False

    def __str__(self) -> str:
        return f"not understood: {self.problem}" if self.steps else self.problem


@dataclass(frozen=True, kw_only=True)
class Held:
    """The bytes that a rank's process holds on one GPU at the end of its loop, as NVML reports.

    `gpu` is the GPU's number in nvidia-smi on the rank's machine, `uuid` is unique over all
    machines, and `own` is whether the rank trains on this GPU.
    """

    rank: int
    gpu: int
    uuid: str
    held_bytes: int
    own: bool


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The facts about one observed training loop.

    `command` is the command that ran the script, or the paths of the traces. `wrapper` is the class
    that makes the module data-parallel, if any. `synchronized` is the share of calls of backward in
    which DistributedDataParallel adds the ranks' gradients, None if unknown. `batches` is the
    number of batches that a process takes for a step, `updates` that of its calls of `backward`,
    and `skipped_updates` the number of updates that a GradScaler skipped after the optimizer's
    first step. `loader_workers` is `WITHOUT_LOADER` without a DataLoader, and None if unknown.
    `pinned` is whether the batches were in pinned memory; None if no batch was copied to a GPU.
    `reads` maps a place in the script, such as `train.py:31 item`, to the number of timed steps in
    which the host waited there for a value of a device. `evaluation_s` and `checkpoint_s` are the
    seconds, between the first and the last step, in which the script evaluated and saved
    checkpoints; no step includes them. `held` lacks ranks whose process NVML does not list.
    `binding` has clauses on the lines of the script by which a rank takes memory on the first GPU.
    """

    command: str
    wrapper: str = ""
    synchronized: float | None = None
    batches: int = 1
    updates: int = 1
    skipped_updates: int = 0
    loader_workers: int | None = WITHOUT_LOADER
    pinned: bool | None = None
    reads: Mapping[str, int]
    evaluation_s: float = 0.0
    checkpoint_s: float = 0.0
    unknown: tuple[Unknown, ...] = ()
    held: tuple[Held, ...] = ()
    binding: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """Return the words of the command; none if no shell could run it.

        The paths of traces that an earlier version imported are not quoted.
        """
        try:
            return shlex.split(self.command)
        except ValueError:
            return []

    @property
    def hidden(self) -> bool:
        """Return whether no phase of the loop is known, so that no rule may judge it."""
        return any(one.hides_phases for one in self.unknown)


def unclear(loop: Observed) -> list[str]:
    """Return one text for each part of the loop that dpbench did not understand."""
    return [
        f"{one} (in {count(one.steps, 'step')})" if one.steps else str(one) for one in loop.unknown
    ]


def traits(parallelism: Parallelism, reduction: Reduction = Reduction.OVERLAPPED) -> Traits:
    """Return the traits that the case of an observed loop declares."""
    return Traits(parallelism=parallelism, reduction=reduction, role=Role.OBSERVED, strategy=SCRIPT)
