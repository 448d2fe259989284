"""Load: what other processes used of the cores and of the GPUs during a period.

`hardware.foreign_load` measures it, and `disturbance` judges it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dpbench.records import words

LIMIT = 0.10
"""The fraction of the cores' capacity, or of a GPU's time, that others may take.

Above it, a measurement is NOISY. For the cores, `disturbance.tolerated` may be less or more.
"""
TICK_S = 0.01
"""The duration of a tick, in which the kernel of Linux counts CPU time."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The fractions, from 0 to 1, of the cores' time that others took during a period.

    Other processes used `foreign`, and a hypervisor gave `steal` to other virtual machines. `cores`
    is the number of cores, and `seconds` the duration of the period.
    """

    foreign: float
    steal: float
    cores: int
    seconds: float

    @property
    def taken(self) -> float:
        """Return the sum of `foreign` and `steal`."""
        return self.foreign + self.steal

    def __str__(self) -> str:
        steal = f" and other virtual machines {self.steal:.0%}" if self.steal >= 0.005 else ""
        return (
            f"other processes took {self.foreign:.0%}{steal} of {words.count(self.cores, 'core')}"
        )


@dataclass(frozen=True)
class UnknownLoad:
    """A load of the cores that could not be measured; `unknown` is the reason."""

    unknown: str

    def __str__(self) -> str:
        return f"the load of other processes is unknown: {self.unknown}"


OfCores = Load | UnknownLoad


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """Another process on a GPU: the share of the time that it uses, and the bytes that it holds.

    Both are None if unknown.
    """

    pid: int
    share: float | None
    memory_bytes: int | None

    def __str__(self) -> str:
        return f"pid {self.pid}" + _holding(self.memory_bytes)


@dataclass(frozen=True, kw_only=True)
class GpuLoad:
    """What other processes used of the GPU with the CUDA ordinal `gpu`.

    `share` is the share of the time in which their kernels ran, and `memory_bytes` the memory that
    they hold; None if unknown. `processes` is empty where NVML lists none, as in a container.
    """

    gpu: int
    share: float | None
    memory_bytes: int | None
    processes: tuple[GpuProcess, ...]

    @property
    def busy(self) -> bool:
        """Return whether the share is known, and above `LIMIT`."""
        return self.share is not None and self.share > LIMIT

    def __str__(self) -> str:
        """Return who uses how much, as in "GPU 1: pid 4242 uses 62%, 10.3 GiB"."""
        return f"GPU {self.gpu}: {', '.join(self._uses())}"

    def _uses(self) -> Iterator[str]:
        apart = [one for one in self.processes if one.share is not None]
        for one in apart:
            yield f"pid {one.pid} uses {one.share:.0%}" + _holding(one.memory_bytes)
        if apart or self.share is None:
            return
        who = " and ".join(map(str, self.processes))
        memory = "" if self.processes else _holding(self.memory_bytes)
        yield f"{who or 'other processes'} use {self.share:.0%}{memory}"


def _holding(size: int | None) -> str:
    return "" if size is None else f", {words.size(size)}"


@dataclass(frozen=True)
class Measured:
    """What others used of the cores and, where these were measured, of the GPUs."""

    cores: OfCores
    gpus: tuple[GpuLoad, ...] = ()
