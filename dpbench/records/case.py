"""Case: one point of a sweep, the phases of a training step, and the limits of a measurement."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import msgspec

from dpbench.records import registry, visible
from dpbench.records.errors import UsageError
from dpbench.records.registry import Parallelism, Traits

HOST = -1
"""The device index of the host, or of the first machine's host."""


def host_device(number: int) -> int:
    """Return the device index of the host of machine `number`, counted from 0: -1, -2 and so on."""
    return HOST - number


class Phase(StrEnum):
    """The phases of one training step, in the order in which DataParallel runs them.

    `data` is the host's wait for a batch from a DataLoader. `clip` is the clipping of gradients,
    and `read` the host's wait for values from a device, such as the loss. Only observed training
    loops have `clip` and `read`. Host-to-device copies count as `scatter`, and `zero_grad` counts
    as `optimizer`. All-reduce and reduce-scatter count as `reduce`. All-gather, weight refresh and
    buffer synchronisation count as `replicate`.
    """

    DATA = "data"
    SCATTER = "scatter"
    REPLICATE = "replicate"
    FORWARD = "forward"
    GATHER = "gather"
    LOSS = "loss"
    BACKWARD = "backward"
    REDUCE = "reduce"
    CLIP = "clip"
    OPTIMIZER = "optimizer"
    READ = "read"


MOVING = (Phase.SCATTER, Phase.REPLICATE, Phase.GATHER, Phase.REDUCE)
"""The phases that mainly move data between devices."""
UNATTRIBUTED = "unattributed"
"""The name of the time that no phase covers."""

Mark = Callable[[Phase, int], AbstractContextManager[Any]]
"""A function for `with mark(phase, device):`, which records when a phase starts and ends."""


def no_mark(phase: Phase, device: int) -> AbstractContextManager[Any]:
    """Record nothing: the default of every `mark` argument."""
    return nullcontext()


@contextmanager
def marked(mark: Mark, phase: Phase, devices: Iterable[int]) -> Iterator[None]:
    """Enter `mark(phase, device)` for each of several devices, which work on the phase together."""
    with ExitStack() as marks:
        for device in devices:
            marks.enter_context(mark(phase, device))
        yield


TRAIN = "train"
MODES = (TRAIN, "forward", "no_grad", "inference")
"""The modes of a step: training, or the forward alone with autograd or without it."""
HABITS = ("compile", "inputs", "loader", "mode", "neighbour", "read_loss", "zero_grad")
"""The fields of `Case` that describe how a training loop works; each can be an axis of a sweep."""


def rows_of_chunks(rows: int, chunks: int) -> tuple[int, ...]:
    """Return the sizes of the chunks of `torch.chunk`, which may be fewer than `chunks`."""
    if not rows:
        return ()
    piece = -(-rows // chunks)
    full, rest = divmod(rows, piece)
    return (piece,) * full + ((rest,) if rest else ())


MOST_DEVICES = 2**16
"""The most devices of a stored case: the loops over those of a damaged one would not end."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of a sweep: a model, a strategy, a batch and devices.

    `batch_size` is the global batch size, 0 if it is unknown, as in some observed loops. `devices`
    is the number of devices. `device_ids` are the indices of the GPUs to use, in order; empty means
    the first GPUs. `schedule` is empty unless the strategy is the engine. `placement` is "spread"
    (one replica per device) or "colocated" (all replicas on one GPU). `options` are sorted (name,
    value) pairs for the strategy. `device_memory_bytes` limits the memory of each emulated device;
    0 means no limit.
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
    inputs: str = "pinned"
    """The memory of the batch before a step: "pageable", "pinned", or "device" for device 0.

    If a strategy has one process per device, "device" puts the whole batch on each device, and
    memory peaks include it.
    """
    hosts: int = 1
    """The number of machines of the ranks; 1 for a strategy without ranks."""
    read_loss: int = 0
    """The loop reads the loss in step 0 and every `read_loss` steps after it; 0 means never."""
    zero_grad: str = "none"
    """The way to clear gradients: "none" drops them, "zero" fills them with zeros."""
    compile: bool = False
    """Whether torch.compile has compiled the forward."""
    loader: int = -1
    """The number of workers of the DataLoader for batches; 0 loads in the loop itself.

    With -1, the loop has its batches before it starts.
    """
    mode: str = TRAIN
    """One of `MODES`; in a forward alone, the module is in eval mode."""
    neighbour: str = ""
    """The model that takes steps concurrently on the next devices; "" for none."""
    unverified: bool = False
    """Whether the steps were timed without a comparison with the reference: UNVERIFIED."""
    declared: Traits | None = field(default=None, compare=False, repr=False)
    """The traits of an external strategy, stored so that they are known without its code."""

    @property
    def traits(self) -> Traits:
        """Return the traits of the case's strategy; those of an external one may be stored."""
        if self.declared and self.declared.strategy == self.strategy:
            return self.declared
        return registry.traits(self.strategy)

    def gpu(self, device: int) -> int:
        """Return CUDA's number of the GPU that the case uses as `device`."""
        return self.device_ids[device] if device < len(self.device_ids) else device

    @property
    def gpu_count(self) -> int:
        """Return the number of the case's GPUs on all machines; colocated replicas have one."""
        return self.devices if self.placement == "spread" else 1

    @property
    def gpus(self) -> tuple[int, ...]:
        """Return CUDA's numbers of the case's GPUs."""
        return self.device_ids[: self.gpu_count] or tuple(range(self.gpu_count))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults: new ones do not change old records."""
        changed = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }
        return changed | ({"declared": asdict(self.declared)} if self.declared else {})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Case:
        """Return the case from the data that `to_dict` returned, also after JSON.

        Control characters in the texts are escaped. Raises ValueError for an unknown field, a value
        of a wrong type, and numbers of devices, machines or samples that no case can have.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            expected = ", ".join(sorted(known))
            raise UsageError(
                f"unknown fields of a case: {', '.join(unknown)}; known fields: {expected}; update"
                " dpbench if a newer version wrote the case"
            )
        case = msgspec.convert(visible.everywhere(data), cls)
        if not (1 <= case.devices <= MOST_DEVICES and case.hosts >= 1 and case.batch_size >= 0):
            raise UsageError(
                f"no case has {case.devices} devices on {case.hosts} machines and a batch of"
                f" {case.batch_size}; a case has 1 to {MOST_DEVICES} devices"
            )
        return case

    @property
    def fingerprint(self) -> str:
        """Return the permanent id of this case: the SHA-256 of its fields as JSON.

        `declared`, and fields at their default, are left out.
        """
        identity = {name: value for name, value in self.to_dict().items() if name != "declared"}
        text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def rows(self) -> tuple[int, ...]:
        """Return the number of samples of each replica, as `torch.chunk` splits the batch.

        Replicas without samples are left out. If the batch size is unknown, every number is 0.
        """
        replicas = max(1, self.devices // self.traits.devices_per_replica)
        return rows_of_chunks(self.batch_size, replicas) if self.batch_size else (0,) * replicas

    @property
    def batch(self) -> str:
        """Return the global batch size as text; "unknown" if it is 0."""
        return str(self.batch_size or "unknown")

    @property
    def working(self) -> int:
        """Return the number of devices that do work; a replica without samples does none.

        All devices count if the batch size is unknown, or if the parallelism is OTHER, in which
        devices do not share out the samples.
        """
        if self.traits.parallelism is Parallelism.OTHER or not self.batch_size:
            return self.devices
        return len(self.rows) * self.traits.devices_per_replica

    @property
    def trains(self) -> bool:
        """Return whether a step trains the module; otherwise it only computes outputs."""
        return self.mode == TRAIN

    @cached_property
    def habits(self) -> tuple[str, ...]:
        """Return a short text for each field in `HABITS` that is not at its default."""
        return tuple(filter(None, map(self.habit, HABITS)))

    def habit(self, name: str) -> str:
        """Return a short text about the field `name`, one of `HABITS`; "" at its default."""
        if getattr(self, name) == getattr(type(self), name):
            return ""
        every = f" every {self.read_loss}" if self.read_loss > 1 else ""
        autograd = {"forward": "with autograd", "inference": "under inference_mode"}.get(
            self.mode, f"under {self.mode}"
        )
        workers = f"{self.loader or 'no'} worker{'' if self.loader == 1 else 's'}"
        texts = {
            "compile": "compiled",
            "inputs": f"inputs {self.inputs}",
            "loader": f"DataLoader with {workers}",
            "mode": f"forward {autograd}",
            "neighbour": f"concurrent with {self.neighbour}",
            "read_loss": f"loss read{every}",
            "zero_grad": "gradients zeroed",
        }
        return texts[name]

    def without(self, habit: str) -> Case:
        """Return the case with the field `habit`, one of `HABITS`, set to its default.

        For a forward alone, the default of `mode` is "forward", because training would be different
        work.
        """
        if habit == "mode" and not self.trains:
            return replace(self, mode="forward")
        return replace(self, **{habit: getattr(type(self), habit)})

    @property
    def extent(self) -> str:
        """Return the number of devices as text, with that of machines if there are several."""
        return f"{self.devices} on {self.hosts} hosts" if self.hosts > 1 else str(self.devices)

    @property
    def label(self) -> str:
        """Return a one-line description of the case for progress and error messages."""
        kind = "" if self.device_kind == "cpu" else f" {self.device_kind}"
        colocated = " colocated" if self.placement == "colocated" else ""
        schedule = f"[{self.schedule}]" if self.schedule else ""
        size = "" if self.size == "small" else f" {self.size}"
        precision = "" if self.precision == "fp32" else f" {self.precision}"
        bound = f" within {self.device_memory_bytes} bytes" if self.device_memory_bytes else ""
        habits = "".join(f" {habit}" for habit in self.habits)
        optimizer = (
            ""
            if self.optimizer == "sgd"
            else f" {self.optimizer} optimizer".replace("own", "model's own")
        )
        unverified = " unverified" if self.unverified else ""
        work = f"batch {self.batch}{precision}{optimizer}{bound}{habits}{unverified}"
        return (
            f"{self.model}{size} {self.strategy}{schedule} x{self.extent}{kind}{colocated} {work}"
        )


CASE_FIELDS = tuple(one for one in fields(Case) if one.compare)
"""The fields that identify a case, which are all except `declared`."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The limits on a trial's steps, and the additional measurements of the trial."""

    budget_s: float = 1.5
    """The total seconds of timed steps after which a trial stops, precise or not."""
    warmup_steps: int = 5
    """The least number of warm-up steps; more count until the step times are steady."""
    min_steps: int = 10
    max_steps: int = 300
    least_s: float = 0.0
    """The least total seconds of timed steps, as long as `max_steps` is not reached."""
    slow: bool | None = None
    """Whether to take only a few steps (see `Trial.slow`); None: the second step decides."""
    block_steps: int = 10
    """The number of steps after which all ranks check again whether to stop."""
    trace: str = ""
    """The file for a Chrome trace of one additional step; empty: no trace."""
    memory_by_phase: bool = True
    """Whether two additional steps measure each device's memory peak in each phase.

    A sample's operations are then counted, and the peak of a device in FLOP/s is timed, too.
    """
    profile: bool = True
    """Whether additional steps on GPUs are profiled."""
    marks: bool = True
    """Whether additional steps, with and without marks, show what marks cost."""
    links: bool = True
    """Whether copies over the links of the GPUs are timed."""
