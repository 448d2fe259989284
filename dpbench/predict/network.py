"""Network: a machine's links as a graph, routes between its nodes, and the speed of collectives.

The speed of collectives comes from the links or from a measured bus bandwidth.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from dpbench.predict.constants import DEFAULT, Constants
from dpbench.predict.events import rates
from dpbench.predict.machine import HOST_NODE, Collective, Link, Machine, UnknownMachine
from dpbench.records import words
from dpbench.records.errors import UsageError
from dpbench.records.files import UnreadableFile

Direction = tuple[str, str]
TRAFFIC: dict[str, Callable[[int], float]] = {
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
}
"""The bytes per link of a ring for each byte of the message, by collective and number of devices.
"""
ONE_WAY = ("broadcast", "reduce")
GB = 1e9
_LINE = re.compile(
    r"^\s*(?P<size>\d+)\s+\d+\s+\w+\s+(?!none)\w+\s+-?\d+\s+(?P<time_us>[\d.]+)\s+[\d.]+\s+(?P<busbw>[\d.]+)\s",
    re.M,
)
"""Matches a line of all_reduce_perf's output.

The columns are size in bytes, count, type, operation, root, and time (µs), algbw and busbw (GB/s)
of the out-of-place all-reduce.
"""
FEWEST = 3
"""The minimum number of different sizes to which a curve is fitted."""
MOST = 1.25
"""The maximum bandwidth of a fitted curve, divided by the best measured bandwidth."""
LIMITS = (0.01, 10_000.0)
"""The accepted bus bandwidths in GB/s, far beyond those of real networks and NVLinks."""
_OTHER = re.compile(r"\b(?!all_reduce)(\w+)_perf\b")
"""Matches the name of another program of nccl-tests, whose `busbw` has another meaning."""


@lru_cache(maxsize=4096)
def route(machine: Machine, source: str, target: str) -> tuple[Direction, ...]:
    """Return the directed links of the route with the fewest hops, over NVLink alone if possible.

    `source` and `target` are names such as "gpu0"; "host" is the memory of the processor nearest to
    the other end. Without NVLink and peer access, two GPUs communicate through host memory. Raises
    UnknownMachine if no route exists.
    """
    links = machine.links
    if "host" not in (source, target):
        over = _shortest([link for link in links if link.kind == "nvlink"], source, target)
        if over:
            return over
        if not machine.peer_access:
            return (*route(machine, source, "host"), *route(machine, "host", target))
        links = tuple(link for link in links if link.kind != "nvlink")
    way = _shortest(links, source, target)
    if not way and source != target:
        raise UnknownMachine(
            f"machine {machine.name}: no route from {source} to {target}; the machine file has the"
            f" links {_listed(machine)}; add the links that are missing"
        )
    return way


def _listed(machine: Machine) -> str:
    return ", ".join(f"{link.a}-{link.b}" for link in machine.links) or "none"


def _shortest(links: Iterable[Link], source: str, target: str) -> tuple[Direction, ...]:
    """Return the way with the fewest hops, () if there is none."""
    import networkx as nx

    graph = nx.Graph((link.a, link.b) for link in links)
    if "host" in (source, target):
        graph.add_edges_from(("host", node) for node in [*graph] if node.startswith(HOST_NODE))
    if source not in graph:
        return ()
    # a route never passes through a GPU
    between = graph.subgraph(
        node for node in graph if node in (source, target) or not node.startswith("gpu")
    )
    way = nx.single_source_shortest_path(between, source).get(target, [])
    return tuple(hop for hop in pairwise(way) if "host" not in hop)


@lru_cache(maxsize=1024)
def capacities(machine: Machine) -> dict[Direction, float]:
    """Return the bytes per second of each directed link; the rates of parallel links are added."""
    return {
        (a, b): bytes_per_s
        for a, ends in _directed(machine.links).items()
        for b, bytes_per_s in ends.items()
    }


def _directed(links: Iterable[Link]) -> dict[str, dict[str, float]]:
    """Return the bytes per second from each end of links to each other end."""
    found: dict[str, dict[str, float]] = {}
    for link in links:
        for a, b in ((link.a, link.b), (link.b, link.a)):
            ends = found.setdefault(a, {})
            ends[b] = ends.get(b, 0.0) + link.bytes_per_s
    return found


@lru_cache(maxsize=1024)
def nvlink_cut(machine: Machine, count: int) -> float:
    """Return the minimum NVLink cut between the first `count` GPUs; 0 if some are not connected.

    `count` is 2 or more, and the unit is bytes per second in each direction. A collective's rings
    cross every cut, so the minimum cut limits their bandwidth.
    """
    import networkx as nx
    from networkx.algorithms.flow import edmonds_karp

    gpus = [f"gpu{i}" for i in range(count)]
    links = _directed(link for link in machine.links if link.kind == "nvlink")
    graph = nx.Graph()
    graph.add_nodes_from(gpus)
    graph.add_weighted_edges_from(
        ((a, b, rate) for a, ends in links.items() for b, rate in ends.items()), weight="capacity"
    )
    graph.remove_nodes_from([n for n in graph if n.startswith("gpu") and n not in gpus])
    return float(
        min(
            nx.maximum_flow_value(graph, gpus[0], other, flow_func=edmonds_karp)
            for other in gpus[1:]
        )
    )


@lru_cache(maxsize=1024)
def ring(machine: Machine, count: int, *, closed: bool) -> tuple[float, str]:
    """Return a ring's bytes per second over the first `count` GPUs, and its slowest kind of hop.

    All hops are busy and share links fairly. The kind is "staged" if GPUs without peer access
    communicate through host memory, "socket" if a hop leads from one processor to another, else
    "peer". A ring that is not `closed`, as in a broadcast, has no last hop back to the first GPU.
    """
    hops = [(f"gpu{i}", f"gpu{(i + 1) % count}") for i in range(count if closed else count - 1)]
    ways = {hop: route(machine, *hop) for hop in hops}
    rate = min(rates(ways, capacities(machine)).values())
    processors = [_processors(way) for way in ways.values()]
    if not machine.peer_access and any(processors):
        return rate, "staged"
    return rate, "socket" if any(len(one) > 1 for one in processors) else "peer"


def _processors(way: tuple[Direction, ...]) -> set[str]:
    return {end for direction in way for end in direction if end.startswith(HOST_NODE)}


@dataclass(frozen=True)
class Bus:
    """The bus bandwidth between devices for large messages, and the kind of link that limits it."""

    bytes_per_s: float
    kind: str  # "nvlink" | "peer" | "staged" | "socket" | "network" | "measured" | "alone"


@lru_cache(maxsize=4096)
def bus(machine: Machine, devices: int, constants: Constants, *, one_way: bool = False) -> Bus:
    """Return the bus bandwidth between `devices` GPUs, which fill one node before the next.

    `one_way` is for a broadcast or a reduction to one device, which use links in one direction
    only.
    """
    unscaled = _bus(machine, devices, constants, one_way)
    scale = constants.bus_scale * constants.delivered
    return Bus(unscaled.bytes_per_s * scale, unscaled.kind)


LINK_KINDS = ("nvlink", "peer", "staged", "socket", "network")
"""The kinds of a bus between several GPUs, by its links."""


@lru_cache(maxsize=4096)
def link_kind(machine: Machine, devices: int) -> str:
    """Return which of `LINK_KINDS` limits collectives of GPUs, also if their bus was measured."""
    return _bus(replace(machine, collective=None), devices, DEFAULT, one_way=False).kind


def _bus(machine: Machine, devices: int, constants: Constants, one_way: bool) -> Bus:
    if machine.collective:
        return Bus(machine.collective.bytes_per_s, "measured")
    nodes = -(-devices // machine.gpu.count)
    inside = _within_node(machine, min(devices, machine.gpu.count), constants, one_way)
    if nodes == 1:
        return inside
    card = sum(link.bytes_per_s for link in machine.links if link.kind == "network")
    # each node's cards together carry the traffic of the ring between nodes
    across = constants.network_efficiency * card * (devices - 1) / devices * nodes / (nodes - 1)
    return Bus(across, "network") if across < inside.bytes_per_s else inside


def _within_node(machine: Machine, count: int, c: Constants, one_way: bool) -> Bus:
    if count < 2:
        return Bus(math.inf, "alone")
    if cut := nvlink_cut(machine, count):
        return Bus(cut * c.nvlink_efficiency, "nvlink")
    rate, kind = ring(machine, count, closed=not one_way)
    rate *= c.peer_efficiency
    together = machine.host.staged_bytes_per_s or math.inf
    most = {
        "peer": math.inf,
        "staged": min(
            c.staged_bytes_per_s * (c.staged_one_way if one_way else 1.0), together / count
        ),
        "socket": c.socket_efficiency * machine.socket_bytes_per_s,
    }[kind]
    return Bus(min(most, rate), kind)


@dataclass(frozen=True)
class DeviceGroup:
    """The devices of a case, with the durations of collectives among them."""

    machine: Machine
    devices: int
    constants: Constants

    @property
    def nodes(self) -> int:
        """Return the number of nodes that the devices occupy."""
        return -(-self.devices // self.machine.gpu.count)

    def coalesced_s(self, kind: str, size: float) -> float:
        """Return the seconds of a collective over tensors, joined into messages of at most 10 MiB.

        `kind` is a collective such as "broadcast", and `size` the total in bytes. One process
        drives all devices.
        """
        if self.devices < 2 or size <= 0:
            return 0.0
        return math.ceil(size / self.constants.chunk_bytes) * self.constants.call_s + self._wire(
            kind, size
        )

    def one_s(self, kind: str, size: float) -> float:
        """Return the seconds of one collective of `size` bytes between processes."""
        if self.devices < 2 or size <= 0:
            return 0.0
        measured = self.machine.collective
        start = measured.start_s if measured else self.constants.start_s
        return start + 2 * self.constants.hop_s * math.log2(self.nodes) + self._wire(kind, size)

    def beside_s(self, seconds: float, size: float) -> float:
        """Return the seconds of kernels that run concurrently with an all-reduce of `size` bytes.

        `seconds` is their duration without the all-reduce.
        """
        slower = seconds * (1 + self.constants.slowdown)
        if bus(self.machine, self.devices, self.constants).kind == "staged":
            slower += self.constants.staged_slowdown * min(seconds, self._wire("all_reduce", size))
        return slower

    def _wire(self, kind: str, size: float) -> float:
        on = bus(self.machine, self.devices, self.constants, one_way=kind in ONE_WAY)
        wire = TRAFFIC[kind](self.devices) * size / on.bytes_per_s
        measured = self.machine.collective
        return wire + (measured.root_s if measured else self.constants.root_s) * math.sqrt(wire)


def collective(given: str) -> Collective:
    """Return a curve of all-reduces from a bus bandwidth in GB/s or a file with nccl-tests' output.

    `given` is the `busbw` that all_reduce_perf prints for its largest sizes, or the path of the
    file. A bandwidth alone is completed by `start_s` and `root_s` of `constants.DEFAULT`. Raises
    ValueError for a number outside `LIMITS` and for a file from which no curve can be fitted.
    """
    try:
        rate = float(given)
    except ValueError:
        return _from_file(Path(given))
    low, high = LIMITS
    if not low <= rate <= high:
        raise UsageError(
            f"the bandwidth of the bus must be a number of GB/s from {low:g} to {high:g}, got"
            f" {given}"
        )
    return Collective(bytes_per_s=rate * GB, start_s=DEFAULT.start_s, root_s=DEFAULT.root_s)


def _from_file(path: Path) -> Collective:
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise UnreadableFile(
            f"{path} is neither a bandwidth in GB/s nor a file that can be read ({error.strerror});"
            " give the busbw of the largest sizes, such as 42.5, or a file with the output of"
            " all_reduce_perf"
        ) from None
    points = [
        (int(one["size"]), float(one["time_us"]) * 1e-6, float(one["busbw"]) * GB)
        for one in _LINE.finditer(text)
    ]
    if other := _OTHER.search(text):
        raise UnreadableFile(
            f"{path} is the output of {other[0]}; give the output of all_reduce_perf instead"
        )
    usable = [point for point in points if min(point) > 0]
    if (sizes := len({size for size, _, _ in usable})) < FEWEST:
        raise UnreadableFile(
            f"{path} has usable lines of all_reduce_perf for {words.count(sizes, 'size')}, but at"
            f" least {FEWEST} sizes are needed; give the whole output, such as that of:"
            " all_reduce_perf -b 8 -e 1G -f 2 -g N"
        )
    return fitted(usable)


def fitted(points: Sequence[tuple[int, float, float]]) -> Collective:
    """Return the curve fitted to all-reduces, each as (bytes, seconds, bus bandwidth in bytes/s).

    The curve is the sum of a constant, a term in proportion to the bytes, and one in proportion to
    their square root; none is negative. The sum of the squared relative errors of the seconds is
    minimal. The bandwidth of the curve is at most `MOST` times the best measured one.
    """
    import numpy as np
    from scipy.optimize import nnls

    seconds = np.array([spent for _, spent, _ in points])
    # the bytes that each device sends in a ring
    sent = np.array([spent * rate for _, spent, rate in points])
    (start_s, per_byte, root), _ = nnls(
        np.stack([1 / seconds, sent / seconds, np.sqrt(sent) / seconds], 1), np.ones(len(points))
    )
    best = max(rate for _, _, rate in points)
    per_byte = max(per_byte, 1 / (MOST * best))  # noise may leave a curve without a linear part
    return Collective(
        bytes_per_s=float(1 / per_byte),
        start_s=float(start_s),
        root_s=float(root / math.sqrt(per_byte)),
    )
