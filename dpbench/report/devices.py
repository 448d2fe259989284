"""Devices: the sections of a report that are tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dpbench.analysis import forecasts, imbalance, transfers
from dpbench.analysis.forecasts import Forecast
from dpbench.analysis.imbalance import Footprint, Index
from dpbench.analysis.report import Report
from dpbench.analysis.summary import PERCENTILES, Row
from dpbench.analysis.transfers import PhaseTraffic
from dpbench.records import Case, names, words
from dpbench.records.ledger import PHASES
from dpbench.report import naming, small_multiples, table
from dpbench.report.section import Section
from dpbench.report.table import Cell, Table, estimate

SAID: Mapping[str, Callable[[float], str]] = {
    "s": words.time,
    "bytes": words.size,
    "J": lambda joules: f"{words.number(joules)} J",
}


def parts(report: Report) -> list[Section]:
    """Return the sections with tables that have lines."""
    trials = small_multiples.order(report.trials)
    predictions = forecasts.forecasts(report.rows, report.past, report.run.facts)
    sections = [
        Section(
            "ladder",
            "The ladder",
            table.LEAD,
            tables=[*map(table.climb, report.ladders)],
            open=True,
            numbers=("step", "speedup", "phase"),
        ),
        Section(
            "phases",
            "Step time by phase",
            PHASE_TIMES,
            tables=[table.phases(report.rows)],
            numbers=("step", "phase"),
        ),
        Section("latency", "Latency", LATENCY, tables=[_latency(report.rows)]),
        Section(
            "imbalance",
            "Device 0 against the others",
            IMBALANCE,
            tables=[_imbalance(imbalance.indexes(trials))],
            numbers=("imbalance", "busy", "memory"),
        ),
        Section(
            "memory-by-phase",
            "Memory by phase",
            MEMORY,
            tables=[_memory(imbalance.footprints(trials))],
        ),
        Section("links", "Bytes over links", LINKS, tables=[_links(transfers.flows(trials))]),
        Section(
            "predicted",
            "Predicted against measured",
            FORECASTS,
            tables=[_forecasts(predictions)],
        ),
        Section("hosts", "Hosts", HOSTS, tables=[table.machines(report)]),
    ]
    return [_labelled(one, report.labels) for one in sections if any(t.lines for t in one.tables)]


def _labelled(section: Section, labels: Mapping[Case, tuple[str, ...]]) -> Section:
    """Return the section with the labels of its tables' cases; of all cases if they name none."""
    of_tables = (
        one.labels or naming.union(labels.get(case, ()) for case in one.cases or labels)
        for one in section.tables
    )
    return replace(section, table_labels=naming.union(of_tables))


PHASE_TIMES = (
    "Milliseconds of the mean step by phase: of all timed steps, also the long ones. The ledger"
    " charges each moment of a step to one phase, so the phases add up to the mean step."
)
LATENCY = (
    "The durations of steps that run the forward alone; each step waits for the output. p50 is the"
    " median over rounds of each round's median, and p95 and p99 are those of each round's"
    " percentiles. Their 95% intervals cover the variation between rounds. A percentile is not"
    " shown if a round has fewer than 20 steps (p95) or 100 steps (p99)."
)
IMBALANCE = (
    "Each quantity has two ratios: device 0 to the mean of the other devices, and the largest"
    " amount to the mean of all devices; 1 means balanced. DDP is the control, because all its"
    " ranks do the same work. The verdict is “above the control” if the whole 95% interval of the"
    " first ratio is above the interval of the control."
)
MEMORY = (
    "Device 0's peak memory in each phase of one untimed step; in small type, the mean peak of the"
    " other devices. The excess is device 0's highest peak minus the mean of the other devices'"
    " highest peaks."
)
LINKS = (
    "A rate is the number of bytes that a step must transfer in a phase, computed from the shapes"
    " of tensors, divided by the sum of the receiving devices' seconds in the phase. These seconds"
    " also include launching and adding, so the bandwidth of the link is higher than the rate."
)
FORECASTS = (
    "The step time that was predicted for this hardware, with its 80% interval, and the measured"
    " one, with its 95% interval. The error is the predicted step time relative to the measured"
    " one. Of 10 measured step times, about 8 should be inside the interval of the prediction."
)
HOSTS = "The machines of the launch. A slow machine delays every rank at each collective."


def _case(case: Case) -> Cell:
    placed = "" if case.placement == "spread" else f" {case.placement}"
    kind = "" if case.device_kind == "cpu" else f", {case.device_kind}"
    work = f"{naming.plain(names.model(case))}{kind}, batch {case.batch}"
    return Cell(f"{names.strategy(case)} ×{case.devices}{placed}", work)


def _latency(rows: Sequence[Row]) -> Table:
    measured = [
        row
        for row in small_multiples.order(rows)
        if row.step and row.percentiles and not row.case.trains
    ]
    columns = (
        "case",
        "rounds, steps",
        "p50, ms",
        *(f"p{number}, ms" for number in PERCENTILES),
        "samples/s",
    )
    lines = tuple(
        (
            _case(row.case),
            Cell(f"{row.rounds}, {row.steps}"),
            estimate(row.step, 1e3),
            *table.percentiles(row),
            estimate(row.throughput),
        )
        for row in measured
    )
    return Table("Latency", columns, lines, cases=[row.case for row in measured])


def _imbalance(indexes: Sequence[Index]) -> Table:
    columns = (
        "case",
        "quantity",
        "verdict",
        "device 0",
        "mean of others",
        "single",
        "device 0 / others",
        "largest / mean",
        "control, ddp",
    )
    lines = tuple(_index(index) for index in indexes)
    return Table("Imbalance", columns, lines, text=3, cases=[index.case for index in indexes])


def _index(index: Index) -> tuple[Cell, ...]:
    as_text = SAID[index.unit]
    others = [amount for device, amount in index.devices.items() if device]
    return (
        _case(index.case),
        Cell(index.quantity, index.basis),
        Cell(index.verdict),
        Cell(as_text(index.devices[0])),
        Cell(as_text(sum(others) / len(others))),
        Cell(as_text(index.floor)) if index.floor is not None else Cell(""),
        estimate(index.first, unit="×"),
        estimate(index.most, unit="×"),
        estimate(index.control, unit="×"),
    )


def _memory(footprints: Sequence[Footprint]) -> Table:
    several = [footprint for footprint in footprints if footprint.excess_bytes is not None]
    metered = any(footprint.used for footprint in several)
    lines = tuple(_footprint(footprint, metered=metered) for footprint in several)
    return Table(
        "Memory by phase",
        ("case", "source", "excess of device 0", *PHASES, *["in use, NVML"] * metered),
        lines,
        text=2,
        cases=[footprint.case for footprint in several],
    )


def _footprint(footprint: Footprint, *, metered: bool) -> tuple[Cell, ...]:
    excess = footprint.excess_bytes or 0.0
    sign = "−" if excess < 0 else ""
    return (
        _case(footprint.case),
        Cell(footprint.basis),
        Cell(f"{sign}{words.size(abs(excess))}", f"peak in {footprint.top}"),
        *(_phase(footprint.peaks.get(phase, {})) for phase in PHASES),
        *[_phase(footprint.used)] * metered,
    )


def _phase(held: Mapping[int, int]) -> Cell:
    others = [size for device, size in held.items() if device]
    if 0 not in held or not others:
        return Cell("")
    return Cell(words.size(held[0]), words.size(sum(others) / len(others)))


def _forecasts(forecasts: Sequence[Forecast]) -> Table:
    lines = tuple(
        (
            _case(forecast.case),
            Cell(forecast.machine or "this run"),
            estimate(forecast.predicted, 1e3),
            estimate(forecast.measured, 1e3),
            Cell(
                f"{'+' if forecast.error >= 0 else '-'}{words.percent(abs(forecast.error))}",
                sort=repr(forecast.error),
            ),
            Cell("yes" if forecast.inside else "no"),
        )
        for forecast in forecasts
    )
    inside = (
        f"{sum(forecast.inside for forecast in forecasts)} of"
        f" {words.count(len(forecasts), 'measured step time')}"
    )
    return Table(
        f"Predicted against measured: the intervals of the predictions contain {inside}",
        ("case", "predicted for", "predicted, ms", "measured, ms", "error", "inside"),
        lines,
        text=2,
        cases=[forecast.case for forecast in forecasts],
        labels=naming.union(forecast.labels for forecast in forecasts),
    )


def _links(flows: Sequence[PhaseTraffic]) -> Table:
    columns = ("case", "phase", "direction", "bytes per step", "device ms", "GB/s")
    lines = tuple(_flow(flow) for flow in flows)
    return Table("Bytes over links", columns, lines, text=3, cases=[flow.case for flow in flows])


def _flow(flow: PhaseTraffic) -> tuple[Cell, ...]:
    seconds = sum(flow.seconds.values())
    each = [rate for device in flow.seconds if (rate := flow.rate_of(device))]
    spread = (
        f"{words.number(min(each) / 1e9)}–{words.number(max(each) / 1e9)} by device"
        if len(each) > 1
        else ""
    )
    return (
        _case(flow.case),
        Cell(flow.phase.value),
        Cell(_ways(flow)),
        Cell(words.size(flow.bytes)),
        Cell(words.number(seconds * 1e3)) if flow.rate else Cell("", _unknown(flow)),
        Cell(words.number(flow.rate / 1e9), spread) if flow.rate else Cell(""),
    )


def _unknown(flow: PhaseTraffic) -> str:
    """Return why the seconds of a phase are unknown."""
    return "within compute" if flow.hidden else "not recorded"


def _ways(flow: PhaseTraffic) -> str:
    sources = {move.source for move in flow.moves}
    targets = {move.target for move in flow.moves}
    if all(source < 0 for source in sources):
        return "host → each" if len(targets) > 1 else "host → 0"
    if sources == {0}:
        return "0 → each"
    if targets == {0}:
        return "each → 0"
    return "a ring" if len(flow.moves) == len(sources) else "each → each"
