"""Collectives: seconds of a message between n devices, by the curve start + W + root * sqrt(W).

W is what the slowest link needs at the saturated bus bandwidth. The curve fits published NCCL all-reduce times to
4-13 % from 1 MiB up, where NCCL's own tuning model is 20-40 % off.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from dpbench.predict.constants import Constants
from dpbench.predict.network import nvlink_cut, ring
from dpbench.records.machine import Machine

TRAFFIC: dict[str, Callable[[int], float]] = {
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
}
"""Bytes over each link for a byte of the message, as a ring moves them."""
ONE_WAY = ("broadcast", "reduce")


@dataclass(frozen=True)
class Bus:
    """The saturated bus bandwidth between devices, and what kind of links sets it."""

    bytes_per_s: float
    kind: str  # "nvlink" | "peer" | "staged" | "socket" | "network" | "measured"


@lru_cache(maxsize=4096)
def bus(machine: Machine, devices: int, constants: Constants, *, one_way: bool = False) -> Bus:
    """Return the bus bandwidth between the first `devices` GPUs; whole nodes when there are several.

    `one_way` is that of a broadcast or a reduction, which uses links in one direction.
    """
    found = _bus(machine, devices, constants, one_way)
    return Bus(found.bytes_per_s * constants.bus_scale, found.kind)


def _bus(machine: Machine, devices: int, constants: Constants, one_way: bool) -> Bus:
    if machine.collective:
        return Bus(machine.collective.bytes_per_s, "measured")
    nodes = -(-devices // machine.gpu.count)
    inside = _inside(machine, min(devices, machine.gpu.count), constants, one_way)
    if nodes == 1:
        return inside
    card = sum(link.bytes_per_s for link in machine.links if link.kind == "network")
    # every node sends what leaves it once around the ring of nodes, over all its cards together
    across = constants.network_efficiency * card * (devices - 1) / devices * nodes / (nodes - 1)
    return Bus(across, "network") if across < inside.bytes_per_s else inside


def _inside(machine: Machine, count: int, c: Constants, one_way: bool) -> Bus:
    """Return the bus bandwidth inside one node."""
    if count < 2:
        return Bus(math.inf, "alone")
    if cut := nvlink_cut(machine, count):
        return Bus(cut * c.nvlink_efficiency, "nvlink")
    rate, kind = ring(machine, count, closed=not one_way)
    rate *= c.peer_efficiency
    together = machine.host.staged_bytes_per_s or math.inf
    most = {
        "peer": math.inf,
        "staged": min(c.staged_bytes_per_s * (c.staged_one_way if one_way else 1.0), together / count),
        "socket": c.socket_efficiency * machine.socket_bytes_per_s,
    }[kind]
    return Bus(min(most, rate), kind)


@dataclass(frozen=True)
class Group:
    """The devices of a case that talk to each other, what carries their messages, and the constants of both."""

    machine: Machine
    devices: int
    constants: Constants

    @property
    def nodes(self) -> int:
        """Return how many nodes the devices fill."""
        return -(-self.devices // self.machine.gpu.count)

    def coalesced_s(self, kind: str, size: float) -> float:
        """Return the seconds of tensors joined to messages of at most 10 MiB, sent one after the other."""
        if self.devices < 2 or size <= 0:
            return 0.0
        return math.ceil(size / self.constants.chunk_bytes) * self.constants.call_s + self._wire(kind, size)

    def one_s(self, kind: str, size: float) -> float:
        """Return the seconds of one message between processes."""
        if self.devices < 2 or size <= 0:
            return 0.0
        measured = self.machine.collective
        start = measured.start_s if measured else self.constants.start_s
        return start + 2 * self.constants.hop_s * math.log2(self.nodes) + self._wire(kind, size)

    def beside_s(self, seconds: float, size: float) -> float:
        """Return what kernels of so many seconds take beside the all-reduce of `size` bytes."""
        slower = seconds * (1 + self.constants.slowdown)
        if bus(self.machine, self.devices, self.constants).kind == "staged":
            slower += self.constants.staged_slowdown * min(seconds, self._wire("all_reduce", size))
        return slower

    def _wire(self, kind: str, size: float) -> float:
        on = bus(self.machine, self.devices, self.constants, one_way=kind in ONE_WAY)
        wire = TRAFFIC[kind](self.devices) * size / on.bytes_per_s
        measured = self.machine.collective
        return wire + (measured.root_s if measured else self.constants.root_s) * math.sqrt(wire)
