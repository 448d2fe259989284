"""Tables: the text of each cell for the page and for Markdown, and all cases as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dpbench.analysis import hosts, summary
from dpbench.analysis.ladder import Ladder, Rung, RungGain
from dpbench.analysis.report import Report
from dpbench.analysis.stats import Percentile
from dpbench.analysis.summary import Row
from dpbench.records import Case, Fault, Source, Status, Trial, Verified, names, plan, words
from dpbench.records.grouping import grouped
from dpbench.records.registry import Role
from dpbench.records.schedule import EFFECTS, Schedule
from dpbench.records.trial import HOSTS, Doubt, Estimate, by_key
from dpbench.report import naming, small_multiples

COLUMNS = (
    "model",
    "strategy",
    "devices",
    "batch",
    "rounds, steps",
    "median ms",
    "speed-up",
    "efficiency",
    "imbalance",
    "peak memory",
    "verified",
    "labels",
    "status",
)
COMPARED = ("speed-up", "efficiency", "verified")
"""The columns that observed loops lack, because they have no baseline and no reference."""
TEXT_COLUMNS = ("model", "strategy", "verified", "labels", "status")
UNCERTAIN, WITHHELD = "~", "—"
FOOTNOTES = {
    UNCERTAIN: f"uncertain, because it is from fewer than {Estimate.ROUNDS} rounds",
    WITHHELD: f"not shown: the interval spans more than a factor of {Estimate.WIDEST:.0f}, or fewer"
    f" than {Estimate.ROUNDS} rounds are without the label NOISY",
}
"""The signs with which the cell of an estimate in doubt begins, and what they mean."""
SPEED_UP = "Speed-up is over single at equal batch or, if weak, at equal batch per device."


@dataclass(frozen=True)
class Cell:
    """A cell: its text, a text in small type, and the value by which the page sorts it."""

    text: str
    small: str = ""
    sort: str = ""


@dataclass(frozen=True)
class TableLine:
    """The line of one case: its id on the page, its cells, its status and its problems.

    `notes` has the problems as pairs of a headline and a text.
    """

    id: str
    cells: tuple[Cell, ...]
    status: str
    notes: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Table:
    """A table; its first `text` columns contain text, the other columns numbers.

    `cases` has the case of each line, by which the page filters the lines. `labels` are those of
    its numbers; if empty, the numbers have the labels of the cases.
    """

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[Cell, ...], ...]
    text: int = 1
    note: str = ""
    cases: Sequence[Case] = ()
    labels: tuple[str, ...] = ()


def lines(rows: Iterable[Row], trials: Sequence[Trial]) -> list[TableLine]:
    """Return the lines of the table of all cases, one per row, with the problems from `trials`."""
    groups = by_key(trials)
    return [_line(row, groups.get(row.key, [])) for row in small_multiples.order(rows)]


class CaseTable(NamedTuple):
    """The table of all cases, and notes on what its lines share and on the signs of its cells."""

    columns: Sequence[str]
    lines: Sequence[TableLine]
    notes: Sequence[str]


def all_cases(report: Report) -> CaseTable:
    """Return the table of all cases; see `lines`.

    The columns are left out that say nothing: the status if all cases are ok, and columns that are
    empty in all lines. What several lines share is a note instead: the settings, the kind of
    device, the result of the verification and the labels.
    """
    every_line = lines(report.rows, report.trials)
    cells = {name: [line.cells[i] for line in every_line] for i, name in enumerate(COLUMNS)}
    dropped = set(COMPARED) if report.observed else set()
    dropped |= {name for name, column in cells.items() if not any(one.text for one in column)}
    if all(line.status == Status.OK for line in every_line):
        dropped |= {"status"}
    shared = []
    for name in ("model", "devices", "verified", "labels") if len(every_line) > 1 else ():
        column = cells[name]
        whole = name in ("verified", "labels")
        texts = {one.text if whole else one.small for one in column}
        if name in dropped or len(texts) > 1 or texts == {""}:
            continue
        if whole:
            dropped |= {name}
        else:
            cells[name] = [replace(one, small="") for one in column]
        text = " ".join(texts.pop().split())
        shared.append(f"verified {text}" if name == "verified" else text)
    kept = [name for name in COLUMNS if name not in dropped]
    found = [
        replace(line, cells=tuple(cells[name][place] for name in kept))
        for place, line in enumerate(every_line)
    ]
    notes = [f"all cases: {', '.join(shared)}"] if shared else []
    if "imbalance" in kept:
        notes.append("imbalance: device 0's busy time over the mean of the other devices")
    return CaseTable(kept, found, [*notes, *footnotes(line.cells for line in found)])


def _line(row: Row, trials: Sequence[Trial]) -> TableLine:
    case = row.case
    measured = row.step is not None
    strategy, *schedule = names.strategy(case).partition("[")
    options = [f" {name}={value}" for name, value in case.options]
    placed = "" if case.placement == "spread" else f" {case.placement}"
    cells = (
        Cell(naming.plain(case.model), ", ".join(names.settings(case))),
        Cell(naming.plain(strategy), naming.plain("".join([*schedule, *options, placed]))),
        Cell(case.extent, case.device_kind, str(case.devices)),
        Cell(case.batch, sort=str(case.batch_size)),
        Cell(f"{row.rounds}, {row.steps}" if measured else "", sort=str(row.steps)),
        estimate(row.step, 1e3),
        _speedup(row),
        efficiency(row.efficiency),
        estimate(row.imbalance, unit="×"),
        _memory(row),
        verified(row),
        Cell("\n".join(row.labels)),
        Cell(row.outcome),
    )
    return TableLine(naming.case_id(case), cells, row.outcome, _notes(row, trials))


def estimate(estimated: Estimate | None, scale: float = 1.0, unit: str = "") -> Cell:
    """Return the cell of an estimate times `scale`, with its interval; empty for None.

    `FOOTNOTES` has the signs of an estimate in doubt.
    """
    if estimated is None:
        return Cell("")
    value = f"{words.number(estimated.value * scale)}{unit}"
    if estimated.doubt is Doubt.ROUNDS:
        return Cell(UNCERTAIN + value, words.count(estimated.n, "round"), repr(estimated.value))
    if estimated.doubt:
        return Cell(WITHHELD, words.count(estimated.n, "round"))
    return Cell(value, words.interval(estimated, scale), repr(estimated.value))


def percentile(found: Percentile) -> Cell:
    """Return the cell of a percentile in milliseconds, with its interval or its steps."""
    if found.low is None or found.high is None:
        return Cell(words.NOT_ENOUGH_STEPS, words.count(found.steps, "step"))
    low, high = words.number(found.low * 1e3), words.number(found.high * 1e3)
    return Cell(words.number(found.value * 1e3), f"{low}–{high}")


def efficiency(estimated: Estimate | None) -> Cell:
    """Return the cell of an efficiency in percent; empty for None or one in doubt."""
    if estimated is None or estimated.doubt:
        return Cell("")
    return Cell(words.percent(estimated.value), sort=repr(estimated.value))


def footnotes(lines: Iterable[Sequence[Cell]]) -> list[str]:
    """Return an explanation of each sign with which a cell of these lines begins."""
    first = {cell.text[:1] for line in lines for cell in line}
    return [f"{sign}: {why}" for sign, why in FOOTNOTES.items() if sign in first]


def lead(rows: Sequence[Row]) -> str:
    """Return what the small type of the table of all cases is, and what a speed-up is over."""
    predicted = [row.source is Source.PREDICTED for row in rows]
    intervals = "80% intervals" if predicted and all(predicted) else "95% intervals"
    if any(predicted) and not all(predicted):
        intervals = "95% intervals, and 80% intervals of predictions"
    return f"In small type: {intervals}. {SPEED_UP}"


def _speedup(row: Row) -> Cell:
    if row.case.options == plan.LIMIT:
        return Cell("", "limit")
    if row.speedup is None:
        return (
            Cell("1×", "baseline", "1")
            if row.case.traits.role is Role.BASELINE and row.step
            else Cell("")
        )
    cell = estimate(row.speedup, unit="×")
    return Cell(f"{cell.text}{' weak' if row.scaling == 'weak' else ''}", cell.small, cell.sort)


def verified(row: Row) -> Cell:
    """Return the cell of a verification; empty for a case that has no reference."""
    if row.verified in (None, Verified.NOT_APPLICABLE):
        return Cell("no" if row.fault is Fault.UNVERIFIED else "")
    return Cell(row.verified.value.replace("_", " "), "" if row.case.trains else "outputs")


def _memory(row: Row) -> Cell:
    if row.memory:
        device = max(row.memory, key=lambda d: row.memory[d])
        peak = row.memory[device]
        where = f"device {device}" + (", ledger" if row.memory_source == "ledger" else "")
        return Cell(words.size(peak), where, str(peak))
    return (
        Cell(words.size(row.host_bytes), "host", str(row.host_bytes))
        if row.host_bytes
        else Cell("")
    )


def _notes(row: Row, trials: Sequence[Trial]) -> tuple[tuple[str, str], ...]:
    rounds_of = grouped(
        (((trial.fault or trial.status).value, trial.refusal), trial.round)
        for trial in trials
        if trial.refusal
    )
    if not rounds_of and row.outcome != Status.OK:
        return ((row.outcome, row.reason or "no reason given"),)
    return tuple(
        (
            f"{outcome} in {words.verb(len(rounds), 'round', 'rounds')}"
            f" {', '.join(str(number + 1) for number in rounds)}",
            reason,
        )
        for (outcome, reason), rounds in rounds_of.items()
    )


def phases(rows: Iterable[Row]) -> Table:
    """Return a table of the milliseconds of each phase and of the step of the measured cases."""
    measured = [
        row for row in small_multiples.order(rows) if row.step and row.phases and not row.doubt
    ]
    present = [phase for phase in summary.PHASES if any(row.phases.get(phase) for row in measured)]
    lines = tuple(
        (
            Cell(f"{naming.plain(row.case.model)}, {name}"),
            *(_phase(row, phase) for phase in present),
            Cell(words.number(row.step.value * 1e3) if row.step else ""),
        )
        for row, name in zip(
            measured, small_multiples.named(measured) if measured else (), strict=True
        )
    )
    columns = ("case", *present, "step")
    return Table(
        "Milliseconds of a step by phase", columns, lines, cases=[row.case for row in measured]
    )


def _phase(row: Row, phase: str) -> Cell:
    floor_s = row.least(phase)
    least = f"at least {words.number(floor_s * 1e3)}" if floor_s else ""
    return Cell(words.number(row.phases.get(phase, 0.0) * 1e3), least)


def as_json(rows: Sequence[Row]) -> str:
    """Return the values of all rows as JSON text that is safe inside an HTML script element."""
    ordered = small_multiples.order(rows)
    numbers = zip(ordered, summary.records(ordered), strict=True)
    return embedded([{"id": naming.case_id(row.case), **record} for row, record in numbers])


def embedded(records: Sequence[Mapping[Any, object]]) -> str:
    """Return records as JSON text that is safe inside an HTML script element.

    The text is an object: `columns` has the keys of all records, and `rows` the values of each
    record in the order of the columns, null for a missing key.
    """
    columns = list(dict.fromkeys(key for record in records for key in record))
    rows = [[record.get(key) for key in columns] for record in records]
    return safe(words.dumps({"columns": columns, "rows": rows}, default=str, separators=(",", ":")))


def safe(json: str) -> str:
    """Return JSON text that is safe inside an HTML script element."""
    return json.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def machines(report: Report) -> Table:
    """Return the table of a launch's machines and their steps of `single`; no line for one."""
    listed = report.provenance.get(HOSTS, {}).get("machines", ())
    paces = grouped(
        (pace.host, f"{pace.case.model}: {words.times(pace.ratio)} the time of {pace.fastest}")
        for pace in hosts.paces(report.trials)
    )
    lines = tuple(
        (
            Cell(naming.plain(machine["name"]), machine["machine"][:8]),
            Cell(
                machine["facts"]["host"]["cpu"],
                words.count(machine["facts"]["host"]["cores"], "core"),
            ),
            Cell(words.size(machine["facts"]["host"]["memory_bytes"])),
            Cell(naming.gpus(machine["facts"].get("gpus") or {})),
            Cell(machine["facts"]["software"]["torch"]),
            Cell("; ".join(paces.get(machine["name"], []))),
        )
        for machine in listed
    )
    columns = (
        "machine",
        "processor",
        "memory",
        "GPUs",
        "torch",
        "step of single, relative to the fastest machine",
    )
    return Table("Machines", columns, lines if len(lines) > 1 else (), text=6)


LEAD = (
    "Each rung is a schedule of the engine that keeps the changes of the rungs below and makes one"
    " more. The time that the change saves has its 95% interval from the rounds that both rungs"
    " have; if the interval includes 0, the verdict is undecided."
)


def title(ladder: Ladder) -> str:
    """Return the title of a ladder: its model, number of devices, settings and batch size."""
    case = ladder.case
    kind = [] if case.device_kind == "cpu" else [case.device_kind]
    parts = [
        f"{case.model} ×{case.devices}",
        *names.settings(case),
        *kind,
        f"batch {case.batch_size}",
    ]
    return naming.clip(", ".join(parts), 90)


def climb(ladder: Ladder) -> Table:
    """Return the table of a ladder's rungs."""
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
    cases = [rung.row.case for rung in ladder.rungs]
    return Table(title(ladder), columns, lines, text=2, note=_limits(ladder), cases=cases)


def _limits(ladder: Ladder) -> str:
    """Return what the rungs of a ladder are compared with, and which have no result."""
    sentences = [naming.rounds([rung.row for rung in ladder.rungs])]
    if ladder.ddp and ladder.ddp.step and not ladder.ddp.doubt:
        sentences.append(f"A step of ddp takes {words.ms(ladder.ddp.step)}.")
    if ladder.limit and ladder.limit.step and not ladder.limit.doubt:
        share = f"single at batch {ladder.limit.case.batch_size}"
        sentences.append(
            f"The limit is the step time of one device's share of the batch, measured as {share}:"
            f" {words.ms(ladder.limit.step)}."
        )
    if ladder.case.device_kind == "emulated":
        sentences.append("The steps show host cost only, and no speed-up.")
    if lost := ", ".join(f"{row.case.schedule} ({row.status.value})" for row in ladder.lost):
        sentences.append(f"Without a result: {lost}.")
    return " ".join(sentences)


def _rung(rung: Rung, best: bool) -> tuple[Cell, ...]:
    change = rung.change
    row = rung.row
    effect = EFFECTS.get(Schedule(rung.name), "the step of torch.nn.DataParallel")
    return (
        Cell(f"{rung.name}{' (best)' if best else ''}", effect),
        Cell(change.verdict, f"over {change.over}") if change else Cell("", "the start"),
        estimate(rung.step, 1e3),
        estimate(change.ratio, unit="×") if change else Cell(""),
        _saved(change) if change else Cell(""),
        _speedup(row),
        estimate(rung.over_ddp, unit="×"),
        (
            Cell(change.phase, f"{words.signed(change.phase_s * 1e3)} ms")
            if change and change.phase
            else Cell("")
        ),
    )


def _saved(change: RungGain) -> Cell:
    gain_s = change.gain_s
    if gain_s.doubt or change.ratio.doubt:
        return Cell(WITHHELD)
    low, high = (words.signed(side * 1e3) for side in (gain_s.low, gain_s.high))
    return Cell(words.signed(gain_s.value * 1e3), f"{low} to {high}")
