"""Resources: the cores and the GPUs of a machine, as a run states them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from dpbench.records.case import Case
from dpbench.records.facts import Surroundings


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The cores that a run may use, the name of its GPUs, and the memory of each in bytes.

    Unknown numbers are 0, and the name of unknown GPUs is "a GPU".

    `described` is the name or the file of the machine for which a run is predicted; it is empty for
    a machine that is measured.
    """

    described: str = ""
    cores: int = 0
    gpu_memory_bytes: tuple[int, ...] = ()
    gpu: str = "a GPU"

    @property
    def device_kind(self) -> str:
        """Return the kind of devices that a run on this machine uses by default."""
        return "cuda" if self.gpu_memory_bytes else "cpu"

    def memory_of(self, case: Case, device: int) -> int:
        """Return the memory in bytes of the GPU that `case` uses as `device`; 0 if unknown."""
        gpu = case.gpu(device)
        local = case.device_kind == "cuda" and case.hosts == 1
        return self.gpu_memory_bytes[gpu] if local and gpu < len(self.gpu_memory_bytes) else 0

    @classmethod
    def of(cls, facts: Surroundings) -> Self:
        """Return the resources that a run states."""
        gpus = facts.gpus.gpus or ()
        return cls(
            cores=facts.host.cores or 0,
            gpu_memory_bytes=tuple(gpu.memory_bytes or 0 for gpu in gpus),
            gpu=next((gpu.name for gpu in gpus if gpu.name), cls.gpu),
        )
