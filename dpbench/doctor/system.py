"""System: what the kernel says about a machine's PCIe tree, sockets, limits and container.

Everything is read from files below a root folder, so that tests read trees of other machines. A
file that is missing or unreadable gives an unknown value, never a guess.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
"""The address of a PCIe device: domain, bus, device and function."""
NVIDIA, MELLANOX = "0x10de", "0x15b3"
INFINIBAND = "0x0207"
KINDS = {"0x03": "gpu", "0x02": "nic", "0x06": "bridge"}
"""The kinds of devices by the first byte of their class; a GPU counts only if it is NVIDIA's."""
LANE_GT = {2.5: 0.25e9, 5.0: 0.5e9, 8.0: 0.985e9, 16.0: 1.969e9, 32.0: 3.938e9, 64.0: 7.563e9}
"""The bytes per second of one lane by its gigatransfers per second, after encoding."""
GENERATIONS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
"""The gigatransfers per second of a lane by PCIe generation."""
ACS_CAPABILITY, ACS_REDIRECT = 0x000D, 0b0001_1100
"""The id of Access Control Services, and its bits that send requests up to the root complex."""


@dataclass(frozen=True, kw_only=True)
class PciDevice:
    """A GPU, a network card or a bridge on PCIe.

    `path` has the addresses of the bridges above it, the root port first, and `root` the name of
    its host bridge. `node` is its NUMA node, -1 if unknown. Widths are in lanes, and `max_speed_gt`
    in gigatransfers per second; 0 means unknown. `rdma` is whether a network card accesses memory
    directly, as InfiniBand's do. `acs` is whether a bridge sends the traffic between its devices up
    to the root complex, None if only root may read it.
    """

    address: str
    kind: str
    root: str
    path: tuple[str, ...]
    node: int
    width: int
    max_width: int
    max_speed_gt: float
    rdma: bool
    acs: bool | None


@dataclass(frozen=True, kw_only=True)
class System:
    """What the kernel says about a machine.

    `nodes` maps NUMA nodes to their cores, and `affinity` has the cores that this process may use.
    `iommu` is "off", "translating", "passthrough" or "unknown". Sizes are in bytes and None if
    unknown, as is `quota`, the cores that the container may use; `locked_bytes` is -1 without a
    limit. `governors` are the frequency governors of the cores, and `huge_pages` is "always",
    "madvise", "never" or "" for unknown.
    """

    pci: Mapping[str, PciDevice]
    nodes: Mapping[int, frozenset[int]]
    affinity: frozenset[int]
    iommu: str
    shm_bytes: int | None
    locked_bytes: int | None
    memory_bytes: int | None
    memory_limit_bytes: int | None
    quota: float | None
    container: bool
    governors: tuple[str, ...]
    huge_pages: str = ""

    def of(self, kind: str) -> list[PciDevice]:
        """Return the devices of a kind, such as "gpu", by address."""
        return [one for _, one in sorted(self.pci.items()) if one.kind == kind]

    def common(self, one: PciDevice, other: PciDevice) -> PciDevice | None:
        """Return the lowest bridge above two devices; None if they meet in the root complex."""
        shared = [address for address in one.path if address in other.path]
        return self.pci.get(shared[-1]) if shared else None


def read(root: Path = Path("/"), affinity: Iterable[int] | None = None) -> System:
    """Return what the files below `root` say; `affinity` are the cores of this process if None."""
    cores = os.sched_getaffinity(0) if affinity is None else affinity
    return System(
        pci=_pci(root),
        nodes=_nodes(root),
        affinity=frozenset(cores),
        iommu=_iommu(root),
        shm_bytes=_size(root / "dev/shm"),
        locked_bytes=_locked(root),
        memory_bytes=_memory(root),
        memory_limit_bytes=_limit(root),
        quota=_quota(root),
        container=_container(root),
        governors=tuple(
            dict.fromkeys(
                _text(path)
                for path in sorted(
                    root.glob("sys/devices/system/cpu/cpu*/cpufreq/scaling_governor")
                )
            )
        ),
        huge_pages=_chosen(root / "sys/kernel/mm/transparent_hugepage/enabled"),
    )


def link_bytes_per_s(speed_gt: float, width: int) -> float:
    """Return what a PCIe link can carry each way, in bytes per second; 0 if unknown."""
    return LANE_GT.get(speed_gt, 0.0) * width


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _chosen(path: Path) -> str:
    """Return the choice that the kernel marks in a list, such as "madvise"; "" if unknown."""
    found = re.search(r"\[(\w+)\]", _text(path))
    return found[1] if found else ""


def _number(path: Path, unknown: int = 0) -> int:
    text = _text(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else unknown


def _pci(root: Path) -> dict[str, PciDevice]:
    found = {}
    for link in sorted((root / "sys/bus/pci/devices").glob("*")):
        place = link.resolve()
        kind = KINDS.get(_text(link / "class")[:4], "")
        if not kind or (kind == "gpu" and _text(link / "vendor") != NVIDIA):
            continue
        speed = re.match(r"[\d.]+", _text(link / "max_link_speed"))
        found[link.name] = PciDevice(
            address=link.name,
            kind=kind,
            root=next((part for part in place.parts if part.startswith("pci")), ""),
            path=tuple(part for part in place.parent.parts if ADDRESS.fullmatch(part)),
            node=_number(link / "numa_node", -1),
            width=_number(link / "current_link_width"),
            max_width=_number(link / "max_link_width"),
            max_speed_gt=float(speed[0]) if speed else 0.0,
            rdma=_text(link / "class").startswith(INFINIBAND)
            or (kind == "nic" and _text(link / "vendor") == MELLANOX),
            acs=_acs(link / "config") if kind == "bridge" else None,
        )
    return found


def _acs(path: Path) -> bool | None:
    """Return whether the extended configuration space shows redirection; None if unreadable."""
    try:
        space = path.read_bytes()
    except OSError:
        return None
    if len(space) < 4096:  # the kernel shows only root more than the first bytes
        return None
    at = 0x100
    while at >= 0x100 and at + 8 <= len(space):
        header = int.from_bytes(space[at : at + 4], "little")
        if header & 0xFFFF == ACS_CAPABILITY:
            return bool(space[at + 6] & ACS_REDIRECT)
        at = header >> 20
    return False


def _nodes(root: Path) -> dict[int, frozenset[int]]:
    return {
        int(folder.name[4:]): cores_in(_text(folder / "cpulist"))
        for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    }


def cores_in(text: str) -> frozenset[int]:
    """Return the numbers in a list of the kernel, such as "0-3,8"."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def _iommu(root: Path) -> str:
    options = _text(root / "proc/cmdline").split()
    folder = root / "sys/class/iommu"
    if not folder.is_dir():
        return "unknown"
    if not any(folder.iterdir()):
        return "off"
    through = {"iommu=pt", "iommu.passthrough=1"} & {*options}
    return "passthrough" if through else "translating"


def _size(folder: Path) -> int | None:
    """Return the size of the file system of a folder.

    In a recorded tree, a file `.size` in the folder has it.
    """
    recorded = _number(folder / ".size", -1)
    if recorded >= 0:
        return recorded
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def _locked(root: Path) -> int | None:
    found = re.search(r"Max locked memory\s+(\S+)", _text(root / "proc/self/limits"))
    if not found:
        return None
    return -1 if found[1] == "unlimited" else int(found[1])


def _memory(root: Path) -> int | None:
    found = re.search(r"MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo"))
    return int(found[1]) * 1024 if found else None


def _limit(root: Path) -> int | None:
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if (limit := _number(root / name, -1)) >= 0:
            return limit
    return None


def _quota(root: Path) -> float | None:
    """Return the cores that the control group may use, None without a limit."""
    quota, _, period = _text(root / "sys/fs/cgroup/cpu.max").partition(" ")
    if not quota:
        quota = _text(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us")
        period = _text(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us")
    if not quota.isdigit() or not period.isdigit():
        return None
    return int(quota) / int(period)


def _container(root: Path) -> bool:
    marks = (root / ".dockerenv", root / "run/.containerenv")
    return any(mark.exists() for mark in marks) or bool(
        re.search("docker|kubepods|containerd|libpod", _text(root / "proc/1/cgroup"))
    )
