"""Findings: tables -> what data parallelism gave, where the time goes, and what change would help by how much.

Rules are data (phases.py, scale.py). Each is asked of a bench: the DataParallel of one model on the most devices, and
the run's other cases. What holds is ranked by the seconds of a step at stake, and says what its remedy gave where
the same run has measured it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dpbench.analysis import stats
from dpbench.analysis.findings import phases, scale
from dpbench.analysis.findings.answer import answer
from dpbench.analysis.findings.bench import Bench, benches
from dpbench.analysis.findings.rule import SMALLEST, Cure, Evidence, Finding, Judgement, Missing, Rule
from dpbench.analysis.summary import Row
from dpbench.records import Trial, schedule, words

__all__ = ["Diagnosis", "Finding", "RULES", "diagnose"]

RULES: tuple[Rule, ...] = (*scale.RULES, *phases.RULES)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One case explained: the answer in a paragraph, the findings by size, and what could not be judged."""

    row: Row
    answer: str
    findings: tuple[Finding, ...]
    unjudged: tuple[str, ...]


def diagnose(rows: Sequence[Row], trials: Sequence[Trial], cores: int) -> list[Diagnosis]:
    """Explain every setting of which several devices were measured; `cores` are the run's, 0 for unknown."""
    return [_diagnosis(bench) for bench in benches(rows, trials, cores)]


def _diagnosis(bench: Bench) -> Diagnosis:
    judged = [(rule, rule.when(bench)) for rule in RULES]
    found = [_finding(bench, rule, seen) for rule, seen in judged if isinstance(seen, Evidence) and _worth(bench, seen)]
    found.sort(key=lambda one: -one.evidence.size_s.value if one.evidence.size_s else 0.0)
    missing = [seen.what for _, seen in judged if isinstance(seen, Missing)]
    return Diagnosis(
        row=bench.row, answer=answer(bench, found), findings=tuple(found), unjudged=(*missing, *_doubtful(judged))
    )


def _doubtful(judged: Sequence[tuple[Rule, Judgement]]) -> Iterator[str]:
    """Yield which rules found a time that may not be shown, and what would help."""
    names = [rule.name for rule, seen in judged if isinstance(seen, Evidence) and seen.size_s and seen.size_s.doubt]
    if names:
        yield f"{', '.join(names)} ({words.NOT_ENOUGH}: {words.REMEDY} would help)"


def _worth(bench: Bench, seen: Evidence) -> bool:
    """Tell whether a finding's time may be shown and is above the noise; a finding on memory has no time."""
    size = seen.size_s
    if size is None:
        return True
    return not (size.doubt or bench.row.doubt) and size.low > 0 and size.value >= SMALLEST * bench.step_s


def _finding(bench: Bench, rule: Rule, seen: Evidence) -> Finding:
    share = seen.size_s.value / bench.step_s if seen.size_s else 0.0
    return Finding(
        rule=rule, row=bench.row, evidence=seen, share=share, cures=cures(bench, rule), labels=bench.row.labels
    )


def cures(bench: Bench, rule: Rule) -> tuple[Cure, ...]:
    """Return the measured cases of the same work that hold a rule's remedy, the fastest first."""
    found = []
    candidates = [*bench.rivals(), bench.all_cores()]
    for row in candidates:
        if row is not None and _holds(row, rule):
            ratio = stats.ratio(bench.row.series, row.series)
            gain_s = stats.difference(bench.row.series, row.series)
            found.append(Cure(row=row, ratio=ratio, gain_s=gain_s, verdict=stats.verdict(ratio)))
    return tuple(sorted(found, key=lambda cure: -cure.ratio.value))


def _holds(row: Row, rule: Rule) -> bool:
    """Tell whether a case is what a rule advises; what TrainStep chose itself counts where any switch is advised."""
    case = row.case
    if not case.traits.scheduled:
        return case.traits.role in rule.roles
    if case.schedule == schedule.FASTEST or not rule.switches:
        return bool(rule.switches)
    mine = schedule.parse(case.schedule or schedule.REFERENCE)
    return any(getattr(mine, switch) in positions for switch, positions in rule.switches.items())
