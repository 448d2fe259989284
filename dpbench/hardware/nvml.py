"""NVML: counters and facts of the GPUs that are visible to CUDA, from NVIDIA's library.

1. Only this module imports pynvml, and only when a function needs it. It never imports torch or
creates a CUDA context.
2. If the library, the driver, the GPU or a counter is missing, or its answer cannot be read, the
value is None or left out, never zero, and no error is raised: see `readings`.
3. All calls use one object, the module pynvml or a substitute, so that tests can replace it.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dpbench.hardware import torch_build
from dpbench.hardware.readings import number, reading, text, truth, whole
from dpbench.records.errors import UnknownName
from dpbench.records.facts import Gpu

log = logging.getLogger(__name__)

# pynvml has no type information, and a protocol of its forty functions would only repeat their
# names
Library = Any
Handle = Any  # NVML's handle of a device, opaque here
Reader = Callable[[Library, Handle], float]
Form = Callable[[Any], Any]
"""A function that returns an answer in the form to use, or raises an error for a wrong answer."""

ORDER, PCI_ORDER, FASTEST_FIRST = "CUDA_DEVICE_ORDER", "PCI_BUS_ID", "FASTEST_FIRST"
"""The environment variable for the order of CUDA's GPU numbers, NVML's order, and the default."""

# Constants of NVML's C interface, which never change
_CLOCK_SM, _CLOCK_MEMORY, _TEMPERATURE_GPU = 1, 2, 0
_UTILIZATION_SAMPLES = 1
_COMPUTE_MODES = ("default", "exclusive thread", "prohibited", "exclusive process")
# Errors after which a call is not repeated: invalid argument, not supported, no permission,
# function not found, version mismatch, deprecated
_NEVER = frozenset((2, 3, 4, 13, 25, 26))

# The calls for each metric: first the name that every driver has, then the name that replaces it.
_SAMPLED: dict[str, tuple[Reader, ...]] = {
    # the driver averages over 1/6 s to 1 s
    "utilization_ratio": (lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,),
    # the first version of the call, which every driver has; includes the memory that the driver
    # reserves
    "memory_used_bytes": (lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,),
    # Ampere (except GA100) and newer report the average of the last second: prefer energy_j for
    # short windows
    "power_w": (lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,),
    "energy_j": (lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3,),
    "power_limit_w": (lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,),
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
# The field with the rate of one link and direction of NVLink, in MB/s
_NVLINK_SPEED = 90
_NVLINK_SWITCH = 2
SWITCH = "switch"
"""The other end of an NVLink that goes to an NVSwitch."""
_NVLINK_RATES = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 6: 25e9, 7: 50e9}
"""The bytes per second of a link and direction by NVML's NVML_NVLINK_VERSION: 1.0, 2.0, 2.2, 3.0,
4.0 and 5.0. Some cards run their links slower, so that the driver's field comes first. The rate of
version 3.1 is unknown: cards such as RTX 3090 and A6000, whose version it may be, have 14 GB/s."""
_UNCORRECTED, _SINCE_START = 1, 0
# Facts about the state of a GPU when a run starts. An idle GPU lowers its clocks and its PCIe link:
# `pcie_generation` and `pcie_width` are the highest that GPU and slot support, `*_now` the present.
_FACTS: dict[str, tuple[Form, Callable[[Library, Handle], Any]]] = {
    "power_limit_w": (number, _SAMPLED["power_limit_w"][0]),
    "default_power_limit_w": (
        number,
        lambda nvml, gpu: nvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu) / 1e3,
    ),
    "sm_clock_hz": (number, _SAMPLED["sm_clock_hz"][0]),
    "memory_clock_hz": (number, _SAMPLED["memory_clock_hz"][0]),
    "application_sm_clock_hz": (
        number,
        lambda nvml, gpu: nvml.nvmlDeviceGetApplicationsClock(gpu, _CLOCK_SM) * 1e6,
    ),
    "application_memory_clock_hz": (
        number,
        lambda nvml, gpu: nvml.nvmlDeviceGetApplicationsClock(gpu, _CLOCK_MEMORY) * 1e6,
    ),
    "max_sm_clock_hz": (
        number,
        lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, _CLOCK_SM) * 1e6,
    ),
    "max_memory_clock_hz": (
        number,
        lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, _CLOCK_MEMORY) * 1e6,
    ),
    "pcie_generation": (whole, lambda nvml, gpu: nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu)),
    "pcie_width": (whole, lambda nvml, gpu: nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)),
    "pcie_generation_now": (
        whole,
        lambda nvml, gpu: nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
    ),
    "pcie_width_now": (whole, lambda nvml, gpu: nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu)),
    "pci_address": (text, lambda nvml, gpu: _address(nvml.nvmlDeviceGetPciInfo(gpu).busId)),
    "ecc": (truth, lambda nvml, gpu: nvml.nvmlDeviceGetEccMode(gpu)[0]),
    "ecc_errors": (
        whole,
        lambda nvml, gpu: nvml.nvmlDeviceGetTotalEccErrors(gpu, _UNCORRECTED, _SINCE_START),
    ),
    "mig": (truth, lambda nvml, gpu: nvml.nvmlDeviceGetMigMode(gpu)[0]),
    "persistence_mode": (truth, lambda nvml, gpu: nvml.nvmlDeviceGetPersistenceMode(gpu)),
    "compute_mode": (
        text,
        lambda nvml, gpu: _COMPUTE_MODES[nvml.nvmlDeviceGetComputeMode(gpu)],
    ),
}
"""The form and the call of each fact; a field of `records.facts.Gpu` has the type of its form."""
_MOST_NVLINKS = 36
"""The largest number of NVLink links of a GPU, NVML's NVML_NVLINK_MAX_LINKS."""
_MOST_GPUS = 1024
"""More GPUs than a machine has: such a number is a wrong answer."""
METRICS = tuple(_SAMPLED)
"""The counters that a run samples; all their calls return at once."""


def _as_is(answer: Any) -> Any:
    return answer


@dataclass(frozen=True, eq=False, kw_only=True)
class NvmlGpu:
    """A GPU that is visible to CUDA; `index` is its CUDA ordinal.

    `uuid` is empty if unknown. `name` and `memory_bytes`, the size of its memory, are None if
    unknown. `answers` records for each call whether the GPU supports it.
    """

    index: int
    uuid: str
    name: str | None
    memory_bytes: int | None
    library: Library = field(repr=False)
    handle: Handle = field(repr=False)
    answers: dict[Any, bool] = field(default_factory=dict, repr=False)

    def read(self, metric: str) -> float | None:
        """Return the present value of a counter or of a fact in numbers; None if it is unknown."""
        for reader in _SAMPLED.get(metric) or (_FACTS[metric][1],):
            value = self._ask(metric, reader, form=number)
            if value is not None:
                return value  # type: ignore[no-any-return]
        return None

    def foreign_memory_bytes(self, pids: Collection[int]) -> float | None:
        """Return the memory of this GPU that processes other than `pids` use, in bytes.

        Return None if NVML lists none of `pids`, because its process ids then belong to another
        namespace.
        """
        held = {pid: size for pid, size in self.processes().items() if size is not None}
        known = not held.keys().isdisjoint(pids)
        return float(sum(size for pid, size in held.items() if pid not in pids)) if known else None

    def processes(self) -> dict[int, int | None]:
        """Return the bytes of this GPU's memory of each compute process, None if unknown, by id."""
        return self._ask("the list of processes", _processes) or {}

    def utilization_samples(self, since_s: float) -> list[tuple[float, float]]:
        """Return the driver's buffered utilisation since `since_s`, in seconds since the epoch.

        Each pair has a time, and the fraction of the time since the previous sample in which a
        kernel ran. The list is empty if the driver has no buffer, or no sample since then.
        """
        found = self._ask("buffered utilisation", _utilization_samples, int(since_s * 1e6))
        return [(at_s, ratio) for at_s, ratio in found or () if at_s > since_s]

    def process_utilization(self, since_s: float) -> dict[int, float]:
        """Return the mean share of the GPU that each process has used since `since_s`, by id.

        `since_s` is in seconds since the epoch. The dict is empty if the driver does not report it.
        """
        shares: dict[int, list[float]] = {}
        found = self._ask("the use by processes", _process_utilization, int(since_s * 1e6))
        for at_s, pid, share in found or ():
            if at_s > since_s:
                shares.setdefault(pid, []).append(share)
        return {pid: sum(each) / len(each) for pid, each in shares.items()}

    def describe(self) -> dict[str, Any]:
        """Return the known facts about this GPU by name."""
        facts: dict[str, Any] = {
            "index": self.index,
            "name": self.name,
            "uuid": self.uuid,
            "memory_bytes": self.memory_bytes,
        }
        for name, (form, reader) in _FACTS.items():
            facts[name] = self._ask(name, reader, form=form)
        facts["nvlinks"] = self._nvlinks()
        return _known(facts)

    def _nvlinks(self) -> dict[str, Any] | None:
        """Return facts about the NVLink links; None without any link.

        They are the numbers of `active` and `inactive` links, the number of active links by their
        other end (a PCIe address or `SWITCH`), and the bytes per second that an active link
        carries each way; the last two only if known.
        """
        states: dict[int, bool] = {}
        for link in range(_MOST_NVLINKS):
            state = self._of_link("nvmlDeviceGetNvLinkState", link, truth)
            if state is not None:
                states[link] = state
        if not states:
            return None
        active = [link for link, up in states.items() if up]
        ends = Counter(end for link in active if (end := self._other_end(link)))
        return _known(
            {
                "active": len(active),
                "inactive": len(states) - len(active),
                "ends": dict(ends) or None,
                "bytes_per_s": self._link_rate(active[0]) if active else None,
            }
        )

    def _of_link(self, call: str, link: int, form: Form = whole) -> Any:
        """Return what NVML says about a link; None if unknown.

        An error for one link, such as one that this GPU lacks, says nothing about the others.
        """
        return _tell(self.library, call, self.handle, link, form=form)

    def _other_end(self, link: int) -> str:
        """Return "switch", or the PCIe address of the GPU at the other end; "" if unknown."""
        if self._of_link("nvmlDeviceGetNvLinkRemoteDeviceType", link) == _NVLINK_SWITCH:
            return SWITCH
        return self._of_link("nvmlDeviceGetNvLinkRemotePciInfo", link, _bus_address) or ""

    def _link_rate(self, link: int) -> float | None:
        """Return the bytes per second that an active link carries each way, None if unknown."""
        # the field has 32 bits; the others of its union have no meaning
        if megabytes := (self._ask("NVLink rate", _nvlink_speed) or 0) & 0xFFFFFFFF:
            return megabytes * 1e6
        return _NVLINK_RATES.get(self._of_link("nvmlDeviceGetNvLinkVersion", link))

    def _ask(
        self, name: str, reader: Callable[..., Any], *arguments: Any, form: Form = _as_is
    ) -> Any:
        """Return the answer in the given form; None if unknown. Unsupported calls are not repeated.

        `name` says in the log what was asked.
        """

        def ask() -> Any:
            try:
                answer = reader(self.library, self.handle, *arguments)
            except self.library.NVMLError as error:
                # a call that has succeeded may fail when it is repeated quickly: keep calling it
                if error.value in _NEVER:
                    self.answers.setdefault(reader, False)
                raise
            except AttributeError as error:
                if error.obj is not self.library:
                    raise
                self.answers[reader] = False  # this pynvml does not have the call
                return None
            self.answers[reader] = True
            return form(answer)

        if self.answers.get(reader) is False:
            return None
        return reading(f"NVML's {name}", ask, absent=self.library.NVMLError)


@dataclass(frozen=True, kw_only=True)
class Nvml:
    """An open NVML session: the GPUs that are visible to CUDA, and the number of all GPUs."""

    gpus: tuple[NvmlGpu, ...]
    physical_gpus: int
    library: Library = field(repr=False)


@contextmanager
def open_nvml(
    library: Library = None, environ: Mapping[str, str] = os.environ
) -> Iterator[Nvml | None]:
    """Open NVML until the `with` block ends; yield None if there is no library, driver or GPU.

    `environ` provides CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER. If the latter is not set, it
    counts as PCI_BUS_ID, as in the processes that measure. Raises LookupError if it is unknown
    which number CUDA gives each GPU (see `_visible_handles`).
    """
    library = library or _import_library()
    if not library or not _tell(library, "nvmlInit", form=lambda _: True):
        yield None
        return
    try:
        physical = _physical(library)
        handles = _visible_handles(library, physical, environ)
        gpus = tuple(_gpu(library, handle, index) for index, handle in enumerate(handles))
        yield Nvml(gpus=gpus, physical_gpus=len(physical), library=library) if physical else None
    finally:
        _tell(library, "nvmlShutdown", form=_as_is)


def describe(library: Library = None, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return driver versions, the number of physical GPUs, and the GPUs that are visible to CUDA.

    `physical_gpus` is 0 if NVML reports no GPU. For `environ` and errors, see `open_nvml`.
    """
    with open_nvml(library, environ) as nvml:
        if nvml is None:
            return {"physical_gpus": 0, "gpus": []}
        versions = {
            "driver": _tell(nvml.library, "nvmlSystemGetDriverVersion", form=text),
            "cuda_driver": _tell(
                nvml.library, "nvmlSystemGetCudaDriverVersion", form=_cuda_version
            ),
        }
        gpus = [gpu.describe() for gpu in nvml.gpus]
        return {**_known(versions), "physical_gpus": nvml.physical_gpus, "gpus": gpus}


def describe_for(
    uuids: Sequence[str], library: Library = None, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Return the facts of `describe` for a process in which dpbench did not set CUDA_DEVICE_ORDER.

    CUDA's default order is FASTEST_FIRST, which NVML does not know if the GPUs are of different
    models. The result then has only the GPUs with the UUIDs `uuids`, which CUDA reports in this
    process, in their order.
    """
    try:
        return describe(library, {ORDER: FASTEST_FIRST, **environ})
    except LookupError:
        facts = describe(library, {})
        places = replicas_of((), uuids, facts["gpus"]) if uuids else {}
        found = sorted(
            (places[gpu["index"]], gpu) for gpu in facts["gpus"] if gpu["index"] in places
        )
        return {**facts, "gpus": [{**gpu, "index": index} for index, gpu in found]}


def nvlinks(one: Gpu, other: Gpu) -> int:
    """Return the number of active NVLinks between two GPUs, 0 without or if unknown.

    Over NVSwitch, it is that of the GPU with fewer links.
    """
    mine, theirs = (gpu.nvlinks.ends or {} for gpu in (one, other))
    straight = mine.get(other.pci_address or "", 0)
    return int(straight or min(mine.get(SWITCH, 0), theirs.get(SWITCH, 0)))


def held_by(pid: int, library: Library = None) -> list[tuple[NvmlGpu, int]]:
    """Return (GPU, bytes held) for each GPU, visible to CUDA or not, on which `pid` holds memory.

    The GPUs have the indices of nvidia-smi. The list is empty if NVML is missing or does not list
    the process, as in a container, where NVML lists the host's process ids.
    """
    with open_nvml(library, {}) as nvml:
        found = [(gpu, gpu.processes().get(pid)) for gpu in nvml.gpus] if nvml else []
    return [(gpu, held) for gpu, held in found if held]


def same_gpu(uuid: str, other: str) -> bool:
    """Return whether two UUIDs, with or without "GPU-" or "MIG-", denote the same GPU."""
    return bare(uuid) == bare(other)


def cuda_visible(visible: str | None, uuids: Sequence[str]) -> tuple[int, ...]:
    """Return the positions in `uuids` of the GPUs that CUDA would show, in CUDA's order.

    `visible` is the value of CUDA_VISIBLE_DEVICES, or None if it is not set. As in CUDA and torch,
    the first entry decides whether the list has numbers or UUIDs, text after the digits of a number
    is ignored, and a UUID may be abbreviated if this is unique. An unknown entry ends the list;
    with a repeated entry, no GPU is visible.
    """
    if visible is None:
        return tuple(range(len(uuids)))
    entries = [entry.strip() for entry in visible.split(",")]
    by_uuid = entries[0].startswith("GPU-")
    chosen: list[int] = []
    for entry in entries:
        if by_uuid:
            matches = [
                i for i, uuid in enumerate(uuids) if entry[:4] == "GPU-" and uuid.startswith(entry)
            ]
        else:
            digits = re.match(r"\+?([0-9]+)", entry)
            matches = [int(digits[1])] if digits and int(digits[1]) < len(uuids) else []
        if len(matches) != 1:
            break
        if matches[0] in chosen:
            return ()
        chosen += matches
    return tuple(chosen)


def replicas_of(
    ordinals: Sequence[int], uuids: Sequence[str], visible: Sequence[Mapping[str, Any]]
) -> dict[int, int]:
    """Return a dict from the CUDA ordinal of each GPU to the index of the replica on it.

    `visible` are the visible GPUs from `describe`. Item i of `ordinals` is the CUDA ordinal of
    replica i's GPU, and item i of `uuids` the UUID that CUDA reports for it; both may be empty.
    Replicas are matched by UUID. One whose UUID is not in `visible` is left out: its GPU may be a
    MIG instance, for which NVML has only the counters of the whole GPU. If `uuids` is empty, or
    only a MIG instance is visible, replicas are matched by `ordinals`; if that is empty too,
    replica i is on visible GPU i.
    """
    if uuids and (len(visible) > 1 or any(gpu["uuid"].startswith("GPU-") for gpu in visible)):
        ordinal_of = {bare(gpu["uuid"]): int(gpu["index"]) for gpu in visible}
        return {
            ordinal_of[bare(uuid)]: index
            for index, uuid in enumerate(uuids)
            if bare(uuid) in ordinal_of
        }
    return {ordinal: index for index, ordinal in enumerate(ordinals or range(len(visible)))}


def bare(uuid: str) -> str:
    """Return a UUID without the prefix, which NVML writes and torch does not."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


def _visible_handles(
    library: Library, physical: dict[str, Handle], environ: Mapping[str, str]
) -> list[Handle]:
    """Return the NVML handles of the GPUs that are visible to CUDA, in the order of CUDA's numbers.

    `physical` maps UUIDs to handles. NVML numbers GPUs in PCI order. CUDA's order FASTEST_FIRST
    cannot be determined without CUDA, but is the same for GPUs of one model. Raises LookupError if
    the GPUs are of different models and CUDA's order is not PCI_BUS_ID, unless CUDA_VISIBLE_DEVICES
    contains UUIDs or shows no GPU.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip().startswith("MIG-"):
        # CUDA shows a process only one MIG instance, the first in the list; NVML may not accept the
        # older names
        first = visible.split(",")[0].strip()
        instance = _tell(library, "nvmlDeviceGetHandleByUUID", first, form=_as_is)
        return [] if instance is None else [instance]
    handles = list(physical.values())
    chosen = [handles[position] for position in cuda_visible(visible, list(physical))]
    order = environ.get(ORDER, PCI_ORDER)
    numbered = visible is None or not visible.strip().startswith("GPU-")
    names = (
        {_tell(library, "nvmlDeviceGetName", handle, form=text) for handle in handles}
        if order != PCI_ORDER
        else set()
    )
    if chosen and numbered and len(names) > 1:
        raise UnknownName(
            f"with {ORDER}={order}, dpbench does not know which number CUDA gives each GPU, because"
            f" the GPUs are of different models ({', '.join(sorted(map(str, names)))}): set"
            f" {ORDER}={PCI_ORDER}, or list UUIDs in CUDA_VISIBLE_DEVICES"
        )
    return chosen


def _physical(library: Library) -> dict[str, Handle]:
    """Return the handles of all GPUs by UUID, in PCI order, without GPUs that do not respond.

    A GPU with an unknown UUID has a text in its place, because CUDA counts this GPU, too.
    """
    handles = {}
    for index in range(_tell(library, "nvmlDeviceGetCount", form=_gpu_count) or 0):
        handle = _tell(library, "nvmlDeviceGetHandleByIndex", index, form=_as_is)
        if handle is not None:
            handles[_uuid(library, handle) or f"unknown, of GPU {index}"] = handle
    return handles


def _gpu_count(answer: Any) -> int:
    count = int(number(answer))
    if count > _MOST_GPUS:
        raise ValueError(f"the answer {answer!r} is no number of GPUs")
    return count


def _gpu(library: Library, handle: Handle, index: int) -> NvmlGpu:
    return NvmlGpu(
        index=index,
        uuid=_uuid(library, handle),
        name=_tell(library, "nvmlDeviceGetName", handle, form=text),
        memory_bytes=_tell(
            library, "nvmlDeviceGetMemoryInfo", handle, form=lambda one: int(number(one.total))
        ),
        library=library,
        handle=handle,
    )


def _uuid(library: Library, handle: Handle) -> str:
    return _tell(library, "nvmlDeviceGetUUID", handle, form=text) or ""


def _nvlink_speed(library: Library, handle: Handle) -> int:
    """Return the value of the field; raises NVMLError if the GPU does not have it."""
    (result,) = library.nvmlDeviceGetFieldValues(handle, [(_NVLINK_SPEED, 0)])
    if result.nvmlReturn:
        raise library.NVMLError(result.nvmlReturn)
    return int(result.value.ullVal)


def _tell(library: Library, call: str, *arguments: Any, form: Form) -> Any:
    """Return the answer of a call in the given form; None if unknown."""
    function = getattr(library, call, None)
    if function is None:  # this pynvml does not have the call
        return None
    # if nvmlInit fails, the machine usually has no NVIDIA driver
    return reading(f"NVML's {call}", lambda: form(function(*arguments)), absent=library.NVMLError)


def _known(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}


def _address(bus_id: bytes | str) -> str:
    """Return a PCIe address as the kernel writes it: NVML's domain has eight digits."""
    domain, _, rest = text(bus_id).lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _bus_address(pci: Any) -> str:
    return _address(pci.busId)


def _cuda_version(answer: Any) -> str:
    version = int(number(answer))
    return f"{version // 1000}.{version % 1000 // 10}"


def _processes(library: Library, handle: Handle) -> dict[int, int | None]:
    # with the version suffix, because on older drivers the bare name raises an exception other than
    # NVMLError
    listed = library.nvmlDeviceGetComputeRunningProcesses_v3(handle)
    return {
        int(number(one.pid)): None if (held := one.usedGpuMemory) is None else int(number(held))
        for one in listed
    }


def _utilization_samples(
    library: Library, handle: Handle, since_us: int
) -> list[tuple[float, float]]:
    """Return (seconds since the epoch, fraction of the time) pairs."""
    _, samples = library.nvmlDeviceGetSamples(handle, _UTILIZATION_SAMPLES, since_us)
    return [(number(one.timeStamp) / 1e6, number(one.sampleValue.uiVal) / 100) for one in samples]


def _process_utilization(
    library: Library, handle: Handle, since_us: int
) -> list[tuple[float, int, float]]:
    """Return (seconds since the epoch, process id, share of the GPU) triples."""
    return [
        (number(one.timeStamp) / 1e6, int(number(one.pid)), number(one.smUtil) / 100)
        for one in library.nvmlDeviceGetProcessUtilization(handle, since_us)
    ]


def problem() -> str:
    """Return why NVML does not answer; empty if it does."""
    library = _import_library()
    if library is None:
        return "NVIDIA's package nvidia-ml-py is missing, or cannot be loaded"
    try:
        library.nvmlInit()
        library.nvmlShutdown()
    except Exception as error:  # whatever it is, it is the answer
        return str(error)
    return ""


def _import_library() -> Library | None:
    """Return pynvml; None, after a warning, if it is missing or is not NVIDIA's.

    None, too, if the installed torch is for another maker's GPUs.
    """
    if not torch_build.vendor().counters:
        return None
    try:
        import pynvml
    except ImportError:
        log.warning(
            "no GPU counters are recorded, because the package nvidia-ml-py is not installed;"
            " install it"
        )
        return None
    except Exception as error:
        log.warning(
            "no GPU counters are recorded, because pynvml raises %s: %s",
            type(error).__name__,
            error,
        )
        return None
    # missing from the older package of that name
    if not hasattr(pynvml, "_nvmlGetFunctionPointer"):
        log.warning(
            "no GPU counters are recorded, because %s is not NVIDIA's; uninstall the package"
            " pynvml, and install the package nvidia-ml-py",
            pynvml,
        )
        return None
    return pynvml
