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

from dpbench.hardware import foreign_load, shared_memory

ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
"""The address of a PCIe device: domain, bus, device and function."""
NVIDIA, MELLANOX = "0x10de", "0x15b3"
INFINIBAND = "0x0207"
KINDS = {"0x03": "gpu", "0x02": "nic", "0x06": "bridge"}
"""The kinds of devices by the first byte of their class; a GPU counts only if it is NVIDIA's."""
LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""The bytes per second of one lane each way by PCIe generation, after encoding."""
ACS_CAPABILITY, ACS_REDIRECT = 0x000D, 0b0001_1100
"""The id of Access Control Services, and its bits that send requests up to the root complex."""


@dataclass(frozen=True, kw_only=True)
class PciDevice:
    """A GPU, a network card or a bridge on PCIe.

    `path` has the addresses of the bridges above it, the root port first. `node` is its NUMA node,
    -1 if unknown. Widths are in lanes, 0 if unknown. `rdma` is whether a network card accesses
    memory directly, as InfiniBand's do. `acs` is whether a bridge sends requests from below further
    up, to the root complex, None if only root may read it.
    """

    address: str
    kind: str
    path: tuple[str, ...]
    node: int
    width: int
    max_width: int
    rdma: bool
    acs: bool | None


@dataclass(frozen=True, kw_only=True)
class System:
    """What the kernel says about a machine.

    `nodes` maps NUMA nodes to their cores, and `affinity` has the cores that this process may use.
    `iommu` is "off", "translating", "passthrough" or "unknown". Sizes are in bytes and None if
    unknown, as is `quota`, the cores that the container may use; `locked_bytes` is -1 without a
    limit.
    """

    pci: Mapping[str, PciDevice]
    nodes: Mapping[int, frozenset[int]]
    affinity: frozenset[int]
    iommu: str
    shm_bytes: int | None
    locked_bytes: int | None
    quota: float | None
    container: bool

    def of(self, kind: str) -> list[PciDevice]:
        """Return the devices of a kind, such as "gpu", by address."""
        return [one for _, one in sorted(self.pci.items()) if one.kind == kind]

    @property
    def devices(self) -> list[PciDevice]:
        """Return the GPUs and the network cards."""
        return [one for one in self.pci.values() if one.kind != "bridge"]

    def shared(self, bridge: str) -> bool:
        """Return whether several devices are below the bridge at an address."""
        return sum(bridge in one.path for one in self.devices) > 1

    def common(self, one: PciDevice, other: PciDevice) -> PciDevice | None:
        """Return the lowest bridge above two devices; None if they meet in the root complex."""
        shared = [address for address in one.path if address in other.path]
        return self.pci.get(shared[-1]) if shared else None


def read(root: Path = Path("/"), affinity: Iterable[int] | None = None) -> System:
    """Return what the files below `root` say; `affinity` are the cores of this process if None."""
    cores = os.sched_getaffinity(0) if affinity is None else affinity
    shared = shared_memory.read(root)
    return System(
        pci=_pci(root),
        nodes=_nodes(root),
        affinity=frozenset(cores),
        iommu=_iommu(root),
        shm_bytes=shared.size_bytes,
        locked_bytes=_locked(root),
        quota=foreign_load.quota(root),
        container=shared.container,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path, unknown: int = 0) -> int:
    text = _text(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else unknown


def _pci(root: Path) -> dict[str, PciDevice]:
    found = {}
    for link in sorted((root / "sys/bus/pci/devices").glob("*")):
        kind = KINDS.get(_text(link / "class")[:4], "")
        if not kind or (kind == "gpu" and _text(link / "vendor") != NVIDIA):
            continue
        found[link.name] = PciDevice(
            address=link.name,
            kind=kind,
            path=tuple(part for part in link.resolve().parent.parts if ADDRESS.fullmatch(part)),
            node=_number(link / "numa_node", -1),
            width=_number(link / "current_link_width"),
            max_width=_number(link / "max_link_width"),
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


def _locked(root: Path) -> int | None:
    found = re.search(r"Max locked memory\s+(\S+)", _text(root / "proc/self/limits"))
    if not found:
        return None
    return -1 if found[1] == "unlimited" else int(found[1])
