"""Resources: the cores and the GPUs of a machine, as a run states them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from dpbench.records.case import Case
from dpbench.records.environment import Environment
from dpbench.records.facts import Surroundings
from dpbench.records.trial import Trial


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The cores that a run may use, the name of its GPUs, and the memory of each in bytes.

    Unknown numbers are 0, and the name of unknown GPUs is "a GPU". `gil` is whether Python has its
    interpreter lock.

    `described` is the name or the file of the machine for which a run is predicted; it is empty for
    a machine that is measured.
    """

    described: str = ""
    cores: int = 0
    gpu_memory_bytes: tuple[int, ...] = ()
    gpu: str = "a GPU"
    gil: bool = True

    @property
    def device_kind(self) -> str:
        """Return the kind of devices that a run on this machine uses by default."""
        return "cuda" if self.gpu_memory_bytes else "cpu"

    def with_gpus(self, count: int) -> str:
        """Return a line that describes a machine with `count` such GPUs, for a prediction."""
        return f"{count}x {self.gpu}" if self.gil else f"{count}x {self.gpu}, no GIL"

    def memory_of(self, case: Case, device: int) -> int:
        """Return the memory in bytes of the GPU that `case` uses as `device`; 0 if unknown."""
        gpu = case.gpu(device)
        local = case.device_kind == "cuda" and case.hosts == 1
        return self.gpu_memory_bytes[gpu] if local and gpu < len(self.gpu_memory_bytes) else 0

    @classmethod
    def of(cls, facts: Surroundings, trials: Sequence[Trial] = ()) -> Self:
        """Return the resources that a run states, and whether its workers had the lock."""
        gpus = facts.gpus.gpus or ()
        return cls(
            cores=facts.host.cores or 0,
            gpu_memory_bytes=tuple(gpu.memory_bytes or 0 for gpu in gpus),
            gpu=next((gpu.name for gpu in gpus if gpu.name), cls.gpu),
            gil=Environment.of(facts, trials).gil != "off",
        )
