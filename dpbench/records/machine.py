"""Machines: descriptions of GPUs, host, and links as a graph, read from TOML, for predictions without the machine.

Every value has a `source`. A missing value is an error and is never guessed from a GPU's name, because most of a
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
from typing import Any, TypeVar

import msgspec

FOLDER = Path(__file__).parents[1] / "machines"
KINDS = ("nvlink", "pcie", "socket", "network", "memory")
"""The kinds of links: `socket` joins processors, `network` joins nodes, `memory` joins a logical device and RAM."""
HOST_NODE = "cpu"
"""The prefix of the names of processors, which are the nodes with host memory."""

Record = TypeVar("Record")


class UnknownMachine(ValueError):
    """A description lacks a value that a prediction needs, or has an unknown or invalid one."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU: the number per node, peak FLOP per second by dtype, memory size and memory bandwidth."""

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
    """The costs of operations on the processor.

    They are relative to the predictor's constants, which were measured on another machine. An operation takes `factor`
    times as long as its constant. Durations of single operations that were measured on this machine replace the
    constants.
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
    """The measured seconds of an all-reduce over all devices: start_s + w + root_s * sqrt(w), w = bytes/bytes_per_s."""

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
    """The values that `dpbench probe` measured, by name."""
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

    Raises LookupError for an unknown name, and UnknownMachine for an incomplete or invalid description.
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


@dataclass(frozen=True, kw_only=True)
class _File:
    """The tables of a TOML file."""

    peer_access: bool
    gpu: dict[str, Any]
    link: list[dict[str, Any]]
    description: str = ""
    source: str = ""
    nodes: int = 1
    host: dict[str, Any] = field(default_factory=dict)
    collective: dict[str, Any] | None = None
    probe: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _LinkRow:
    between: tuple[str, str]
    kind: str
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class _Figure:
    value: float


def read(data: Mapping[str, Any], name: str) -> Machine:
    """Return the machine that the tables of a TOML file describe.

    Raises UnknownMachine for keys that are missing or unknown, and for values of another type.
    """
    for key, why in (
        ("peer_access", "whether GPUs access each other's memory (true or false); see `nvidia-smi topo -p2p r`"),
        ("gpu", "the table [gpu] with name and count"),
        ("link", "the links, as [[link]] with between, kind and bytes_per_s; see `nvidia-smi topo -m`"),
    ):
        if key not in data:
            _known(data, name, [f.name for f in fields(_File)])
            raise UnknownMachine(f"machine {name}: `{key}` is missing ({why}); it is not guessed from the GPU's name")
    file = _record(_File, data, name)
    machine = Machine(
        name=name, description=file.description, peer_access=file.peer_access, nodes=file.nodes,
        gpu=_record(Gpu, file.gpu, f"{name}: [gpu]"), host=_record(Host, file.host, f"{name}: [host]"),
        links=tuple(link for row in file.link for link in _links(row, name)), sources=dict(_sources(data)),
        collective=_record(Collective, file.collective, f"{name}: [collective]") if file.collective else None,
        probe={key: _figure(row, f"{name}: [probe.{key}]") for key, row in file.probe.items()},
    )  # fmt: skip
    _check(machine)
    return machine


def _links(table: Mapping[str, Any], name: str) -> Iterator[Link]:
    """Yield the links that one table describes; a name such as `gpu0-3` means each of four nodes."""
    where = f"{name}: [[link]] {table.get('between', '')}"
    row = _record(_LinkRow, table, where)
    if row.kind not in KINDS:
        raise UnknownMachine(f"machine {where}: {_unknown('kind of link', row.kind, list(KINDS))}")
    if not row.bytes_per_s > 0:
        raise UnknownMachine(f"machine {where}: bytes_per_s is {row.bytes_per_s}; it must be above 0")
    first, second = row.between
    for a in _each(first):
        for b in _each(second):
            yield Link(a, b, row.kind, row.bytes_per_s)


def _each(text: str) -> list[str]:
    """Return the nodes that a name means: `gpu0-3` is gpu0, gpu1, gpu2, gpu3."""
    match = re.fullmatch(r"(\D+)(\d+)-(\d+)", text)
    if not match:
        return [text]
    return [f"{match[1]}{i}" for i in range(int(match[2]), int(match[3]) + 1)]


def _figure(row: Any, where: str) -> float:
    """Return one value of the table [probe]. Raises UnknownMachine if it is missing or has an old format."""
    if not isinstance(row, Mapping) or "value" not in row:
        raise UnknownMachine(f"machine {where}: expected a table with the key `value`; got {row!r}")
    if "median" in row:
        raise UnknownMachine(
            f"machine {where}: this file was written by an older probe; measure again: dpbench probe --output FILE.toml"
        )
    return _converted(_Figure, row, where).value


def _record(kind: type[Record], data: Mapping[str, Any], where: str) -> Record:
    """Return a table as a record. Raises UnknownMachine for unknown, missing and mistyped values."""
    _known(data, where, [*(f.name for f in fields(kind)), "source"])  # type: ignore[arg-type]
    return _converted(kind, data, where)


def _converted(kind: type[Record], data: Mapping[str, Any], where: str) -> Record:
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise UnknownMachine(f"machine {where}: {error}") from None


def _known(data: Mapping[str, Any], where: str, known: list[str]) -> None:
    """Check the keys of a table. Raises UnknownMachine for a key that is not defined."""
    for key in data:
        if key not in known:
            raise UnknownMachine(f"machine {where}: {_unknown('key', key, sorted(known))}")


def _unknown(kind: str, name: str, known: list[str]) -> str:
    """Return the message for an unknown name, with the known names and the closest of them."""
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
    """Check a machine. Raises UnknownMachine for counts below one, GPUs without a link, and nodes without a network."""
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
