"""Words: the doctor's result as text: the machine as a tree, its links, and the findings."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from dpbench.doctor.examination import DIRECT, STAGED, Examination, Problem
from dpbench.doctor.faults import Examined
from dpbench.doctor.system import PciDevice
from dpbench.hardware import provenance
from dpbench.records import words

WIDTH = 100


def text(machine: Examined, examination: Examination) -> str:
    """Return the whole result."""
    lines = [*tree(machine), *_host(machine), *_software(machine), *links(examination)]
    for number, problem in enumerate(examination.problems, 1):
        lines += ["", *_problem(number, problem)]
    if not examination.faults:
        lines += ["", f"{examination.summary}."]
    lines += ["", _wrapped(f"Checked: {', '.join(examination.checked)}.")]
    if examination.unchecked:
        lines.append(_wrapped(f"Not checked: {'; '.join(examination.unchecked)}."))
    if examination.copies:
        lines.append(f"[{' '.join(examination.labels)}]")
    return "\n".join(lines)


def _wrapped(line: str) -> str:
    return textwrap.fill(line, WIDTH, subsequent_indent="  ")


def _problem(number: int, problem: Problem) -> Iterator[str]:
    finding = problem.first
    kind = "" if finding.wrong else " (a fact, not a fault)"
    yield textwrap.fill(f"{number}. {finding.says}{kind}", WIDTH, subsequent_indent="   ")
    for name, said in problem.parts:
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


def _software(machine: Examined) -> Iterator[str]:
    """Yield the versions, and the variables that change what torch, CUDA and NCCL do."""
    titles = {
        "torch": "torch",
        "cuda": "CUDA",
        "nccl": "NCCL",
        "driver": "driver",
        "driver_cuda": "which supports CUDA",
    }
    known = [
        f"{title} {machine.software[name]}"
        for name, title in titles.items()
        if machine.software.get(name)
    ]
    if known:
        yield _wrapped(f"software: {', '.join(known)}")
    if given := provenance.variables(machine.variables):
        yield _wrapped(f"variables: {', '.join(f'{name}={given[name]}' for name in given)}")


def tree(machine: Examined) -> Iterator[str]:
    """Yield the sockets with their cores, and below them the bridges, GPUs and network cards."""
    system = machine.system
    shown = system.devices if system.of("gpu") else []  # network cards matter beside GPUs alone
    places = [gpu.pci_address or "" for gpu in machine.gpus]
    titles = [f"GPU {number}  {gpu.name or ''}" for number, gpu in enumerate(machine.gpus)]
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
                if address not in printed and system.shared(address):
                    printed.add(address)
                    yield f"{'  ' * depth}bridge {address}"
                depth += system.shared(address)
            yield f"{'  ' * depth}{names.get(one.address) or _kind(one)}{_lanes(one)}"
    placed = {one.address for one in shown}
    for place, name in zip(places, titles, strict=True):
        if place not in placed:
            yield f"{name}  (its place on PCIe is unknown)"


def _kind(device: PciDevice) -> str:
    return {"nic": "network card", "gpu": "GPU that torch does not use"}[device.kind]


def _lanes(device: PciDevice) -> str:
    if not device.max_width:
        return ""
    now = f"{device.width} of " if device.width != device.max_width else ""
    return f"  PCIe, {now}{words.count(device.max_width, 'lane')}"


def links(examination: Examination) -> Iterator[str]:
    """Yield a table of the copies from and to the host, and one of those between all GPUs."""
    if not examination.copies:
        return
    yield from ("", *words.aligned(examination.host_table(), left=(0,)))
    if len(examination.gpus) > 1:
        yield from ("", "direct copies in GB/s, from each GPU (row) to each GPU (column):")
        yield from words.aligned(examination.pair_table(), left=(0,))
        direct, staged = (
            [one for one in examination.copies if one.way == way and one.share]
            for way in (DIRECT, STAGED)
        )
        if direct:
            low, high = (
                words.percent(edge(one.share or 0 for one in direct)) for edge in (min, max)
            )
            yield f"they reach {low} to {high} of what their links carry"
        if staged:
            rates = [one.bytes_per_s / 1e9 for one in staged]
            low, high = (words.number(edge(rates)) for edge in (min, max))
            yield f"through the host's memory: {low} to {high} GB/s"
    if examination.all_reduce_bytes_per_s:
        rate = words.number(examination.all_reduce_bytes_per_s / 1e9)
        yield f"all-reduce over all GPUs: {rate} GB/s sent by each"
