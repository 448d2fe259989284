"""Timeline: the sections on the distribution of steps and on utilisation over time."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray

from dpbench.analysis import sampled
from dpbench.analysis.report import Report
from dpbench.analysis.summary import Row
from dpbench.records import Case, Trial, words
from dpbench.records.estimate import Estimate
from dpbench.report import marks, naming, small_multiples, svg
from dpbench.report.section import Panel, Section

COLUMNS = 200
"""The number of points in time at which the utilisation in a round is drawn."""
DEVICES = 16
"""The largest number of GPUs or cores for which utilisation is drawn per case."""
PAUSE = 0.15
"""The gap between two rounds on the time axis, as a fraction of the longest round."""
_CORE = re.compile(r"core(\d+)_utilization_ratio")

Place = tuple[str, int]
"""The kind of a device, which is "GPU" or "core", and the index of the device."""
Series = dict[Place, list[tuple[float, float]]]
"""The utilisation of each GPU or core, as pairs of a time in seconds and a ratio from 0 to 1."""
Round = tuple[Series, str]
"""The utilisation in a round, and its mean as text."""


def utilisation(report: Report, rows: Sequence[Row], key: str = "utilisation") -> Section:
    """Return the section on utilisation over time, of GPUs if sampled, else of CPU cores.

    The ids in the drawings begin with `key`.
    """
    rounds_of = {
        (row.case, row.run): [
            (series, _mean(trial, series))
            for trial in report.trials_of(row)
            if (series := _series(trial))
        ]
        for row in rows
        if row.source.timed
    }
    with_series = [row for row in rows if row.source.timed and rounds_of[row.case, row.run]]
    panels, left_out = small_multiples.split(with_series, per=12)
    return Section(
        "utilisation",
        "Utilisation over time",
        "One row per GPU, or per CPU core on machines without GPUs. The rounds of a case are drawn"
        " one after another. A gap is time without readings.",
        [_strips(facet, rounds_of, f"{key}{i}") for i, facet in enumerate(panels)],
        left_out if panels else "Utilisation was not sampled.",
    )


def _series(trial: Trial) -> Series:
    samples = trial.grouped
    gpus = sampled.utilisation_within(trial)
    places = {("GPU", device): series for device, series in gpus.items() if device >= 0} or {
        ("core", int(core[1])): series
        for metric in samples.metrics
        if (core := _CORE.fullmatch(metric))
        for series in samples.series(metric).values()
    }
    return {place: sorted(zip(*series, strict=True)) for place, series in sorted(places.items())}


def _mean(trial: Trial, series: Series) -> str:
    """Return the mean utilisation of a trial as text."""
    of_gpus = any(kind == "GPU" for kind, _ in series)
    shares = (
        sampled.utilisation(trial).values()
        if of_gpus
        else [value for readings in series.values() for _, value in readings]
    )
    return (
        f"{words.percent(float(np.mean([*shares])))} busy on average"
        if shares
        else (f"{sampled.NOT_CHECKED}, because there are too few readings")
    )


def _strips(
    facet: small_multiples.Facet,
    rounds_of: Mapping[tuple[Case, str], Sequence[Round]],
    key: str,
) -> Panel:
    groups = [rounds_of[row.case, row.run] for row in facet.rows]
    every_device = [sorted({place for series, _ in group for place in series}) for group in groups]
    devices = [places[:DEVICES] for places in every_device]
    thick = max(4, min(10, 60 // max(map(len, devices))))
    heights = [22 + thick * len(rows) for rows in devices]
    figure, axes, tops = svg.lanes(
        facet.names, [""] * len(groups), heights, keys=1, cases=facet.cases
    )
    pause = PAUSE * max(_length(series) for group in groups for series, _ in group)
    ends = []
    drawn = zip(facet.names, groups, devices, tops, strict=True)
    for number, (name, group, places, top) in enumerate(drawn):
        with marks.in_lane(axes, number):
            ends.append(_case(axes, name, group, places, top + 17, thick, pause))
    axes.set(
        xlim=(0, max(ends) * 1.01 or 1), xlabel="seconds, one round after another", aspect="auto"
    )
    axes.set_ylim(sum(heights), 0)  # imshow has changed the limits
    svg.amounts(axes.xaxis)
    axes.grid(False)
    _colour_scale(figure)
    kind = " or ".join(sorted({kind for rows in devices for kind, _ in rows}))
    description = f"Utilisation of each {kind} over time for " + ", ".join(facet.names)
    drawing = svg.render(
        figure, key=key, title=f"Utilisation: {facet.title}", description=description
    )
    more = any(len(places) > DEVICES for places in every_device)
    caption = f"One row per {kind}, with number 0 on top." + (
        f" Only the first {DEVICES} are drawn." if more else ""
    )
    return Panel(facet.title, drawing, caption, facet.labels, cases=facet.cases)


def _length(series: Series) -> float:
    times = [time for readings in series.values() for time, _ in readings]
    return max(times) - min(times)


def _case(
    axes: Axes,
    name: str,
    group: Iterable[Round],
    devices: Sequence[Place],
    y: float,
    thick: float,
    pause: float,
) -> float:
    """Draw the utilisation in the rounds of a case, and return the last one's end in seconds.

    `y` is the top edge of the drawing, `thick` the height of a device's row.
    """
    left = 0.0
    for number, (series, mean) in enumerate(group, start=1):
        image, width = _image(series, devices)
        extent = (left, left + width, y + thick * len(devices), y)
        strip = axes.imshow(image, extent=extent, interpolation="none", zorder=2)
        marks.explain(strip, f"{name}, round {number}: {mean}")
        left += width + pause
    return left - pause


def _image(series: Series, devices: Sequence[Place]) -> tuple[NDArray[np.uint8], float]:
    """Return the image of the utilisation in one round, and its width in seconds.

    A reading covers the time since the previous one, but no more than three typical sampling
    intervals. The image is transparent where there are no readings.
    """
    begin = min(readings[0][0] for readings in series.values())
    apart = np.diff([time for readings in series.values() for time, _ in readings])
    usual = float(np.median(apart[apart > 0])) if (apart > 0).any() else 0.1
    width = _length(series) + usual
    moments = begin - usual + (np.arange(COLUMNS) + 0.5) * width / COLUMNS
    grid = np.full((len(devices), COLUMNS), np.nan)
    for line, device in enumerate(devices):
        if device in series:
            times, values = np.array(series[device]).T
            index = np.searchsorted(times, moments).clip(max=len(times) - 1)
            near = (times[index] - moments >= 0) & (times[index] - moments <= 3 * usual)
            grid[line, near] = values[index][near]
    pixels = mpl.colormaps["cividis"](np.clip(grid, 0, 1), bytes=True)
    pixels[np.isnan(grid)] = 0
    return pixels.astype(np.uint8), width


def _colour_scale(figure: Figure) -> None:
    height = figure.get_figheight() * 72
    axes = figure.add_axes((84 / svg.WIDTH, 4 / height, 120 / svg.WIDTH, 9 / height))
    axes.imshow(np.linspace(0, 1, 64)[None], cmap="cividis", aspect="auto", interpolation="none")
    axes.set_axis_off()
    figure.text(78 / svg.WIDTH, 5 / height, "idle, 0%", fontsize=svg.SMALL, ha="right")
    figure.text(210 / svg.WIDTH, 5 / height, "100%, busy", fontsize=svg.SMALL)


ROUNDS = 5
"""The largest number of rounds drawn per case."""
ROW = 12
"""The height of a round's box in SVG units."""
OUTLIER = 3.0
"""An outlier is farther than this multiple of the interquartile range from the quartiles."""


def steps(report: Report, rows: Sequence[Row], key: str = "steps") -> Section:
    """Return the section on the distribution of step times, with a box per round.

    The ids in the drawings begin with `key`.
    """
    measured = [row for row in rows if row.source.timed and row.step and _timed(report, row)]
    panels, left_out = small_multiples.split(measured, per=8)
    return Section(
        "steps",
        "Distribution of step times",
        "A box shows the timed steps of a round: its ends are the quartiles, the line in it is the"
        f" median, and the whiskers end at the last step that is no outlier (beyond {OUTLIER:g}"
        f" interquartile ranges). {naming.processes(rows)} The band is the 95% interval of the"
        " median step. Warm-up steps do not count.",
        [_steps(report, facet, f"{key}{i}") for i, facet in enumerate(panels)],
        left_out if panels else "No steps were recorded.",
        numbers=("step",),
    )


def _timed(report: Report, row: Row) -> list[Trial]:
    return [trial for trial in report.trials_of(row) if trial.trusted and trial.timed]


def _steps(report: Report, facet: small_multiples.Facet, key: str) -> Panel:
    every_round = [_timed(report, row) for row in facet.rows]
    groups = [trials[:ROUNDS] for trials in every_round]
    values = [words.ms(row.step) if row.step else "" for row in facet.rows]
    heights = [24 + ROW * len(group) for group in groups]
    figure, axes, tops = svg.lanes(facet.names, values, heights, keys=2, cases=facet.cases)
    each = [np.array(trial.timed) * 1e3 for group in groups for trial in group]
    longest = svg.FARTHEST * max(float(np.median(times)) for times in each)
    low = min(float(times.min()) for times in each)
    end = _scale(axes, low, min(max(float(times.max()) for times in each), longest))
    drawn = zip(facet.rows, facet.names, groups, tops, strict=True)
    for number, (row, name, group, top) in enumerate(drawn):
        with marks.in_lane(axes, number):
            if row.step and naming.drawable(row.step):
                _interval(axes, row.step, top + 18, top + 18 + ROW * len(group))
            for place, trial in enumerate(group):
                box = _box(axes, trial, top + 24 + ROW * place, end, svg.colour(row.case))
                median = words.time(float(np.median(trial.timed)))
                basis = f"median {median} of {words.count(len(trial.timed), 'timed step')}"
                marks.explain(box, f"{name}, round {trial.round + 1}: {basis}")
    axes.set_xlabel("milliseconds of one step")
    dot: dict[str, Any] = {"linestyle": "", "color": svg.FOREGROUND}
    keys = [
        Patch(facecolor=svg.MUTED, label="half of a round's steps"),
        Patch(facecolor=svg.MUTED, alpha=0.25, label="median, 95%"),
        Line2D([], [], marker="o", markersize=3.2, label="outlier", **dot),
        Line2D([], [], marker=">", markersize=6, label="beyond the axis", **dot),
    ]
    svg.legend(figure, keys, 2)
    description = "; ".join(
        f"{name}: median {value}" for name, value in zip(facet.names, values, strict=True)
    )
    drawing = svg.render(
        figure, key=key, title=f"Distribution of step times: {facet.title}", description=description
    )
    more = any(len(trials) > ROUNDS for trials in every_round)
    caption = _left_out(facet.names, groups, end, more=more)
    return Panel(facet.title, drawing, caption, facet.labels, cases=facet.cases)


def _interval(axes: Axes, step: Estimate, top: float, bottom: float) -> None:
    low, high = step.low * 1e3, step.high * 1e3
    axes.add_patch(
        Rectangle(
            (low, top), high - low, bottom - top, facecolor=svg.MUTED, alpha=0.25, linewidth=0
        )
    )
    axes.plot([step.value * 1e3] * 2, [top, bottom], color=svg.FOREGROUND, linewidth=1.0)


def _scale(axes: Axes, low: float, high: float) -> float:
    """Set the time axis to a range with a margin, and return its end.

    The axis has a log scale if the range spans more than a factor of 6.
    """
    if low > 0 and high / low > 6:
        edges = low / 1.1, high * 1.1
        decades = range(math.floor(math.log10(edges[0])), math.ceil(math.log10(edges[1])) + 1)
        leading = (1, 2, 5) if edges[1] < 100 * edges[0] else (1,)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator([m * 10.0**d for d in decades for m in leading]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words.exact(value)))
    else:
        room = (high - low) * 0.06 or high * 0.05 or 1.0
        edges = max(0.0, low - room), high + room
        svg.amounts(axes.xaxis)
    axes.set_xlim(edges)
    return edges[1]


def _box(axes: Axes, trial: Trial, y: float, end: float, colour: str) -> Rectangle:
    """Draw and return the box of a round's timed steps, with whiskers, and outliers as dots.

    Where steps are beyond the `end` of the axis, in milliseconds, an arrow points to them.
    """
    times = np.array(trial.timed) * 1e3
    first, middle, third = (float(edge) for edge in np.quantile(times, [0.25, 0.5, 0.75]))
    reach = OUTLIER * (third - first)
    usual = (times >= first - reach) & (times <= third + reach)
    svg.whisker(axes, y, middle, (float(times[usual].min()), float(times[usual].max())), end)
    box = svg.bar(axes, (first, third - first), (y - 4, 8), facecolor=colour, edgecolor=colour)
    axes.plot([middle, middle], [y - 4, y + 4], color=svg.FOREGROUND, linewidth=1.4)
    dots = times[~usual & (times <= end)]
    axes.plot(dots, np.full(len(dots), y), "o", color=colour, markersize=3.2)
    if (times > end).any():
        axes.plot([end], [y], ">", color=colour, markersize=6)
    return box


def _left_out(
    names: Sequence[str], groups: Sequence[Sequence[Trial]], end: float, *, more: bool
) -> str:
    """Return a caption on the timed steps beyond `end` (in ms), and on `more` rounds."""
    sentences = []
    for name, trials in zip(names, groups, strict=True):
        times = [seconds * 1e3 for trial in trials for seconds in trial.timed]
        if beyond := [time for time in times if time > end]:
            count = words.count(len(times), "timed step")
            sentences.append(
                f"{name}: {len(beyond)} of {count} beyond the axis, up to"
                f" {words.number(max(beyond))} ms."
            )
    if more:
        sentences.append(f"Only the first {words.count(ROUNDS, 'round')} of a case are drawn.")
    return " ".join(sentences) or "All timed steps."
