"""The nouns of dpbench: what was asked, what was seen, what follows.

Everything here is frozen and knows only the standard library. Times are seconds on the machine's monotonic
clock, sizes are bytes; the unit stands in each name.

Schema history of `Trial`: 1 (first); 2 (memory by phase and kind, the device that failed).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import Any

SCHEMA = 2
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


UNATTRIBUTED = "unattributed"
"""The name under which a ledger lists the time that no phase covers."""

Mark = Callable[[Phase, int], AbstractContextManager[Any]]
"""`with mark(phase, device):` says that a phase runs on a device; who listens is not the engine's business."""


def no_mark(phase: Phase, device: int) -> AbstractContextManager[Any]:
    """Listen to nothing: the default of every `mark` argument."""
    return nullcontext()


class Source(StrEnum):
    """Who produced a trial."""

    MEASURED = "measured"
    PREDICTED = "predicted"


class Status(StrEnum):
    """How a trial ended; all but `killed` are final."""

    OK = "ok"
    OOM = "oom"
    FAILED = "failed"
    TIMEOUT = "timeout"
    KILLED = "killed"
    SKIPPED = "skipped"


class Fault(StrEnum):
    """Why a trial that ended well has no usable step seconds."""

    UNVERIFIED = "unverified"
    CLOCK = "bad clock"
    UNTIMED = "untimed"


class Verified(StrEnum):
    """How a step's gradients compared with the chunked reference, best first."""

    BITWISE = "bitwise"
    WITHIN_TOLERANCE = "within_tolerance"
    NOT_APPLICABLE = "not_applicable"
    NO = "no"


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
    mode: str = "train"
    optimizer: str = "sgd"
    seed: int = 0
    options: tuple[tuple[str, str], ...] = ()
    device_memory_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, so that a new axis changes no old record."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

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
        return cls(**values)

    @property
    def fingerprint(self) -> str:
        """Name this case forever: sha256 of its canonical JSON without fields at their default."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
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


@dataclass(frozen=True)
class Span:
    """One phase on one device during one step, on the common time base."""

    step: int
    phase: Phase
    device: int
    clock: str  # "host" | "cuda_event"
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Sample:
    """One reading of one metric; the metric's name carries its unit."""

    time_s: float
    device: int
    metric: str
    value: float


@dataclass(frozen=True)
class Step:
    """One training step: the interval that ends at `end_s`."""

    seconds: float
    warmup: bool
    end_s: float

    @property
    def start_s(self) -> float:
        """Return when the step began."""
        return self.end_s - self.seconds


@dataclass(frozen=True)
class Memory:
    """The peak of one device's memory; `source` is allocator, rss or ledger.

    `phase` is empty for the peak of whole steps. `kind` is allocated (what tensors, or the process, hold) or reserved
    (what the allocator took from the driver).
    """

    device: int
    peak_bytes: int
    source: str
    phase: str = ""
    kind: str = "allocated"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One case run once (or predicted once): everything that was seen, nothing derived.

    `setup` maps the stages before the first step to their seconds; `provenance` holds the facts of host and
    torch that make the numbers repeatable. `failed_device` is the replica's device that failed first, where one did.
    """

    case: Case
    source: Source = Source.MEASURED
    status: Status = Status.OK
    reason: str = ""
    verified: Verified = Verified.NOT_APPLICABLE
    steps: tuple[Step, ...] = ()
    spans: tuple[Span, ...] = ()
    samples: tuple[Sample, ...] = ()
    memory: tuple[Memory, ...] = ()
    setup: Mapping[str, float] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA
    round: int = 0
    started_s: float = 0.0
    """Seconds since the epoch."""
    failed_device: int | None = None

    def readings(self, metric: str, *, timed: bool = False) -> dict[int, list[float]]:
        """Return a metric's values by device, in time; with `timed` those of warm-up steps are left out."""
        warm_s = max((step.end_s for step in self.steps if timed and step.warmup), default=float("-inf"))
        found: dict[int, list[float]] = {}
        for sample in self.samples:
            # a profiled step stands outside the series, at time 0
            if sample.metric == metric and (sample.time_s > warm_s or sample.time_s == 0.0):
                found.setdefault(sample.device, []).append(sample.value)
        return found

    @property
    def timed(self) -> tuple[float, ...]:
        """Return the seconds of the steps that are not warm-up, in order."""
        return tuple(step.seconds for step in self.steps if not step.warmup)

    @property
    def fault(self) -> Fault | None:
        """Return why a trial of status `ok` has no usable step seconds; None where it has them, or another status."""
        if self.status is not Status.OK:
            return None
        if self.verified is Verified.NO:
            return Fault.UNVERIFIED
        if self._impossible_s is not None:
            return Fault.CLOCK
        return None if self.timed else Fault.UNTIMED

    @property
    def refusal(self) -> str:
        """Say why the trial has no usable step seconds; empty where it has them."""
        if self.status is Status.OK and self.fault is None:
            return ""
        said = {
            Fault.CLOCK: f"the clock is wrong: a timed step took {self._impossible_s} s; it must be above 0 and finite",
            Fault.UNTIMED: "no step was timed",
        }
        return said.get(self.fault or Fault.UNVERIFIED) or self.reason or "no reason given"

    @property
    def _impossible_s(self) -> float | None:
        """Return the first timed seconds that no step can take: not finite, or not above 0."""
        return next((seconds for seconds in self.timed if not (math.isfinite(seconds) and seconds > 0)), None)

    @property
    def trusted(self) -> bool:
        """Tell whether the numbers may be shown; a trial without timed steps may still have others."""
        return self.status is Status.OK and self.fault in (None, Fault.UNTIMED)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; long series are columns, not rows."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain["case"] = self.case.to_dict()
        plain["setup"], plain["provenance"] = dict(self.setup), dict(self.provenance)
        for name, kind in _SERIES.items():
            rows = getattr(self, name)
            plain[name] = {f.name: [getattr(row, f.name) for row in rows] for f in fields(kind)}
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trial:
        """Rebuild a trial from `to_dict`, through JSON or not."""
        if data.get("schema", SCHEMA) > SCHEMA:
            raise ValueError(f"trial of schema {data['schema']}; this dpbench reads up to {SCHEMA}: update it")
        values = dict(data)
        values["case"] = Case.from_dict(values["case"])
        for name, kind in (("source", Source), ("status", Status), ("verified", Verified)):
            values[name] = kind(values[name])
        for name, record in _SERIES.items():
            columns = dict(values.get(name) or {})
            if "phase" in columns and record is Span:
                columns["phase"] = [_PHASES[phase] for phase in columns["phase"]]
            # an older schema lacks the last fields, which have defaults
            known = [f.name for f in fields(record) if f.name in columns or f.default is MISSING]
            rows = zip(*(columns.get(name, ()) for name in known), strict=True)
            values[name] = tuple(record(*row) for row in rows)
        return cls(**values)


_PHASES = {phase.value: phase for phase in Phase}
"""A trial has thousands of spans: looking a phase up is ten times as fast as constructing it."""
_SERIES: dict[str, Any] = {"steps": Step, "spans": Span, "samples": Sample, "memory": Memory}


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


@dataclass(frozen=True)
class Cost:
    """Seconds of work on one device: so much whatever the batch, and so much a sample; never less than the least."""

    fixed_s: float = 0.0
    sample_s: float = 0.0
    least_s: float = 0.0

    def at(self, samples: float) -> float:
        """Return the seconds of a batch."""
        return max(self.least_s, self.fixed_s + self.sample_s * samples)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What one model costs on one device, per sample where it scales with the batch.

    Counts describe the model alone. Seconds hold for one device and precision: those that are None are worked out
    from FLOP and bytes. `launches` are the operations that the host hands to the device; `gradient_bytes` are the
    sizes of the parameters in the order in which backward finishes their gradients, empty when nobody knows.
    """

    model: str
    parameter_tensors: int
    parameter_bytes: int
    buffer_bytes: int
    input_bytes: float
    output_bytes: float
    forward_flop: float
    backward_flop: float
    buffer_tensors: int = 0
    modules: int = 0
    forward_launches: int = 0
    backward_launches: int = 0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    gradient_bytes: tuple[int, ...] = ()
    source: str = "traced"  # "measured" | "traced" | "counted" | "given"
    forward: Cost | None = None
    loss: Cost | None = None
    backward: Cost | None = None
    optimizer: Cost | None = None
    rest: Cost | None = None
    """What a host's step takes beside these: copies of the batch, and what no phase covers."""


@dataclass(frozen=True)
class Task:
    """One piece of a step's work: so much of a unit on a resource, after other tasks.

    `after` are indices into the list of tasks whose end this one waits for; `overlap` are indices of tasks it
    follows but may run beside: it waits for their start. Units are flop, bytes, s, and what the host does one by one:
    launches, modules, tensors, threads, wakes. Resources:

        device:i                    the stream of device i: kernels, one after the other
        host, host:i                the main thread; the thread that serves device i
        gil                         the interpreter, shared by the threads of one process
        copy:a:b                    a copy from a to b, each a device's number or `host`
        all_reduce:k ...            the k-th collective; its tasks (one a device) begin and end together. Kinds:
                                    broadcast, reduce, all_reduce, reduce_scatter, all_gather
    """

    phase: Phase
    device: int
    resource: str
    amount: float
    unit: str
    after: tuple[int, ...] = ()
    overlap: tuple[int, ...] = ()
