"""The nouns of a diagnosis: a rule asks a bench for evidence, and what it finds is a finding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dpbench.analysis.findings.bench import Bench
from dpbench.analysis.summary import Row
from dpbench.records.estimate import Estimate
from dpbench.records.traits import Role

SMALLEST = 0.02
"""The share of a step below which a finding is not worth a reader's time."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a rule saw: in one clause, in numbers, and how many seconds of a step are at stake.

    `size_s` is either what a change gained where it was `measured`, or a bound: what the trouble costs in all, which
    no remedy can save more of. None where the trouble costs memory and no time.
    """

    says: str
    numbers: str
    size_s: Estimate | None
    measured: bool = False


@dataclass(frozen=True)
class Missing:
    """What a rule would need to judge: a case that was not measured, and the option that adds it."""

    what: str


Judgement = Evidence | Missing | None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One way in which data parallelism loses time, and what helps.

    `switches` (switch -> positions) and `roles` of strategies say which other cases of the same work hold the remedy,
    so that its gain can be read off where they were measured; `needs` are the options that would measure it.
    """

    name: str
    when: Callable[[Bench], Judgement]
    remedy: str
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    roles: tuple[Role, ...] = ()
    needs: str = ""


@dataclass(frozen=True, kw_only=True)
class Cure:
    """A case that holds a remedy, against the subject: how many times as fast, seconds saved, and what is decided."""

    row: Row
    ratio: Estimate
    gain_s: Estimate
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A rule that holds: its evidence, its size as a share of the step, and what the remedy gave where measured."""

    rule: Rule
    row: Row
    evidence: Evidence
    share: float
    cures: tuple[Cure, ...]
    labels: tuple[str, ...]
