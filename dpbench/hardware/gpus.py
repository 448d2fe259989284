"""GPUs: which GPUs the installed torch can use and, if it can use none, why.

torch alone decides: NVML may be missing although torch works, and may list GPUs that torch cannot
use. A subprocess asks torch, so that planning a run loads neither torch nor CUDA.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dpbench.hardware import nvml, readings, torch_build
from dpbench.records import vendors
from dpbench.records.errors import UnknownName
from dpbench.records.vendors import Vendor

log = logging.getLogger(__name__)

ASK_LIMIT_S = 120.0
"""The most seconds that torch gets to load and to answer."""
_DEVICES = Path("/dev")
_MAYBE = ("name", "architecture")
"""The facts that a GPU lacks if torch tells none."""
_QUESTION = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    found, unread, error = [], {}, ""
    versions = {
        "cuda": lambda: torch.version.cuda,
        "hip": lambda: getattr(torch.version, "hip", ""),
        "cudnn": lambda: torch.backends.cudnn.version(),
        "nccl": lambda: ".".join(map(str, torch.cuda.nccl.version())),
    }

    def version(name):  # unknown in builds without the library
        try:
            return str(versions[name]() or "")
        except Exception:
            return ""

    def text(gpu, name):  # as dpbench.hardware.readings, which this process may not find
        try:
            return str(getattr(gpu, name, ""))
        except Exception as raised:
            unread[name] = f"{type(raised).__name__}: {raised}"
            return ""

    try:
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                gpu = torch.cuda.get_device_properties(index)
                found.append({
                    "index": index,
                    "name": text(gpu, "name"),
                    "uuid": text(gpu, "uuid"),
                    "memory_bytes": gpu.total_memory,
                    "capability": [gpu.major, gpu.minor],
                    "architecture": text(gpu, "gcnArchName") if version("hip") else "",
                })
    except Exception as raised:
        found, error = [], str(raised)
    texts = [str(one.message) for one in caught]
    said = error or next((one for one in texts if "CUDA" in one or "HIP" in one), "")
    try:
        other = torch.accelerator.current_accelerator(check_available=True)
    except Exception:
        other = None
    other = "" if other is None or other.type == "cuda" else other.type
print(json.dumps([found, unread, said, {name: version(name) for name in versions}, other]))
"""


@dataclass(frozen=True, kw_only=True)
class TorchGpus:
    """The GPUs that torch can use, in the order of CUDA's numbers.

    Each has its `index`, `name`, `uuid` (both empty if torch does not tell it), `memory_bytes`,
    `capability` (major, minor) and `architecture` (empty for NVIDIA's). If there are none,
    `missing` says why, and `other` is the type of another device that torch can use, such as "mps".
    `versions` are those of CUDA or HIP, and of what AMD's torch has in place of cuDNN and NCCL, as
    far as they are known.
    """

    gpus: tuple[dict[str, Any], ...] = ()
    missing: str = ""
    other: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def vendor(self) -> Vendor:
        """Return the maker of the GPUs."""
        return vendors.of(self.versions.get("hip"))

    def alike(self) -> tuple[int, ...]:
        """Return the CUDA numbers of the largest group of GPUs of one name and size of memory.

        The architecture tells apart those of AMD that have no name.
        """
        groups: dict[Any, list[int]] = defaultdict(list)
        for gpu in self.gpus:
            kind = gpu["name"], gpu.get("architecture")
            groups[*kind, round(gpu["memory_bytes"] / 2**30)].append(gpu["index"])
        largest: list[int] = max(groups.values(), key=len, default=[])
        return tuple(largest)

    def names(self, ordinals: Sequence[int]) -> str:
        """Return the GPUs with these CUDA numbers as text, such as "0 (T4), 1 (T4)"."""
        each = {i: self.gpus[i]["name"] or self.gpus[i].get("architecture") for i in ordinals}
        return ", ".join(f"{i} ({name or 'without a name'})" for i, name in each.items())

    def ordinals(self, uuids: Sequence[str]) -> list[int]:
        """Return the CUDA numbers of the GPUs with these, possibly abbreviated, UUIDs.

        Raises LookupError for a UUID that does not belong to exactly one of the GPUs.
        """
        found = []
        for uuid in uuids:
            wanted = nvml.bare(uuid)
            matches = [
                gpu["index"] for gpu in self.gpus if nvml.bare(gpu["uuid"]).startswith(wanted)
            ]
            if not wanted or len(matches) != 1:
                listed = ", ".join(gpu["uuid"] for gpu in self.gpus)
                raise UnknownName(
                    "{} matches {number} GPUs, but must match exactly one of the GPUs that torch"
                    " can use: {listed}",
                    option="device_ids",
                    value=uuid,
                    number=len(matches),
                    listed=listed or "none",
                )
            found += matches
        return found


@cache
def of_torch() -> TorchGpus:
    """Return the GPUs that the installed torch can use; the first call may take some seconds."""
    name, built_for_gpus = _build()
    if not built_for_gpus:
        return TorchGpus(
            missing=f"{name} is a build for CPUs; install a build of torch for"
            f" {' or '.join(one.platform for one in vendors.ALL)}, or let make take one from the"
            " Python that runs it: make TORCH=system"
        )
    try:
        answer = subprocess.run(
            [sys.executable, "-P", "-c", _QUESTION],  # -P: no file of the working folder is torch
            env={nvml.ORDER: nvml.PCI_ORDER, **os.environ},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ASK_LIMIT_S,
            check=True,
        )
        gpus, unread, error, versions, other = json.loads(answer.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return TorchGpus(missing=f"{name} did not list its GPUs within {ASK_LIMIT_S:.0f} s")
    except subprocess.CalledProcessError as failed:
        last = (failed.stderr.strip().splitlines() or ["no output"])[-1]
        return TorchGpus(missing=f"{name} failed while it listed its GPUs: {last}")
    except (OSError, ValueError, IndexError) as failed:
        return TorchGpus(missing=f"the list of GPUs of {name} cannot be read: {failed}")
    for fact, why in unread.items():
        readings.note(f"the {fact} of a GPU in torch", why)
    known = {name: version for name, version in versions.items() if version}
    if gpus:
        return TorchGpus(gpus=tuple(gpus), versions=known)
    if other:
        supported = " and ".join(one.platform for one in vendors.ALL)
        finds = f"finds the device {other}, but dpbench supports devices of {supported} only"
    else:
        why = error or _hidden(vendors.of(known.get("hip"))) or "no driver, or no device"
        finds = f"finds no GPU: {why}"
    return TorchGpus(missing=f"{name} {finds}", other=other)


def _hidden(vendor: Vendor) -> str:
    """Return which variables can hide all GPUs of a maker; "" if none is set."""
    given = [f"{name}={os.environ[name]}" for name in vendor.hiding if name in os.environ]
    return f"{', '.join(given)} shows none" if given else ""


def unused() -> str:
    """Return why torch uses none of the GPUs that this machine seems to have.

    The result is empty if torch uses GPUs, and if nothing shows that there is one.
    """
    if of_torch().gpus:
        return ""
    if of_torch().other:
        return of_torch().missing
    for vendor in vendors.ALL:
        files = sorted(one.name for pattern in vendor.files for one in _DEVICES.glob(pattern))
        if files:
            return f"this machine has a GPU ({_DEVICES / files[0]}), but {of_torch().missing}"
    listed = nvml.describe()["physical_gpus"]
    return f"NVML lists {listed} GPU(s), but {of_torch().missing}" if listed else ""


def describe() -> dict[str, Any]:
    """Return the facts of `nvml.describe`, with one entry for each GPU that torch can use.

    The versions of torch's libraries for GPUs are added.
    The facts of a GPU that NVML does not list are only those of torch, which also tells the name
    and the memory that NVML does not know. A GPU without a name, as some of AMD, has no `name`.
    """
    usable = of_torch().gpus
    vendor = of_torch().vendor
    facts: dict[str, Any] = {"physical_gpus": 0, "gpus": []}
    if vendor.counters:
        facts = nvml.describe()
    by_uuid = {nvml.bare(gpu["uuid"]): gpu for gpu in facts["gpus"] if gpu["uuid"]}
    unknown = [gpu for gpu in usable if nvml.bare(gpu["uuid"]) not in by_uuid]
    if unknown:
        whose = (
            f"NVML does not list {len(unknown)} of the {len(usable)} GPUs that torch uses"
            f" ({nvml.problem() or 'they may be parts of a GPU'})"
        )
        log.warning(
            "%s: their power, clocks, load and memory in use are not recorded",
            vendor.unread or whose,
        )
    gpus = []
    for gpu in usable:
        listed = by_uuid.get(nvml.bare(gpu["uuid"]), gpu)
        told = {name: gpu[name] for name in ("name", "memory_bytes")} | listed
        gpus.append(
            {name: value for name, value in told.items() if name not in _MAYBE or value}
            | {"index": gpu["index"]}
        )
    count = max(facts["physical_gpus"], len(gpus))
    return {**facts, **of_torch().versions, "physical_gpus": count, "gpus": gpus}


def _build() -> tuple[str, bool]:
    """Return the name of the installed torch, and whether it may find GPUs; load no torch."""
    named = torch_build.versions()
    if named is None:
        return "no installed torch", False
    name = f"torch {named['__version__']}"
    if "cuda" not in named:  # a build that runs from its sources
        return name, True
    # torch for macOS has MPS in the build for CPUs
    others = named.get("xpu") or platform.system() == "Darwin"
    return name, bool(named.get("cuda") or named.get("hip") or others)
