"""Machines: the GPUs, the host and the links of a machine, from which its steps are predicted.

Descriptions are TOML files, whose tables name the `source` of their values. A value that a file
lacks is an error, because a prediction depends mainly on whether GPUs can access each other's
memory, and over which links. A file that `described` makes from a line of text names what it
assumes.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from reprlib import repr as abridged
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec

from dpbench.predict import described
from dpbench.records import data_sheets
from dpbench.records.errors import UnknownName, UsageError
from dpbench.records.files import UnreadableFile, text_of
from dpbench.records.registry import unknown
from dpbench.records.visible import everywhere
from dpbench.records.words import count

KINDS = ("nvlink", "pcie", "socket", "network")
"""The kinds of links. `socket` joins processors, `network` joins nodes."""
HOST_NODE = "cpu"
"""The prefix of processors' names, such as cpu0; as the end of a link, its host memory."""

UNMEASURED_WITHOUT_GIL = (
    "without the interpreter lock, each operation of the host is assumed to take as long as with"
    " it, and not longer beside those of other threads"
)
UNMEASURED_WITH_GIL = (
    "with the interpreter lock, each operation of the host is assumed to take as long as without"
    " it, and to be as much slower beside other threads as where the constants were measured"
)
OWN_CORES = (
    "without the interpreter lock, the thread of each GPU is assumed to have a core of its own"
)
Record = TypeVar("Record")
MOST_GPUS = 256
"""The most GPUs of one node in a description."""
Number = Annotated[float, msgspec.Meta(ge=-1e24, le=1e24)]
"""A finite number."""
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e24)]
"""A number of 0 or more."""
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e24)]
"""A number above 0."""


class UnknownMachine(UsageError):
    """A value in a machine's description is missing, unknown or invalid."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The GPUs of one node: their number, and each one's memory and peak FLOP/s by dtype."""

    name: str
    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_GPUS)]
    memory_bytes: Amount = 0.0
    memory_bytes_per_s: Amount = 0.0
    flop_per_s: Mapping[str, Positive] = field(default_factory=dict)


@dataclass(frozen=True)
class Link:
    """A link between the devices or processors `a` and `b`; `bytes_per_s` is per direction."""

    a: str
    b: str
    kind: str
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Host:
    """The costs of operations on the host's processor.

    An operation takes `factor` times as long as the predictor's constant, which was measured on
    another machine. A field such as `launch_s` is the duration of one operation on this host, and
    replaces the constant. `gil` is whether Python has its global interpreter lock; without it,
    threads run Python code at the same time. `hand_off` is the fraction by which each additional
    thread slows down the operations of the others. `measured_gil` is whether Python had the lock
    when these durations and `hand_off` were measured. None, or 0 for `cores` and the rates, means
    unknown.
    """

    factor: Positive = 1.0
    gil: bool = True
    cores: Annotated[int, msgspec.Meta(ge=0, le=65536)] = 0
    pageable_bytes_per_s: Amount = 0.0
    staged_bytes_per_s: Amount = 0.0
    """The total of all GPUs' transfers through host memory."""
    launch_s: Amount | None = None
    module_s: Amount | None = None
    tensor_s: Amount | None = None
    thread_s: Amount | None = None
    hand_off: Amount | None = None
    measured_gil: bool = True


@dataclass(frozen=True, kw_only=True)
class Collective:
    """The constants of an all-reduce over all devices: start_s + w + root_s * sqrt(w) seconds.

    w is the number of bytes that each device sends, divided by `bytes_per_s`. `root_s` is in square
    roots of seconds.
    """

    bytes_per_s: Positive
    start_s: Number
    root_s: Number = 0.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine of one or more equal nodes; `gpu` and `links` describe one node.

    `peer_access` is whether GPUs can access each other's memory. `assumed` lists assumptions about
    what the description does not state.
    """

    name: str
    description: str
    peer_access: bool
    gpu: Gpu
    links: tuple[Link, ...]
    host: Host = field(default_factory=Host)
    nodes: int = 1
    collective: Collective | None = None
    assumed: tuple[str, ...] = ()

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Return `assumed`, and what is assumed about a host that nobody measured."""
        return (*self.assumed, *self._assumed_of_host())

    def _assumed_of_host(self) -> Iterator[str]:
        host = self.host
        measured = host.launch_s is not None
        if host.gil and measured and not host.measured_gil:
            yield UNMEASURED_WITH_GIL
        if not host.gil and (host.measured_gil or not measured):
            yield UNMEASURED_WITHOUT_GIL
        if not host.gil and self.gpu.count > 1 and host.cores < self.gpu.count:
            known = f", and the host has {count(host.cores, 'core')}" if host.cores else ""
            yield f"{OWN_CORES}{known}"

    @property
    def devices(self) -> int:
        """Return the number of GPUs in all nodes."""
        return self.gpu.count * self.nodes

    @property
    def socket_bytes_per_s(self) -> float:
        """Return the total bytes per second of all links between processors."""
        return sum(link.bytes_per_s for link in self.links if link.kind == "socket")

    def __hash__(self) -> int:
        return self._hash  # cached, because every look-up of a route needs it

    @cached_property
    def _hash(self) -> int:
        return hash(
            (self.name, self.gpu.name, self.gpu.count, self.nodes, self.links, self.peer_access)
        )


def names() -> list[str]:
    """Return the names of the machines that come with dpbench."""
    return sorted(described.bundled())


def rows() -> list[tuple[str, str]]:
    """Return a name for `load` and a one-line description of machines.

    They are the machines that come with dpbench, and eight of each GPU with a known 16-bit peak.
    """
    loaded = {name: load(name) for name in names()}
    found = [
        (name, f"{one.description} ({count(one.devices, 'GPU')})") for name, one in loaded.items()
    ]
    for name, gpu in data_sheets.table()["gpu"].items():
        if "fp16" in gpu.get("tflops", {}):
            memory = f"{gpu['memory_gib']} GiB at {gpu['memory']} GB/s"
            found.append(
                (f"8x {name}", f"Any number of {gpu['name']}: {memory}, PCIe {gpu['pcie']}")
            )
    return found


def is_line(name: str) -> bool:
    """Return whether `name` is a line that describes a machine: a number of GPUs and their name."""
    return bool(described.COUNT.match(name))


def text_of_machine(name: str) -> str:
    """Return the TOML text of a machine that comes with dpbench, or that a line describes."""
    known = described.bundled().get(name)
    if known:
        return described.toml(known["text"], description=known["description"])
    return described.toml(name)


def load(name: str) -> Machine:
    """Return a machine by one of `names()`, the path of a TOML file, or a line that describes it.

    A line begins with the number of GPUs, such as "8x A100 PCIe 40GB, 2 sockets, PCIe 4". Raises
    LookupError for an unknown name or GPU, OSError for a file that cannot be read, UnreadableFile
    for one that is not TOML, and UnknownMachine for an incomplete or invalid description.
    """
    if is_line(name) or name in names():
        return read(tomllib.loads(text_of_machine(name)), name)
    path = Path(name)
    if path.suffix != ".toml":
        raise UnknownName(
            f"{unknown('machine', name, names())}; or give a file whose name ends in .toml, or a"
            " line such as '8x A100 PCIe 40GB, 2 sockets'"
        )
    try:
        data = tomllib.loads(text_of(path))
    except (ValueError, RecursionError) as error:
        # also bytes that are not UTF-8, and numbers of too many digits
        raise UnreadableFile(f"{path} is not valid TOML: {error}") from None
    try:
        return read(data, path.stem)
    except UnknownMachine as error:
        raise UnknownMachine(f"{path}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class _File:
    """The top level of a machine's TOML file."""

    peer_access: bool
    gpu: dict[str, Any]
    link: list[dict[str, Any]]
    description: str = ""
    source: str = ""
    nodes: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 1
    assumed: tuple[str, ...] = ()
    host: dict[str, Any] = field(default_factory=dict)
    collective: dict[str, Any] | None = None
    probe: dict[str, Any] = field(default_factory=dict)
    """The figures that earlier versions of `dpbench doctor` wrote, which no prediction needs."""


@dataclass(frozen=True, kw_only=True)
class _LinkRow:
    between: tuple[str, str]
    kind: str
    bytes_per_s: Positive


def read(data: Mapping[str, Any], name: str) -> Machine:
    """Return the machine that `data`, the content of a TOML file, describes.

    Raises UnknownMachine for missing or unknown keys, and for values of a wrong type or range.
    """
    data = everywhere(data)
    for key, why in (
        (
            "peer_access",
            "true if GPUs can access each other's memory, else false; see `nvidia-smi topo -p2p r`",
        ),
        ("gpu", "the table [gpu] with the keys `name` and `count`"),
        (
            "link",
            (
                "one table [[link]] per link, with the keys `between`, `kind` and `bytes_per_s`;"
                " see `nvidia-smi topo -m`"
            ),
        ),
    ):
        if key not in data:
            _known(data, name, [f.name for f in fields(_File)])
            raise UnknownMachine(
                f"machine {name}: `{key}` is missing, and it is not guessed from the GPU's name;"
                f" add it to the description: {why}"
            )
    file = _record(_File, data, name)
    machine = Machine(
        name=name,
        description=file.description,
        peer_access=file.peer_access,
        nodes=file.nodes,
        assumed=file.assumed,
        gpu=_record(Gpu, file.gpu, f"{name}: [gpu]"),
        host=_record(Host, file.host, f"{name}: [host]"),
        links=tuple(link for row in file.link for link in _links(row, name)),
        collective=(
            _record(Collective, file.collective, f"{name}: [collective]")
            if file.collective
            else None
        ),
    )
    _check(machine)
    return machine


def _links(table: Mapping[str, Any], name: str) -> Iterator[Link]:
    """Yield the links of one [[link]] table; an end such as `gpu0-3` means four GPUs."""
    where = f"{name}: [[link]] {table.get('between', '')}"
    row = _record(_LinkRow, table, where)
    if row.kind == "memory":
        raise UnknownMachine(
            f"machine {where}: a link of the kind memory describes logical CPU devices, and"
            " predictions are for GPUs only; `dpbench run` measures steps on the processor within"
            " minutes"
        )
    if row.kind not in KINDS:
        raise UnknownMachine(f"machine {where}: {unknown('kind of link', row.kind, list(KINDS))}")
    first, second = (_each(end, where) for end in row.between)
    for a in first:
        for b in second:
            yield Link(a, b, row.kind, row.bytes_per_s)


def _each(text: str, where: str) -> list[str]:
    match = re.fullmatch(r"(\D+)(\d+)-(\d+)", text)
    if not match:
        return [text]
    first, last = (int(digits) if len(digits) < 9 else MOST_GPUS for digits in match.groups()[1:])
    if not first <= last < MOST_GPUS:
        raise UnknownMachine(
            f"machine {where}: `between` has the range {abridged(text)}; a range such as gpu0-3"
            f" must ascend and end below {MOST_GPUS}"
        )
    return [f"{match[1]}{i}" for i in range(first, last + 1)]


def _record(kind: type[Record], data: Mapping[str, Any], where: str) -> Record:
    _known(data, where, [*(f.name for f in fields(kind)), "source"])  # type: ignore[arg-type]
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise UnknownMachine(f"machine {where}: {error}{_found(kind, data)}") from None


def _found(kind: type[Record], data: Mapping[str, Any]) -> str:
    for key, hint in get_type_hints(kind, include_extras=True).items():
        try:
            msgspec.convert(data.get(key), hint | None)
        except msgspec.ValidationError:
            return f"; `{key}` is {abridged(data[key])}"
    return ""


def _known(data: Mapping[str, Any], where: str, keys: list[str]) -> None:
    for key in data:
        if key not in keys:
            raise UnknownMachine(f"machine {where}: {unknown('key', key, sorted(keys))}")


def _check(machine: Machine) -> None:
    ends = {end for link in machine.links for end in (link.a, link.b)}
    gpus = [f"gpu{i}" for i in range(machine.gpu.count)]
    if lost := [gpu for gpu in gpus if gpu not in ends]:
        raise UnknownMachine(
            f"machine {machine.name}: no link leads to {', '.join(lost)}; add a table [[link]] with"
            f" between = ['{lost[0]}', ...]"
        )
    if extra := sorted(end for end in ends.difference(gpus) if re.fullmatch(r"gpu\d+", end)):
        raise UnknownMachine(
            f"machine {machine.name}: a [[link]] leads to {extra[0]}, but [gpu] has `count`"
            f" {machine.gpu.count}, so the last GPU is gpu{machine.gpu.count - 1}; correct"
            " `between` or `count`"
        )
    if machine.nodes > 1 and not any(link.kind == "network" for link in machine.links):
        raise UnknownMachine(
            f"machine {machine.name}: it has {machine.nodes} nodes and no link of kind 'network';"
            " add a table [[link]] with between = ['cpu0', 'network'] and the network card's"
            " bytes_per_s"
        )
