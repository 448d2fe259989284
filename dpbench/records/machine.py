"""Machines: descriptions of GPUs, host, and links as a graph, read from TOML, for predictions without the machine.

Every figure has a `source`. A missing figure is an error and is never guessed from a GPU's name, because most of a
prediction depends on whether GPUs can access each other's memory, and over which links.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "machines"
KINDS = ("nvlink", "pcie", "socket", "network", "memory")
"""The kinds of links: `socket` joins processors, `network` joins nodes, `memory` joins a logical device and RAM."""
HOST_NODE = "cpu"
"""The prefix of the names of processors, which are the nodes with host memory."""


class UnknownMachine(ValueError):
    """A description lacks a value that a prediction needs, or has an unknown or invalid one."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU: the number per node, peak FLOP per second by dtype, memory in bytes and its bytes per second."""

    name: str
    count: int
    memory_bytes: float = 0.0
    memory_bytes_per_s: float = 0.0
    flop_per_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Link:
    """A link between two nodes, with its bytes per second in each direction."""

    a: str
    b: str
    kind: str
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Host:
    """The costs of the processor: `factor` times the seconds of the machine on which the constants were measured.

    The seconds of single operations, if they were measured on this machine, replace the constants.
    """

    factor: float = 1.0
    cores: int = 0
    pageable_bytes_per_s: float = 0.0
    staged_bytes_per_s: float = 0.0
    """The bytes per second that all GPUs together move through host memory; 0 if unknown."""
    launch_s: float | None = None
    module_s: float | None = None
    tensor_s: float | None = None
    thread_s: float | None = None
    hand_off: float | None = None


@dataclass(frozen=True, kw_only=True)
class Collective:
    """The measured curve of an all-reduce over all devices: seconds = start + W + root * sqrt(W), W = bytes / rate."""

    bytes_per_s: float
    start_s: float
    root_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One or more nodes of one kind, each with the same GPUs and links."""

    name: str
    description: str
    peer_access: bool
    gpu: Gpu
    links: tuple[Link, ...]
    host: Host = field(default_factory=Host)
    nodes: int = 1
    collective: Collective | None = None
    probe: Mapping[str, float] = field(default_factory=dict, compare=False)
    """The figures of `dpbench probe` by name."""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def devices(self) -> int:
        """Return the total number of GPUs of all nodes."""
        return self.gpu.count * self.nodes

    @property
    def logical(self) -> bool:
        """Return whether the devices are logical devices on a processor."""
        return any(link.kind == "memory" for link in self.links)

    @property
    def socket_bytes_per_s(self) -> float:
        """Return the total bytes per second of the links between processors."""
        return sum(link.bytes_per_s for link in self.links if link.kind == "socket")

    def __hash__(self) -> int:
        return self._hash  # cached, because every look-up of a route needs it

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.gpu.name, self.gpu.count, self.nodes, self.links, self.peer_access))


def names() -> list[str]:
    """Return the names of the machines that come with dpbench."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Machine:
    """Return a machine by its name or from a TOML file.

    Raise LookupError for an unknown name, and UnknownMachine for an incomplete or invalid description.
    """
    path = Path(name)
    if name not in names():
        if path.suffix != ".toml":
            raise LookupError(f"{_unknown('machine', name, names())}; or give a file whose name ends in .toml")
    else:
        path = FOLDER / f"{name}.toml"
    try:
        data = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise UnknownMachine(f"{path} is not valid TOML: {error}") from None
    return read(data, path.stem)


def read(data: Mapping[str, Any], name: str) -> Machine:
    """Return the machine that the tables of a TOML file describe; raise UnknownMachine for missing or unknown keys."""
    _known(data, name, ["description", "source", "peer_access", "nodes", "gpu", "host", "link", "collective", "probe"])
    for key, why in (
        ("peer_access", "whether GPUs access each other's memory (true or false); see `nvidia-smi topo -p2p r`"),
        ("gpu", "the table [gpu] with name and count"),
        ("link", "the links, as [[link]] with between, kind and bytes_per_s; see `nvidia-smi topo -m`"),
    ):
        if key not in data:
            raise UnknownMachine(f"machine {name}: `{key}` is missing: {why}; it is not guessed from the GPU's name")
    gpu = _record(Gpu, data["gpu"], f"{name}: [gpu]")
    links = tuple(link for row in data["link"] for link in _links(row, name))
    machine = Machine(
        name=name, description=str(data.get("description", "")), peer_access=bool(data["peer_access"]),
        nodes=int(data.get("nodes", 1)), gpu=gpu, links=links, sources=dict(_sources(data)),
        host=_record(Host, data.get("host", {}), f"{name}: [host]"),
        collective=_record(Collective, data["collective"], f"{name}: [collective]") if "collective" in data else None,
        probe={key: _figure(row, f"{name}: [probe.{key}]") for key, row in data.get("probe", {}).items()},
    )  # fmt: skip
    _check(machine)
    return machine


def _links(row: Mapping[str, Any], name: str) -> Iterator[Link]:
    """Yield the links that one row describes; a name such as `gpu0-3` means each of four nodes."""
    where = f"{name}: [[link]] {row.get('between', '')}"
    _known(row, where, ["between", "kind", "bytes_per_s", "source"])
    if missing := [key for key in ("between", "kind", "bytes_per_s") if key not in row]:
        raise UnknownMachine(f"machine {where}: {', '.join(missing)} missing")
    if row["kind"] not in KINDS:
        raise UnknownMachine(f"machine {where}: {_unknown('kind of link', row['kind'], list(KINDS))}")
    first, second = row["between"]
    for a in _each(first):
        for b in _each(second):
            yield Link(a, b, row["kind"], float(row["bytes_per_s"]))


def _each(text: str) -> list[str]:
    """Return the nodes that a name means: `gpu0-3` is gpu0, gpu1, gpu2, gpu3."""
    match = re.fullmatch(r"(\D+)(\d+)-(\d+)", text)
    if not match:
        return [text]
    return [f"{match[1]}{i}" for i in range(int(match[2]), int(match[3]) + 1)]


def _figure(row: Any, where: str) -> float:
    """Return the value of one figure of the probe; raise UnknownMachine if it is missing."""
    if not isinstance(row, Mapping) or "value" not in row:
        raise UnknownMachine(f"machine {where}: must be a table with a value; got {row!r}")
    if "median" in row:
        raise UnknownMachine(f"machine {where}: written by an older probe; renew it: dpbench probe --output FILE.toml")
    return float(row["value"])


def _record(kind: Any, data: Mapping[str, Any], where: str) -> Any:
    known = [f.name for f in fields(kind)]
    _known(data, where, [*known, "source"])
    try:
        return kind(**{key: value for key, value in data.items() if key != "source"})
    except TypeError as error:
        raise UnknownMachine(f"machine {where}: {str(error).partition('__init__() ')[2]}") from None


def _known(data: Mapping[str, Any], where: str, known: list[str]) -> None:
    """Raise UnknownMachine for keys that are not defined."""
    for key in data:
        if key not in known:
            raise UnknownMachine(f"machine {where}: {_unknown('key', key, sorted(known))}")


def _unknown(kind: str, name: str, known: list[str]) -> str:
    """Return a message that a name is unknown, with the known names and the closest of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown {kind} {name!r}; known: {', '.join(known)}" + (f"; did you mean {near[0]!r}?" if near else "")


def _sources(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the source of each table."""
    for key, value in data.items():
        if key == "source":
            yield "machine", str(value)
        elif isinstance(value, dict) and "source" in value:
            yield key, str(value["source"])
        elif isinstance(value, list):
            yield from ((f"{key} {row['between']}", str(row["source"])) for row in value if "source" in row)


def _check(machine: Machine) -> None:
    """Raise UnknownMachine for counts below one, for GPUs without a link, and for nodes without a network."""
    if machine.gpu.count < 1 or machine.nodes < 1:
        raise UnknownMachine(
            f"machine {machine.name}: {machine.gpu.count} GPUs on {machine.nodes} nodes; both must be at least 1"
        )
    ends = {end for link in machine.links for end in (link.a, link.b)}
    lost = [f"gpu{i}" for i in range(machine.gpu.count) if f"gpu{i}" not in ends]
    if lost:
        raise UnknownMachine(
            f"machine {machine.name}: no link leads to {', '.join(lost)}; add [[link]] between = ['{lost[0]}', ...]"
        )
    if machine.nodes > 1 and not any(link.kind == "network" for link in machine.links):
        raise UnknownMachine(
            f"machine {machine.name}: {machine.nodes} nodes and no link of kind 'network'; "
            "add [[link]] between = ['cpu0', 'network'] with the network card's bytes_per_s"
        )
