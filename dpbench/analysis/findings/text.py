"""Text: answers and diagnoses as plain text.

An answer has three bullets: the gain, the cause of lost time, and the change that helps. A diagnosis has a paragraph,
the findings from largest to smallest, and open questions. The paragraph states the gain from several devices, the lost
time, and the best changes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dpbench.analysis import stats
from dpbench.analysis.findings.rule import CaseContext, Cure, Finding, scaled
from dpbench.analysis.ladder import label, short
from dpbench.analysis.summary import Row
from dpbench.records import UNATTRIBUTED, Case, schedule, words
from dpbench.records.registry import Role
from dpbench.records.trial import Estimate
from dpbench.records.words import NOT_ENOUGH, REMEDY, count, doubt, duration, exact, percent, time, times, withheld

if TYPE_CHECKING:
    from dpbench.analysis.answer import Answer
    from dpbench.analysis.findings import Diagnosis
    from dpbench.analysis.summary import Row

_REMEDY = f"Use {REMEDY}."
LARGEST = 3
"""The paragraph names at most this number of phases, and at most this number of changes."""
WIDTH = 100
CURES = 2
"""The largest number of measured cases that a finding names as remedies, the fastest first."""
NEXT, UNMEASURED = "command", "not measured in this run; measure it with"
"""The titles of a finding's command: one for a command that applies the remedy, one for a command that measures it."""
NO_FINDING = "no finding exceeds the measurement noise"
NOTHING = "Nothing to explain: no training step on several devices has a verified result in this run."
NOTE = (
    "Sizes are seconds per step with 95% intervals. 'Costs at most' gives the total cost of a problem: no remedy can "
    "save more. These costs overlap, so do not add them up. Findings below 2% of the step, and those whose interval "
    "includes 0, are left out."
)


def paragraph(context: CaseContext, findings: Sequence[Finding]) -> str:
    """Return one paragraph about the diagnosed case.

    If there are not enough rounds for its step time, the paragraph says only this. An observed loop is compared
    with no other case.
    """
    if context.row.step and context.row.step.doubt:
        remedy = "Observe more steps." if context.observed else _REMEDY
        return f"{_subject(context)}: {NOT_ENOUGH} for the time of a step ({doubt(context.row.step)}). {remedy}"
    if context.case.traits.observed:
        takes = f"{_subject(context)} take {duration(context.row.step)} per step." if context.row.step else ""
        return " ".join(filter(None, (takes, _largest(context), _recommended(findings))))
    return " ".join(filter(None, (_gives(context), _steps(context), _where(context), _fix(context, findings))))


def _gives(context: CaseContext) -> str:
    """Return sentences on the speed-up over one device, the ideal, and limits of the machine (cores, a shared GPU)."""
    case, row = context.case, context.row
    subject = _subject(context)
    if row.speedup is None:
        why = (
            "emulated devices show host cost only"
            if case.device_kind == "emulated"
            else "the strategy single was not measured on the same work"
        )
        said = f"{subject} take {time(context.step_s)} per step; the gain over one device is unknown, because {why}."
    elif row.speedup.doubt:
        said = (
            f"{subject} take {time(context.step_s)} per step; {withheld(row.speedup)} for the gain over one device "
            f"({doubt(row.speedup)}). {_REMEDY}"
        )
    else:
        weak = " (weak scaling)" if row.scaling == "weak" else ""
        ideal = "" if case.placement == "colocated" else f" (ideal: {case.devices}×)"
        said = f"{subject} give {times(row.speedup)} over one device{weak}{ideal}."
    if context.oversubscribed:
        said += (
            f" But {len(case.rows)} devices share {count(context.cores, 'core')} (oversubscribed): at most "
            f"{context.cores}× was possible on this machine."
        )
    if case.placement == "colocated":
        said += " The replicas share one GPU: the result shows host cost only, and no speed-up was possible."
    return said


def _subject(context: CaseContext) -> str:
    """Return the first sentence's subject: model, batch size, habits of the training loop, devices and strategy."""
    case = context.case
    if context.observed:
        wrapper = f" under {context.observed.wrapper}" if context.observed.wrapper else ""
        return f"{case.model} at batch {case.batch}: the training steps on {devices(case)}{wrapper}"
    habits = "".join(f", {habit}" for habit in case.habits)
    return f"{case.model} at batch {case.batch_size}{habits}: {devices(case)} under {strategy(case)}"


def _steps(context: CaseContext) -> str:
    """Return a sentence on the speed-up over the next smaller measured number of devices.

    Return "" if no smaller number was measured, or if there are not enough rounds for the speed-up.
    """
    fewer = context.fewer()
    if fewer is None:
        return ""
    most, before = context.case.devices, fewer.case.devices
    gained = stats.ratio(scaled(fewer.series, context.case.batch_size / fewer.case.batch_size), context.row.series)
    if gained.doubt:
        return ""
    return (
        f"Going from {before} to {most} devices gave a speed-up of {times(gained)}; the ideal is "
        f"{exact(most / before)}×."
    )


def _where(context: CaseContext) -> str:
    """Return sentences on the step time in excess of perfect scaling, and on the phases with the largest excess.

    The phases of a case sum to its step time, so the excesses of all phases sum to the time lost. If the step time with
    perfect scaling is unknown, return a sentence on the longest phases instead.
    """
    found = context.ideal()
    if found is None or found[0].doubt or context.ratio(found[0]).doubt:
        return _largest(context)
    alone, divisor = found
    assert alone.step is not None
    ideal_s = alone.step.value / divisor
    lost_s = context.step_s - ideal_s
    if lost_s <= 0:
        return (
            f"A step takes {time(context.step_s)}; with perfect scaling it would take {time(ideal_s)}: no time is lost."
        )
    names = {**context.row.phases, **alone.phases}
    lost = {n: context.row.phases.get(n, 0.0) - alone.phases.get(n, 0.0) / divisor for n in names}
    return (
        f"A step takes {time(context.step_s)}; with perfect scaling it would take {time(ideal_s)}. "
        f"Of the {time(lost_s)} lost, {_shares(lost, lost_s)}."
    )


def _largest(context: CaseContext) -> str:
    """Return a sentence on the longest phases, for a case whose step time with perfect scaling is unknown."""
    return f"Of a step of {time(context.step_s)}, {_shares(context.row.phases, context.step_s)}."


def _shares(seconds: Mapping[str, float], whole_s: float) -> str:
    """Return a clause with the (at most three) longest phases in `seconds` and their shares of `whole_s`.

    Phases whose share is below 1 % are left out.
    """
    top = sorted((name for name in seconds if seconds[name] >= 0.01 * whole_s), key=lambda name: -seconds[name])[
        :LARGEST
    ]
    named = [
        f"{time(seconds[name])} ({percent(seconds[name] / whole_s)}) "
        f"{'go to Python code between the phases' if name == UNATTRIBUTED else f'go to {name}'}"
        for name in top
    ]
    return ", ".join(named)


def _fix(context: CaseContext, findings: Sequence[Finding]) -> str:
    """Return sentences on the fastest measured cases of the same work, and on the speed-up of the best of them.

    If none of them is faster than the diagnosed case, recommend the remedy of the largest finding instead. If one
    device without data parallelism is faster than the diagnosed case, a last sentence says so.
    """
    better = _faster(context, context.rivals)
    if not better:
        return f"{_unmeasured(context, findings)}{_alone(context)}"
    said = [f"{_name(row)} is {times(ratio)} as fast" for row, ratio in better[:LARGEST]]
    best, _ = better[0]
    shown = best.speedup if best.speedup and not best.speedup.doubt else None
    after = f" With {_name(best)}, {context.case.devices} devices give {times(shown)} over one device." if shown else ""
    return f"Measured to help: {'; '.join(said)}.{after}{_alone(context)}"


def _alone(context: CaseContext) -> str:
    """Return a sentence on the speed of one device if it is decidedly faster than the diagnosed case, else "".

    One device means `single`, or one CPU device that uses all cores, whichever is faster. If this device is also faster
    than every measured case of the same work on several devices, the sentence says so.
    """
    if context.case.placement == "colocated" or context.case.device_kind == "emulated":
        return ""
    candidates = (context.single(), context.all_cores())
    found = _faster(context, [row for row in candidates if row is not None])
    if not found:
        return ""
    row, ratio = found[0]
    name = "one device" if row.case.traits.role is Role.BASELINE else strategy(row.case)
    several = [rival for rival in context.rivals if not _slower(rival, row, context)]
    beaten = "" if several else ", and faster than every measured case on several devices: use one device here"
    return f" Without data parallelism, {name} is {times(ratio)} as fast{beaten}."


def _slower(rival: Row, alone: Row, context: CaseContext) -> bool:
    """Return whether `rival` is decidedly slower than the case on one device in `alone`.

    Its speed-up decides if `alone` is its baseline, as in an answer.
    """
    if rival.speedup and rival.scaling == "strong" and alone.case.traits.role is Role.BASELINE:
        return stats.verdict(rival.speedup) == "slower"
    return stats.verdict(stats.ratio(alone.series, rival.series, level=context.level)) == "slower"


def _faster(context: CaseContext, others: Sequence[Row]) -> list[tuple[Row, Estimate]]:
    """Return, fastest first, the rows of `others` that are decidedly faster than the diagnosed case.

    Each row comes with the ratio of the diagnosed case's step time to its step time.
    """
    found = [(row, context.ratio(row)) for row in others]
    decided = [pair for pair in found if stats.verdict(pair[1]) == "faster"]
    return sorted(decided, key=lambda pair: -pair[1].value)


def _name(row: Row) -> str:
    """Return the name of a row's strategy or, for the engine, of its schedule, such as "the schedule dp[cached]"."""
    if not row.case.traits.scheduled:
        return strategy(row.case)
    chosen = " (chosen by TrainStep itself)" if row.case.schedule in schedule.SELECTED else ""
    return f"the schedule {strategy(row.case)}{chosen}"


def _unmeasured(context: CaseContext, findings: Sequence[Finding]) -> str:
    """Return sentences for a run in which no other case of the same work is decidedly faster.

    The sentences name the other cases, and recommend the remedy of the largest finding (see `_recommended`).
    """
    tried = context.rivals
    nothing = (
        f"No measured alternative is decidedly faster on the same work ({', '.join(strategy(r.case) for r in tried)})."
        if tried
        else "No alternative for the same work was measured."
    )
    return f"{nothing} {_recommended(findings)}".strip()


def _recommended(findings: Sequence[Finding]) -> str:
    """Return a sentence with the remedy of the largest finding; "" if there is none.

    A finding whose cost is the measured gain of another case is not used.
    """
    bounds = [one for one in findings if one.evidence.size_s and not one.evidence.measured]
    if not bounds:
        return ""
    first = bounds[0]
    assert first.evidence.size_s is not None
    return (
        f"According to the largest finding, this change could save at most {time(first.evidence.size_s.value)} "
        f"({percent(first.share)} of the step): {first.rule.remedy}."
    )


def explain(
    answers: Sequence[Answer], diagnoses: Sequence[Diagnosis], rows: Sequence[Row] = (), samples: int = 0
) -> str:
    """Return the answers as text, each with three bullets, followed by the cases in `rows` that have no result.

    If `samples`, the number of samples in an epoch, is not 0, each answer also states the time of an epoch.
    """
    said = ["\n".join(_bullets(one, diagnosis_of(one, diagnoses), samples)) for one in answers] or [NOTHING]
    return "\n\n".join([*said, *_without_result(rows)])


def render(diagnoses: Sequence[Diagnosis], rows: Sequence[Row] = ()) -> str:
    """Return all diagnoses as text, followed by the cases in `rows` that have no result, each with the reason."""
    explained = ["\n".join(_lines(one)) for one in diagnoses] or [NOTHING]
    note = [textwrap.fill(NOTE, WIDTH)] if diagnoses else []
    return "\n\n".join([*explained, *note, *_without_result(rows)])


def _without_result(rows: Sequence[Row]) -> list[str]:
    return [f"No result: {label(row.case)}: {_lost(row)}" for row in rows if row.step is None]


def diagnosis_of(answer: Answer, diagnoses: Sequence[Diagnosis]) -> Diagnosis | None:
    """Return the diagnosis of a case that the answer compares with the baseline; None if there is no diagnosis."""
    alike = [one for one in diagnoses if one.row.source is answer.source]
    return next((one for one in alike if one.row.case in answer.compared), None)


def _bullets(answer: Answer, diagnosis: Diagnosis | None, samples: int) -> Iterator[str]:
    """Yield the lines of an answer: the headline with its labels, three bullets, and the next command or code."""
    yield textwrap.fill(f"{answer.subject}: {answer.headline} [{' '.join(answer.labels)}]", WIDTH)
    epoch = answer.epoch(samples) if samples else ""
    costly = [one for one in diagnosis.findings if one.stake] if diagnosis else []
    observed = answer.home.traits.observed  # the headline of an observed loop names the finding
    largest = f"the most costly finding in {_named(costly[0].row.case)}: {headline(costly[0])}" if costly else ""
    cause = [answer.reason, "" if observed else largest]
    change = _remedy_clauses(costly[0]) if costly else []
    first = "certainty" if observed else "gain"
    bullets = {first: [answer.certainty, answer.memory, epoch], "cause": cause, "change": change}
    unexplained = NO_FINDING if diagnosis else "no case was diagnosed"
    nothing = {first: words.MISSING, "cause": unexplained, "change": "none that these measurements support"}
    for name, clauses in bullets.items():
        yield _filled(f"  - {name}: ", "; ".join(filter(None, clauses)) or nothing[name], hang=4)
    # code and command are not wrapped, so that a user can paste them
    code = costly[0].code if costly and costly[0].code != answer.command else ""
    yield from (f"  {name}: {line}" for name, line in (("code", code), ("next", answer.command)) if line)


def _named(case: Case) -> str:
    return f"{strategy(case)} on {devices(case)}"


def _remedy_clauses(finding: Finding) -> list[str]:
    """Return the clauses of the bullet on the remedy of a finding: the remedy and its measured gain."""
    return [finding.rule.remedy, f"measured: {_cure(finding.cures[0])}" if finding.cures else ""]


def _lost(row: Row) -> str:
    return textwrap.shorten(f"{row.outcome}: {row.reason or 'no reason given'}", 2 * WIDTH)


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    yield f"[{' '.join(diagnosis.labels)}]"
    yield textwrap.fill(diagnosis.text, WIDTH)
    if not diagnosis.findings:
        yield f"\n{NO_FINDING[0].upper()}{NO_FINDING[1:]}."
    for number, finding in enumerate(diagnosis.findings, 1):
        yield ""
        yield _filled(f"{number:>2}. ", f"{headline(finding)} [{' '.join(finding.labels)}]")
        for name, text in parts(finding):
            yield _filled(f"    {name}: ", text)
    if diagnosis.unjudged:
        yield ""
        yield _filled("Not judged, for lack of measurements: ", "; ".join(diagnosis.unjudged) + ".", hang=4)


def _filled(start: str, text: str, hang: int = 0) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=" " * (hang or 8))


def headline(finding: Finding) -> str:
    """Return one clause with the problem of a finding and its cost, in seconds and as a share of the step."""
    size = finding.evidence.size_s
    if size is None:
        return finding.evidence.says if finding.evidence.aside else f"{finding.evidence.says} (costs memory, not time)"
    kind = "saves" if finding.evidence.measured else "costs at most"
    if finding.evidence.predicted:
        kind = "is predicted to save"
    return f"{finding.evidence.says}: {kind} {duration(size)}, {percent(finding.share)} of the step"


def parts(finding: Finding) -> list[tuple[str, str]]:
    """Return pairs (title, text): the evidence, the remedy, its measured gains, the line of code, and the command.

    The measured gains and the command are left out if the evidence itself is a measured gain. The command is also left
    out if the gains were measured.
    """
    found = [("evidence", finding.evidence.numbers), ("remedy", finding.rule.remedy)]
    if finding.cures and not finding.evidence.measured:
        found.append(("measured in this run", "; ".join(_cure(cure) for cure in finding.cures[:CURES])))
    if finding.code:
        found.append(("code", finding.code))
    if finding.command and not (finding.cures or finding.evidence.measured):
        found.append((NEXT if finding.evidence.command else UNMEASURED, finding.command))
    return found


def _cure(cure: Cure) -> str:
    """Return, as text, the name of a case that applies the remedy and its speed relative to the diagnosed case."""
    name = strategy(cure.row.case)
    if cure.ratio.doubt:
        return f"{name}: {withheld(cure.ratio)}"
    said = {"faster": "as fast", "slower": "as fast (slower)", "same": "as fast (the same)"}
    verdict = said.get(cure.verdict, "as fast (undecided)")
    saved = f", saves {time(cure.gain_s.value)}" if cure.verdict == "faster" else ""
    return f"{name} {times(cure.ratio)} {verdict}{saved}"


def strategy(case: Case) -> str:
    """Return the name of a case's strategy, with the short name of its schedule in brackets if it has one."""
    if case.traits.all_cores:
        return "one device with all cores"
    return f"{case.strategy}[{short(case.schedule)}]" if case.schedule else case.strategy


def devices(case: Case) -> str:
    """Return the number and the kind of a case's devices as text, such as "4 GPUs"."""
    if case.placement == "colocated":
        return f"{words.count(case.devices, 'replica')} sharing one GPU"
    noun = {"cpu": "logical CPU device", "cuda": "GPU"}.get(case.device_kind, f"{case.device_kind} device")
    return words.count(case.devices, noun)
