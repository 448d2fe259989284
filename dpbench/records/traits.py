"""Traits: the facts about a strategy that plans, predictions and reports depend on, whatever the strategy's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self


class Role(StrEnum):
    """The part that a strategy has in comparisons, in the order in which reports show them.

    At most one strategy of dpbench has each of the first five roles.
    """

    BASELINE = "baseline"
    """One device without a wrapper: speed-ups are relative to it."""
    ALL_CORES = "all cores"
    """One CPU device that uses every core: the gain without data parallelism."""
    WRAPPER = "wrapper"
    """torch.nn.DataParallel itself."""
    ENGINE = "engine"
    """dpbench's engine, which runs on a schedule."""
    CONTROL = "control"
    """DistributedDataParallel: its ranks do equal work, so that differences between its devices are the machine's."""
    OTHER = "other"


class Parallelism(StrEnum):
    """How a strategy uses several devices."""

    NONE = "none"
    THREADS = "threads"
    """One process drives all devices, and device 0 leads."""
    RANKS = "ranks"
    """Each device has a process of its own: a rank of one process group."""


class Reduction(StrEnum):
    """How the time of adding the gradients shows in a trial's spans."""

    SEPARATE = "separate"
    """The phase reduce holds all of it."""
    IN_BACKWARD = "in backward"
    """The phase backward contains all of it."""
    OVERLAPPED = "overlapped"
    """It runs during backward; the phase reduce holds the rest that backward does not cover."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The traits of one strategy. `strategy` is the name that cases call it by; the registry sets it."""

    parallelism: Parallelism = Parallelism.THREADS
    reduction: Reduction = Reduction.SEPARATE
    role: Role = Role.OTHER
    needs_accelerator: bool = False
    shared_stream: bool = False
    """Whether replicas that share a GPU also share its stream."""
    strategy: str = ""

    @property
    def one_device(self) -> bool:
        """Return whether the strategy uses one device, whatever number a sweep asks for."""
        return self.parallelism is Parallelism.NONE

    @property
    def ranks(self) -> bool:
        """Return whether each device has a process."""
        return self.parallelism is Parallelism.RANKS

    @property
    def threads(self) -> bool:
        """Return whether one process drives all devices."""
        return self.parallelism is Parallelism.THREADS

    @property
    def all_cores(self) -> bool:
        """Return whether an operator uses all cores of the CPU, instead of one for each device."""
        return self.role is Role.ALL_CORES

    @property
    def scheduled(self) -> bool:
        """Return whether the strategy runs on one of the engine's schedules."""
        return self.role is Role.ENGINE

    @property
    def alone(self) -> bool:
        """Return whether the strategy needs a worker that measures no other case."""
        return self.ranks or self.all_cores

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the traits that `to_dict` wrote."""
        enums = {
            "parallelism": Parallelism(data["parallelism"]), "reduction": Reduction(data["reduction"]),
            "role": Role(data["role"]),
        }  # fmt: skip
        return cls(**{**data, **enums})
