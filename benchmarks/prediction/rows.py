"""Rows: convert a published row with its baseline into a case, and predict its step's duration.

The machine of a row is derived from the free text in the row's columns. Properties that the text
does not state get common values and are listed as assumed; any assumption widens the interval of
the prediction.
"""

from __future__ import annotations

import math
import re
import statistics
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.prediction import formula, named_models
from benchmarks.prediction.loops import PLAIN, LoopDifferences
from benchmarks.prediction.published import NAMED, Matched, PublishedRow
from dpbench.predict import profiles
from dpbench.predict.constants import DEFAULT, Constants
from dpbench.predict.machine import Gpu, Host, Link, Machine
from dpbench.predict.work import Profile
from dpbench.records import Case, Phase, plan, registry
from dpbench.records.registry import Role

DATA = Path(__file__).parent
GB = 1e9
PCIE_GB = {1: 3.0, 2: 6.0, 3: 12.0, 4: 24.0, 5: 48.0, 6: 96.0}
"""The rate of 16 lanes in GB/s per direction, by PCIe generation, as in NCCL (graph/topo.h has 12
for generation 3).
"""
STAGED_GB = {4: 18.0}
"""The maximum rate in GB/s at which all GPUs together copy through host memory, by PCIe generation.

Generations that are not listed have no maximum. The reason for this limit: in two independent
tables, 8 GeForce GPUs are slower on hosts with two EPYC processors (PCIe 4) than on hosts with two
Xeon processors (PCIe 3).
"""
SOCKET_GB = {1: 10.0, 2: 10.0, 3: 10.0, 4: 40.0, 5: 60.0, 6: 60.0}
"""The rate of the links between two processors in GB/s, by the PCIe generation of the processors.

NCCL's topo.h has 10 GB/s for two Skylake, 16 GB/s for two Zen 2 and 22 GB/s for two Sapphire Rapids
processors, regardless of how many links connect the two processors.
"""
MESH = (
    "0-1:1",
    "0-2:1",
    "0-3:2",
    "0-4:2",
    "1-2:2",
    "1-3:1",
    "1-5:2",
    "2-3:2",
    "2-6:1",
    "3-7:1",
    "4-5:1",
    "4-6:1",
    "4-7:2",
    "5-6:2",
    "5-7:1",
    "6-7:2",
)
"""The NVLinks of eight V100 in a DGX-1: pairs of GPUs, each with the number of links (from
`nvidia-smi topo -m`).
"""
STATION = ("0-1:1", "0-2:1", "0-3:2", "1-2:2", "1-3:1", "2-3:1")
"""The NVLinks of the four V100 in a DGX Station: pairs of GPUs, each with the number of links."""


@dataclass(frozen=True)
class Described:
    """The machine that a row's columns describe.

    `assumed` lists the assumptions about properties that the columns do not state. Any assumption
    widens the interval of the prediction.
    """

    machine: Machine
    assumed: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def _gpus() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = tomllib.loads(
        (DATA / "gpus.toml").read_text(encoding="utf-8")
    )["gpu"]
    return found


def _figures(text: str) -> dict[str, Any] | None:
    """Return the data of the known GPU with the longest name that `text` contains.

    None if there is none.
    """
    words = re.sub(r"[-_]", " ", text.lower())
    names = sorted(_gpus(), key=len, reverse=True)
    return next(
        (_gpus()[name] for name in names if re.search(rf"(?<![a-z0-9]){name}(?!\d)", words)), None
    )


@lru_cache(maxsize=4096)
def describe(
    gpu: str, interconnect: str, count: int, host_factor: float, *, one_node: bool = False
) -> Described:
    """Return the machine that a row's columns `gpu`, `interconnect` and `n_gpu` describe.

    `count` is the number of GPUs. Properties that these columns do not state are assumed. With
    `one_node`, all GPUs are on one node regardless of the text, as strategies with a single process
    require.
    """
    text = f" {gpu} {interconnect} ".lower().replace("_", " ")
    figures = _figures(gpu) or _figures(interconnect)
    assumed = (
        [] if figures else [f"the GPU {gpu!r} is unknown, so PCIe 4 with peer access is assumed"]
    )
    figures = figures or {"pcie": 4, "peer": True}
    node, nodes = (count, 1) if one_node else _nodes(text, count)
    nvlink = list(_nvlink(text, figures, node, assumed))
    links = [*nvlink, *_pcie(text, figures, node)]
    if nodes > 1:
        links.append(Link("cpu0", "network", "network", _network(interconnect, assumed)))
    peer = _peer(text, figures, bool(nvlink), assumed)
    staged = STAGED_GB.get(_generation(text, figures), 0.0) * GB
    machine = Machine(
        name=f"{gpu}, {interconnect}",
        description="from a published row",
        gpu=Gpu(name=gpu, count=node),
        peer_access=peer,
        links=tuple(links),
        nodes=nodes,
        host=Host(factor=host_factor, staged_bytes_per_s=staged),
    )
    return Described(machine, tuple(assumed))


def _nodes(text: str, count: int) -> tuple[int, int]:
    """Return the GPUs per node and the number of nodes for `count` GPUs, as stated or assumed."""
    if match := re.search(r"(\d+) (?:gpus?|x) ?(?:/|per|a) ?node", text):
        node = int(match[1])
    elif match := re.search(r"\b(\d+) nodes", text):
        node = max(1, count // int(match[1]))
    else:
        node = (
            count
            if count <= 8 or ("node" not in text and not _networked(text) and count <= 16)
            else 8
        )
    node = min(node, count)
    return node, -(-count // node)


def _networked(text: str) -> bool:
    return bool(re.search(r"\b(ib|infiniband|efa|ethernet|roce|gbe|gb/s network)\b", text))


def _network(interconnect: str, assumed: list[str]) -> float:
    """Return the total rate of a node's network cards in bytes per second.

    As in NCCL, 100 Gbit/s count as 12 GB/s. If the text states no rate, append an assumption to
    `assumed`.
    """
    match = re.search(r"(?:(\d+) ?x ?)?(\d+) ?g(?:b|bit|bps|be|b/s|bit/s)?\b", interconnect.lower())
    if not match:
        assumed.append("the rate of the network is not stated, so 100 Gbit/s is assumed")
        return 12.0 * GB
    return int(match[1] or 1) * int(match[2]) * 0.12 * GB


def _nvlink(text: str, figures: dict[str, Any], node: int, assumed: list[str]) -> Iterator[Link]:
    """Yield the NVLinks of a node: to a switch, in a mesh, or as bridges between pairs of GPUs.

    `node` is the number of its GPUs, and `figures` is the data of the GPU. Assumptions are appended
    to `assumed`.
    """
    absent = re.search(
        r"no nvlink|without nvlink|nvlink (?:bridge )?unknown|bridge unknown|p2p disable", text
    )
    if "unknown" in text and not re.search("nvlink assumed|nvswitch", text):
        assumed.append("the links are not stated")
    if absent:
        return
    named = re.search(r"nvlink|nvswitch|dgx|hgx|sxm|\bnv\d|nvl\b", text)
    if not named or node < 2:
        return
    if "assumed" in text or not re.search(r"nvlink|nvswitch|dgx|hgx|\bnv\d", text):
        assumed.append("the row does not state NVLink explicitly, but NVLink is assumed")
    bridged = re.search(r"bridge|pairs|bonded", text) or (
        "switch" not in figures and "mesh" not in figures
    )
    if bridged:
        lanes = re.search(r"\bnv(\d+)\b", text)
        rate = 20.0 * int(lanes[1]) if lanes and int(lanes[1]) <= 6 else figures.get("bridge", 40.0)
        yield from (
            Link(f"gpu{i}", f"gpu{i + 1}", "nvlink", rate * GB) for i in range(0, node - 1, 2)
        )
    elif "mesh" in figures and "nvswitch" not in text:
        pairs = STATION if re.search("station|dgxs", text) else MESH
        for pair in pairs:
            ends, _, lanes_text = pair.partition(":")
            a, _, b = ends.partition("-")
            if max(int(a), int(b)) < node:
                yield Link(f"gpu{a}", f"gpu{b}", "nvlink", int(lanes_text) * figures["mesh"] * GB)
    else:
        rate = figures.get("switch", figures.get("bridge", 40.0))
        yield from (Link(f"gpu{i}", "nvswitch", "nvlink", rate * GB) for i in range(node))


def _pcie(text: str, figures: dict[str, Any], node: int) -> Iterator[Link]:
    """Yield the PCIe links of a node with `node` GPUs; `figures` is the data of the GPU.

    A node with up to four GPUs has one processor, and no PCIe switches unless the text names some.
    A larger node has two processors and PCIe switches. A switch connects two GPUs, or four if the
    text states a single PCIe root.
    """
    generation = _generation(text, figures)
    rate = PCIE_GB[generation] * GB
    if re.search(r"\bx8\b|8 lanes", text):
        rate /= 2
    one_root = re.search(r"trt2|single root|one root", text)
    share = (
        4
        if one_root
        else 2
        if node > 4 or "trt" in text or "switch (pix)" in text or "pix" in text
        else 1
    )
    for i in range(node):
        if share == 1:
            yield Link(f"gpu{i}", "cpu0", "pcie", rate)
            continue
        yield Link(f"gpu{i}", f"switch{i // share}", "pcie", rate)
    if share > 1:
        switches = -(-node // share)
        for k in range(switches):
            second = 2 * k >= switches > 1 and node > 4
            yield Link(f"switch{k}", "cpu1" if second else "cpu0", "pcie", rate)
        if switches > 1 and node > 4:
            yield Link("cpu0", "cpu1", "socket", SOCKET_GB[generation] * GB)


def _generation(text: str, figures: dict[str, Any]) -> int:
    """Return the PCIe generation that the text states.

    If the text states none, the generation of the GPU.
    """
    match = re.search(r"(?:pcie|pci-e|gen) ?(?:gen ?)?(\d)", text)
    return int(match[1]) if match and int(match[1]) in PCIE_GB else int(figures["pcie"])


def _peer(text: str, figures: dict[str, Any], nvlink: bool, assumed: list[str]) -> bool:
    """Return whether GPUs have peer access over PCIe; `nvlink` states whether the node has NVLinks.

    Assumptions are appended to `assumed`.
    """
    if re.search(r"(?:p2p|peer access) unknown", text):
        assumed.append("peer access is unknown, so the default of this kind of GPU is assumed")
        return bool(figures.get("peer", True))
    if (
        not nvlink
        and re.search(r"unknown", text)
        and not re.search(r"bridge unknown|bridge\) unknown", text)
    ):
        assumed.append("the links are unknown, so it is assumed that GPUs have no peer access")
        return False
    if re.search(r"no p2p|without p2p|p2p disable|p2p off|no peer", text):
        return False
    if re.search(r"\bp2p\b|peer access|\bpix\b", text):
        return True
    if not nvlink:
        assumed.append("peer access is not stated, so the default of this kind of GPU is assumed")
    return bool(figures.get("peer", True))


PROCESSORS = {3: 1.5, 4: 1.15}
"""How much slower one thread of a processor is than that of the constants, by PCIe generation.

Generation 3 or below counts as 3; processors with generation 5 or above are as fast.
"""
TORCHES = (((1, 8), 1.7), ((2, 0), 1.4))
"""How much slower host operations are in versions of torch below the given one."""
TORCH = 1.5
"""How much slower they are if the version is not stated."""
LATE = ("replicated", "server_gpu", "server_cpu")
"""The strategies that are assumed to reduce gradients only after backward has ended."""
OVERLAP = "overlap"
"""The prior of the training loop, if it is unknown whether it overlaps reduction with backward."""
BATCH = 32
"""The assumed number of samples per device if a table does not state the batch size."""


@dataclass(frozen=True)
class PublishedCase:
    """A published row as a case to predict, with its profile, machine and timed phases."""

    row: PublishedRow
    case: Case
    profile: Profile
    machine: Described
    phases: frozenset[Phase]
    accumulated: float = 1.0
    """The number of backward passes per optimizer step.

    Only the last backward pass reduces gradients.
    """
    known: str = "traced"
    """The origin of the model's counts: "traced", "public" or "estimated"."""
    exact: bool = True
    """Whether the baseline has the same batch size per device as the row."""
    loops: tuple[LoopDifferences, ...] = (PLAIN,)
    """The possible training loops, with the longest step first."""

    def step_s(self, seconds_of: Callable[..., float], constants: Constants = DEFAULT) -> float:
        """Return the duration of the row's step in seconds: between those of the possible loops.

        `seconds_of` has the parameters of `formula.seconds`.
        """
        machine = self.machine.machine
        alone = linear_s(self, constants) if self.accumulated > 1 else 0.0
        logs = []
        for loop in self.loops:
            seconds = seconds_of(
                self.case, self.profile, machine, constants, phases=self.phases, loop=loop
            )
            mean = (seconds + (self.accumulated - 1) * alone) / self.accumulated
            logs.append(math.log(mean))
        return math.exp(statistics.mean(logs))


def timed(row: PublishedRow) -> frozenset[Phase]:
    """Return the phases in a published duration, by the row's columns `timed` and `optimizer`."""
    phases = set(Phase)
    words = row.timed.lower()
    if "forward only" in row.notes.lower():
        words = "forward"
    if words and "backward" not in words and "step" not in words and "forward" in words:
        phases -= {Phase.BACKWARD, Phase.REDUCE, Phase.OPTIMIZER, Phase.LOSS}
    if row.optimizer.lower() == "none":
        phases -= {Phase.OPTIMIZER}
    if "h2d" not in words:  # loaders copy concurrently, and synthetic batches are on the GPU
        phases -= {Phase.SCATTER}
    return frozenset(phases)


def loops_of(row: PublishedRow) -> tuple[LoopDifferences, ...]:
    """Return the training loops that a row may have.

    A script with a process per device may reduce gradients only after backward, for example if it
    is compiled or joins them itself; published tables do not tell.
    """
    kind = NAMED[row.strategy]
    if kind == "dp":
        return (LoopDifferences(batch_first="h2d" in row.timed.lower()),)
    late = LoopDifferences(late_reduction=True)
    return (late,) if kind in LATE else (late, PLAIN)


def host_of(row: PublishedRow) -> float:
    """Return the host factor of a row's machine, by the age of its processor and of torch."""
    text = f" {row.gpu} {row.interconnect} ".lower().replace("_", " ")
    figures = _figures(row.gpu) or _figures(row.interconnect) or {"pcie": 4}
    processor = PROCESSORS.get(max(3, _generation(text, figures)), 1.0)
    found = re.search(r"\b(?:py)?torch (\d+)\.(\d+)", f"{row.framework} {row.notes}")
    if not found:
        return processor * TORCH
    version = (int(found[1]), int(found[2]))
    return processor * next((slower for below, slower in TORCHES if version < below), 1.1)


def question(
    matched: Matched, constants: Constants = DEFAULT, host: float | None = None
) -> PublishedCase:
    """Return a published row with its baseline as a case to predict.

    `host` is the host factor of the row's machine, `host_of` the row by default.
    """
    row = matched.row
    host = host_of(row) if host is None else host
    known = named_models.find(row.model, row.parameters or None, row.precision)
    counted = known.profile
    if row.data_set and "resized" not in row.notes:
        _, values = row.data_set
        counted = replace(counted, input_bytes=4.0 * values)
    each = max(1, round(row.batch or BATCH))
    machine = describe(
        row.gpu, row.interconnect, row.devices, host, one_node=NAMED[row.strategy] == "dp"
    )
    phases = timed(row)
    samples = max(1, round(matched.one_samples)) if row.batch else each
    other = matched.other if row.batch and matched.other and matched.other[1] >= 1 else None
    profile = _profile(counted, matched.one_s, samples, machine.machine, constants, other, phases)
    case = Case(
        model=row.model,
        device_kind="cuda",
        strategy=registry.of_role(Role.WRAPPER if NAMED[row.strategy] == "dp" else Role.CONTROL),
        devices=row.devices,
        batch_size=each * row.devices,
    )
    return PublishedCase(
        row,
        case,
        profile,
        machine,
        phases,
        max(1.0, known.update_samples / (each * row.devices)),
        known.known,
        samples == each,
        loops_of(row),
    )


def _profile(
    counted: Profile,
    step_s: float,
    samples: int,
    machine: Machine,
    constants: Constants,
    other: tuple[float, int] | None,
    phases: frozenset[Phase],
) -> Profile:
    """Return `counted` with timings such that a step's `phases` take `step_s` on one device.

    `other` is a known step at another batch size as (seconds, samples), which determines the part
    that does not depend on the batch size.
    """
    alone = plan.baseline(model=counted.model, batch_size=samples)

    def rest_s(idle: Profile) -> float:
        return formula.seconds(alone, idle, machine, constants, phases=phases)

    return profiles.split(
        counted,
        step_s,
        samples,
        rest_s,
        forward_share=constants.forward_share if Phase.BACKWARD in phases else 1.0,
        fixed_share=_fixed_share(step_s, samples, other),
    )


def _fixed_share(step_s: float, samples: int, other: tuple[float, int] | None) -> float:
    """Return the share of a step's duration that does not depend on the batch size."""
    if other is None or other[1] == samples:
        return profiles.FIXED_SHARE
    slope = (step_s - other[0]) / (samples - other[1])
    return min(1.0, max(0.0, 1 - slope * samples / step_s))


def linear_s(asked: PublishedCase, constants: Constants = DEFAULT) -> float:
    """Return a row's step duration in seconds under linear scaling.

    This is the duration of a step on a single device with one device's share of the batch.
    """
    case, machine = asked.case, asked.machine.machine
    alone = replace(
        case, strategy=registry.of_role(Role.BASELINE), devices=1, batch_size=case.rows[0]
    )
    return formula.seconds(alone, asked.profile, machine, constants, phases=asked.phases)
