"""Rungs: a ladder in words, the same for the page and for Markdown; no drawing."""

from __future__ import annotations

from collections.abc import Sequence

from dpbench.analysis.ladder import Change, Ladder, Rung, short
from dpbench.records import schedule, shown, words
from dpbench.records.estimate import Estimate
from dpbench.report import naming
from dpbench.report.table import Cell, Table

TITLE = "The ladder"
LEAD = (
    "Each rung turns one more switch of the engine's schedule; its bar is what the step gained or lost by that, from "
    "where the rung below it stood. A whisker is the 95% interval of that difference, by the rounds that both have: "
    "where it reaches over the start of its bar nothing is decided, and the bar is grey."
)
VERDICTS = {"faster": "faster", "slower": "costs", "same": "the same", "undecided": "undecided"}


def title(ladder: Ladder) -> str:
    """Name what was climbed."""
    case = ladder.case
    kind = [] if case.device_kind == "cpu" else [case.device_kind]
    parts = [f"{case.model} ×{case.devices}", *naming.setting(case), *kind, f"batch {case.batch_size}"]
    return naming.clip(", ".join(parts), 90)


def climb(ladder: Ladder) -> Table:
    """Return the climb, a line a rung."""
    columns = (
        "rung",
        "verdict",
        "step, ms",
        "over the rung below",
        "saves, ms",
        "× single",
        "× ddp",
        "phase that changed most",
    )
    lines = tuple(_rung(rung, rung is ladder.fastest) for rung in ladder.rungs)
    lost = ", ".join(f"{short(row.case.schedule)} ({row.status.value})" for row in ladder.lost)
    return Table("Climbing", columns, lines, text=2, note=f"Without a result: {lost}." if lost else "")


def _rung(rung: Rung, best: bool) -> tuple[Cell, ...]:
    change, row = rung.change, rung.row
    turned = "=".join(schedule.LADDER[rung.name]) if rung.name in schedule.LADDER else "no switch"
    tolerance = "" if schedule.RUNGS[rung.name].exact else ", tolerance"
    return (
        Cell(f"{rung.name}{' (best)' if best else ''}", turned + tolerance),
        Cell(VERDICTS[change.verdict], f"over {change.over}") if change else Cell("", "the start"),
        _estimate(rung.step, 1e3),
        _estimate(change.ratio, unit="×") if change else Cell(""),
        _saved(change) if change else Cell(""),
        _estimate(row.speedup, unit="×") if row.speedup else Cell(""),
        _estimate(rung.over_ddp, unit="×") if rung.over_ddp else Cell(""),
        Cell(change.phase, f"{words.signed(change.phase_s * 1e3)} ms") if change and change.phase else Cell(""),
    )


def ablation(ladder: Ladder) -> Table | None:
    """Return what each switch gives on top of all others; None where that was not measured."""
    if not ladder.ablations:
        return None
    columns = ("switch set back", "verdict", "its gain", "saves, ms", "phase that changed most")
    lines = tuple(_switch(change) for change in ladder.ablations)
    note = f"Cannot be set back alone: {'. '.join(ladder.fixed)}." if ladder.fixed else ""
    return Table(f"{short(ladder.base)} without one of its switches", columns, lines, text=2, note=note)


def _switch(change: Change) -> tuple[Cell, ...]:
    verdict = {"faster": "helps", "slower": "costs"}.get(change.verdict, VERDICTS[change.verdict])
    return (
        Cell(change.name, f"to {schedule.SWITCHES[change.name][0]}"),
        Cell(verdict),
        _estimate(change.ratio, unit="×"),
        _saved(change),
        Cell(change.phase, f"{words.signed(change.phase_s * 1e3)} ms") if change.phase else Cell(""),
    )


def tables(ladder: Ladder) -> Sequence[Table]:
    """Return the ladder's tables: ablations first, which are short."""
    return [table for table in (ablation(ladder), climb(ladder)) if table]


def _estimate(estimate: Estimate, scale: float = 1.0, unit: str = "") -> Cell:
    if estimate.doubt:
        return Cell(words.NOT_ENOUGH)
    return Cell(words.number(estimate.value * scale) + unit, shown.interval(estimate, scale))


def _saved(change: Change) -> Cell:
    """Say the milliseconds that a change saves, negative when it costs time."""
    gain_s = change.gain_s
    if gain_s.doubt or change.ratio.doubt:
        return Cell(words.NOT_ENOUGH)
    low, high = (words.signed(side * 1e3) for side in (gain_s.low, gain_s.high))
    return Cell(words.signed(gain_s.value * 1e3), f"{low} to {high}")
