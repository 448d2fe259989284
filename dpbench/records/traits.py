"""Traits: the properties of a strategy that plans, predictions and reports depend on, instead of on its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self


class Role(StrEnum):
    """The role of a strategy in comparisons, in the order in which reports show the strategies.

    At most one strategy of dpbench has each of the first five roles.
    """

    BASELINE = "baseline"
    """One device without a wrapper: speed-ups are relative to it."""
    ALL_CORES = "all cores"
    """One CPU device that uses all cores: the gain without data parallelism."""
    WRAPPER = "wrapper"
    """torch.nn.DataParallel itself."""
    ENGINE = "engine"
    """dpbench's engine, which runs on a schedule."""
    CONTROL = "control"
    """DistributedDataParallel: its ranks do equal work, so differences between its devices are due to the machine."""
    OTHER = "other"


class Parallelism(StrEnum):
    """How a strategy uses several devices."""

    NONE = "none"
    THREADS = "threads"
    """One process runs all devices, and device 0 coordinates them."""
    RANKS = "ranks"
    """Each device has a separate process, which is a rank of one process group."""


class Reduction(StrEnum):
    """How the time of adding the gradients appears in a trial's spans."""

    SEPARATE = "separate"
    """The phase reduce contains all of it."""
    IN_BACKWARD = "in backward"
    """The phase backward contains all of it."""
    OVERLAPPED = "overlapped"
    """It runs during backward; the phase reduce contains the rest that backward does not cover."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The traits of one strategy. `strategy` is its name in cases, which the registry sets."""

    parallelism: Parallelism = Parallelism.THREADS
    reduction: Reduction = Reduction.SEPARATE
    role: Role = Role.OTHER
    needs_accelerator: bool = False
    shared_stream: bool = False
    """Whether replicas that share a GPU also share its stream."""
    strategy: str = ""

    @property
    def one_device(self) -> bool:
        """Return whether the strategy uses one device, whatever the number of devices in a sweep."""
        return self.parallelism is Parallelism.NONE

    @property
    def ranks(self) -> bool:
        """Return whether each device has a separate process."""
        return self.parallelism is Parallelism.RANKS

    @property
    def threads(self) -> bool:
        """Return whether one process runs all devices."""
        return self.parallelism is Parallelism.THREADS

    @property
    def all_cores(self) -> bool:
        """Return whether one operator uses all cores of the CPU, instead of one core per device."""
        return self.role is Role.ALL_CORES

    @property
    def scheduled(self) -> bool:
        """Return whether the strategy runs on one of the engine's schedules."""
        return self.role is Role.ENGINE

    @property
    def alone(self) -> bool:
        """Return whether the strategy must be measured in a separate worker, without other cases."""
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
