"""Facts: what a run, a machine and a trial state besides numbers, each read once into a record.

The stored facts are plain data (`provenance`). Only those that dpbench reads again have a field
here, and each may be missing, because earlier versions did not store it. A fact of another type
raises msgspec.ValidationError, which is a ValueError: its row of the store is damaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from dpbench.records.data_sheets import DataSheet
from dpbench.records.load import GpuLoad, Load
from dpbench.records.observed import Observed
from dpbench.records.work import CopyTimes, Move, Operations, Sizes


class NvLinks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The NVLinks of a GPU.

    `ends` has the number of active links by their other end, a PCIe address or `nvml.SWITCH`, and
    `bytes_per_s` what an active link carries each way; both None if unknown.
    """

    active: int = 0
    inactive: int = 0
    ends: dict[str, int] | None = None
    bytes_per_s: float | None = None


class Gpu(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU that CUDA shows to the run; a fact that is None is unknown."""

    name: str | None = None
    uuid: str | None = None
    memory_bytes: int | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    pci_address: str | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_width_now: int | None = None
    ecc: bool | None = None
    ecc_errors: int | None = None
    compute_mode: str | None = None
    persistence_mode: bool | None = None
    mig: bool | None = None
    nvlinks: NvLinks = NvLinks()


class Gpus(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of a machine, None if unknown, and the versions of their libraries."""

    gpus: tuple[Gpu, ...] | None = None
    driver: str | None = None
    cuda: Any = None
    hip: Any = None
    cudnn: Any = None
    nccl: Any = None


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The host of a machine; `machine` is the architecture of its processor."""

    name: str = ""
    cpu: str | None = None
    cores: int | None = None
    memory_bytes: int | None = None
    system: str = ""
    machine: str = ""


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What a run, a machine of a launch, and a trial state about host and software."""

    host: Host = Host()
    gpus: Gpus = Gpus()
    packages: dict[str, Any] = {}
    software: dict[str, Any] = {}
    """The packages, in launches of earlier versions."""
    variables: dict[str, str] | None = None
    python: Any = None
    python_build: Any = None
    gil: Any = None
    gil_switched_on_by: str = ""
    """The module whose import switched the interpreter lock on, in a Python that began without."""
    torch: Any = None
    cuda: Any = None
    hip: Any = None
    cudnn: Any = None
    """The version of cuDNN, or of what AMD's torch has in its place: see `records.vendors`."""
    nccl: Any = None
    """That of NCCL, or of what is in its place."""
    gpu: Any = None
    """The name of the first GPU, as torch tells it."""

    @classmethod
    def of(cls, provenance: Mapping[str, Any]) -> Self:
        """Return the facts in stored plain data. Raises ValueError for a fact of a wrong type."""
        return msgspec.convert(provenance, cls)


class MeasuredHost(Host, frozen=True, kw_only=True):
    """The host of a launch's machine, whose size is always known."""

    cpu: str
    cores: int
    memory_bytes: int


class MachineFacts(Surroundings, frozen=True, kw_only=True):
    """What a machine of a launch states."""

    host: MeasuredHost


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of a launch; `machine` is the id of its current boot, or else the host name."""

    name: str
    machine: str
    ranks: tuple[int, ...] = ()
    facts: MachineFacts


class Machines(msgspec.Struct, frozen=True, kw_only=True):
    """The machines of a launch, rank 0's first."""

    machines: tuple[Machine, ...] = ()


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """A checkout: its version, its commit, and a digest of its uncommitted changes."""

    version: str | None = None
    commit: str | None = None
    dirty: bool | None = None
    changes: str = ""


class LoadBefore(msgspec.Struct, frozen=True, kw_only=True):
    """The load of the cores before a run; `unknown` is the reason if it could not be measured."""

    unknown: str = ""
    foreign: float | None = None
    steal: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How the plan of a run has grown: by cases, or by rounds.

    `joined` has the first round of each case that joined the run later, by fingerprint. `looks` is
    how often results were looked at before the plan grew.
    """

    joined: Mapping[str, int] = field(default_factory=dict)
    looks: int = 0


class RunFacts(Surroundings, frozen=True, kw_only=True):
    """What a run states about itself, its machines and its code."""

    name: str = ""
    tags: dict[str, str] = {}
    command: str = ""
    dpbench: Code = Code()
    project: Code = Code()
    hosts: Machines = Machines()
    noisy: dict[str, str] = {}
    """The reasons of the label NOISY: `before` and `during`, each a text."""
    foreign_load: LoadBefore = LoadBefore()
    growth: Growth = Growth()


class StoredCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What every stored result of a validity check has; further keys depend on the check."""

    value: float
    limit: float
    ok: bool


class ModelCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What `dpbench check` has seen in a model, by name, and its notes."""

    seen: dict[str, Any] = {}
    notes: tuple[str, ...] = ()


class Traced(msgspec.Struct, frozen=True, kw_only=True):
    """What the traces of an imported loop state: the number of ranks of the training."""

    world_size: int = 1


@dataclass(frozen=True)
class TrialHost:
    """One machine of a trial: its name and the ranks that run on it.

    `machine` is the id of the machine's current boot, or else the host name. `cores` is the number
    of cores that these ranks may use together; 0 means unknown.
    """

    name: str
    machine: str
    ranks: tuple[int, ...]
    cores: int = 0


@dataclass(frozen=True)
class Products:
    """The formats in which matrix products and convolutions multiply float32 values.

    A format is "ieee" (float32 itself), "tf32" or "bf16"; None if unknown.
    """

    matmul: str | None
    convolution: str | None


@dataclass(frozen=True)
class Averaging:
    """How the mean of the chunks' own gradients differs from the gradient of the whole batch.

    The chunks are the rows of the ranks, or of micro-batches. `low` and `high` are the smallest and
    the largest difference of a parameter's gradient, divided by the norm of its gradient of the
    whole batch. `rows` is the number of samples in the batch.
    """

    low: float
    high: float
    rows: int


class TrialFacts(Surroundings, frozen=True, kw_only=True):
    """What a trial states about its workers, its model and its measurement.

    `looks` is how often the trial's run may look at its results to go on or stop: each look is
    another chance of a wrong verdict, for which the intervals are widened. `slow` is whether the
    trial took only a few steps, because they are long. `mark_pairs` has the seconds of a step with
    marks, and of one without beside it. `no_profile` is the reason why the figures of profiled
    steps are withheld. `failed_hosts` has the reasons, by machine, why others could not run a
    baseline. `gpu_busy_s` is the time in which the busiest GPU computes in a step, by the profiler.
    `error_draws` are draws of the logarithm of a prediction's error: draw i uses the same random
    numbers in all predictions, so errors that two steps share cancel in the ratio of the steps.
    """

    hosts: tuple[TrialHost, ...] = ()
    failed_hosts: dict[str, str] = {}
    clock_error_s: float | None = None
    looks: int = 1
    slow: bool = False
    foreign_load: Load | None = None
    """What others used of the cores while steps were timed."""
    foreign_gpus: tuple[GpuLoad, ...] = ()
    """What others used of the case's GPUs before the trial's round."""
    gpu_busy_s: float | None = None
    mark_pairs: tuple[tuple[float, float], ...] = ()
    no_profile: str = ""
    float32: Products | None = None
    averaging: Averaging | None = None
    validity: dict[str, dict[str, Any]] | None = None
    model: Sizes | None = None
    model_check: ModelCheck | None = None
    moves: tuple[Move, ...] | None = None
    """The bytes that a step of an external strategy moves; those of dpbench's own are computed."""
    links: tuple[CopyTimes, ...] | None = None
    operations: Operations | None = None
    data_sheet: DataSheet | None = None
    """That of the case's GPUs; None for unlike or unknown GPUs, and those of other makers."""
    no_peer_access: list[Any] | None = None
    gpu_uuids: tuple[str, ...] = ()
    batches_per_epoch: int = 0
    fake_gpus: bool = False
    """Whether the facts of the trial's run describe fake GPUs."""
    loop: Observed | None = msgspec.field(default=None, name="observed")
    trace: Traced = Traced()
    machine: str = ""
    """The machine for which the trial is predicted."""
    interval_80_s: tuple[float, float] | None = None
    error_draws: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for result in (self.validity or {}).values():
            msgspec.convert(result, StoredCheck)

    @property
    def hosts_share(self) -> bool:
        """Return whether several of the hosts are one machine."""
        machines = [host.machine for host in self.hosts]
        return len({*machines}) < len(machines)

    @property
    def copies(self) -> tuple[CopyTimes, ...]:
        """Return the timed copies, without those of no bytes or no time, which have no rate."""
        every = self.links or ()
        return tuple(one for one in every if one.bytes > 0 and min(one.seconds, default=0.0) > 0)


def stated(**facts: Any) -> dict[str, Any]:
    """Return facts of a trial, given by their names in `TrialFacts`, as plain data to store.

    Raises TypeError for an unknown name.
    """
    record = TrialFacts(**facts)
    stored = dict(zip(record.__struct_fields__, record.__struct_encode_fields__, strict=True))
    return {stored[name]: msgspec.to_builtins(getattr(record, name)) for name in facts}
