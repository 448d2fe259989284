"""Result: the examined machine with its findings and its picture, as it is shown and stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from statistics import mean

from dpbench.analysis.summary import FAKE_GPU
from dpbench.doctor import faults
from dpbench.doctor.faults import Examined
from dpbench.doctor.system import PciDevice
from dpbench.hardware.nvml import SWITCH
from dpbench.records import Source, fake
from dpbench.records.examination import (
    DIRECT,
    PINNED,
    Box,
    Examination,
    Finding,
    Link,
    MadeCopy,
)
from dpbench.records.words import count

SOCKETS, SWITCHES, CARDS, BELOW = range(4)
"""The rows of the picture."""
NVSWITCH = "NVSwitch"


def result(machine: Examined, started_s: float) -> Examination:
    """Return the result for a machine; `started_s` is in seconds since the epoch."""
    findings = faults.found(machine)
    done, undone = faults.checked(machine)
    copies = _copies(machine)
    boxes, links = _picture(machine, copies, findings)
    gpus = {"driver": machine.software.get("driver"), "gpus": machine.gpus}
    fakes = machine.gpus and fake.fake_gpus({"gpus": gpus})
    return Examination(
        started_s=started_s,
        labels=(Source.MEASURED.upper(), *([FAKE_GPU] if fakes else [])),
        findings=tuple(findings),
        checked=tuple(done),
        unchecked=tuple(undone),
        gpus=tuple(machine.gpus),
        software=machine.software,
        copies=copies,
        all_reduce_bytes_per_s=(machine.all_reduce.bytes_per_s or None)
        if machine.all_reduce
        else None,
        boxes=tuple(boxes),
        links=tuple(links),
    )


def _copies(machine: Examined) -> tuple[MadeCopy, ...]:
    return tuple(
        MadeCopy(
            source=one.copy.source,
            target=one.copy.target,
            way=one.copy.way,
            bytes_per_s=one.bytes_per_s,
            promised_bytes_per_s=machine.carried(one.copy),
            wrong=one.wrong,
            failure=one.failure,
        )
        for one in machine.transfers
    )


def _picture(
    machine: Examined, copies: Sequence[MadeCopy], findings: Sequence[Finding]
) -> tuple[list[Box], list[Link]]:
    """Return sockets, the switches below them, GPUs and cards in a row, and the links between."""
    cards = sorted(
        (one for one in machine.system.pci.values() if one.kind != "bridge"),
        key=lambda one: (one.node, one.root, one.path),
    )
    ids = [gpu.get("pci_address") or f"GPU {i}" for i, gpu in enumerate(machine.gpus)]
    known = {one.address: one for one in cards}
    shown = [*known, *(one for one in ids if one not in known)]
    switches = _switches(cards)
    above = {one: switch for switch, below in switches.items() for one in below}
    nodes = {one: known[one].node if one in known else -1 for one in shown}
    columns: dict[str, float] = {one: i for i, one in enumerate(shown)}
    boxes = [
        Box(id=one, row=CARDS, column=columns[one], texts=_texts(machine, known.get(one), ids, one))
        for one in shown
    ]
    # of both directions the slower one, because a link is as good as its worse direction
    to_host = {one: min(_shares(copies, PINNED, gpu), default=None) for gpu, one in enumerate(ids)}
    links = [
        Link(ends=(above.get(one, _socket(nodes[one])), one), share=to_host.get(one))
        for one in shown
    ]
    for switch, below in switches.items():
        column = mean(columns[one] for one in below)
        boxes.append(Box(id=switch, row=SWITCHES, column=column, texts=("switch", switch)))
        links.append(Link(ends=(_socket(nodes[below[0]]), switch), share=None))
    for node in sorted({*nodes.values()} or {*machine.system.nodes} or {-1}):
        inside = [columns[one] for one in shown if nodes[one] == node] or [0.0]
        column = (min(inside) + max(inside)) / 2
        cores = machine.system.nodes.get(node, machine.system.affinity if node < 0 else ())
        texts = (_socket(node), count(len(cores), "core"))
        boxes.append(Box(id=_socket(node), row=SOCKETS, column=column, texts=texts))
    if machine.gpus and all(_switched(machine, gpu) for gpu in range(len(ids))):
        column = mean(columns[one] for one in ids)
        boxes.append(Box(id=NVSWITCH, row=BELOW, column=column, texts=(NVSWITCH,)))
        # the best copy shows what a GPU's own links carry: a slow one may be due to its other end
        best = [max(_shares(copies, DIRECT, gpu), default=None) for gpu in range(len(ids))]
        links += [
            Link(ends=(NVSWITCH, one), share=share) for one, share in zip(ids, best, strict=True)
        ]
    links += _between(machine, copies, findings, ids)
    return boxes, links


def _socket(node: int) -> str:
    return f"node {node}" if node >= 0 else "processor"


def _switches(cards: Sequence[PciDevice]) -> dict[str, list[str]]:
    """Return the lowest bridges above several devices, each with the addresses of these."""
    found: dict[str, list[str]] = {}
    for one in cards:
        for address in reversed(one.path):
            if sum(address in other.path for other in cards) > 1:
                found.setdefault(address, []).append(one.address)
                break
    return found


def _texts(
    machine: Examined, card: PciDevice | None, ids: Sequence[str], address: str
) -> tuple[str, ...]:
    if address not in ids:
        assert card is not None
        return ("network card" if card.kind == "nic" else "unused GPU", address)
    gpu = ids.index(address)
    facts = machine.gpus[gpu]
    generation, width = facts.get("pcie_generation"), facts.get("pcie_width")
    link = f"PCIe {generation} with {count(width, 'lane')}" if generation and width else "PCIe"
    return (f"GPU {gpu}", str(facts.get("name", "")), link)


def _shares(copies: Sequence[MadeCopy], way: str, *gpus: int) -> list[float]:
    """Return the known shares that copies of a way from or to all these GPUs reach."""
    return [
        one.share
        for one in copies
        if one.way == way and {*gpus} <= {one.source, one.target} and one.share is not None
    ]


def _switched(machine: Examined, gpu: int) -> bool:
    return SWITCH in machine.gpus[gpu].get("nvlinks", {}).get("ends", {})


def _between(
    machine: Examined, copies: Sequence[MadeCopy], findings: Sequence[Finding], ids: Sequence[str]
) -> Iterator[Link]:
    """Yield the direct NVLinks, and the pairs of GPUs that a finding names."""
    for pair in combinations(range(len(ids)), 2):
        named = any({*one.gpus} == {*pair} for one in findings)
        straight = machine.nvlinks(*pair) and not _switched(machine, pair[0])
        if straight or named:
            share = min(_shares(copies, DIRECT, *pair), default=None)
            yield Link(ends=(ids[pair[0]], ids[pair[1]]), share=share)
