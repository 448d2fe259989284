"""Findings: explain the gain from data parallelism, where the time goes, and what would help.

The rules are in phases.py and scale.py, those about cases that are judged alone in siblings. Each
examines one case, preferably that of torch.nn.DataParallel on the most devices, and compares it
with the other cases of the run. A finding is a problem that a rule found, with the gain of the
remedy if that was measured. Findings are sorted by their cost in seconds per step, the largest
first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from dpbench.analysis import commands, stats
from dpbench.analysis.findings import phases, scale
from dpbench.analysis.findings.rule import (
    SMALLEST,
    CaseContext,
    Cure,
    Evidence,
    Finding,
    FindingRule,
    Missing,
    contexts,
)
from dpbench.analysis.summary import Row
from dpbench.records import Case, Trial, plan, schedule, siblings, words
from dpbench.records.estimate import Doubt
from dpbench.records.names import in_words
from dpbench.records.observed import unclear
from dpbench.records.registry import Role
from dpbench.records.resources import Resources

__all__ = ["Diagnosis", "Finding", "RULES", "diagnose"]

TRAIN_STEP = 'step = dpbench.TrainStep(model, loss_fn, optimizer_fn, device_ids, schedule="{}")'
"""The line of code that applies a schedule to a training loop."""
DDP = (
    "model = torch.nn.parallel.DistributedDataParallel(model)  # in each process that torchrun"
    " starts"
)
"""The line of code that trains with one process per device."""
RULES: tuple[FindingRule, ...] = (*scale.RULES, *phases.RULES)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The explanation of the diagnosed case, whose results are in `row`.

    `labels` are those of all compared cases. `findings` are sorted by cost, the largest first.
    `unjudged` has a text for each question that the run cannot answer. `open` are findings whose
    cost is too small or uncertain to be shown.
    """

    row: Row
    labels: tuple[str, ...]
    findings: tuple[Finding, ...]
    unjudged: tuple[str, ...]
    open: tuple[Finding, ...] = ()


def diagnose(
    rows: Sequence[Row],
    trials: Sequence[Trial],
    machine: Resources,
    machine_result: str = "",
) -> list[Diagnosis]:
    """Return the diagnoses of a run: of each observed loop, and of the cases of `contexts`."""
    return [_diagnosis(context) for context in contexts(rows, trials, machine, machine_result)]


def _rules_alone() -> tuple[FindingRule, ...]:
    """Return the rules on a case by itself: those of siblings, and those that compare nothing."""
    theirs = chain.from_iterable(siblings.added("rules"))
    return (*theirs, *(rule for rule in RULES if rule.alone))


def definitions() -> str:
    """Return all rules as a Markdown table, which docs/measuring.md contains."""
    rules = (*RULES, *chain.from_iterable(siblings.added("rules")))
    theirs = _rules_alone()
    lines = ["| finding | is made if | of |", "|---|---|---|"]
    for rule in rules:
        cases = ["cases"] * (rule in RULES) + ["loops"] * (rule in theirs)
        lines.append(f"| {rule.key} | {rule.when} | {', '.join(cases)} |")
    return "\n".join(lines)


def _diagnosis(context: CaseContext) -> Diagnosis:
    rules = _rules_alone() if context.case.traits.judged_alone else RULES
    if context.row.on_fake_gpus or (context.loop and context.loop.hidden):
        rules = ()  # times that mean nothing, and unknown phases, are no evidence
    judged = [(rule, rule.find(context)) for rule in rules]
    every = [_finding(context, rule, one) for rule, one in judged if isinstance(one, Evidence)]
    shown = [finding for finding in every if _worth(context, finding.evidence)]
    unjudged = [seen.what for _, seen in judged if isinstance(seen, Missing)]
    unjudged += unclear(context.loop) if context.loop else _doubtful(every)
    return Diagnosis(
        row=context.row,
        labels=context.labels,
        findings=tuple(sorted(shown, key=lambda finding: -finding.stake)),
        unjudged=tuple(unjudged),
        open=tuple(finding for finding in every if not _worth(context, finding.evidence)),
    )


def _doubtful(every: Sequence[Finding]) -> Iterator[str]:
    sizes = {finding.rule.key: finding.evidence.size_s for finding in every}
    doubtful = {key: size_s for key, size_s in sizes.items() if size_s and size_s.doubt}
    if doubtful:
        few = words.withheld(*doubtful.values())
        yield f"the cost of {', '.join(doubtful)} ({few}: {words.REMEDY} would help)"


def _worth(context: CaseContext, seen: Evidence) -> bool:
    """Return whether the finding with the evidence `seen` is shown.

    It is if its cost and the step time have enough rounds, and the interval of its cost is above 0
    and the cost at least 2 % of the step; always for memory, or for time outside the steps. A trace
    shows where its steps spent their time, even if they are too few for an interval.
    """
    size = seen.size_s
    if size is None:
        return True
    few = context.row.source.profiled and context.row.doubt is Doubt.ROUNDS
    sure = not (size.doubt or context.row.doubt) and size.low > 0
    return (few or sure) and size.value >= SMALLEST * context.step_s


def _finding(context: CaseContext, rule: FindingRule, seen: Evidence) -> Finding:
    tried = rule.remedies(context.case)
    measured = cures(context, rule)
    applied, code = _code(context.case, measured, tried)
    return Finding(
        rule=rule,
        row=context.row,
        evidence=seen,
        share=seen.size_s.value / context.step_s if seen.size_s else 0.0,
        cures=measured,
        labels=(*context.labels, *([] if seen.source.timed else [seen.source.upper()])),
        code=seen.code or code,
        code_for="" if seen.code else applied,
        command=seen.command or (_measure(context, tried) if tried else ""),
    )


def _measure(context: CaseContext, tried: Sequence[Case]) -> str:
    """Return the command that measures cases with a remedy beside the diagnosed case."""
    alone = plan.alone(context.case, context.case.batch_size)
    return commands.measure([alone, context.case, *tried], machine=context.machine)


def _code(case: Case, measured: Sequence[Cure], tried: Sequence[Case]) -> tuple[str, str]:
    """Return what a remedy uses, and the line of code that applies it; "" if there is none.

    It is that of the fastest measured case with the remedy, if decidedly faster; else of the first
    case in `tried` that is not decidedly slower. Fewer devices or a larger batch change no code.
    """
    better = [cure.row.case for cure in measured if cure.verdict == "faster"]
    slower = {cure.row.case for cure in measured if cure.verdict == "slower"}
    best = better[0] if better else next((one for one in tried if one not in slower), None)
    if best and best.schedule and best.schedule != case.schedule:
        return f"the schedule {best.schedule}", TRAIN_STEP.format(best.schedule)
    if best and best.traits.role is Role.CONTROL and best.strategy != case.strategy:
        return in_words(best), DDP
    return "", ""


def cures(context: CaseContext, rule: FindingRule) -> tuple[Cure, ...]:
    """Return the measured cases of the same work that apply the remedy, the fastest first."""
    measured = []
    for row in context.rivals:
        if _applies(row, rule):
            ratio = context.ratio(row)
            measured.append(
                Cure(row=row, ratio=ratio, gain_s=context.saved(row), verdict=stats.verdict(ratio))
            )
    return tuple(sorted(measured, key=lambda cure: -cure.ratio.value))


def _applies(row: Row, rule: FindingRule) -> bool:
    """Return whether a case applies the remedy, by its strategy's role or its schedule.

    A schedule that TrainStep chose itself counts for every rule that recommends schedules.
    """
    case = row.case
    if not case.traits.scheduled:
        return case.traits.role in rule.roles
    if case.schedule in schedule.SELECTED or not rule.schedules:
        return bool(rule.schedules)
    mine = schedule.known(case.schedule or schedule.Schedule.REFERENCE)
    ladder = [*schedule.Schedule]
    return mine is not None and ladder.index(mine) >= ladder.index(rule.schedules[0])
