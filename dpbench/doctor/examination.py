"""Examination: what `dpbench doctor` found on a machine, for its JSON, its page and the store.

A store keeps it as JSON with the machine, for the pages and the findings of the runs there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from dpbench.records import HOST, visible, words
from dpbench.records.boxes import Box, Link
from dpbench.records.disturbance import NOISY
from dpbench.store.rows import check_time

log = logging.getLogger(__name__)

DIRECT, STAGED, PINNED, PAGEABLE = "direct", "through the host", "pinned", "pageable"
"""The ways of a copy: between two GPUs, or between the host's memory and a GPU."""
HANGS = "does not end"
"""The beginning of the failure of a copy that hangs."""
MOST = 1000
"""The largest number of boxes of a picture, and of its rows and columns."""
LISTED = 12
"""The largest number of other links that a problem names."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding: what is the matter, the evidence, what it costs, the change, and how to undo it.

    `wrong` is whether the change removes a fault; otherwise the finding is a fact, of the hardware
    or of a load during the examination. `gpus` are CUDA's numbers of the GPUs whose link is the
    matter: one for its link to the host, two for the link between them, none for another matter.
    """

    name: str
    says: str
    evidence: str
    cost: str = ""
    change: str = ""
    undo: str = ""
    wrong: bool = True
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Problem:
    """A finding, and the others that say the same of other links."""

    first: Finding
    others: tuple[Finding, ...]

    @property
    def parts(self) -> list[tuple[str, str]]:
        """Return the parts of the problem's text that are not empty, each with its name."""
        links = [" -> ".join(f"GPU {gpu}" for gpu in one.gpus) for one in self.others]
        left_out = len(links) - LISTED
        more = [f"{left_out} more"] if left_out > 0 else []
        named = [
            ("also", ", ".join([*links[:LISTED], *more])),
            *((name, getattr(self.first, name)) for name in ("evidence", "cost", "change", "undo")),
        ]
        return [(name, said) for name, said in named if said]


@dataclass(frozen=True, kw_only=True)
class MadeCopy:
    """A copy between two GPUs, or between the host (-1) and a GPU.

    `way` is "direct", "through the host", "pinned" or "pageable". `promised_bytes_per_s` is what
    the links on its way can carry, 0 if unknown. `wrong` is the number of bytes that differed on
    arrival. `failure` is "" if the copy ended.
    """

    source: int
    target: int
    way: str
    bytes_per_s: float
    promised_bytes_per_s: float
    wrong: int
    failure: str

    @property
    def share(self) -> float | None:
        """Return the measured over the promised rate, 0 if the copy is wrong or has no end.

        None if the promised rate is unknown.
        """
        if self.failure or self.wrong:
            return 0.0
        return self.bytes_per_s / self.promised_bytes_per_s if self.promised_bytes_per_s else None

    @property
    def cell(self) -> str:
        """Return the rate in GB/s, or what is wrong with the copy."""
        if self.failure:
            return "hangs" if self.failure.startswith(HANGS) else "fails"
        return "wrong" if self.wrong else words.number(self.bytes_per_s / 1e9)


@dataclass(frozen=True, kw_only=True)
class Examination:
    """The result of `dpbench doctor`: the findings, the faults first, and what they are based on.

    `started_s` is in seconds since the epoch. `labels` are those of measurements, such as
    "FAKE-GPU". `gpus` has the facts of each GPU that torch can use, in CUDA's order, and `software`
    versions by name. `all_reduce_bytes_per_s` is what each GPU sent per second, None without a
    result. `boxes` and `links` are the machine's picture; ValueError for a link without its boxes.
    """

    started_s: float
    labels: tuple[str, ...]
    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    unchecked: tuple[str, ...]
    gpus: tuple[Mapping[str, Any], ...]
    software: Mapping[str, str]
    copies: tuple[MadeCopy, ...]
    all_reduce_bytes_per_s: float | None
    boxes: tuple[Box, ...]
    links: tuple[Link, ...]

    def __post_init__(self) -> None:
        within = [0 <= box.row <= MOST and 0 <= box.column <= MOST for box in self.boxes]
        if not all(within) or len(within) > MOST:
            raise ValueError(f"{len(within)} boxes, {within.count(False)} of them outside")
        missing = {end for link in self.links for end in link.ends} - {box.id for box in self.boxes}
        if missing:
            raise ValueError(f"links of the picture end at unknown boxes: {sorted(missing)}")

    @property
    def problems(self) -> list[Problem]:
        """Return the findings, those together that differ only in their link and its rate."""
        groups: dict[tuple[str, ...], list[Finding]] = {}
        for one in self.findings:
            of_links = (one.name, one.evidence, one.change, str(one.wrong))
            groups.setdefault(of_links if one.gpus else (one.says,), []).append(one)
        return [Problem(first, tuple(others)) for first, *others in groups.values()]

    @property
    def faults(self) -> int:
        """Return the number of problems that a change removes."""
        return sum(problem.first.wrong for problem in self.problems)

    @property
    def summary(self) -> str:
        """Return the number of faults in words, or that none was found."""
        if self.faults:
            return f"{words.count(self.faults, 'fault')} found"
        if NOISY in self.labels:
            return "No fault found, but other processes took the cores, which may hide or feign one"
        return "Nothing wrong found"

    def host_table(self) -> list[tuple[str, ...]]:
        """Return a row per GPU: GB/s from and to the host, and the slower's share of the link."""
        ways = [(way, up) for way in (PINNED, PAGEABLE) for up in (True, False)]
        head = ("GB/s", *(f"{'from' if up else 'to'} {way}" for way, up in ways), "of the link")
        rows = [head]
        for gpu in range(len(self.gpus)):
            ends = {True: (HOST, gpu), False: (gpu, HOST)}
            shares = [
                one.share or 0.0
                for one in self.copies
                if one.way == PINNED and gpu in (one.source, one.target)
            ]
            slower = min(shares, default=0.0)
            cells = (self._cell(*ends[up], way) for way, up in ways)
            rows.append((f"GPU {gpu}", *cells, words.percent(slower) if slower else ""))
        return rows

    def pair_table(self) -> list[tuple[str, ...]]:
        """Return a row per source and a column per target of direct copies, in GB/s."""
        numbers = range(len(self.gpus))
        rows: list[tuple[str, ...]] = [("", *(f"GPU {target}" for target in numbers))]
        for source in numbers:
            cells = (self._cell(source, target, DIRECT) for target in numbers)
            rows.append((f"GPU {source}", *cells))
        return rows

    def _cell(self, source: int, target: int, way: str) -> str:
        wanted = (source, target, way)
        found = (one for one in self.copies if (one.source, one.target, one.way) == wanted)
        return next((one.cell for one in found), "")


@lru_cache(maxsize=16)
def read(stored: str) -> Examination | None:
    """Return the examination with this JSON; None, with a warning, if it cannot be read."""
    try:
        found = msgspec.convert(visible.loads(stored), Examination)
        check_time(found.started_s)
    except (ValueError, TypeError, RecursionError) as error:
        log.warning("a result of dpbench doctor is left out, because it is damaged: %s", error)
        return None
    return found


def about_links(stored: str, links: Sequence[frozenset[int]]) -> str:
    """Return what a stored examination says about links, as a clause; "" if nothing.

    A link is that between two of CUDA's GPUs, or of one and the host.
    """
    examination = read(stored)
    if examination is None:
        return ""
    found = [one for link in links for one in examination.findings if {*one.gpus} == link]
    said = "; ".join(f"{one.says} ({one.change})" for one in found)
    when = words.day(examination.started_s)
    return f"dpbench doctor found on {when}: {said}" if found else ""
