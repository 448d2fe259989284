"""Words: the doctor's result as text: the machine as a tree, its links, and the findings."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from dpbench.doctor.faults import Examined, Finding
from dpbench.doctor.system import PciDevice
from dpbench.doctor.transfers import Copy, Transfer
from dpbench.records import HOST, words

WIDTH = 100


def text(
    machine: Examined, findings: Sequence[Finding], checks: tuple[Sequence[str], Sequence[str]]
) -> str:
    """Return the whole result; `checks` has what was checked, and what was not."""
    done, undone = checks
    lines = [*tree(machine), *links(machine)]
    for number, finding in enumerate(findings, 1):
        lines += ["", *_finding(number, finding)]
    if not any(finding.wrong for finding in findings):
        lines += ["", "Nothing wrong found."]
    lines += ["", _wrapped(f"Checked: {', '.join(done)}.")]
    if undone:
        lines.append(_wrapped(f"Not checked: {'; '.join(undone)}."))
    return "\n".join(lines)


def _wrapped(line: str) -> str:
    return textwrap.fill(line, WIDTH, subsequent_indent="  ")


def _finding(number: int, finding: Finding) -> Iterator[str]:
    kind = "" if finding.wrong else " (a fact of the hardware, or harmless)"
    yield textwrap.fill(f"{number}. {finding.says}{kind}", WIDTH, subsequent_indent="   ")
    for name in ("evidence", "cost", "change", "undo"):
        if said := getattr(finding, name):
            yield textwrap.fill(
                f"   {name}: {said}", WIDTH, subsequent_indent=" " * 6, break_on_hyphens=False
            )


def tree(machine: Examined) -> Iterator[str]:
    """Yield the sockets with their cores, and below them the bridges, GPUs and network cards."""
    system = machine.system
    shown = [one for one in system.pci.values() if one.kind != "bridge"]
    names = {
        str(gpu.get("pci_address")): f"GPU {number}  {gpu.get('name', '')}"
        for number, gpu in enumerate(machine.gpus)
    }
    nodes = sorted({*system.nodes, *(one.node for one in shown)})
    for node in nodes:
        cores = system.nodes.get(node, frozenset())
        title = f"node {node}" if node >= 0 else "unknown node"
        yield f"{title}: {words.count(len(cores), 'core')}" if cores else title
        printed: set[str] = set()
        for one in sorted((one for one in shown if one.node == node), key=lambda one: one.path):
            depth = 1
            for address in one.path:
                if address not in printed and _shared(address, shown):
                    printed.add(address)
                    yield f"{'  ' * depth}bridge {address}"
                depth += _shared(address, shown)
            yield f"{'  ' * depth}{names.get(one.address) or _kind(one)}{_lanes(one)}"
    placed = {one.address for one in shown}
    for address, name in names.items():
        if address not in placed:
            yield f"{name}  (its place on PCIe is unknown)"


def _shared(address: str, devices: Sequence[PciDevice]) -> bool:
    return sum(address in one.path for one in devices) > 1


def _kind(device: PciDevice) -> str:
    return {"nic": "network card", "gpu": "GPU that torch does not use"}[device.kind]


def _lanes(device: PciDevice) -> str:
    if not device.max_width:
        return ""
    now = f"{device.width} of " if device.width != device.max_width else ""
    return f"  PCIe, {now}{words.count(device.max_width, 'lane')}"


def links(machine: Examined) -> Iterator[str]:
    """Yield a table of the copies, with the share of what the PCIe link promises."""
    if not machine.transfers:
        return
    rows = [("copy", "GB/s", "of the link"), *(_link(machine, one) for one in machine.transfers)]
    yield ""
    yield from words.aligned(rows, left=(0,))
    if machine.all_reduce and machine.all_reduce.bytes_per_s:
        rate = words.number(machine.all_reduce.bytes_per_s / 1e9)
        yield f"all-reduce over all GPUs: {rate} GB/s sent by each"


def _link(machine: Examined, one: Transfer) -> tuple[str, str, str]:
    if one.failure:
        return str(one.copy), "-", one.failure
    promised = promised_bytes_per_s(machine, one.copy)
    share = words.percent(one.bytes_per_s / promised) if promised else ""
    wrong = f"  {words.count(one.wrong, 'wrong byte')}" if one.wrong else ""
    return str(one.copy), words.number(one.bytes_per_s / 1e9), share + wrong


def promised_bytes_per_s(machine: Examined, copy: Copy) -> float:
    """Return what the slower PCIe link of a copy can carry, in bytes per second; 0 if unknown."""
    return min(machine.promised(end) for end in copy.ends if end != HOST)
