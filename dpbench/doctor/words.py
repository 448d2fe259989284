"""Words: the doctor's result as text: the machine as a tree, its links, and the findings."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from dpbench.doctor.faults import Examined, Finding
from dpbench.doctor.system import PciDevice
from dpbench.doctor.transfers import DIRECT, PAGEABLE, PINNED, STAGED, Copy
from dpbench.records import HOST, words

WIDTH = 100


def text(
    machine: Examined, findings: Sequence[Finding], checks: tuple[Sequence[str], Sequence[str]]
) -> str:
    """Return the whole result; `checks` has what was checked, and what was not."""
    done, undone = checks
    lines = [*tree(machine), *_host(machine), *links(machine)]
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


def _host(machine: Examined) -> Iterator[str]:
    if machine.memory_bytes_per_s:
        yield f"host memory: {words.number(machine.memory_bytes_per_s / 1e9)} GB/s read and written"
    if not machine.gpus:
        yield (
            "torch uses no GPU here: `dpbench run` measures this processor, and `dpbench predict`"
            " described GPUs"
        )


def tree(machine: Examined) -> Iterator[str]:
    """Yield the sockets with their cores, and below them the bridges, GPUs and network cards."""
    system = machine.system
    every = [one for one in system.pci.values() if one.kind != "bridge"]
    shown = every if system.of("gpu") else []  # network cards matter beside GPUs alone
    places = [str(gpu.get("pci_address", "")) for gpu in machine.gpus]
    titles = [f"GPU {number}  {gpu.get('name', '')}" for number, gpu in enumerate(machine.gpus)]
    names = dict(zip(places, titles, strict=True))
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
    for place, name in zip(places, titles, strict=True):
        if place not in placed:
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
    """Yield a table of the copies from and to the host, and one of those between all GPUs."""
    if not machine.transfers:
        return
    yield from ("", *words.aligned(host_table(machine), left=(0,)))
    if len(machine.gpus) > 1:
        yield from ("", "direct copies in GB/s, from each GPU (row) to each GPU (column):")
        yield from words.aligned(pair_table(machine, DIRECT), left=(0,))
        staged = [one.bytes_per_s for one in machine.of(STAGED)]
        if staged:
            low, high = (words.number(edge(staged) / 1e9) for edge in (min, max))
            yield f"through the host's memory: {low} to {high} GB/s"
    if machine.all_reduce and machine.all_reduce.bytes_per_s:
        rate = words.number(machine.all_reduce.bytes_per_s / 1e9)
        yield f"all-reduce over all GPUs: {rate} GB/s sent by each"


def host_table(machine: Examined) -> list[tuple[str, ...]]:
    """Return a row per GPU: GB/s from and to the host, and the share of what its link promises."""
    head = ("GB/s", "from pinned", "to pinned", "from pageable", "to pageable", "of the link")
    rows: list[tuple[str, ...]] = [head]
    for gpu in range(len(machine.gpus)):
        ends = ((HOST, gpu), (gpu, HOST))
        cells = [_cell(machine, Copy(*pair, way)) for way in (PINNED, PAGEABLE) for pair in ends]
        best = max(
            (one.bytes_per_s for one in machine.of(PINNED) if gpu in one.copy.ends), default=0
        )
        promised = machine.promised(gpu)
        share = words.percent(best / promised) if promised and best else ""
        rows.append((f"GPU {gpu}", *cells, share))
    return rows


def pair_table(machine: Examined, way: str) -> list[tuple[str, ...]]:
    """Return a row per source and a column per target, in GB/s."""
    numbers = range(len(machine.gpus))
    rows: list[tuple[str, ...]] = [("", *(f"GPU {target}" for target in numbers))]
    for source in numbers:
        cells = (
            _cell(machine, Copy(source, target, way)) if source != target else ""
            for target in numbers
        )
        rows.append((f"GPU {source}", *cells))
    return rows


def _cell(machine: Examined, copy: Copy) -> str:
    """Return the rate of a copy in GB/s, or what is wrong with it."""
    found = next((one for one in machine.transfers if one.copy == copy), None)
    if found is None:
        return ""
    if found.failure:
        return "hangs" if found.hangs else "fails"
    return "wrong" if found.wrong else words.number(found.bytes_per_s / 1e9)


def promised_bytes_per_s(machine: Examined, copy: Copy) -> float:
    """Return what the slower PCIe link of a copy can carry, in bytes per second; 0 if unknown."""
    return min(machine.promised(end) for end in copy.ends if end != HOST)
