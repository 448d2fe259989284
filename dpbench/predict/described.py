"""Described: the machine file of a line of text, such as "8x A100 PCIe 40GB, 2 sockets, PCIe 4".

The figures of a GPU come from the table of data sheets. Properties of the machine that the text
does not state get common values, and are listed under `assumed` in the file. The machines that come
with dpbench are such lines.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from dpbench.records.data_sheets import table
from dpbench.records.errors import UnknownName, UsageError
from dpbench.records.words import count as counted

DATA = Path(__file__).parent / "data"
COUNT = re.compile(r"\s*([1-9]\d{0,5}) ?[x×] ?(?=\w)(?!.*\.toml$)", re.I)
"""Matches the number of all GPUs at the begin of a description, but no name of a file."""
GB = 1e9
PCIE_GB = {1: 3.0, 2: 6.0, 3: 12.0, 4: 24.0, 5: 48.0, 6: 96.0}
"""The rate of 16 lanes in GB/s per direction, by PCIe generation."""
GENERATION = rf"(?:pcie|pci-e|gen) ?(?:gen ?)?([{min(PCIE_GB)}-{max(PCIE_GB)}])(?!\d| ?[gmt]i?b)"
"""Matches a PCIe generation, but no size of memory such as the 40GB of "PCIe 40GB"."""
LANES = (
    r"pci-?e ?(?:gen ?)?(?:\d(?:\.0)?)? ?x8\b|\bx8 pci-?e\b(?! gpu)"
    r"|\bx?8[ -](?:pci-?e )?lanes?\b"
)
"""Matches eight PCIe lanes, but no eight GPUs such as in "2 nodes x8 GPUs"."""
TIMES = (
    r"(\d+) ?[x×](?!\s*(?:gpu|node|nvidia|tesla|geforce|quadro|titan|rtx|gtx"
    r"|[abghklptv]b?\d|(?:8|16|\d{4})\b(?! ?g)))"
)
"""Matches the number of network cards, but not that of GPUs or nodes, nor "PCIe 4 x16"."""
WITH_GIL = r"(?<!not )\bwith(?: the| a)?[ -]gil\b"
WITHOUT_GIL = (
    r"(?<!not )\b(?:no|without(?: the| a)?)[ -]gil\b"
    r"|[,;]\s*(?:python )?free[- ]thread(?:ed|ing)(?: python)?(?: 3\.\d+t?)?\s*(?=[,;]|$)"
)
"""Matches that Python has no global interpreter lock; what is free-threaded is a part alone."""
ABOUT_GIL = r"\b(?:no|x)?gil\b|free[- ]?thread|interpreter(?:'s)? lock|3\.\d+t\b"
"""Matches other words about the lock."""
PCIE_SOURCE = "NCCL src/graph/topo.h, PCI_BW"
SOCKET_GB = {4: 48.0, 5: 66.0, 6: 66.0}
"""The rate of the links between two processors in GB/s, by the PCIe generation of the processors.

Three links (the usual number, assumed) of the 16 GB/s that NCCL counts for a pair of Zen 2, or of
22 GB/s for Sapphire Rapids; below generation 4, two links of 10 GB/s as of Skylake.
"""
SOCKET_SOURCE = "two or three links, assumed, of a pair of processors in NCCL src/graph/topo.h"
STAGED_GB = {4: 18.0}
"""The maximum rate in GB/s at which all GPUs together copy through host memory, by PCIe generation.

Generations that are not listed have no maximum. In two independent tables, 8 GeForce GPUs are
slower on hosts with two EPYC processors (PCIe 4) than on hosts with two Xeon processors (PCIe 3).
"""
HOST_SOURCE = "the machine on which the constants were measured, with a present torch"
INFINIBAND = {"edr": 100, "hdr": 200, "ndr": 400, "xdr": 800}
"""The Gbit/s of one InfiniBand card."""
MESH = "0-1:1 0-2:1 0-3:2 0-4:2 1-2:2 1-3:1 1-5:2 2-3:2 2-6:1 3-7:1 4-5:1 4-6:1 4-7:2 5-6:2 5-7:1"
MESH += " 6-7:2"
"""Pairs of the eight V100 of a DGX-1, with the number of their NVLinks (`nvidia-smi topo -m`)."""
STATION = "0-1:1 0-2:1 0-3:2 1-2:2 1-3:1 2-3:1"
"""Those of the four V100 of a DGX Station; which pairs have two links is assumed."""


@lru_cache(maxsize=1)
def bundled() -> Mapping[str, Mapping[str, str]]:
    """Return the `text` and the `description` of each machine that comes with dpbench, by name."""
    found: Mapping[str, Mapping[str, str]] = tomllib.loads(
        (DATA / "machines.toml").read_text(encoding="utf-8")
    )
    return found


def figures(text: str) -> Mapping[str, Any]:
    """Return the figures of the GPU that a text names.

    Raises LookupError with the nearest names if it names no known GPU.
    """
    spaced = re.sub(r"[^a-z0-9.,]+", " ", text.lower())
    spaced = re.sub(r"\b(\d+) ?gi?b\b", r"\1gb", re.sub(r"(\d)(ti|super)\b", r"\1 \2", spaced))
    known: Mapping[str, Any] = table()["gpu"]
    entries = [name for name in known if _names(name, spaced)]
    if entries:
        return dict(known[max(entries, key=lambda name: (name.count(" "), len(name)))])
    words = spaced.split()
    near = {name for word in words for name in difflib.get_close_matches(word, known, 2, 0.5)}
    raise UnknownName(
        "{text} names no known GPU; the nearest known ones: {near}. `dpbench list machines` lists"
        " all",
        option="machine",
        value=text,
        remedy="describe another GPU in a file: {machine:FILE.toml}",
        text=repr(text),
        near=", ".join(sorted(near)) or "none",
    )


def _names(name: str, text: str) -> bool:
    """Return whether a text contains all words of the name of a GPU.

    "pcie" counts only as a form factor, without a generation, and not beside "sxm". A GPU whose
    number "ti" or "super" follows is another GPU.
    """
    words = name.split()
    another = re.search(rf"{words[0]} (?:ti|super)\b", text) and len(words) == 1
    if another or ("pcie" in words and "sxm" in text):
        return False
    return all(
        re.search(rf"(?<!\d){word}(?! ?(?:gen ?)?\d\b)", text)
        if word == "pcie"
        else re.search(rf"(?<!\d)(?<!\b[a-z]){word}(?![a-z0-9])", text)
        for word in words
    )


_Link = tuple[str, str, str, float, str]
"""A link or a group of equal links: both ends, kind, GB/s and source."""


class _Text:
    """The properties of a machine in a text; `assumed` lists what it does not state."""

    def __init__(self, text: str, gpu: Mapping[str, Any], count: int, *, one_node: bool) -> None:
        self.cased = COUNT.sub("", text, count=1)
        self.text = f" {text} ".lower().replace("_", " ")
        self.gpu = gpu
        self.assumed: list[str] = []
        self.node, self.nodes = (count, 1) if one_node else self._nodes(count)

    def has(self, pattern: str) -> bool:
        return bool(re.search(pattern, self.text))

    def number(self, pattern: str) -> int:
        """Return the number that the first group of a pattern matches, or 0."""
        found = re.search(pattern, self.text)
        return int(found[1]) if found else 0

    def _nodes(self, count: int) -> tuple[int, int]:
        """Return the GPUs per node and the number of nodes."""
        networked = self.has(r"\b(ib|infiniband|efa|ethernet|roce|gbe|gb/s network)\b|node")
        if nodes := self.number(r"\b([1-9]\d*) node(?:s\b|\(s\)|\b)"):
            if count % nodes:
                raise UsageError(
                    f"{_gpus(count)} cannot be shared equally by {nodes} nodes: state a number of"
                    f" GPUs that is a multiple of {nodes}, or another number of nodes"
                )
            node = count // nodes
        else:
            node = self.number(r"\b(\d+) ?x? ?(?:gpus?|[a-z]+\d+)? ?(?:/|per|a) ?node")
            node = node or (count if count <= 8 or (count <= 16 and not networked) else 8)
        node = min(node, count)
        if count % node:
            raise UsageError(
                f"{_gpus(count)} cannot be divided into nodes of {node}: state a number of nodes"
                f' that divides {count}, such as "1 node", or a multiple of {_gpus(node)}'
            )
        return node, count // node

    @cached_property
    def generation(self) -> int:
        """Return the PCIe generation that the text states, else that of the GPU."""
        return self.number(GENERATION) or int(self.gpu["pcie"])

    @cached_property
    def sockets(self) -> int:
        """Return the number of processors: as stated, else one for up to four GPUs, else two."""
        if self.has(r"\b(?:two|dual|2x?) ?(?:sockets?|processors|cpus|epyc|xeon)"):
            return min(2, self.node)
        if self.has(r"\b(?:one|single|1) (?:socket|processor|cpu)\b"):
            return 1
        return 2 if self.node > 4 else 1

    def nvlinks(self) -> Iterator[_Link]:
        """Yield each NVLink or group of equal NVLinks."""
        gpu, node, source = self.gpu, self.node, table()["links"]
        absent = r"no nvlink|without nvlink|nvlink (?:bridge )?unknown|bridge unknown|p2p disable"
        if self.has("unknown") and not self.has("nvlink assumed|nvswitch"):
            self.assumed.append("the links are not stated")
        named = self.has(r"nvlink|nvswitch|dgx|hgx|sxm|\bnv\d|nvl\b") and not self.has(absent)
        if not named or node < 2:
            return
        if self.has("assumed") or not self.has(r"nvlink|nvswitch|dgx|hgx|\bnv\d"):
            self.assumed.append("NVLink is not stated, but assumed")
        linked = "switch" in gpu or "mesh" in gpu
        if self.has("bridge|pairs|bonded") or not linked:
            lanes = self.number(r"\bnv(\d+)\b")
            rate = 20.0 * lanes if 0 < lanes <= 6 else gpu.get("bridge", 40.0)
            for first in range(0, node - 1, 2):
                yield f"gpu{first}", f"gpu{first + 1}", "nvlink", rate, source
        elif "mesh" in gpu and not self.has("nvswitch"):
            for pair in (STATION if self.has("station|dgxs") else MESH).split():
                ends, _, lanes_text = pair.partition(":")
                a, b = ends.split("-")
                if max(int(a), int(b)) < node:
                    yield f"gpu{a}", f"gpu{b}", "nvlink", int(lanes_text) * gpu["mesh"], source
        else:
            rate = gpu.get("switch", gpu.get("bridge", 40.0))
            yield _range(0, node), "nvswitch", "nvlink", rate, source

    def pcie(self) -> Iterator[_Link]:
        """Yield PCIe links and the link between processors.

        A PCIe switch joins two GPUs of more than four, or four if the text states one PCIe root.
        """
        node, sockets, rate = self.node, self.sockets, PCIE_GB[self.generation]
        lanes = 8 if self.has(LANES) else 16
        rate *= lanes / 16
        source = f"PCIe {self.generation} x{lanes}, {rate:g} GB/s a direction: {PCIE_SOURCE}"
        share = 2 if node > 4 or self.has(r"trt|\bpix\b") else 1
        if self.has("trt2|single root|one root"):
            share = 4
        switches = -(-node // share)
        for number in range(switches):
            gpus = _range(number * share, min(node, (number + 1) * share))
            cpu = f"cpu{number * sockets // switches}"
            if share > 1:
                yield gpus, f"switch{number}", "pcie", rate, source
                gpus = f"switch{number}"
            yield gpus, cpu, "pcie", rate, source
        if sockets > 1:
            between = 6.0 if self.has("qpi|broadwell|xeon e5") else SOCKET_GB.get(self.generation)
            yield "cpu0", "cpu1", "socket", between or 20.0, SOCKET_SOURCE

    def network(self) -> float:
        """Return the total rate of a node's network cards in GB/s.

        As in NCCL, 100 Gbit/s count as 12 GB/s.
        """
        cards = r"\b(?i:ib|infiniband|efa|ethernet|roce|gbe|network|nic|cards?|edr|hdr|ndr|xdr)\b"
        bits = r"(\d+) ?[gG](?:bit|bps|b|bE|be)?(?:/s)?\b"  # not GB, as of memory
        parts = re.split(r"[,;+]", self.cased)
        words = " ".join(part for part in parts if re.search(rf"{cards}|{bits}", part))
        number = re.search(TIMES, words, re.I)
        times = int(number[1]) if number else 1
        if found := re.search(r"(\d+(?:\.\d+)?) ?GB/s", words):
            return times * float(found[1]) * 0.96
        if found := re.search(bits, words):
            return times * int(found[1]) * 0.12
        if found := re.search(rf"\b({'|'.join(INFINIBAND)})\b", words.lower()):
            return times * INFINIBAND[found[1]] * 0.12
        self.assumed.append("the rate of the network is not stated, so 100 Gbit/s is assumed")
        return 12.0

    def gil(self) -> bool:
        """Return whether Python has its global interpreter lock: it has, unless the text denies it.

        Raises UsageError for words about the lock that are none of the known forms.
        """
        unlocked = self.has(WITHOUT_GIL)
        rest = re.sub(f"{WITH_GIL}|{WITHOUT_GIL}", " ", self.text)
        unclear = re.search(ABOUT_GIL, rest) or (unlocked and re.search(WITH_GIL, self.text))
        if unclear:
            raise UsageError(
                f"it is unclear whether {self.cased.strip()!r} has Python's interpreter lock"
                f" ({unclear[0]!r}): between commas, state 'no GIL', 'free-threaded Python' or"
                " 'with the GIL'"
            )
        return not unlocked

    def peer(self, nvlink: bool) -> bool:
        """Return whether GPUs have peer access over PCIe; `nvlink` is whether there are NVLinks."""
        usual = bool(self.gpu.get("peer", True))
        if self.has(r"(?:p2p|peer access) unknown"):
            self.assumed.append("peer access is unknown: the default of this GPU is assumed")
            return usual
        if not nvlink and self.has("unknown") and not self.has(r"bridge\)? unknown"):
            self.assumed.append("the links are unknown: GPUs without peer access are assumed")
            return False
        if self.has(r"no p2p|without p2p|p2p disable|p2p off|no peer"):
            return False
        if self.has(r"\bp2p\b|peer access|\bpix\b"):
            return True
        if not nvlink:
            self.assumed.append("peer access is not stated: the default of this GPU is assumed")
        return usual


def _gpus(number: int) -> str:
    return counted(number, "GPU")


def _range(begin: int, end: int) -> str:
    return f"gpu{begin}-{end - 1}" if end - begin > 1 else f"gpu{begin}"


def toml(
    text: str,
    *,
    count: int = 0,
    gpu: Mapping[str, Any] | None = None,
    one_node: bool = False,
    description: str = "",
) -> str:
    """Return the machine file that a line of text describes, with the source of each figure.

    `count` is the number of all GPUs, by default that at the begin of the text. `gpu` has their
    figures, by default those of the GPU that the text names. With `one_node`, all GPUs are on one
    node regardless of the text. Raises LookupError for an unknown GPU, and ValueError if the text
    states no number of GPUs.
    """
    gpu = gpu or figures(text)
    stated = COUNT.match(text)
    if not count and not stated:
        raise UsageError(
            f"the description {text!r} states no number of GPUs; begin it with one, such as"
            f" 8x {gpu['name']}"
        )
    words = _Text(text, gpu, count or int(stated[1] if stated else 1), one_node=one_node)
    nvlinks = list(words.nvlinks())
    links = [*nvlinks, *words.pcie()]
    if words.nodes > 1:
        rate = words.network()
        links.append(("cpu0", "network", "network", rate, "the text, as NCCL counts network cards"))
    peer = words.peer(bool(nvlinks))
    staged = STAGED_GB.get(words.generation, 0.0) if not peer else 0.0
    lines = [
        f"description = {json.dumps(description or 'made from a line of text')}",
        f"peer_access = {str(peer).lower()}",
        f"nodes = {words.nodes}",
        f"assumed = {json.dumps(words.assumed)}",
        f"source = {json.dumps(table()['peer'])}",
        "\n[host]\nfactor = 1.0",
        f"gil = {str(words.gil()).lower()}",
        f"staged_bytes_per_s = {staged * GB:.4g}",
        f"source = {json.dumps(HOST_SOURCE)}",
        f"\n[gpu]\nname = {json.dumps(gpu['name'])}",
        f"count = {words.node}",
    ]
    if "memory_gib" in gpu:
        lines.append(f"memory_bytes = {gpu['memory_gib'] * 2**30}")
    if "memory" in gpu:
        lines.append(f"memory_bytes_per_s = {gpu['memory'] * GB:.6g}")
    peaks = ", ".join(f"{key} = {one * 1e12:.6g}" for key, one in gpu.get("tflops", {}).items())
    lines += [f"flop_per_s = {{ {peaks} }}", f"source = {json.dumps(gpu['source'])}"]
    for first, second, kind, rate, source in links:
        lines += [
            f"\n[[link]]\nbetween = {json.dumps([first, second])}",
            f'kind = "{kind}"',
            f"bytes_per_s = {rate * GB:.6g}",
            f"source = {json.dumps(source)}",
        ]
    return "\n".join(lines) + "\n"
