"""Answer: one paragraph with the gain from the devices, the phases that lose time, and the best changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dpbench.analysis import stats
from dpbench.analysis.findings.rule import CaseContext, Finding, scaled
from dpbench.analysis.findings.text import devices, strategy
from dpbench.analysis.summary import Row
from dpbench.records import UNATTRIBUTED, schedule
from dpbench.records.registry import Role
from dpbench.records.trial import Estimate
from dpbench.records.words import NOT_ENOUGH, REMEDY, count, doubt, exact, percent, time, times

_REMEDY = f"To decide it, use {REMEDY}."
LARGEST = 3
"""The largest number of phases, and of changes, that the paragraph names."""


def answer(context: CaseContext, findings: Sequence[Finding]) -> str:
    """Return the answer for one diagnosed case as a paragraph."""
    if context.row.step and context.row.step.doubt:
        return f"{_subject(context)}: {NOT_ENOUGH} for the time of a step ({doubt(context.row.step)}). {_REMEDY}"
    return " ".join(filter(None, (_gives(context), _steps(context), _where(context), _fix(context, findings))))


def _gives(context: CaseContext) -> str:
    """Return sentences on the speed-up, the ideal, and the limits of this machine."""
    case, row = context.case, context.row
    subject = _subject(context)
    if row.speedup is None:
        why = (
            "emulated devices show host cost only"
            if case.device_kind == "emulated"
            else "the strategy single was not measured at equal work"
        )
        said = f"{subject} take {time(context.step_s)} per step; the gain over one device is unknown, because {why}."
    elif row.speedup.doubt:
        said = (
            f"{subject} take {time(context.step_s)} per step; {NOT_ENOUGH} for the gain over one device "
            f"({doubt(row.speedup)}). {_REMEDY}"
        )
    else:
        unsure = {"undecided": ", undecided whether faster or slower", "same": ", no gain"}
        verdict = unsure.get(stats.verdict(row.speedup), "")
        weak = " (weak scaling)" if row.scaling == "weak" else ""
        ideal = "" if case.placement == "colocated" else f" (ideal: {case.devices}×)"
        said = f"{subject} give {times(row.speedup)} over one device{weak}{ideal}{verdict}."
    if context.oversubscribed:
        said += (
            f" But {len(case.rows)} devices share {count(context.cores, 'core')} (oversubscribed): at most "
            f"{context.cores}× was possible here."
        )
    if case.placement == "colocated":
        said += " They share one GPU: the result shows host cost only, and no speed-up was possible."
    return said


def _subject(context: CaseContext) -> str:
    """Return the subject of the paragraph: model, batch, devices and strategy."""
    case = context.case
    habits = "".join(f", {habit}" for habit in case.habits)
    return f"{case.model} at batch {case.batch_size}{habits}: {devices(case)} under {strategy(case)}"


def _steps(context: CaseContext) -> str:
    """Return a sentence on the gain over the next smaller number of devices; empty if it is unknown or in doubt."""
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
    """Return sentences on the time lost against perfect scaling, by phase.

    In each of the two cases the phases sum to the step, so their differences sum to the time lost.
    """
    found = context.ideal()
    if found is None or found[0].doubt:
        return _largest(context)
    alone, divisor = found
    assert alone.step is not None
    ideal_s = alone.step.value / divisor
    lost_s = context.step_s - ideal_s
    if lost_s <= 0:
        return f"A step takes {time(context.step_s)}, no more than the {time(ideal_s)} of perfect scaling."
    names = {*context.row.phases, *alone.phases}
    lost = {n: context.row.phases.get(n, 0.0) - alone.phases.get(n, 0.0) / divisor for n in names}
    return (
        f"A step takes {time(context.step_s)}; with perfect scaling it would take {time(ideal_s)}. "
        f"Of the {time(lost_s)} lost, {_shares(lost, lost_s)}."
    )


def _largest(context: CaseContext) -> str:
    """Return a sentence on the largest phases, for cases without a baseline."""
    return f"Of a step of {time(context.step_s)}, {_shares(context.row.phases, context.step_s)}."


def _shares(seconds: Mapping[str, float], whole_s: float) -> str:
    """Return the largest parts of a whole as text; parts below 1 % are left out."""
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
    """Return sentences on the measured changes that help most, and the speed-up with the best of them."""
    better = _faster(context, context.rivals())
    if not better:
        return f"{_unmeasured(context, findings)}{_alone(context)}"
    said = [f"{_name(row)} is {times(ratio)} as fast" for row, ratio in better[:LARGEST]]
    best, _ = better[0]
    shown = best.speedup if best.speedup and not best.speedup.doubt else None
    after = f" With {_name(best)}, {context.case.devices} devices give {times(shown)} over one device." if shown else ""
    return f"Measured to help: {'; '.join(said)}.{after}{_alone(context)}"


def _alone(context: CaseContext) -> str:
    """Return a sentence if one device is decidedly faster than the diagnosed case, else an empty string.

    The sentence also states if one device is faster than every case that was measured on several devices.
    """
    if context.case.placement == "colocated" or context.case.device_kind == "emulated":
        return ""
    candidates = (context.single(), context.all_cores())
    found = _faster(context, [row for row in candidates if row is not None])
    if not found:
        return ""
    row, ratio = found[0]
    name = "one device" if row.case.traits.role is Role.BASELINE else strategy(row.case)
    several = [rival for rival in context.rivals() if stats.verdict(stats.ratio(row.series, rival.series)) != "slower"]
    beaten = "" if several else ", and faster than everything measured on several devices: it is the better choice here"
    return f" Without data parallelism, {name} is {times(ratio)} as fast{beaten}."


def _faster(context: CaseContext, others: Sequence[Row]) -> list[tuple[Row, Estimate]]:
    """Return the rows that are decidedly faster than the diagnosed case, with their speed ratio, the fastest first."""
    found = [(row, stats.ratio(context.row.series, row.series)) for row in others]
    decided = [pair for pair in found if stats.verdict(pair[1]) == "faster"]
    return sorted(decided, key=lambda pair: -pair[1].value)


def _name(row: Row) -> str:
    """Return the name of a row's strategy or schedule."""
    if not row.case.traits.scheduled:
        return strategy(row.case)
    chosen = " (chosen by TrainStep itself)" if row.case.schedule == schedule.FASTEST else ""
    return f"the schedule {strategy(row.case)}{chosen}"


def _unmeasured(context: CaseContext, findings: Sequence[Finding]) -> str:
    """Return sentences on the most promising remedy, for a run in which no measured change is decidedly faster."""
    tried = context.rivals()
    nothing = (
        f"No measured alternative is decidedly faster on the same work ({', '.join(strategy(r.case) for r in tried)})."
        if tried
        else "No alternative for the same work was measured."
    )
    bounds = [one for one in findings if one.evidence.size_s and not one.evidence.measured]
    if not bounds:
        return nothing
    first = bounds[0]
    assert first.evidence.size_s is not None
    return (
        f"{nothing} According to the largest finding, this change could save at most "
        f"{time(first.evidence.size_s.value)} ({percent(first.share)} of the step): {first.rule.remedy}."
    )
