"""Machines: trees of files as the kernel shows them, and examined machines, made by hand.

The trees follow what `lspci -tv`, `/sys` and `/proc` show on such machines. No tree is a recording
of a real one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec

from dpbench.doctor import system
from dpbench.doctor.examination import DIRECT, PAGEABLE, PINNED, STAGED
from dpbench.doctor.faults import AllReduce, Examined
from dpbench.doctor.transfers import Copy, Transfer, copies
from dpbench.hardware.nvml import SWITCH
from dpbench.records import HOST
from dpbench.records.facts import Gpu, NvLinks

GPU, CARD, BRIDGE = "0x030200", "0x020700", "0x060400"


@dataclass(frozen=True)
class Slot:
    """A device of a tree: its class, the path of addresses below a host bridge, and its lanes."""

    kind: str
    root: str
    path: Sequence[str]
    node: int = 0
    width: int = 16
    max_width: int = 16
    acs: int | None = None


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A machine: its devices, the cores of its nodes, and the texts of files."""

    slots: Sequence[Slot]
    nodes: Mapping[int, str] = field(default_factory=lambda: {0: "0-15"})
    cmdline: str = "quiet"
    iommu: bool = False
    shm_bytes: int = 32 * 2**30
    files: Mapping[str, str] = field(default_factory=dict)


def gpu(root: str, *path: str, **more: Any) -> Slot:
    return Slot(GPU, root, path, **more)


def bridge(root: str, *path: str, **more: Any) -> Slot:
    return Slot(BRIDGE, root, path, **more)


def card(root: str, *path: str, **more: Any) -> Slot:
    return Slot(CARD, root, path, **more)


TWO_3090 = Tree(
    slots=[
        bridge("pci0000:00", "0000:00:01.1"),
        gpu("pci0000:00", "0000:00:01.1", "0000:01:00.0"),
        bridge("pci0000:00", "0000:00:03.1"),
        gpu("pci0000:00", "0000:00:03.1", "0000:02:00.0"),
    ]
)
FOUR_BEHIND_A_SWITCH = Tree(
    slots=[
        bridge("pci0000:00", "0000:00:01.1"),
        bridge("pci0000:00", "0000:00:01.1", "0000:01:00.0", acs=0),
        *(
            bridge("pci0000:00", "0000:00:01.1", "0000:01:00.0", f"0000:02:0{i}.0")
            for i in range(4)
        ),
        *(
            gpu(
                "pci0000:00",
                "0000:00:01.1",
                "0000:01:00.0",
                f"0000:02:0{i}.0",
                f"0000:0{i + 3}:00.0",
            )
            for i in range(4)
        ),
    ]
)
DGX = Tree(
    slots=[
        slot
        for i in range(8)
        for root in [f"pci0000:{16 * i + 1:02x}"]
        for port in [f"0000:{16 * i + 1:02x}:00.0"]
        for switch in [f"0000:{16 * i + 2:02x}:00.0"]
        for slot in (
            bridge(root, port, node=i // 4),
            bridge(root, port, switch, node=i // 4),
            gpu(root, port, switch, f"0000:{16 * i + 3:02x}:00.0", node=i // 4),
            card(root, port, switch, f"0000:{16 * i + 4:02x}:00.0", node=i // 4),
        )
    ],
    nodes={0: "0-55", 1: "56-111"},
    iommu=True,
    cmdline="iommu=pt",
    files={"proc/self/limits": "Max locked memory         unlimited            unlimited   bytes"},
)
TWO_SOCKETS = Tree(
    slots=[
        slot
        for i in range(8)
        for root in [f"pci0000:{16 * i + 1:02x}"]
        for slot in (
            bridge(root, f"0000:{16 * i + 1:02x}:00.0", node=i // 4),
            gpu(root, f"0000:{16 * i + 1:02x}:00.0", f"0000:{16 * i + 2:02x}:00.0", node=i // 4),
        )
    ],
    nodes={0: "0-31", 1: "32-63"},
)
CLOUD = Tree(
    slots=[gpu("pci0000:00", "0000:00:1e.0", node=-1, width=0, max_width=0)],
    nodes={0: "0-7"},
)
CONTAINER = Tree(
    slots=TWO_3090.slots,
    nodes={0: "0-63"},
    shm_bytes=64 * 2**20,
    files={
        ".dockerenv": "",
        "sys/fs/cgroup/cpu.max": "400000 100000",
        "proc/self/limits": "Max locked memory         8388608              8388608    bytes",
    },
)
TREES = {
    "2x3090": TWO_3090,
    "4x behind a switch": FOUR_BEHIND_A_SWITCH,
    "DGX": DGX,
    "two sockets": TWO_SOCKETS,
    "cloud": CLOUD,
    "container": CONTAINER,
}


def made(folder: Path, tree: Tree) -> Path:
    """Write the files of a tree below a folder, and return it."""
    for slot in tree.slots:
        place = folder / "sys/devices" / slot.root / Path(*slot.path)
        place.mkdir(parents=True, exist_ok=True)
        texts = {
            "class": slot.kind,
            "vendor": system.NVIDIA,
            "numa_node": str(slot.node),
            "current_link_width": str(slot.width),
            "max_link_width": str(slot.max_width),
        }
        for name, text in texts.items():
            (place / name).write_text(f"{text}\n")
        if slot.acs is not None:
            (place / "config").write_bytes(_space(slot.acs))
        links = folder / "sys/bus/pci/devices"
        links.mkdir(parents=True, exist_ok=True)
        (links / slot.path[-1]).symlink_to(place)
    for node, cores in tree.nodes.items():
        where = folder / f"sys/devices/system/node/node{node}"
        where.mkdir(parents=True)
        (where / "cpulist").write_text(f"{cores}\n")
    (folder / "sys/class/iommu").mkdir(parents=True)
    if tree.iommu:
        (folder / "sys/class/iommu/dmar0").mkdir()
    (folder / "dev/shm").mkdir(parents=True)
    (folder / "dev/shm/.size").write_text(str(tree.shm_bytes))
    for name, text in {"proc/cmdline": tree.cmdline, **tree.files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    return folder


def _space(control: int) -> bytes:
    """Return a configuration space whose second extended capability is ACS, with this control."""
    space = bytearray(4096)
    space[0x100:0x104] = ((0x140 << 20) | 0x0001).to_bytes(4, "little")
    space[0x140:0x144] = system.ACS_CAPABILITY.to_bytes(4, "little")
    space[0x146] = control
    return bytes(space)


def read(folder: Path, name: str) -> system.System:
    """Return what the tree with this name says to a process that may use all cores."""
    tree = TREES[name]
    cores = [core for text in tree.nodes.values() for core in system.cores_in(text)]
    return system.read(made(folder, tree), cores)


def examined(folder: Path, name: str) -> Examined:
    """Return a healthy machine of a tree: PCIe 4 with 16 lanes, and nothing slow or wrong."""
    found = read(folder, name)
    devices = found.of("gpu")
    rates = {PINNED: 25e9, PAGEABLE: 9e9, DIRECT: 22e9, STAGED: 11e9}
    count = len(devices)
    gpus = [
        Gpu(
            name="NVIDIA A100-PCIE-40GB",
            pci_address=one.address,
            pcie_generation=4,
            pcie_width=16,
            pcie_width_now=16,
            power_limit_w=250.0,
            default_power_limit_w=250.0,
            compute_mode="default",
            persistence_mode=True,
        )
        for one in devices
    ]
    return Examined(
        system=found,
        gpus=gpus,
        peers=frozenset(permutations(range(count), 2)),
        transfers=[Transfer(copy, rates[copy.way]) for copy in copies(count)],
        all_reduce=AllReduce(bytes_per_s=18e9) if count > 1 else None,
        software={"torch": "2.13.0", "cuda": "12.8", "nccl": "2.27.3", "driver_cuda": "12.8"},
    )


def with_nvswitch(machine: Examined, links: int = 18, rate: float = 25e9) -> Examined:
    """Return the machine with NVLinks to NVSwitches, over which pairs reach 85%."""
    nvlinks = NvLinks(active=links, ends={SWITCH: links}, bytes_per_s=rate)
    direct = 0.85 * links * rate
    return replace(
        machine,
        gpus=[msgspec.structs.replace(gpu, nvlinks=nvlinks) for gpu in machine.gpus],
        transfers=[
            replace(one, bytes_per_s=direct) if one.copy.way == DIRECT else one
            for one in machine.transfers
        ],
        all_reduce=AllReduce(bytes_per_s=0.8 * direct),
    )


def with_bridges(machine: Examined, links: int = 4, rate: float = 14e9) -> Examined:
    """Return the machine with NVLink bridges between GPUs 0 and 1, 2 and 3 and so on."""
    gpus = [
        msgspec.structs.replace(
            gpu,
            nvlinks=NvLinks(
                active=links,
                ends={machine.gpus[i ^ 1].pci_address or "": links},
                bytes_per_s=rate,
            ),
        )
        for i, gpu in enumerate(machine.gpus)
    ]
    bridged = [
        replace(one, bytes_per_s=0.85 * links * rate)
        if one.copy.way == DIRECT and one.copy.source == one.copy.target ^ 1
        else one
        for one in machine.transfers
    ]
    return replace(machine, gpus=gpus, transfers=bridged)


def with_transfer(machine: Examined, copy: Copy, **result: Any) -> Examined:
    """Return the machine with another result of one copy."""
    changed = [replace(one, **result) if one.copy == copy else one for one in machine.transfers]
    return replace(machine, transfers=changed)


def healthy() -> Examined:
    """Return a machine without GPUs on which nothing is wrong."""
    nothing = system.System(
        pci={},
        nodes={0: frozenset({0, 1})},
        affinity=frozenset({0, 1}),
        iommu="off",
        shm_bytes=2**34,
        locked_bytes=-1,
        quota=None,
        container=False,
    )
    return Examined(system=nothing)


UP = Copy(HOST, 0, PINNED)
