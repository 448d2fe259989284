"""Sentences: a diagnosis as one paragraph: the gain, the lost time, and the best changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dpbench.analysis import stats
from dpbench.analysis.findings.rule import CaseContext, Finding, scaled
from dpbench.analysis.summary import Row
from dpbench.records import UNATTRIBUTED, fake, schedule
from dpbench.records.names import devices, in_words
from dpbench.records.registry import Role
from dpbench.records.trial import Estimate
from dpbench.records.words import (
    NOT_ENOUGH,
    REMEDY,
    count,
    doubt,
    duration,
    exact,
    percent,
    time,
    times,
    withheld,
)

_REMEDY = f"Use {REMEDY}."
LARGEST = 3
"""The largest number of phases, and of changes, that the paragraph names."""


def paragraph(context: CaseContext, findings: Sequence[Finding]) -> str:
    """Return one paragraph about the diagnosed case.

    If there are not enough rounds for its step time, or if the GPUs were fake, the paragraph says
    only this. An observed loop is compared with no other case.
    """
    if context.row.on_fake_gpus:
        return f"{_subject(context)}: {fake.WHY}."
    if context.row.step and context.row.step.doubt:
        remedy = "Observe more steps." if context.observed else _REMEDY
        return (
            f"{_subject(context)}: {NOT_ENOUGH} for the time of a step ({doubt(context.row.step)})."
            f" {remedy}"
        )
    if context.case.traits.observed:
        takes = (
            f"{_subject(context)} take {duration(context.row.step)} per step."
            if context.row.step
            else ""
        )
        return " ".join(filter(None, (takes, _largest(context), _recommended(findings))))
    return " ".join(
        filter(None, (_gives(context), _steps(context), _where(context), _fix(context, findings)))
    )


def _gives(context: CaseContext) -> str:
    case = context.case
    row = context.row
    subject = _subject(context)
    if row.speedup is None:
        why = (
            "emulated devices show host cost only"
            if case.device_kind == "emulated"
            else "the strategy single was not measured on the same work"
        )
        sentences = (
            f"{subject} take {time(context.step_s)} per step; the gain over one device is unknown,"
            f" because {why}."
        )
    elif row.speedup.doubt:
        sentences = (
            f"{subject} take {time(context.step_s)} per step; {withheld(row.speedup)} for the gain"
            f" over one device ({doubt(row.speedup)}). {_REMEDY}"
        )
    else:
        weak = " (weak scaling)" if row.scaling == "weak" else ""
        ideal = "" if case.placement == "colocated" else f" (ideal: {case.devices}×)"
        sentences = f"{subject} give {times(row.speedup)} over one device{weak}{ideal}."
    if context.oversubscribed:
        sentences += (
            f" But {len(case.rows)} devices share {count(context.cores, 'core')} (oversubscribed):"
            f" at most {context.cores}× was possible on this machine."
        )
    if case.placement == "colocated":
        sentences += (
            " The replicas share one GPU: the result shows host cost only, and no speed-up was"
            " possible."
        )
    return sentences


def _subject(context: CaseContext) -> str:
    case = context.case
    if context.observed:
        wrapper = f" under {context.observed.wrapper}" if context.observed.wrapper else ""
        return f"{case.model} at batch {case.batch}: the training steps on {devices(case)}{wrapper}"
    habits = "".join(f", {habit}" for habit in case.habits)
    return (
        f"{case.model} at batch {case.batch_size}{habits}: {devices(case)} under {in_words(case)}"
    )


def _steps(context: CaseContext) -> str:
    """Return a sentence on the speed-up over fewer devices; "" if unknown or in doubt."""
    fewer = context.fewer()
    if fewer is None:
        return ""
    most = context.case.devices
    before = fewer.case.devices
    gained = stats.ratio(
        scaled(fewer.series, context.case.batch_size / fewer.case.batch_size), context.row.series
    )
    if gained.doubt:
        return ""
    return (
        f"Going from {before} to {most} devices gave a speed-up of {times(gained)}; the ideal is "
        f"{exact(most / before)}×."
    )


def _where(context: CaseContext) -> str:
    """Return sentences on the excess over perfect scaling, and on its largest phases.

    The excesses of all phases sum to the time lost. Without a time of perfect scaling, return a
    sentence on the longest phases instead.
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
            f"A step takes {time(context.step_s)}; with perfect scaling it would take"
            f" {time(ideal_s)}: no time is lost."
        )
    names = {**context.row.phases, **alone.phases}
    lost = {n: context.row.phases.get(n, 0.0) - alone.phases.get(n, 0.0) / divisor for n in names}
    return (
        f"A step takes {time(context.step_s)}; with perfect scaling it would take {time(ideal_s)}. "
        f"Of the {time(lost_s)} lost, {_shares(lost, lost_s)}.{_floors(context.row)}"
    )


def _largest(context: CaseContext) -> str:
    shares = _shares(context.row.phases, context.step_s)
    return f"Of a step of {time(context.step_s)}, {shares}.{_floors(context.row)}"


def _floors(row: Row) -> str:
    """Return a sentence on the least times of phases by bytes and operations; "" if unknown."""
    known = [f"{name} {time(least_s)}" for name in row.phases if (least_s := row.least(name))]
    if not known:
        return ""
    return f" By bytes over links and operations over the peak, at least: {', '.join(known)}."


def _shares(seconds: Mapping[str, float], whole_s: float) -> str:
    """Return a clause with the longest phases and their shares of `whole_s`, if at least 1 %."""
    top = sorted(
        (name for name in seconds if seconds[name] >= 0.01 * whole_s),
        key=lambda name: -seconds[name],
    )[:LARGEST]
    named = [
        f"{time(seconds[name])} ({percent(seconds[name] / whole_s)}) "
        f"{'go to Python code between the phases' if name == UNATTRIBUTED else f'go to {name}'}"
        for name in top
    ]
    return ", ".join(named)


def _fix(context: CaseContext, findings: Sequence[Finding]) -> str:
    """Return sentences on the fastest measured cases of the same work, and the best speed-up.

    If none is faster than the diagnosed case, recommend the remedy of the largest finding.
    """
    better = _faster(context, context.rivals)
    if not better:
        return f"{_unmeasured(context, findings)}{_alone(context)}"
    clauses = [f"{_name(row)} is {times(ratio)} as fast" for row, ratio in better[:LARGEST]]
    best, _ = better[0]
    shown = best.speedup if best.speedup and not best.speedup.doubt else None
    after = (
        f" With {_name(best)}, {context.case.devices} devices give {times(shown)} over one device."
        if shown
        else ""
    )
    return f"Measured to help: {'; '.join(clauses)}.{after}{_alone(context)}"


def _alone(context: CaseContext) -> str:
    """Return a sentence on one device if it is decidedly faster than the diagnosed case, else "".

    One device means `single`, or one CPU device with all cores, whichever is faster.
    """
    if context.case.placement == "colocated" or context.case.device_kind == "emulated":
        return ""
    candidates = (context.single(), context.all_cores())
    found = _faster(context, [row for row in candidates if row is not None])
    if not found:
        return ""
    row, ratio = found[0]
    name = "one device" if row.case.traits.role is Role.BASELINE else in_words(row.case)
    several = [rival for rival in context.rivals if not _slower(rival, row, context)]
    beaten = (
        ""
        if several
        else ", and faster than every measured case on several devices: use one device here"
    )
    return f" Without data parallelism, {name} is {times(ratio)} as fast{beaten}."


def _slower(rival: Row, alone: Row, context: CaseContext) -> bool:
    """Return whether `rival` is decidedly slower than `alone`, a case on one device.

    Its speed-up decides if `alone` is its baseline, as in an answer.
    """
    if rival.speedup and rival.scaling == "strong" and alone.case.traits.role is Role.BASELINE:
        return stats.verdict(rival.speedup) == "slower"
    return stats.verdict(stats.ratio(alone.series, rival.series, level=context.level)) == "slower"


def _faster(context: CaseContext, others: Sequence[Row]) -> list[tuple[Row, Estimate]]:
    """Return, fastest first, the decidedly faster rows, with the ratios of the step times."""
    found = [(row, context.ratio(row)) for row in others]
    decided = [pair for pair in found if stats.verdict(pair[1]) == "faster"]
    return sorted(decided, key=lambda pair: -pair[1].value)


def _name(row: Row) -> str:
    if not row.case.traits.scheduled:
        return in_words(row.case)
    chosen = " (chosen by TrainStep itself)" if row.case.schedule in schedule.SELECTED else ""
    return f"the schedule {row.case.schedule}{chosen}"


def _unmeasured(context: CaseContext, findings: Sequence[Finding]) -> str:
    """Return sentences that name the other cases, none decidedly faster, and recommend a remedy."""
    tried = context.rivals
    nothing = (
        "No measured alternative is decidedly faster on the same work"
        f" ({', '.join(in_words(r.case) for r in tried)})."
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
        "According to the largest finding, this change could save at most"
        f" {time(first.evidence.size_s.value)} ({percent(first.share)} of the step):"
        f" {first.rule.remedy}."
    )
