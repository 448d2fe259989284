"""Tables: the text of each cell for the page and for Markdown, and all cases as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dpbench.analysis import hosts, quantities
from dpbench.analysis.ladder import Ladder, Rung, RungGain
from dpbench.analysis.report import Report
from dpbench.analysis.summary import PERCENTILES, Row
from dpbench.records import Case, Fault, Status, Trial, Verified, names, plan, words
from dpbench.records.environment import UNKNOWN, Environment
from dpbench.records.estimate import Estimate
from dpbench.records.grouping import grouped
from dpbench.records.ledger import PHASES
from dpbench.records.registry import Role
from dpbench.records.schedule import EFFECTS, Schedule
from dpbench.records.trial import by_key
from dpbench.report import naming, small_multiples

UNCERTAIN = "~"
FOOTNOTES = {
    UNCERTAIN: f"uncertain: fewer than {Estimate.ROUNDS} rounds, an interval that spans more than a"
    f" factor of {Estimate.WIDEST:.0f}, or too much other work (NOISY)",
}
"""The sign with which the cell of an estimate in doubt begins, and what it means."""
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


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the table of all cases, in the terminal, on pages and in Markdown.

    `cell` returns its cell of a row. `text` is whether it contains text, `interval` whether its
    small type is an interval, and `compared` whether it says something only about cases with a
    baseline and a reference. `printed` is whether the terminal has it, `brief` whether it has it
    without small type; narrow terminals leave columns out by their number `yields`, 1 first, and
    those with 0 never. `note` explains the column of these rows.
    """

    heading: str
    cell: Callable[[Row], Cell]
    text: bool = False
    interval: bool = False
    compared: bool = False
    printed: bool = True
    brief: bool = False
    yields: int = 0
    note: Callable[[Sequence[Row]], str] | None = None


class CaseTable(NamedTuple):
    """The table of all cases, and notes on what its lines share and on the signs of its cells."""

    columns: Sequence[str]
    lines: Sequence[TableLine]
    notes: Sequence[str]


def all_cases(report: Report) -> CaseTable:
    """Return the table of all cases, with the problems of each from its trials; see `shown`."""
    groups = by_key(report.trials)
    ordered = small_multiples.order(report.rows)
    columns, cells, notes = shown(ordered, COLUMNS)
    found = [
        TableLine(
            naming.case_id(row.case), tuple(line), row.outcome, _notes(row, groups.get(row.key, []))
        )
        for row, line in zip(ordered, cells, strict=True)
    ]
    return CaseTable([column.heading for column in columns], found, notes)


def shown(
    rows: Sequence[Row], columns: Sequence[Column]
) -> tuple[list[Column], list[list[Cell]], list[str]]:
    """Return the columns that say something about the rows, the cells of each row, and notes.

    Left out are the status if all cases are ok, columns that are empty in all lines, and those of
    comparisons if no case has a baseline. What several lines share is a note instead: the settings,
    the kind of device, the result of the verification and the labels.
    """
    cells = {column.heading: [column.cell(row) for row in rows] for column in columns}
    dropped = {
        name for name, column in cells.items() if rows and not any(one.text for one in column)
    }
    if not any(row.case.traits.comparable for row in rows):
        dropped |= {column.heading for column in columns if column.compared}
    if all(row.outcome == Status.OK and not row.left_out for row in rows):
        dropped |= {"status"}
    shared = []
    for name in ("model", "devices", "verified", "labels") if len(rows) > 1 else ():
        column = cells[name]
        whole = name in ("verified", "labels")
        texts = {f"{one.text} {one.small}".strip() if whole else one.small for one in column}
        if name in dropped or len(texts) > 1 or texts == {""}:
            continue
        if whole:
            dropped |= {name}
        else:
            cells[name] = [replace(one, small="") for one in column]
        text = " ".join(texts.pop().split())
        shared.append(f"verified {text}" if name == "verified" else text)
    kept = [column for column in columns if column.heading not in dropped]
    lines = [[cells[column.heading][place] for column in kept] for place in range(len(rows))]
    notes = [f"all cases: {', '.join(shared)}"] if shared else []
    notes += [f"{column.heading}: {column.note(rows)}" for column in kept if column.note]
    return kept, lines, [*notes, *footnotes(lines)]


def _model(row: Row) -> Cell:
    return Cell(naming.plain(row.case.model), ", ".join(names.settings(row.case)))


def _strategy(row: Row) -> Cell:
    case = row.case
    options = [f"{name}={value}" for name, value in case.options if case.options != plan.LIMIT]
    placed = [] if case.placement == "spread" else [case.placement]
    return Cell(naming.plain(names.strategy(case)), naming.plain(" ".join([*options, *placed])))


def _steps(row: Row) -> Cell:
    return Cell(f"{row.rounds}, {row.steps}" if row.step else "", sort=str(row.steps))


def _rate(row: Row) -> Cell:
    """Return the samples per second, marked if they or the step time beside them are in doubt."""
    rate = row.throughput
    if rate is None or row.step is None:
        return Cell("")
    sign = UNCERTAIN if rate.doubt or row.step.doubt else ""
    return Cell(f"{sign}{words.number(rate.value)}", sort=repr(rate.value))


def estimate(estimated: Estimate | None, scale: float = 1.0, unit: str = "") -> Cell:
    """Return the cell of an estimate times `scale`, with its interval; empty for None.

    `FOOTNOTES` has the signs of an estimate in doubt.
    """
    if estimated is None:
        return Cell("")
    value = f"{words.number(estimated.value * scale)}{unit}"
    if estimated.doubt:
        return Cell(UNCERTAIN + value, words.count(estimated.n, "round"), repr(estimated.value))
    return Cell(value, words.interval(estimated, scale), repr(estimated.value))


def percentiles(row: Row) -> list[Cell]:
    """Return the cells of a row's percentiles in milliseconds."""
    cells = []
    for number in PERCENTILES:
        found = row.percentiles.get(number)
        few = Cell(words.NOT_ENOUGH_STEPS, words.count(row.steps, "step"))
        cells.append(estimate(found, 1e3) if found else few)
    return cells


def share(estimated: Estimate | None) -> Cell:
    """Return the cell of a share in percent; empty for None or one in doubt."""
    if estimated is None or estimated.doubt:
        return Cell("")
    return Cell(words.percent(estimated.value), sort=repr(estimated.value))


def footnotes(lines: Iterable[Sequence[Cell]]) -> list[str]:
    """Return an explanation of each sign with which a cell of these lines begins."""
    first = {cell.text[:1] for line in lines for cell in line}
    return [f"{sign}: {why}" for sign, why in FOOTNOTES.items() if sign in first]


def lead(rows: Sequence[Row]) -> str:
    """Return what the small type of the table of all cases is, and what a speed-up is over."""
    timed = {row.source.timed for row in rows}
    intervals = "80% intervals" if timed == {False} else "95% intervals"
    if len(timed) > 1:
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


def _status(row: Row) -> Cell:
    rest = ", further rounds left out for lack of time"
    return Cell(f"{row.outcome}{rest * (row.left_out and row.step is not None)}")


def _imbalance_note(_: Sequence[Row]) -> str:
    return "device 0's busy time over the mean of the other devices"


def _peak_note(rows: Sequence[Row]) -> str:
    sources = {row.at_peak.source: None for row in rows if row.at_peak and row.peak_share}
    return (
        "a step's operations, as torch counts those of the model, at the peak of its GPUs, over the"
        f" measured step. IMPORTED: {'; '.join(sources)}"
    )


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
    """Return a table of the milliseconds of each phase and of the mean step of measured cases."""
    measured = [
        row for row in small_multiples.order(rows) if row.step and row.phases and not row.doubt
    ]
    present = [phase for phase in PHASES if any(row.phases.get(phase) for row in measured)]
    lines = tuple(
        (
            Cell(f"{naming.plain(row.case.model)}, {name}"),
            *(_phase(row, phase) for phase in present),
            Cell(words.number(row.mean.value * 1e3) if row.mean else ""),
        )
        for row, name in zip(
            measured, small_multiples.named(measured) if measured else (), strict=True
        )
    )
    columns = ("case", *present, "mean step")
    return Table(
        "Milliseconds of the mean step by phase",
        columns,
        lines,
        cases=[row.case for row in measured],
    )


def _phase(row: Row, phase: str) -> Cell:
    floor_s = row.least(phase)
    least = f"at least {words.number(floor_s * 1e3)}" if floor_s else ""
    return Cell(words.number(row.phases.get(phase, 0.0) * 1e3), least)


def as_json(rows: Sequence[Row]) -> str:
    """Return the values of all rows as JSON text that is safe inside an HTML script element."""
    ordered = small_multiples.order(rows)
    numbers = zip(ordered, quantities.records(ordered), strict=True)
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
    paces = grouped(
        (pace.host, f"{pace.case.model}: {words.times(pace.ratio)} the time of {pace.fastest}")
        for pace in hosts.paces(report.trials)
    )
    lines = tuple(
        (
            Cell(naming.plain(machine.name), machine.machine[:8]),
            Cell(machine.facts.host.cpu, words.count(machine.facts.host.cores, "core")),
            Cell(words.size(machine.facts.host.memory_bytes)),
            Cell(naming.gpus(machine.facts.gpus)),
            Cell(Environment.of(machine.facts).torch or UNKNOWN),
            Cell("; ".join(paces.get(machine.name, []))),
        )
        for machine in report.run.facts.hosts.machines
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
        return Cell(f"{UNCERTAIN}{words.signed(gain_s.value * 1e3)}")
    low, high = (words.signed(side * 1e3) for side in (gain_s.low, gain_s.high))
    return Cell(words.signed(gain_s.value * 1e3), f"{low} to {high}")


COLUMNS = (
    Column(heading="model", cell=_model, text=True),
    Column(heading="strategy", cell=_strategy, text=True),
    Column(
        heading="devices",
        cell=lambda row: Cell(row.case.extent, row.case.device_kind, str(row.case.devices)),
    ),
    Column(heading="batch", cell=lambda row: Cell(row.case.batch, sort=str(row.case.batch_size))),
    Column(heading="rounds, steps", cell=_steps, printed=False),
    Column(heading="ms/step", cell=lambda row: estimate(row.step, 1e3), interval=True),
    Column(heading="samples/s", cell=_rate, yields=4),
    Column(heading="speed-up", cell=_speedup, interval=True, compared=True),
    Column(heading="efficiency", cell=lambda row: share(row.efficiency), compared=True, yields=2),
    Column(heading="of peak", cell=lambda row: share(row.peak_share), yields=3, note=_peak_note),
    Column(
        heading="imbalance",
        cell=lambda row: estimate(row.imbalance, unit="×"),
        brief=True,
        yields=1,
        note=_imbalance_note,
    ),
    Column(heading="peak memory", cell=_memory, printed=False),
    Column(heading="verified", cell=verified, text=True, compared=True),
    Column(heading="labels", cell=lambda row: Cell("\n".join(row.labels)), text=True),
    Column(heading="status", cell=_status, text=True),
)
"""The columns of the table of all cases."""
TEXT_COLUMNS = tuple(column.heading for column in COLUMNS if column.text)
