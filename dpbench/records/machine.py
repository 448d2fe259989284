"""Machines that are described rather than here: GPUs, host, and links as a graph, read from TOML.

Every figure stands beside its `source`. What a description does not say is refused, and never guessed from a GPU's
name: whether GPUs reach each other's memory, and over which links, decides most of a prediction.
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
"""Kinds of links: `socket` joins processors, `network` joins nodes, `memory` is a logical device's way to RAM."""
HOST_NODE = "cpu"
"""Names of nodes that begin so are processors: host memory is there."""


class Unknown(ValueError):
    """A description lacks what a prediction needs, or says what nobody knows."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU: peak FLOP a second by dtype, bytes a second of its memory, bytes of it."""

    name: str
    count: int
    memory_bytes: float = 0.0
    memory_bytes_per_s: float = 0.0
    flop_per_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Link:
    """A link between two nodes, with bytes a second in each direction."""

    a: str
    b: str
    kind: str
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Host:
    """What the processor costs: `factor` times the seconds of the machine that the constants were measured on.

    Seconds of single operations, where somebody measured them on this machine, replace the constants.
    """

    factor: float = 1.0
    cores: int = 0
    pageable_bytes_per_s: float = 0.0
    staged_bytes_per_s: float = 0.0
    """What all GPUs together move through host memory; 0 where nobody says."""
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
    """Nodes of one kind, each with the same GPUs and links."""

    name: str
    description: str
    peer_access: bool
    gpu: Gpu
    links: tuple[Link, ...]
    host: Host = field(default_factory=Host)
    nodes: int = 1
    collective: Collective | None = None
    probe: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Figures of `dpbench probe` by name."""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def devices(self) -> int:
        """Return how many GPUs all nodes have together."""
        return self.gpu.count * self.nodes

    @property
    def logical(self) -> bool:
        """Tell whether its devices are logical ones on a processor."""
        return any(link.kind == "memory" for link in self.links)

    @property
    def socket_bytes_per_s(self) -> float:
        """Return what the links between two processors carry together."""
        return sum(link.bytes_per_s for link in self.links if link.kind == "socket")

    def __hash__(self) -> int:
        return self._hash  # asked for at every look-up of a route

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.gpu.name, self.gpu.count, self.nodes, self.links, self.peer_access))


def names() -> list[str]:
    """Return the names of the machines that come with dpbench."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Machine:
    """Return a machine by its name, or from a TOML file of one's own.

    Raises LookupError for a name that nobody knows, Unknown for a description that is not complete.
    """
    path = Path(name)
    if name not in names():
        if path.suffix != ".toml":
            raise LookupError(f"{_unknown('machine', name, names())}; your own is a file that ends in .toml")
    else:
        path = FOLDER / f"{name}.toml"
    try:
        data = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise Unknown(f"{path}: no TOML: {error}") from None
    return read(data, path.stem)


def read(data: Mapping[str, Any], name: str) -> Machine:
    """Return the machine that TOML's tables describe."""
    _known(data, name, ["description", "source", "peer_access", "nodes", "gpu", "host", "link", "collective", "probe"])
    for key, why in (
        ("peer_access", "whether GPUs reach each other's memory (true or false); `nvidia-smi topo -p2p r` tells"),
        ("gpu", "the table [gpu] with name and count"),
        ("link", "the links, as [[link]] with between, kind and bytes_per_s; `nvidia-smi topo -m` tells"),
    ):
        if key not in data:
            raise Unknown(f"machine {name}: `{key}` is missing: {why}; it is not guessed from the GPU's name")
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
    """Yield the links that one row describes: `gpu0-3` stands for each of four."""
    where = f"{name}: [[link]] {row.get('between', '')}"
    _known(row, where, ["between", "kind", "bytes_per_s", "source"])
    if missing := [key for key in ("between", "kind", "bytes_per_s") if key not in row]:
        raise Unknown(f"machine {where}: {', '.join(missing)} missing")
    if row["kind"] not in KINDS:
        raise Unknown(f"machine {where}: {_unknown('kind of link', row['kind'], list(KINDS))}")
    first, second = row["between"]
    for a in _each(first):
        for b in _each(second):
            yield Link(a, b, row["kind"], float(row["bytes_per_s"]))


def _each(text: str) -> list[str]:
    """Return the nodes that a name stands for: `gpu0-3` is gpu0, gpu1, gpu2, gpu3."""
    match = re.fullmatch(r"(\D+)(\d+)-(\d+)", text)
    if not match:
        return [text]
    return [f"{match[1]}{i}" for i in range(int(match[2]), int(match[3]) + 1)]


def _figure(row: Any, where: str) -> float:
    """Return a figure of the probe."""
    if not isinstance(row, Mapping) or "value" not in row:
        raise Unknown(f"machine {where}: a table with a value; got {row!r}")
    if "median" in row:
        raise Unknown(f"machine {where}: written by an older probe; write it anew: dpbench probe --output FILE.toml")
    return float(row["value"])


def _record(kind: Any, data: Mapping[str, Any], where: str) -> Any:
    known = [f.name for f in fields(kind)]
    _known(data, where, [*known, "source"])
    try:
        return kind(**{key: value for key, value in data.items() if key != "source"})
    except TypeError as error:
        raise Unknown(f"machine {where}: {str(error).partition('__init__() ')[2]}") from None


def _known(data: Mapping[str, Any], where: str, known: list[str]) -> None:
    """Refuse keys that nobody reads."""
    for key in data:
        if key not in known:
            raise Unknown(f"machine {where}: {_unknown('key', key, sorted(known))}")


def _unknown(kind: str, name: str, known: list[str]) -> str:
    """Say that a name is unknown, which ones are known, and which was probably meant."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown {kind} {name!r}; known: {', '.join(known)}" + (f"; did you mean {near[0]!r}?" if near else "")


def _sources(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the source of each table."""
    for key, value in data.items():
        if key == "source":
            yield "machine", str(value)
        elif isinstance(value, dict) and "source" in value:
            yield key, str(value["source"])
        elif isinstance(value, list):
            yield from ((f"{key} {row['between']}", str(row["source"])) for row in value if "source" in row)


def _check(machine: Machine) -> None:
    """Refuse counts below one, and GPUs that no link leads to."""
    if machine.gpu.count < 1 or machine.nodes < 1:
        raise Unknown(f"machine {machine.name}: {machine.gpu.count} GPUs on {machine.nodes} nodes: at least 1 each")
    ends = {end for link in machine.links for end in (link.a, link.b)}
    lost = [f"gpu{i}" for i in range(machine.gpu.count) if f"gpu{i}" not in ends]
    if lost:
        raise Unknown(f"machine {machine.name}: no link leads to {', '.join(lost)}; [[link]] between = ['gpu0', ...]")
    if machine.nodes > 1 and not any(link.kind == "network" for link in machine.links):
        raise Unknown(
            f"machine {machine.name}: {machine.nodes} nodes and no link of kind 'network'; "
            "add [[link]] between = ['cpu0', 'network'] with the network card's bytes_per_s"
        )
