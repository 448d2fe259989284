"""A simulated machine: its GPUs and links on a timeline, its PCI order, and NVML's counters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.simulated.timeline import Gpu, Stream, Timeline

MAX_CLOCK_MHZ = 2000
THERMAL = 0x20
"""The bit of NVML's clock event reasons for a software thermal slowdown."""


@dataclass(frozen=True)
class Rates:
    """The speeds of a normal GPU in flop/s and bytes/s, and of links in bytes/s and seconds."""

    flops: float = 1e9
    memory: float = 1e9
    host: float = 2e8
    link: float = 4e8
    latency_s: float = 10e-6
    kernel_s: float = 3e-6


class Machine:
    """A machine with GPUs, whose CUDA numbers are their positions in `gpus`.

    `slow_links` maps pairs of CUDA numbers, of which -1 is the host, to the fraction of the normal
    bandwidth in both directions, or in the direction from the first to the second if it also has
    the reversed pair. `pci` has the CUDA numbers in PCI order, which by default is the reverse of
    CUDA's order. `lag_s` is the sampling period of the driver's counters: NVML returns the averages
    of the last complete period. `profiled` has the true start and end of each profiled step.
    """

    def __init__(
        self,
        gpus: list[Gpu],
        *,
        rates: Rates | None = None,
        call_s: float = 5e-6,
        slow_links: dict[tuple[int, int], float] | None = None,
        pci: list[int] | None = None,
        lag_s: float = 0.02,
    ) -> None:
        self.timeline = Timeline(gpus, call_s)
        self.rates, self.lag_s = rates or Rates(), lag_s
        self._slow_links = slow_links or {}
        self.pci = pci or [gpu.index for gpu in reversed(gpus)]
        self.streams = [Stream(gpu.index) for gpu in gpus]
        self.profiled: list[tuple[float, float]] = []

    def link_s(self, source: int, target: int, size: int) -> float:
        """Return the seconds for a copy of `size` bytes from one GPU to another."""
        rate = self.rates.link * self._slow_links.get(
            (source, target), self._slow_links.get((target, source), 1.0)
        )
        return self.rates.latency_s + size / rate

    def host_s(self, device: int, size: int) -> float:
        """Return the seconds for a copy of `size` bytes between the host and a GPU."""
        return self.rates.latency_s + size / (
            self.rates.host * self._slow_links.get((-1, device), 1.0)
        )

    def ring_s(self, devices: list[int], size: int) -> float:
        """Return the slowest link's seconds when each device sends `size` bytes to the next."""
        pairs = zip(devices, [*devices[1:], devices[0]], strict=True)
        return max(self.link_s(source, target, size) for source, target in pairs)

    def busy_s(
        self, device: int, start_s: float, end_s: float, kinds: tuple[str, ...] = ("compute",)
    ) -> float:
        """Return the true seconds between two times in which a device does work of `kinds`."""
        done, seconds = start_s, 0.0
        mine = [
            w
            for w in self.timeline.work
            if w.device == device and w.kind in kinds and w.end_s > start_s
        ]
        for work in sorted(mine, key=lambda one: one.start_s):
            seconds += max(0.0, min(work.end_s, end_s) - max(work.start_s, done))
            done = max(done, min(work.end_s, end_s))
        return seconds


class NvmlError(Exception):
    """An error of NVML, whose number is `value`, as in pynvml."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclass
class Nvml:
    """The functions of pynvml that dpbench calls, over a machine at the true time `at_s`.

    Handles are CUDA numbers.
    """

    machine: Machine
    at_s: float
    NVMLError: Any = field(default=NvmlError)

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.machine.pci)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return self.machine.pci[index]

    def nvmlDeviceGetUUID(self, gpu: int) -> str:
        return f"GPU-{gpu:08x}"

    def nvmlDeviceGetName(self, gpu: int) -> str:
        return "Simulated GPU"

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(total=1 << 34, used=(gpu + 1) << 30)

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> SimpleNamespace:
        start_s, end_s = self._period()
        kinds = (
            "compute",
            "collective",
        )  # "percent of time during which one or more kernels was executing"
        return SimpleNamespace(
            gpu=round(100 * self.machine.busy_s(gpu, start_s, end_s, kinds) / (end_s - start_s))
        )

    def nvmlDeviceGetClockInfo(self, gpu: int, kind: int) -> int:
        return round(MAX_CLOCK_MHZ * self._clocked(gpu))

    def nvmlDeviceGetMaxClockInfo(self, gpu: int, kind: int) -> int:
        return MAX_CLOCK_MHZ

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: int) -> int:
        return THERMAL if self._clocked(gpu) < 1 else 0

    def nvmlDeviceGetTemperature(self, gpu: int, sensor: int) -> int:
        return 60 + gpu

    def __getattr__(self, name: str) -> Any:
        def missing(*arguments: Any) -> Any:
            raise NvmlError(3)  # not supported

        return missing

    def _clocked(self, gpu: int) -> float:
        """Return the clock as a fraction of the GPU's own clock.

        A slow model of GPU is not throttled.
        """
        one = self.machine.timeline.gpus[gpu]
        return one.speed(self._period()[1]) / one.speeds[0][1]

    def _period(self) -> tuple[float, float]:
        """Return the true start and end of the last complete sampling period."""
        end_s = math.floor(self.at_s / self.machine.lag_s) * self.machine.lag_s
        return end_s - self.machine.lag_s, end_s
