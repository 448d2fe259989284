"""Case: one point of a sweep, the phases of its step, and how much measuring it is worth."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from dpbench.records import registry
from dpbench.records.traits import Traits

HOST = -1
"""The device number of what happens on the host rather than on one of the devices."""


class Phase(StrEnum):
    """The parts of one training step, in the order in which DataParallel goes through them.

    Host-to-device copies count as scatter, zero_grad as optimizer, all-reduce and reduce-scatter as reduce,
    all-gather, weight refresh and buffer synchronisation as replicate.
    """

    SCATTER = "scatter"
    REPLICATE = "replicate"
    FORWARD = "forward"
    GATHER = "gather"
    LOSS = "loss"
    BACKWARD = "backward"
    REDUCE = "reduce"
    OPTIMIZER = "optimizer"


MOVING = (Phase.SCATTER, Phase.REPLICATE, Phase.GATHER, Phase.REDUCE)
"""The phases that move data rather than compute."""
UNATTRIBUTED = "unattributed"
"""The name under which a ledger lists the time that no phase covers."""

Mark = Callable[[Phase, int], AbstractContextManager[Any]]
"""`with mark(phase, device):` says that a phase runs on a device; who listens is not the engine's business."""


def no_mark(phase: Phase, device: int) -> AbstractContextManager[Any]:
    """Listen to nothing: the default of every `mark` argument."""
    return nullcontext()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of a sweep: what to run, and nothing about how or where it is timed.

    `batch_size` is the global batch. `device_ids` names the accelerators to use, in order; empty means the
    first ones. `options` belong to the strategy: a sorted tuple of (name, value) pairs. `device_memory_bytes` bounds
    what each emulated device may hold; 0 is no bound.
    """

    model: str
    strategy: str
    batch_size: int
    devices: int = 1
    size: str = "small"
    schedule: str = ""
    device_kind: str = "cpu"
    device_ids: tuple[int, ...] = ()
    placement: str = "spread"
    precision: str = "fp32"
    optimizer: str = "sgd"
    seed: int = 0
    options: tuple[tuple[str, str], ...] = ()
    device_memory_bytes: int = 0
    declared: Traits | None = field(default=None, compare=False, repr=False)
    """The traits of a strategy from outside of dpbench, so that a stored case tells them without its code."""

    @property
    def traits(self) -> Traits:
        """Return the traits of the case's strategy."""
        if self.declared and self.declared.strategy == self.strategy:
            return self.declared
        return registry.traits(self.strategy)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, so that a new axis changes no old record."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return found | ({"declared": self.declared.to_dict()} if self.declared else {})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Case:
        """Rebuild a case from `to_dict`, through JSON or not; unknown fields are an error."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ValueError(f"unknown fields of a case: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        values = dict(data)
        values["device_ids"] = tuple(values.get("device_ids", ()))
        values["options"] = tuple((str(k), str(v)) for k, v in values.get("options", ()))
        if values.get("declared"):
            values["declared"] = Traits.from_dict(values["declared"])
        return cls(**values)

    @property
    def fingerprint(self) -> str:
        """Name this case forever: sha256 of its canonical JSON without fields at their default."""
        asked = {name: value for name, value in self.to_dict().items() if name != "declared"}
        text = json.dumps(asked, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def rows(self) -> tuple[int, ...]:
        """Return each replica's rows of the batch: `torch.chunk`'s sizes, which may use fewer devices than given."""
        piece = -(-self.batch_size // self.devices)
        full, rest = divmod(self.batch_size, piece)
        return (piece,) * full + ((rest,) if rest else ())

    @property
    def label(self) -> str:
        """Say the case in one short line for progress and error messages."""
        kind = "" if self.device_kind == "cpu" else f" {self.device_kind}"
        colocated = " colocated" if self.placement == "colocated" else ""
        schedule = f"[{self.schedule}]" if self.schedule else ""
        size = "" if self.size == "small" else f" {self.size}"
        precision = "" if self.precision == "fp32" else f" {self.precision}"
        bound = f" within {self.device_memory_bytes} bytes" if self.device_memory_bytes else ""
        work = f"batch {self.batch_size}{precision}{bound}"
        return f"{self.model}{size} {self.strategy}{schedule} x{self.devices}{kind}{colocated} {work}"


CASE_FIELDS = tuple(one for one in fields(Case) if one.compare)
"""The fields that say what a case runs."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much measuring a trial is worth."""

    budget_s: float = 1.5
    """Seconds of timed steps after which a trial stops, precise or not."""
    warmup_steps: int = 5
    """Steps that count as warm-up in any case; what more does, the series tells."""
    min_steps: int = 10
    max_steps: int = 300
    block_steps: int = 10
    """Steps between two questions whether to stop; ranks agree on the answer."""
    trace: str = ""
    """The file for a Chrome trace of one more step, profiled after all else was measured; empty for none."""
    memory_by_phase: bool = True
    """Whether two more steps tell what each device holds in each phase."""
