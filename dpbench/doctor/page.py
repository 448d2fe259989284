"""Page: the doctor's result as one HTML file, with a picture of sockets, switches and links."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from markupsafe import Markup

from dpbench.doctor import words
from dpbench.doctor.faults import SLOW, Examined, Finding
from dpbench.doctor.system import PciDevice
from dpbench.doctor.transfers import DIRECT, PINNED
from dpbench.records.words import count, number, percent
from dpbench.report import templates

WIDE, HIGH, GAP = 132, 46, 18
"""The width and the height of a box and the gap between two, in SVG units."""
STYLE = """
main.doctor { max-width: 1100px; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
table.rates { width: auto; }
table.rates th, table.rates td { padding: .25rem .8rem; }
svg .box { fill: var(--card); stroke: var(--muted); }
svg .link { stroke: var(--ddp); stroke-width: 3; }
svg .link.slow { stroke: var(--loss); }
svg .link.unknown { stroke: var(--muted); stroke-width: 1.5; }
svg text { fill: var(--fg); font-size: 11px; text-anchor: middle; }
"""


def render(
    machine: Examined, findings: Sequence[Finding], checks: tuple[Sequence[str], Sequence[str]]
) -> str:
    """Return the HTML text; `checks` has what was checked, and what was not."""
    style = f"{templates.text_of('page.css')}{STYLE}"
    wrong = sum(finding.wrong for finding in findings)
    return templates.template("page.html", Path(__file__).parent).render(
        policy=Markup(f"default-src 'none'; style-src {templates.allowed(style)}"),
        style=Markup(style),
        host=platform.node(),
        summary=f"{count(wrong, 'fault')} found" if wrong else "Nothing wrong found",
        findings=findings,
        checked=checks[0],
        unchecked=checks[1],
        picture=Markup(picture(machine)),
        hosts=words.host_table(machine) if machine.transfers else [],
        pairs=words.pair_table(machine, DIRECT) if len(machine.gpus) > 1 else [],
    )


def picture(machine: Examined) -> str:
    """Return an SVG: sockets on top, switches below them, and GPUs and network cards at the bottom.

    A line to a GPU is green, or red if its copies reach less than `SLOW` of what the link promises;
    it is thin and grey if nothing was measured.
    """
    shown = sorted(
        (one for one in machine.system.pci.values() if one.kind != "bridge"),
        key=lambda one: (one.node, one.root, one.path),
    )
    places = {one.address: (i + 0.5) * (WIDE + GAP) for i, one in enumerate(shown)}
    switches = _switches(shown)
    for address, below in switches.items():
        places[address] = sum(places[one.address] for one in below) / len(below)
    nodes = sorted({one.node for one in shown}) or [0]
    tops = {
        node: _middle([places[one.address] for one in shown if one.node == node]) for node in nodes
    }
    width = max(1, len(shown)) * (WIDE + GAP)
    rows = [0.0, 1.0, 2.0] if switches else [0.0, 0.0, 1.0]
    heights = [8 + row * 2 * HIGH for row in rows]
    svg = ElementTree.Element(
        "svg",
        {
            "viewBox": f"0 0 {width} {heights[2] + HIGH + 8:g}",
            "role": "img",
            "aria-label": "; ".join(words.tree(machine)),
        },
    )
    for one in shown:
        above = next((address for address in reversed(one.path) if address in switches), "")
        end = (places[above], heights[1] + HIGH) if above else (tops[one.node], HIGH + 8)
        _line(svg, (places[one.address], heights[2]), end, _look(machine, one))
    for address, below in switches.items():
        _line(svg, (places[address], heights[1]), (tops[below[0].node], HIGH + 8), "unknown")
        _box(svg, places[address], heights[1], (f"switch {address}",))
    for node, x in tops.items():
        cores = machine.system.nodes.get(node, frozenset())
        name = f"node {node}" if node >= 0 else "processor"
        _box(svg, x, 8, (name, count(len(cores), "core") if cores else ""))
    for one in shown:
        _box(svg, places[one.address], heights[2], _names(machine, one))
    return ElementTree.tostring(svg, encoding="unicode")


def _middle(values: Sequence[float]) -> float:
    return (min(values) + max(values)) / 2 if values else (WIDE + GAP) / 2


def _switches(shown: Sequence[PciDevice]) -> dict[str, list[PciDevice]]:
    """Return the lowest bridges above several devices, each with these devices."""
    found: dict[str, list[PciDevice]] = {}
    for one in shown:
        for address in reversed(one.path):
            if sum(address in other.path for other in shown) > 1:
                found.setdefault(address, []).append(one)
                break
    return found


def _rates(machine: Examined, device: PciDevice) -> Iterator[float]:
    """Yield the shares of the promised rate that the copies of a GPU and the host reach."""
    for gpu in range(len(machine.gpus)):
        if machine.pci(gpu) is device and machine.promised(gpu):
            for one in machine.of(PINNED):
                if gpu in one.copy.ends:
                    yield one.bytes_per_s / machine.promised(gpu)


def _look(machine: Examined, device: PciDevice) -> str:
    shares = list(_rates(machine, device))
    return "unknown" if not shares else "slow" if min(shares) < SLOW else ""


def _names(machine: Examined, device: PciDevice) -> tuple[str, ...]:
    numbers = [gpu for gpu in range(len(machine.gpus)) if machine.pci(gpu) is device]
    if not numbers:
        return ("network card" if device.kind == "nic" else "unused GPU", device.address)
    shares = list(_rates(machine, device))
    reached = f"{percent(min(shares))} of its link" if shares else device.address
    lanes = f", {number(device.max_width)} lanes" if device.max_width else ""
    return (f"GPU {numbers[0]}{lanes}", reached)


def _line(
    svg: ElementTree.Element, start: tuple[float, float], end: tuple[float, float], look: str
) -> None:
    (x1, y1), (x2, y2) = start, end
    places = {"x1": f"{x1:g}", "y1": f"{y1:g}", "x2": f"{x2:g}", "y2": f"{y2:g}"}
    ElementTree.SubElement(svg, "line", {**places, "class": f"link {look}".strip()})


def _box(svg: ElementTree.Element, x: float, y: float, lines: Sequence[str]) -> None:
    place = {"x": f"{x - WIDE / 2:g}", "y": f"{y:g}", "width": str(WIDE), "height": str(HIGH)}
    ElementTree.SubElement(svg, "rect", {**place, "rx": "6", "class": "box"})
    for number_, text in enumerate(filter(None, lines)):
        line = ElementTree.SubElement(
            svg, "text", {"x": f"{x:g}", "y": f"{y + 19 + 16 * number_:g}"}
        )
        line.text = text
