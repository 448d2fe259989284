"""Rule: the types of a diagnosis. A rule examines a case and returns evidence, from which a finding is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dpbench.analysis.findings.bench import CaseContext
from dpbench.analysis.summary import Row
from dpbench.records.estimate import Estimate
from dpbench.records.traits import Role

SMALLEST = 0.02
"""The fraction of a step below which a finding is not shown."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The evidence of a rule: a clause that states the problem, the numbers behind it, and the cost of the problem.

    `size_s` is in seconds per step. If `measured`, `size_s` is the measured gain of a change. Otherwise it is an upper
    bound: the total cost of the problem, which is the most that a remedy can save. `size_s` is None if the problem
    costs memory but no time.
    """

    says: str
    numbers: str
    size_s: Estimate | None
    measured: bool = False


@dataclass(frozen=True)
class Missing:
    """A question that a rule could not answer, with the option that adds the missing case."""

    what: str


Judgement = Evidence | Missing | None


@dataclass(frozen=True, kw_only=True)
class FindingRule:
    """One cause of lost time in data parallelism, and its remedy.

    `switches` (switch -> positions) and `roles` (of strategies) identify the cases of the same work that apply the
    remedy. If such cases were measured, their gain is shown; otherwise `needs` gives the options that measure them.
    """

    name: str
    when: Callable[[CaseContext], Judgement]
    remedy: str
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    roles: tuple[Role, ...] = ()
    needs: str = ""


@dataclass(frozen=True, kw_only=True)
class Cure:
    """A case that applies a remedy, compared with the diagnosed case: speed ratio, seconds saved, and verdict."""

    row: Row
    ratio: Estimate
    gain_s: Estimate
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem that a rule found: its evidence, its size as a fraction of the step, and its measured remedies."""

    rule: FindingRule
    row: Row
    evidence: Evidence
    share: float
    cures: tuple[Cure, ...]
    labels: tuple[str, ...]
