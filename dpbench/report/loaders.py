"""Loaders: the section of the page on a DataLoader with several numbers of workers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from dpbench.analysis import loaders
from dpbench.analysis.loaders import LoaderCurve, Shape
from dpbench.records import Trial, words
from dpbench.records.estimate import Estimate
from dpbench.records.loading import FIRST_BATCH, NEXT_EPOCH
from dpbench.records.registry import Role
from dpbench.report import marks, naming, svg
from dpbench.report.section import Panel, Section
from dpbench.report.table import Cell, Table, estimate

COLUMNS = (
    "workers",
    "samples/s",
    "of best",
    "step's share",
    "slower one",
    "epoch, s",
    "first batch, ms",
    "next epoch, ms",
)


def section(curve: LoaderCurve, trials: Sequence[Trial], key: str) -> Section:
    """Return the section with a plot of the rate over the number of workers, and its table.

    `key` makes the ids of the drawing unique.
    """
    note = "" if curve.points else "No measurement succeeded."
    return Section(
        "loaders",
        "DataLoader",
        "Samples per second that a DataLoader yields to a loop that only waits for batches, without"
        " the start of its workers. Whiskers are 95% intervals.",
        [_panel(curve, key)] if curve.points else [],
        note,
        [_table(curve, trials)] if curve.points else [],
        naming.labels([point.row for point in curve.points]),
        open=True,
    )


def _panel(curve: LoaderCurve, key: str) -> Panel:
    rows = [point.row for point in curve.points]
    figure = _drawing(curve)
    said = loaders.said(curve)
    return Panel(
        naming.clip(rows[0].case.model, 90),
        svg.render(figure, key=key, title="Rate of a DataLoader", description=" ".join(said)),
        " ".join([naming.rounds(rows), *said]),
        naming.labels(rows),
        [row.case for row in rows],
        figure,
    )


def _table(curve: LoaderCurve, trials: Sequence[Trial]) -> Table:
    lines = []
    for point in curve.points:
        setups = [
            trial.setup
            for trial in trials
            if trial.case == point.row.case and NEXT_EPOCH in trial.setup
        ]
        waits = [
            statistics.median(setup[name] for setup in setups) for name in (FIRST_BATCH, NEXT_EPOCH)
        ]
        lines.append(
            (
                Cell(str(point.workers)),
                estimate(point.row.throughput),
                estimate(point.of_best),
                estimate(point.busy),
                Cell(point.bound.value if point.busy else ""),
                estimate(point.epoch),
                *(Cell(words.number(seconds * 1e3)) for seconds in waits),
            )
        )
    cases = [point.row.case for point in curve.points]
    return Table("Each number of workers", COLUMNS, tuple(lines), text=0, cases=cases)


def _drawing(curve: LoaderCurve) -> marks.Drawing:
    points = [point for point in curve.points if naming.drawable(point.row.throughput)]
    rates = [point.row.throughput for point in points if point.row.throughput]
    batch_size = curve.points[0].row.case.batch_size
    needed = batch_size / curve.step.value if curve.step else 0.0
    end = max(svg.extent(rates) if rates else 1.0, needed)
    bottom = svg.below((curve.shape is Shape.KNEE) + (curve.step is not None))
    figure, axes = svg.canvas(234 + bottom, left=44, bottom=bottom, top=26)
    axes.text(0, 1.035, "samples per second", transform=axes.transAxes, fontsize=svg.SMALL)
    axes.set(xlabel="workers")
    axes.grid()
    colour = svg.ROLES[Role.ENGINE]
    axes.plot(
        [point.workers for point in points],
        [rate.value for rate in rates],
        color=colour,
        linewidth=1.8,
    )
    for point, rate in zip(points, rates, strict=True):
        (dot,) = axes.plot([point.workers], [rate.value], "o", color=colour, markersize=6)
        svg.whisker(
            axes, point.workers, rate.value, (rate.low, rate.high), end, upright=True, colour=colour
        )
        explanation = (
            f"{loaders.workers_said([point.workers])}: {words.number(rate.value)} samples/s"
            f" ({words.interval(rate)})"
        )
        marks.explain(dot, explanation, [point.row.case])
    keys = [*_knee(axes, curve), *([_demand(axes, batch_size, curve.step)] if curve.step else [])]
    axes.set_ylim(0, end * 1.06)
    axes.set_xticks(curve.counts)
    svg.amounts(axes.yaxis, 6)
    if keys:
        svg.legend(figure, keys, 1)
    return figure


def _knee(axes: Axes, curve: LoaderCurve) -> list[Line2D]:
    """Draw the knee, if there is one, as a vertical line with its interval as a band."""
    if curve.shape is not Shape.KNEE or curve.knee is None:
        return []
    colour = svg.ROLES[Role.ENGINE]
    axes.axvspan(curve.possible[0], curve.possible[-1], color=colour, alpha=0.15, linewidth=0)
    label = f"knee: {curve.knee} (95 %: {loaders.among(curve.possible)})"
    return [axes.axvline(curve.knee, color=colour, linewidth=1.6, dashes=(4, 3), label=label)]


def _demand(axes: Axes, batch_size: int, step: Estimate) -> Line2D:
    """Draw the rate that the step needs as a horizontal line, with its interval as a band.

    Without workers, no rate is enough: the step waits for each batch.
    """
    colour = svg.ROLES[Role.BASELINE]
    rate = batch_size / step.value
    axes.axhspan(
        batch_size / step.high, batch_size / step.low, color=colour, alpha=0.15, linewidth=0
    )
    label = f"beside workers, the step needs {words.number(rate)} samples/s"
    return axes.axhline(rate, color=colour, linewidth=1.6, dashes=(8, 3), label=label)
