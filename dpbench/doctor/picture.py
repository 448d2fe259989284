"""Picture: the boxes of an examined machine, and the links between them with their shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from dpbench.doctor.examination import DIRECT, PINNED, Finding, MadeCopy
from dpbench.doctor.faults import Examined
from dpbench.doctor.system import PciDevice
from dpbench.hardware.nvml import SWITCH
from dpbench.records.boxes import Box, Link
from dpbench.records.words import count

SOCKETS, SWITCHES, GPUS, BELOW = range(4)
"""The rows of the picture."""
NVSWITCH = "NVSwitch"


@dataclass(frozen=True)
class _Gpu:
    """A GPU: its place from the left, its address, node, and the switch above it, "" if none.

    `number` is CUDA's number, -1 for a GPU that torch does not use.
    """

    column: int
    address: str
    node: int
    switch: str
    number: int

    @property
    def above(self) -> str:
        """Return the id of the box above."""
        return self.switch or _socket(self.node)


def of(
    machine: Examined, copies: Sequence[MadeCopy], findings: Sequence[Finding]
) -> tuple[tuple[Box, ...], tuple[Link, ...]]:
    """Return sockets on top, switches, then GPUs, and NVSwitch below, and all links.

    Switches and sockets name the network cards below them, which share their links.
    """
    gpus = _gpus(machine)
    boxes = [*_gpu_boxes(machine, gpus), *_switch_boxes(machine, gpus), *_sockets(machine, gpus)]
    links = [*_to_host(copies, gpus), *_nvlinks(machine, copies, findings, gpus)]
    if any(NVSWITCH in link.ends for link in links):
        boxes.append(_over(NVSWITCH, BELOW, gpus, NVSWITCH))
    return tuple(boxes), tuple(links)


def _socket(node: int) -> str:
    return f"node {node}" if node >= 0 else "processor"


def _gpus(machine: Examined) -> list[_Gpu]:
    known = sorted(machine.system.of("gpu"), key=lambda one: (one.node, *one.path, one.address))
    used = [gpu.pci_address or f"GPU {i}" for i, gpu in enumerate(machine.gpus)]
    nodes = {one.address: one.node for one in known}
    # the lowest bridge that it shares with another device
    switches = {
        one.address: next(filter(machine.system.shared, reversed(one.path)), "") for one in known
    }
    shown = [*nodes, *(one for one in used if one not in nodes)]
    return [
        _Gpu(
            column,
            one,
            nodes.get(one, -1),
            switches.get(one, ""),
            used.index(one) if one in used else -1,
        )
        for column, one in enumerate(shown)
    ]


def _over(id_: str, row: int, gpus: Sequence[_Gpu], *texts: str) -> Box:
    """Return a box in the middle of these GPUs."""
    columns = [gpu.column for gpu in gpus] or [0]
    return Box(id=id_, row=row, column=(min(columns) + max(columns)) / 2, texts=texts)


def _gpu_boxes(machine: Examined, gpus: Sequence[_Gpu]) -> Iterator[Box]:
    for gpu in gpus:
        if gpu.number < 0:
            yield _over(gpu.address, GPUS, [gpu], "unused GPU", gpu.address)
            continue
        facts = machine.gpus[gpu.number]
        generation, width = facts.pcie_generation, facts.pcie_width
        link = f"PCIe {generation} with {count(width, 'lane')}" if generation and width else "PCIe"
        yield _over(gpu.address, GPUS, [gpu], f"GPU {gpu.number}", facts.name or "", link)


def _switch_boxes(machine: Examined, gpus: Sequence[_Gpu]) -> Iterator[Box]:
    for switch in dict.fromkeys(gpu.switch for gpu in gpus if gpu.switch):
        below = [gpu for gpu in gpus if gpu.switch == switch]
        beside = [one for one in machine.system.of("nic") if switch in one.path]
        yield _over(switch, SWITCHES, below, "switch", switch, _cards(beside))


def _sockets(machine: Examined, gpus: Sequence[_Gpu]) -> Iterator[Box]:
    switches = {gpu.switch for gpu in gpus}
    for node in sorted({gpu.node for gpu in gpus} or {*machine.system.nodes} or {-1}):
        below = [gpu for gpu in gpus if gpu.node == node]
        others = [
            one
            for one in machine.system.of("nic")
            if one.node == node and gpus and not switches & {*one.path}
        ]
        cores = machine.system.nodes.get(node, machine.system.affinity)
        name = _socket(node)
        yield _over(name, SOCKETS, below, name, count(len(cores), "core"), _cards(others))


def _cards(cards: Sequence[PciDevice]) -> str:
    return count(len(cards), "network card") if cards else ""


def _to_host(copies: Sequence[MadeCopy], gpus: Sequence[_Gpu]) -> Iterator[Link]:
    """Yield the links up to the sockets; a share is that of the slower direction."""
    for gpu in gpus:
        shares = _shares(copies, PINNED, gpu.number) if gpu.number >= 0 else []
        yield Link(ends=(gpu.above, gpu.address), share=min(shares, default=None))
    for switch, node in dict.fromkeys((gpu.switch, gpu.node) for gpu in gpus if gpu.switch):
        yield Link(ends=(_socket(node), switch), share=None)


def _shares(copies: Sequence[MadeCopy], way: str, *gpus: int) -> list[float]:
    """Return the known shares that copies of a way from or to all these GPUs reach."""
    return [
        one.share
        for one in copies
        if one.way == way and {*gpus} <= {one.source, one.target} and one.share is not None
    ]


def _nvlinks(
    machine: Examined,
    copies: Sequence[MadeCopy],
    findings: Sequence[Finding],
    gpus: Sequence[_Gpu],
) -> Iterator[Link]:
    """Yield the NVLinks between GPUs or to NVSwitch, and the pairs that a finding names."""
    used = [gpu for gpu in gpus if gpu.number >= 0]
    switched = {
        gpu.number for gpu in used if SWITCH in (machine.gpus[gpu.number].nvlinks.ends or {})
    }
    for gpu in used:
        if gpu.number in switched:
            # the best copy shows what its own links carry: a slow one may be due to its other end
            best = max(_shares(copies, DIRECT, gpu.number), default=None)
            yield Link(ends=(gpu.address, NVSWITCH), share=best)
    for one, other in combinations(used, 2):
        pair = {one.number, other.number}
        straight = machine.nvlinks(one.number, other.number) and not pair & switched
        if straight or any({*finding.gpus} == pair for finding in findings):
            share = min(_shares(copies, DIRECT, *pair), default=None)
            yield Link(ends=(one.address, other.address), share=share)
