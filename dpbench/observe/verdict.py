"""Verdict: the answers about observed loops, which name the most costly problem, or none.

`decide` is the rule. A problem stands out if the whole interval of its cost is at least `WORTH`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from pathlib import PurePath

from dpbench.analysis import decision, uneven
from dpbench.analysis.answer import Answer, highest_peak
from dpbench.analysis.decision import Choice
from dpbench.analysis.findings import Diagnosis
from dpbench.analysis.findings.rule import Evidence, Finding
from dpbench.analysis.summary import Row
from dpbench.records import Source, Trial, fake, hidden, words
from dpbench.records.disturbance import NOISY
from dpbench.records.estimate import Doubt, Estimate
from dpbench.records.observed import Observed, unclear
from dpbench.records.resources import Resources
from dpbench.records.trial import by_key

WORTH = decision.WORTH - 1
"""The least cost that stands out, as a fraction of the step."""
UNCLEAR = 0.5
"""The fraction of steps not understood from which the absence of problems is not stated."""
PROFILE_MORE = "schedule = torch.profiler.schedule(wait=1, warmup=3, active=20)"
"""The line of code that records more steps in a trace."""


class Ground(StrEnum):
    """The reason for a verdict."""

    COST = auto()
    """A problem decidedly costs at least `WORTH` of the step."""
    CLEAR = auto()
    """No problem can cost `WORTH` of the step."""
    UNEVEN = auto()
    """Some steps are much longer than most, for none of the known reasons."""
    OPEN = auto()
    """It is undecided whether a problem costs `WORTH` of the step."""
    NOISY = auto()
    """Other processes used so much of the cores that steps are longer; no problem stands out."""
    UNCLEAR = auto()
    """Parts of too many steps were not understood, and no problem stands out."""
    FEW = auto()
    """The step time is in doubt: there are too few steps, or the interval is too wide."""
    NO_RESULT = auto()
    FAKE_GPU = auto()


@dataclass(frozen=True)
class Verdict:
    """The verdict on an observed loop; `cost` is the index of the deciding cost, if any."""

    choice: Choice
    ground: Ground
    cost: int | None = None


def decide(
    step: Estimate | None,
    costs: Sequence[Estimate],
    unclear: float = 0.0,
    *,
    uneven: bool = False,
    noisy: bool = False,
) -> Verdict:
    """Return the verdict on a loop; `step` is its step time in seconds, None without a result.

    `costs` are those of its problems as fractions of the step, the largest first. `unclear` is the
    fraction of steps with parts that dpbench did not understand. The first cost that is decidedly
    at least `WORTH` stands out; in too few steps for an interval, the first of that size is named.
    `uneven` is whether the mean step differs from the median step, and `noisy` whether other
    processes used the cores.
    """
    if step is None:
        return Verdict(Choice.UNKNOWN, Ground.NO_RESULT)
    if step.doubt:
        few = step.doubt is Doubt.ROUNDS
        large = [number for number, cost in enumerate(costs) if few and cost.value >= WORTH]
        return Verdict(Choice.UNKNOWN, Ground.FEW, large[0] if large else None)
    decided = [number for number, cost in enumerate(costs) if cost.low >= WORTH]
    possible = [number for number, cost in enumerate(costs) if cost.high >= WORTH]
    if decided:
        verdict = Verdict(Choice.CHANGE, Ground.COST, decided[0])
    elif unclear >= UNCLEAR:
        verdict = Verdict(Choice.UNKNOWN, Ground.UNCLEAR)
    elif noisy:
        verdict = Verdict(Choice.UNKNOWN, Ground.NOISY, possible[0] if possible else None)
    elif uneven:
        verdict = Verdict(Choice.CHANGE, Ground.UNEVEN)
    elif possible:
        verdict = Verdict(Choice.UNKNOWN, Ground.OPEN, possible[0])
    else:
        verdict = Verdict(Choice.KEEP, Ground.CLEAR)
    return verdict


def answers(
    rows: Sequence[Row], trials: Sequence[Trial], diagnoses: Sequence[Diagnosis], machine: Resources
) -> list[Answer]:
    """Return one answer for each observed loop of a run; none without one."""
    mine = [row for row in rows if row.case.traits.judged_alone]
    by_case = {one.row.case: one for one in diagnoses}
    groups = by_key(trials)
    return [_answer(row, groups[row.key], by_case.get(row.case), mine, machine) for row in mine]


def _answer(
    row: Row,
    trials: Sequence[Trial],
    diagnosis: Diagnosis | None,
    alike: Sequence[Row],
    machine: Resources,
) -> Answer:
    loop = trials[-1].facts.loop or Observed(command="", reads={})
    findings = diagnosis.findings if diagnosis else ()
    problems = [*findings, *(diagnosis.open if diagnosis else ())]
    timed = [(one, cost) for one in problems if (cost := _cost(one.evidence, row))]
    affected = max((one.steps for one in loop.unknown), default=0)
    total = sum(len(trial.steps) for trial in trials)
    verdict = (
        Verdict(Choice.UNKNOWN, Ground.FAKE_GPU)
        if row.on_fake_gpus
        else decide(
            row.step,
            [cost for _, cost in timed],
            affected / total if total else 0.0,
            uneven=uneven.differs(row),
            noisy=NOISY in row.labels,
        )
    )
    problem, cost = timed[verdict.cost] if verdict.cost is not None else (None, None)
    finding = problem if problem in findings else None
    decided = finding if verdict.ground is not Ground.FEW else None
    command = decided.command or decided.code if decided else _again(row, loop)
    return Answer(
        subject=_subject(row, alike, loop.wrapper),
        choice=verdict.choice,
        settled=verdict.choice is not Choice.UNKNOWN,
        basis=verdict.ground,
        problem=problem.rule.key if problem else "",
        cost=None if problem and problem.evidence.aside else cost,
        home=row.case,
        source=row.source,
        headline=_headline(row, trials, verdict, problem, cost, loop),
        reason=_reason(row, trials, verdict, problem),
        certainty="; ".join(_certainty(row, trials, loop, verdict.ground)),
        memory=_memory(row, [one.evidence for one in problems], machine),
        command=command,
        labels=finding.labels if finding else row.labels,
        compared=frozenset([row.case]),
        row=row,
    )


def _cost(problem: Evidence, row: Row) -> Estimate | None:
    """Return the cost of a problem as a fraction of the steps; None if it costs no time."""
    if problem.aside:
        outside = problem.aside / (1 - problem.aside) if problem.aside < 1 else float("inf")
        return Estimate(outside, outside, outside, Estimate.ROUNDS)
    if problem.size_s is None or row.mean is None:
        return None
    return problem.share or problem.size_s.scaled(1 / row.mean.value)


def _subject(row: Row, mine: Sequence[Row], wrapper: str) -> str:
    alike = [one.case for one in mine if one.case.model == row.case.model]
    batch = [f"batch {row.case.batch}"] if len({one.batch_size for one in alike}) > 1 else []
    devices = (
        [words.count(row.case.devices, "device")] if len({one.devices for one in alike}) > 1 else []
    )
    found = [*batch, *devices]
    name = f"{row.case.model} under {wrapper}" if wrapper else row.case.model
    return f"{name} ({', '.join(found)})" if found else name


def _headline(
    row: Row,
    trials: Sequence[Trial],
    verdict: Verdict,
    problem: Finding | None,
    cost: Estimate | None,
    loop: Observed,
) -> str:
    says = problem.evidence.says if problem else ""
    if verdict.ground is Ground.COST and problem and cost:
        return says if problem.evidence.aside else f"{says}: {share(cost)} of the step"
    if verdict.ground is Ground.CLEAR:
        return (
            f"{Choice.KEEP}: no problem that dpbench detects costs {WORTH:.0%} of the step or more"
        )
    if verdict.ground is Ground.UNEVEN and row.mean and row.step:
        return (
            "some steps are much longer than most: the mean step takes"
            f" {words.duration(row.mean)}, the median step {words.duration(row.step)}"
        )
    if verdict.ground is Ground.NOISY:
        why = _beside_others(trials)
        if cost:
            why += f"; {says}, which costs {between(cost)} of the step"
    elif verdict.ground is Ground.OPEN and cost:
        why = f"{says}, which costs {between(cost)} of the step"
    elif verdict.ground is Ground.UNCLEAR:
        why = (
            "dpbench did not understand parts of at least half of the steps:"
            f" {loop.unknown[0].problem}"
        )
    elif verdict.ground is Ground.FAKE_GPU:
        why = fake.WHY
    elif verdict.ground is Ground.FEW and row.step:
        steps = words.count(row.steps, "timed step")
        varies = "the step time varies too much: its interval spans more than a factor of"
        few = f"{steps} {words.verb(row.steps, 'is', 'are')} not enough for an interval"
        why = few if row.step.doubt is Doubt.ROUNDS else f"{varies} {Estimate.WIDEST:.0f} ({steps})"
        if cost:
            why = f"{why}; in {words.verb(row.steps, 'it', 'them')}, {says}:"
            why += f" {words.percent(cost.value)} of the step"
    else:
        why = f"no step has a result ({row.outcome})"
    return f"{Choice.UNKNOWN}: {why}"


def _beside_others(trials: Sequence[Trial]) -> str:
    """Return what other processes used while the loop ran."""
    loads = [load for trial in trials if (load := trial.facts.foreign_load)]
    used = max((load.taken * load.cores for load in loads), default=0.0)
    cores = loads[0].cores if loads else 0
    amount = f"{words.number(used)} of {words.count(cores, 'core')}" if loads else "a GPU"
    return f"other processes used {amount} ({NOISY})"


def share(cost: Estimate) -> str:
    """Return a fraction of a step as a percentage with its interval, such as "41% (38–44%)".

    If the interval is too wide for a single number, return only its ends.
    """
    if cost.high > Estimate.WIDEST * cost.low:
        return between(cost)
    low, high = (words.percent(max(0.0, end)) for end in (cost.low, cost.high))
    return f"{words.percent(cost.value)} ({low.removesuffix('%')}–{high})"


def between(cost: Estimate) -> str:
    """Return the ends of the interval of a fraction, such as "between 4.1% and 8.0%"."""
    return f"between {words.percent(max(0.0, cost.low))} and {words.percent(cost.high)}"


def _reason(
    row: Row,
    trials: Sequence[Trial],
    verdict: Verdict,
    problem: Finding | None,
) -> str:
    if problem:
        return problem.evidence.numbers
    if verdict.ground is Ground.UNEVEN:
        return uneven.where(trials)
    if verdict.ground is not Ground.CLEAR or not row.phases or row.mean is None:
        return ""
    most = max(sorted(row.phases), key=lambda name: row.phases[name])
    return (
        f"the mean step takes {words.duration(row.mean)}; the longest part is {words.part(most)}:"
        f" {words.time(row.phases[most])}"
    )


def _certainty(row: Row, trials: Sequence[Trial], loop: Observed, ground: Ground) -> Iterator[str]:
    if row.step:
        apart = f"{words.count(row.rounds, 'part')} of " if row.rounds >= Estimate.ROUNDS else ""
        yield (
            f"95% interval from {words.count(row.steps, 'step')} in {apart}one execution, without"
            " the variation between executions"
        )
    if row.source is Source.IMPORTED:
        gpus = dict.fromkeys(str(trial.facts.gpu) for trial in trials if trial.facts.gpu)
        where = f" on {', '.join(gpus)}" if gpus else ""
        yield f"from a profiler's trace{where}; the profiler itself slows the host"
    yield from unclear(loop)
    if NOISY in row.labels and ground is not Ground.NOISY:
        yield f"uncertain: {_beside_others(trials)}"
    if row.case.device_kind == "cpu":
        yield "this says nothing about GPUs"


def _memory(row: Row, problems: Sequence[Evidence], machine: Resources) -> str:
    clauses = [one.says for one in problems if one.size_s is None and not one.aside]
    if row.memory:
        clauses.insert(0, highest_peak(row, machine))
    return "; ".join(clauses)


def _again(row: Row, loop: Observed) -> str:
    """Return the command that watches the script again or, for a trace, the code for more steps."""
    if row.source is Source.IMPORTED:
        return PROFILE_MORE
    words_of = loop.words
    if "dpbench" in words_of:
        return hidden.to_fill_in(loop.command)
    if words_of and PurePath(words_of[0]).name.startswith("python"):
        words_of = words_of[1:]
    again = shlex.join(["dpbench", "watch", *(words_of or [row.case.model])])
    return hidden.to_fill_in(again)
