"""The answer in a paragraph: what the devices give, where the lost time goes, which change helps and by how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dpbench.analysis import stats
from dpbench.analysis.findings.bench import Bench, scaled
from dpbench.analysis.findings.rule import Finding
from dpbench.analysis.findings.text import devices, strategy
from dpbench.analysis.summary import Row
from dpbench.records import UNATTRIBUTED, schedule
from dpbench.records.estimate import Estimate
from dpbench.records.traits import Role
from dpbench.records.words import NOT_ENOUGH, REMEDY, count, doubt, exact, percent, time, times

_REMEDY = f"What would help: {REMEDY}."
LARGEST = 3
"""Phases, and changes, that the paragraph names."""


def answer(bench: Bench, findings: Sequence[Finding]) -> str:
    """Return the paragraph."""
    if bench.row.step and bench.row.step.doubt:
        return f"{_subject(bench)}: {NOT_ENOUGH} for the time of a step ({doubt(bench.row.step)}). {_REMEDY}"
    return " ".join(filter(None, (_gives(bench), _steps(bench), _where(bench), _fix(bench, findings))))


def _gives(bench: Bench) -> str:
    """Say the speed-up against the ideal, and what that could have been here."""
    case, row = bench.case, bench.row
    subject = _subject(bench)
    if row.speedup is None:
        why = (
            "emulated devices show host cost alone"
            if case.device_kind == "emulated"
            else "the strategy single was not measured at equal work"
        )
        said = f"{subject} take {time(bench.step_s)} a step; the gain over one device is unknown, because {why}."
    elif row.speedup.doubt:
        said = (
            f"{subject} take {time(bench.step_s)} a step; {NOT_ENOUGH} for the gain over one device "
            f"({doubt(row.speedup)}). {_REMEDY}"
        )
    else:
        unsure = {"undecided": ", which does not decide whether that is faster or slower", "same": ", no gain"}
        verdict = unsure.get(stats.verdict(row.speedup), "")
        weak = " (weak scaling)" if row.scaling == "weak" else ""
        ideal = "" if case.placement == "colocated" else f", of an ideal {case.devices}×"
        said = f"{subject} give {times(row.speedup)} over one device{weak}{ideal}{verdict}."
    if bench.oversubscribed:
        said += (
            f" But they share {count(bench.cores, 'core')}: {len(case.rows)} devices are oversubscribed, and no more "
            f"than {bench.cores}× was possible here."
        )
    if case.placement == "colocated":
        said += " They share one GPU: that is host cost, and no speed-up was possible."
    return said


def _subject(bench: Bench) -> str:
    """Name what is explained: model, batch, devices and strategy."""
    case = bench.case
    return f"{case.model} at batch {case.batch_size}: {devices(case)} under {strategy(case)}"


def _steps(bench: Bench) -> str:
    """Say what the last devices added."""
    fewer = bench.fewer()
    if fewer is None:
        return ""
    most, before = bench.case.devices, fewer.case.devices
    gained = stats.ratio(scaled(fewer.series, bench.case.batch_size / fewer.case.batch_size), bench.row.series)
    if gained.doubt:
        return ""
    return f"Going from {before} to {most} devices gave {times(gained)}, of an ideal {exact(most / before)}×."


def _where(bench: Bench) -> str:
    """Say where the time beyond perfect scaling goes, by phase: both ledgers sum to their steps, so this one does."""
    found = bench.ideal()
    if found is None or found[0].doubt:
        return _largest(bench)
    alone, divisor = found
    assert alone.step is not None
    ideal_s = alone.step.value / divisor
    lost_s = bench.step_s - ideal_s
    if lost_s <= 0:
        return f"A step takes {time(bench.step_s)}, no more than the {time(ideal_s)} of perfect scaling."
    names = {*bench.row.phases, *alone.phases}
    lost = {n: bench.row.phases.get(n, 0.0) - alone.phases.get(n, 0.0) / divisor for n in names}
    return (
        f"A step takes {time(bench.step_s)}; with perfect scaling it would take {time(ideal_s)}. "
        f"Of the {time(lost_s)} lost, {_shares(lost, lost_s)}."
    )


def _largest(bench: Bench) -> str:
    """Say the largest phases, where there is nothing to hold them against."""
    return f"Of a step of {time(bench.step_s)}, {_shares(bench.row.phases, bench.step_s)}."


def _shares(seconds: Mapping[str, float], whole_s: float) -> str:
    """Say the largest parts of a whole, from a hundredth of it."""
    top = sorted((name for name in seconds if seconds[name] >= 0.01 * whole_s), key=lambda name: -seconds[name])[
        :LARGEST
    ]
    named = [
        f"{time(seconds[name])} ({percent(seconds[name] / whole_s)}) "
        f"{'go to Python between the phases' if name == UNATTRIBUTED else f'go to {name}'}"
        for name in top
    ]
    return ", ".join(named)


def _fix(bench: Bench, findings: Sequence[Finding]) -> str:
    """Say which change helps most, measured where it was, and what the best of them makes of so many devices."""
    better = _faster(bench, bench.rivals())
    if not better:
        return f"{_unmeasured(bench, findings)}{_alone(bench)}"
    said = [f"{_name(row)} is {times(ratio)} as fast" for row, ratio in better[:LARGEST]]
    best, _ = better[0]
    shown = best.speedup if best.speedup and not best.speedup.doubt else None
    after = f" With the first, {bench.case.devices} devices give {times(shown)} over one device." if shown else ""
    return f"What helps, measured here: {'; '.join(said)}.{after}{_alone(bench)}"


def _alone(bench: Bench) -> str:
    """Say so where one device is decidedly faster than several, and than everything measured on several."""
    if bench.case.placement == "colocated" or bench.case.device_kind == "emulated":
        return ""
    candidates = (bench.single(), bench.all_cores())
    found = _faster(bench, [row for row in candidates if row is not None])
    if not found:
        return ""
    row, ratio = found[0]
    name = "one device" if row.case.traits.role is Role.BASELINE else strategy(row.case)
    several = [rival for rival in bench.rivals() if stats.verdict(stats.ratio(row.series, rival.series)) != "slower"]
    beaten = "" if several else ", and faster than everything measured on several: it is the better choice here"
    return f" Without data parallelism, {name} is {times(ratio)} as fast{beaten}."


def _faster(bench: Bench, others: Sequence[Row]) -> list[tuple[Row, Estimate]]:
    """Return those that do the subject's work decidedly faster, the fastest first."""
    found = [(row, stats.ratio(bench.row.series, row.series)) for row in others]
    decided = [pair for pair in found if stats.verdict(pair[1]) == "faster"]
    return sorted(decided, key=lambda pair: -pair[1].value)


def _name(row: Row) -> str:
    """Name a change."""
    if not row.case.traits.scheduled:
        return strategy(row.case)
    chosen = " (what TrainStep chooses itself)" if row.case.schedule == schedule.FASTEST else ""
    return f"the schedule {strategy(row.case)}{chosen}"


def _unmeasured(bench: Bench, findings: Sequence[Finding]) -> str:
    """Say what to try where nothing that was measured is decidedly faster."""
    tried = bench.rivals()
    nothing = (
        f"Nothing measured here is decidedly faster on the same work ({', '.join(strategy(r.case) for r in tried)})."
        if tried
        else "No other way to do the same work was measured."
    )
    bounds = [one for one in findings if one.evidence.size_s and not one.evidence.measured]
    if not bounds:
        return nothing
    first = bounds[0]
    assert first.evidence.size_s is not None
    return (
        f"{nothing} The largest finding bounds what a change could save at {time(first.evidence.size_s.value)} "
        f"({percent(first.share)} of the step): {first.rule.remedy}."
    )
