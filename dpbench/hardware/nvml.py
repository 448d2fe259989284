"""What the GPUs that CUDA would see report about themselves, through NVIDIA's management library.

1. The only place that imports pynvml, and only when asked; never torch, and it makes no CUDA context.
2. No library, no driver, no GPU, a counter that this GPU lacks: absent, never an error and never a zero.
3. All calls go through one object, the module pynvml or whatever has its functions: the tests' seam.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)

Library = Any  # pynvml has no type information; a protocol of its forty functions would only repeat its names
Handle = Any  # what NVML calls a device, opaque to us
Reader = Callable[[Library, Handle], float]

# Numbers of NVML's C interface, which never change
_CLOCK_SM, _CLOCK_MEMORY, _TEMPERATURE_GPU, _PCIE_TX, _PCIE_RX = 1, 2, 0, 0, 1
# invalid argument, not supported, no permission, function not found, version mismatch, deprecated
_NEVER = frozenset((2, 3, 4, 13, 25, 26))

# Per metric the calls that give it: the name that every driver has, then the one that is to replace it.
_FAST: dict[str, tuple[Reader, ...]] = {
    # the driver averages over 1/6 s to 1 s
    "utilization_ratio": (lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,),
    # the first version of the call, which every driver has: includes what the driver reserves for itself
    "memory_used_bytes": (lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,),
    # Ampere (GA100 apart) and newer report the average of the last second: prefer energy_j over short windows
    "power_w": (lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,),
    "energy_j": (lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3,),
    "sm_clock_hz": (lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, _CLOCK_SM) * 1e6,),
    "memory_clock_hz": (lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, _CLOCK_MEMORY) * 1e6,),
    "temperature_c": (
        lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, _TEMPERATURE_GPU),
        lambda nvml, gpu: nvml.nvmlDeviceGetTemperatureV(gpu, _TEMPERATURE_GPU),
    ),
    "throttle_reasons": (
        lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
        lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu),
    ),
}
# NVML gives KB/s over the 20 ms for which each call blocks; KB is taken as 1000 bytes
_SLOW: dict[str, tuple[Reader, ...]] = {
    "pcie_rx_bytes_per_s": (lambda nvml, gpu: nvml.nvmlDeviceGetPcieThroughput(gpu, _PCIE_RX) * 1e3,),
    "pcie_tx_bytes_per_s": (lambda nvml, gpu: nvml.nvmlDeviceGetPcieThroughput(gpu, _PCIE_TX) * 1e3,),
}
# What does not change during a run; of the PCIe link what GPU and slot can do, not what they do when idle
_FACTS: dict[str, Reader] = {
    "power_limit_w": lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,
    "max_sm_clock_hz": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, _CLOCK_SM) * 1e6,
    "max_memory_clock_hz": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, _CLOCK_MEMORY) * 1e6,
    "pcie_generation": lambda nvml, gpu: nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu),
    "pcie_width": lambda nvml, gpu: nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu),
}
_READERS = {**_FAST, **_SLOW}
FAST_METRICS = tuple(_FAST)  # these answer at once
SLOW_METRICS = tuple(_SLOW)  # these block for about 20 ms a call


@dataclass(frozen=True, eq=False, kw_only=True)
class NvmlGpu:
    """One GPU that CUDA would see; `index` is its CUDA ordinal."""

    index: int
    uuid: str
    name: str
    memory_bytes: int | None
    library: Library = field(repr=False)
    handle: Handle = field(repr=False)
    answers: dict[Any, bool] = field(default_factory=dict, repr=False)

    def read(self, metric: str) -> float | None:
        """Read one counter now; None where this GPU, driver or moment does not give it."""
        for reader in _READERS[metric]:
            value = self._ask(reader)
            if value is not None:
                return float(value)
        return None

    def process_memory_bytes(self, pids: Collection[int]) -> float | None:
        """Sum what these hold here; None if NVML lists none of them (in a container it lists the host's)."""
        used = [size for pid, size in self._held() if pid in pids]
        return float(sum(used)) if used else None

    def foreign_memory_bytes(self, pids: Collection[int]) -> float | None:
        """Sum what all others hold here; None if NVML lists none of these, for then its numbers are not ours."""
        held = self._held()
        known = any(pid in pids for pid, _ in held)
        return float(sum(size for pid, size in held if pid not in pids)) if known else None

    def _held(self) -> list[tuple[int, int]]:
        """Return the processes that compute here, and the bytes that each holds."""
        return [(p.pid, p.usedGpuMemory) for p in self._ask(_processes) or () if p.usedGpuMemory is not None]

    def describe(self) -> dict[str, Any]:
        """Return the facts that belong to a measurement's provenance; those unknown are left out."""
        facts = {"index": self.index, "name": self.name, "uuid": self.uuid, "memory_bytes": self.memory_bytes}
        facts.update((fact, self._ask(reader)) for fact, reader in _FACTS.items())
        return _known(facts)

    def _ask(self, reader: Callable[[Library, Handle], Any]) -> Any:
        """Call `reader` unless it is known to be missing; errors are None."""
        if self.answers.get(reader) is False:
            return None
        try:
            value = reader(self.library, self.handle)
        except AttributeError:  # this pynvml does not have the call
            self.answers[reader] = False
        except self.library.NVMLError as error:
            # one that has answered before may refuse a reading when polled fast: it is asked again
            if error.value in _NEVER:
                self.answers.setdefault(reader, False)
        else:
            self.answers[reader] = True
            return value
        return None


@dataclass(frozen=True, kw_only=True)
class Nvml:
    """An open NVML: `gpus` are those CUDA would see, `physical_gpus` counts all that the driver has."""

    gpus: tuple[NvmlGpu, ...]
    physical_gpus: int
    library: Library = field(repr=False)


@contextmanager
def open_nvml(library: Library = None, environ: Mapping[str, str] = os.environ) -> Iterator[Nvml | None]:
    """Open NVML for the length of a `with`; None where there is no library, no driver or no GPU."""
    library = library or _import_library()
    if not library or not _tell(library, lambda: library.nvmlInit() or True):
        yield None
        return
    try:
        physical = _physical(library)
        handles = _visible_handles(library, physical, environ.get("CUDA_VISIBLE_DEVICES"))
        gpus = tuple(_gpu(library, handle, index) for index, handle in enumerate(handles))
        yield Nvml(gpus=gpus, physical_gpus=len(physical), library=library) if physical else None
    finally:
        _tell(library, library.nvmlShutdown)


def describe(library: Library = None) -> dict[str, Any]:
    """Return driver and GPUs for provenance; `physical_gpus` is 0 where NVML knows of none."""
    with open_nvml(library) as nvml:
        if nvml is None:
            return {"physical_gpus": 0, "gpus": []}
        cuda = _tell(nvml.library, nvml.library.nvmlSystemGetCudaDriverVersion)
        driver = _tell(nvml.library, nvml.library.nvmlSystemGetDriverVersion)
        versions = {"driver": driver, "cuda_driver": cuda and f"{cuda // 1000}.{cuda % 1000 // 10}"}
        gpus = [gpu.describe() for gpu in nvml.gpus]
        return {**_known(versions), "physical_gpus": nvml.physical_gpus, "gpus": gpus}


def cuda_device_count(library: Library = None) -> int:
    """Count the GPUs that CUDA would see, without CUDA; 0 without NVML."""
    with open_nvml(library) as nvml:
        return 0 if nvml is None else len(nvml.gpus)


def cuda_visible(visible: str | None, uuids: Sequence[str]) -> tuple[int, ...]:
    """Return the positions in `uuids` that CUDA would show, in its order, for a CUDA_VISIBLE_DEVICES.

    As CUDA and torch read it: the first entry decides between numbers and UUIDs; of a number the leading
    digits count; a UUID may be cut short while it stays unique; an unknown entry ends the list; a repeated
    one empties it.
    """
    if visible is None:
        return tuple(range(len(uuids)))
    entries = [entry.strip() for entry in visible.split(",")]
    by_uuid = entries[0].startswith("GPU-")
    chosen: list[int] = []
    for entry in entries:
        if by_uuid:
            matches = [i for i, uuid in enumerate(uuids) if entry[:4] == "GPU-" and uuid.startswith(entry)]
        else:
            digits = re.match(r"\+?([0-9]+)", entry)
            matches = [int(digits[1])] if digits and int(digits[1]) < len(uuids) else []
        if len(matches) != 1:
            break
        if matches[0] in chosen:
            return ()
        chosen += matches
    return tuple(chosen)


def _visible_handles(library: Library, physical: dict[str, Handle], visible: str | None) -> list[Handle]:
    """Return the handles that CUDA would number 0, 1, ...

    Numbers are taken in PCI order, which is NVML's. CUDA's default, CUDA_DEVICE_ORDER=FASTEST_FIRST, cannot
    be known from here; with identical GPUs it is the same order.
    """
    if visible is not None and visible.strip().startswith("MIG-"):
        # CUDA shows a process one MIG instance, the first that is named; NVML may not know the older names
        instance = _tell(library, library.nvmlDeviceGetHandleByUUID, visible.split(",")[0].strip())
        return [] if instance is None else [instance]
    handles = list(physical.values())
    return [handles[position] for position in cuda_visible(visible, list(physical))]


def _physical(library: Library) -> dict[str, Handle]:
    """Map UUID to handle for all GPUs in PCI order; one that fell off the bus is left out."""
    found = {}
    for index in range(_tell(library, library.nvmlDeviceGetCount) or 0):
        handle = _tell(library, library.nvmlDeviceGetHandleByIndex, index)
        uuid = None if handle is None else _tell(library, library.nvmlDeviceGetUUID, handle)
        if uuid is not None:
            found[uuid] = handle
    return found


def _gpu(library: Library, handle: Handle, index: int) -> NvmlGpu:
    """Read what names a GPU; a MIG instance may not tell everything."""
    uuid = _tell(library, library.nvmlDeviceGetUUID, handle) or ""
    name = _tell(library, library.nvmlDeviceGetName, handle) or ""
    memory = getattr(_tell(library, library.nvmlDeviceGetMemoryInfo, handle), "total", None)
    return NvmlGpu(index=index, uuid=uuid, name=name, memory_bytes=memory, library=library, handle=handle)


def _tell(library: Library, call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call answers; None if it fails."""
    try:
        return call(*arguments)
    except library.NVMLError as error:  # of nvmlInit: most often an ordinary machine without a driver
        log.info("no answer from NVML: %s", error)
        return None


def _known(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}


def _processes(library: Library, handle: Handle) -> Any:
    # by version, because on older drivers the bare name raises what is no NVMLError
    return library.nvmlDeviceGetComputeRunningProcesses_v3(handle)


def _import_library() -> Library | None:
    """Import pynvml; None if it is not there or not NVIDIA's own."""
    try:
        import pynvml
    except ImportError:
        log.warning("no GPU counters: the package nvidia-ml-py is not installed")
        return None
    if not hasattr(pynvml, "_nvmlGetFunctionPointer"):  # the older package of that name does not export it
        log.warning("no GPU counters: %s is not NVIDIA's: remove pynvml, install nvidia-ml-py", pynvml)
        return None
    return pynvml
