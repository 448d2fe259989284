"""Findings: explain the gain from data parallelism, where the time goes, and which changes would help.

The rules are data, in phases.py and scale.py. Each rule examines one case, by preference DataParallel's on the most
devices, and compares it with the other cases of the run. Findings are ranked by their cost in seconds per step. Each
finding shows the gain of its remedy if the same run measured that gain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dpbench.analysis import stats
from dpbench.analysis.findings import phases, scale
from dpbench.analysis.findings.answer import answer
from dpbench.analysis.findings.rule import (
    SMALLEST,
    CaseContext,
    Cure,
    Evidence,
    Finding,
    FindingRule,
    Judgement,
    Missing,
    contexts,
)
from dpbench.analysis.summary import Row
from dpbench.records import Trial, schedule, words

__all__ = ["Diagnosis", "Finding", "RULES", "diagnose"]

RULES: tuple[FindingRule, ...] = (*scale.RULES, *phases.RULES)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The explanation of one case: the answer in a paragraph, the findings by size, and the questions left open."""

    row: Row
    answer: str
    findings: tuple[Finding, ...]
    unjudged: tuple[str, ...]


def diagnose(rows: Sequence[Row], trials: Sequence[Trial], cores: int) -> list[Diagnosis]:
    """Return one diagnosis for each setting and batch size that was measured on several devices.

    `cores` is the number of cores that the run may use, 0 for unknown.
    """
    return [_diagnosis(context) for context in contexts(rows, trials, cores)]


def _diagnosis(context: CaseContext) -> Diagnosis:
    judged = [(rule, rule.when(context)) for rule in RULES]
    found = [
        _finding(context, rule, seen) for rule, seen in judged if isinstance(seen, Evidence) and _worth(context, seen)
    ]
    found.sort(key=lambda one: -one.evidence.size_s.value if one.evidence.size_s else 0.0)
    missing = [seen.what for _, seen in judged if isinstance(seen, Missing)]
    return Diagnosis(
        row=context.row, answer=answer(context, found), findings=tuple(found), unjudged=(*missing, *_doubtful(judged))
    )


def _doubtful(judged: Sequence[tuple[FindingRule, Judgement]]) -> Iterator[str]:
    """Yield one line with the rules whose time is in doubt and the way to get enough rounds, if there are any."""
    names = [rule.name for rule, seen in judged if isinstance(seen, Evidence) and seen.size_s and seen.size_s.doubt]
    if names:
        yield f"{', '.join(names)} ({words.NOT_ENOUGH}: {words.REMEDY} would help)"


def _worth(context: CaseContext, seen: Evidence) -> bool:
    """Return whether a finding is worth showing.

    A finding is worth showing if its time and the step's time are trusted, the whole interval of its time is above 0,
    and its time is at least 2 % of the step. A finding about memory has no time and is always shown.
    """
    size = seen.size_s
    if size is None:
        return True
    return not (size.doubt or context.row.doubt) and size.low > 0 and size.value >= SMALLEST * context.step_s


def _finding(context: CaseContext, rule: FindingRule, seen: Evidence) -> Finding:
    share = seen.size_s.value / context.step_s if seen.size_s else 0.0
    return Finding(
        rule=rule, row=context.row, evidence=seen, share=share, cures=cures(context, rule), labels=context.row.labels
    )


def cures(context: CaseContext, rule: FindingRule) -> tuple[Cure, ...]:
    """Return the measured cases of the same work that apply a rule's remedy, the fastest first."""
    found = []
    candidates = [*context.rivals(), context.all_cores()]
    for row in candidates:
        if row is not None and _applies(row, rule):
            ratio = stats.ratio(context.row.series, row.series)
            gain_s = stats.difference(context.row.series, row.series)
            found.append(Cure(row=row, ratio=ratio, gain_s=gain_s, verdict=stats.verdict(ratio)))
    return tuple(sorted(found, key=lambda cure: -cure.ratio.value))


def _applies(row: Row, rule: FindingRule) -> bool:
    """Return whether a case applies a rule's remedy.

    A schedule that TrainStep chose itself applies the remedy of every rule that advises switches.
    """
    case = row.case
    if not case.traits.scheduled:
        return case.traits.role in rule.roles
    if case.schedule == schedule.FASTEST or not rule.switches:
        return bool(rule.switches)
    mine = schedule.parse(case.schedule or schedule.REFERENCE)
    return any(getattr(mine, switch) in positions for switch, positions in rule.switches.items())
