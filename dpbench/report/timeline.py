"""Timeline: report sections about all timed steps, utilisation over time, and device 0 compared with other devices."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray

from dpbench.analysis.summary import Row
from dpbench.records import Case, Source, Trial, words
from dpbench.records.registry import Role
from dpbench.records.trial import Estimate
from dpbench.report import naming, small_multiples, svg
from dpbench.report.svg import Panel, Section

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
"""The readings of the utilisation of each GPU or core, as pairs of a time in seconds and a ratio from 0 to 1."""


def utilisation(rows: Sequence[Row], trials: Sequence[Trial]) -> Section:
    """Return the section on utilisation over time: of GPUs if GPUs were sampled, else of CPU cores."""
    by_case: dict[Case, list[Series]] = {}
    for trial in trials:
        if trial.source is Source.MEASURED and (series := _series(trial)):
            by_case.setdefault(trial.case, []).append(series)
    drawn = [row for row in rows if row.source is Source.MEASURED and row.case in by_case]
    panels, left_out = small_multiples.split(drawn, per=12)
    return Section(
        "utilisation", "Utilisation over time",
        "One row per GPU, or per CPU core on machines without GPUs. The rounds of a case are drawn one after another. "
        "A gap is time without readings.",
        [_strips(facet, by_case, f"heat{i}") for i, facet in enumerate(panels)],
        left_out if panels else "Utilisation was not sampled.",
    )  # fmt: skip


def _series(trial: Trial) -> Series:
    """Return the readings of the utilisation of each GPU in a trial, or of each core if no GPU was sampled."""
    gpus: Series = {}
    cores: Series = {}
    for sample in trial.samples:
        if sample.metric == "utilization_ratio" and sample.device >= 0:
            gpus.setdefault(("GPU", sample.device), []).append((sample.time_s, sample.value))
        elif core := _CORE.fullmatch(sample.metric):
            cores.setdefault(("core", int(core[1])), []).append((sample.time_s, sample.value))
    return {place: sorted(found) for place, found in sorted((gpus or cores).items())}


def _strips(facet: small_multiples.Facet, by_case: dict[Case, list[Series]], key: str) -> Panel:
    groups = [by_case[row.case] for row in facet.rows]
    devices = [sorted({device for series in group for device in series})[:DEVICES] for group in groups]
    thick = max(4, min(10, 60 // max(map(len, devices))))
    heights = [22 + thick * len(rows) for rows in devices]
    figure, axes, tops = svg.lanes(facet.names, [""] * len(groups), heights, keys=1)
    pause = PAUSE * max(_length(series) for group in groups for series in group)
    ends = [
        _case(axes, group, rows, top + 17, thick, pause) for group, rows, top in zip(groups, devices, tops, strict=True)
    ]
    axes.set(xlim=(0, max(ends) * 1.01 or 1), xlabel="seconds, one round after another", aspect="auto")
    axes.set_ylim(sum(heights), 0)  # imshow has changed the limits
    svg.amounts(axes.xaxis)
    axes.grid(False)
    _colour_scale(figure)
    kind = " or ".join(sorted({kind for rows in devices for kind, _ in rows}))
    said = f"Utilisation of each {kind} over time for " + ", ".join(facet.names)
    drawing = svg.render(figure, key=key, title=f"Utilisation: {facet.title}", description=said)
    more = any(len({d for series in group for d in series}) > DEVICES for group in groups)
    caption = f"One row per {kind}, with number 0 on top." + (f" Only the first {DEVICES} are drawn." if more else "")
    return Panel(facet.title, drawing, caption, facet.labels)


def _length(series: Series) -> float:
    times = [time for readings in series.values() for time, _ in readings]
    return max(times) - min(times)


def _case(axes: Axes, group: Iterable[Series], devices: Sequence[Place], y: float, thick: float, pause: float) -> float:
    """Draw the utilisation in the rounds of one case, one after another; return the end of the last round in seconds.

    `y` is the top edge of the drawing, `thick` the height of one device's row, and `pause` the gap between two rounds.
    """
    left = 0.0
    for series in group:
        image, width = _image(series, devices)
        axes.imshow(image, extent=(left, left + width, y + thick * len(devices), y), interpolation="none", zorder=2)
        left += width + pause
    return left - pause


def _image(series: Series, devices: Sequence[Place]) -> tuple[NDArray[np.uint8], float]:
    """Return the pixels of the utilisation in one round, transparent in gaps, and the seconds that they cover.

    A reading covers the time since the previous reading, but no more than three typical sampling intervals.
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
    """Draw the legend of the utilisation's colours below the plot."""
    height = figure.get_figheight() * 72
    axes = figure.add_axes((84 / svg.WIDTH, 4 / height, 120 / svg.WIDTH, 9 / height))
    axes.imshow(np.linspace(0, 1, 64)[None], cmap="cividis", aspect="auto", interpolation="none")
    axes.set_axis_off()
    figure.text(78 / svg.WIDTH, 5 / height, "idle, 0%", fontsize=svg.SMALL, ha="right")
    figure.text(210 / svg.WIDTH, 5 / height, "100%, busy", fontsize=svg.SMALL)


TICKS = 80
"""The largest number of timed steps drawn per round."""
ROUNDS = 5
"""The largest number of rounds drawn per case."""


def imbalance(rows: Sequence[Row]) -> Section:
    """Return the section that compares device 0 with the other devices in busy time, and in memory if it is known."""
    panels, notes = [], []
    for kind, draw in (("busy", _busy), ("memory", _memory)):
        drawn = [row for row in rows if len(getattr(row, kind)) > 1]
        found, left_out = small_multiples.split(drawn, per=12)
        panels += [draw(facet, f"{kind}{i}") for i, facet in enumerate(found)]
        if not found and kind == "memory" and panels:
            notes.append("Memory is not compared, because it is not known per device.")
        notes.append(left_out)
    if not panels:
        notes = ["No case with several devices has busy time or memory per device."]
    return Section(
        "imbalance", "Device 0 against the others",
        "DataParallel gathers outputs on device 0. A filled mark is device 0, and hollow marks are the other devices. "
        "The number next to a case's name is the ratio of device 0 to the mean of the other devices.",
        panels, " ".join(filter(None, notes)),
    )  # fmt: skip


def _busy(facet: small_multiples.Facet, key: str) -> Panel:
    """Return the panel with each device's busy time and, below it, the time in which a phase was open on the device."""
    values = [words.times(row.imbalance) if row.imbalance else "" for row in facet.rows]
    figure, axes, tops = svg.lanes(facet.names, values, [46] * len(values), keys=2)
    for row, top in zip(facet.rows, tops, strict=True):
        _dumbbell(axes, {d: s * 1e3 for d, s in row.busy.items()}, top + 24, "D", svg.ROLES[Role.ENGINE])
        _dumbbell(axes, {d: s * 1e3 for d, s in row.occupied.items()}, top + 37, "s", svg.MUTED)
    most = max(max([*row.busy.values(), *row.occupied.values()]) for row in facet.rows) * 1e3
    axes.set(xlim=(0, most * 1.04 or 1), xlabel="milliseconds of one step")
    svg.amounts(axes.xaxis)
    keys = [
        _mark("D", svg.ROLES[Role.ENGINE], True, "device 0, busy"),
        _mark("D", svg.ROLES[Role.ENGINE], False, "others, busy"),
        _mark("s", svg.MUTED, True, "device 0, occupied"), _mark("s", svg.MUTED, False, "others, occupied"),
    ]  # fmt: skip
    svg.legend(figure, keys, 2)
    said = "; ".join(f"{name}: busy time {value}" for name, value in zip(facet.names, values, strict=True))
    drawing = svg.render(figure, key=key, title=f"Busy time of device 0: {facet.title}", description=said)
    sources = ", ".join(sorted({row.busy_source for row in facet.rows if row.busy_source}))
    caption = f"Source of busy time: {sources or 'unknown'}. A device is occupied while a phase is open on it, even if "
    caption += "the device waits."
    return Panel(f"Busy time, {facet.title}", drawing, caption, facet.labels)


def _memory(facet: small_multiples.Facet, key: str) -> Panel:
    """Return the panel with each device's peak memory."""
    ratios = [row.memory_imbalance for row in facet.rows]
    values = [f"{words.number(ratio)}×" if ratio is not None else "" for ratio in ratios]
    figure, axes, tops = svg.lanes(facet.names, values, [38] * len(values), keys=1)
    most = max(max(row.memory.values()) for row in facet.rows)
    unit, scale = words.binary(most)
    for row, top in zip(facet.rows, tops, strict=True):
        _dumbbell(axes, {d: size / scale for d, size in row.memory.items()}, top + 24, "D", svg.ROLES[Role.CONTROL])
    axes.set(xlim=(0, most / scale * 1.04 or 1), xlabel=f"peak memory, {unit}")
    svg.amounts(axes.xaxis)
    colour = svg.ROLES[Role.CONTROL]
    svg.legend(figure, [_mark("D", colour, full, name) for full, name in ((True, "device 0"), (False, "others"))], 2)
    said = "; ".join(f"{name}: {value}" for name, value in zip(facet.names, values, strict=True))
    drawing = svg.render(figure, key=key, title=f"Peak memory of device 0: {facet.title}", description=said)
    sources = ", ".join(sorted({row.memory_source for row in facet.rows if row.memory_source}))
    return Panel(f"Peak memory, {facet.title}", drawing, f"Source: {sources or 'unknown'}.", facet.labels)


def _dumbbell(axes: Axes, values: Mapping[int, float], y: float, marker: str, colour: str) -> None:
    """Draw the values of all devices as marks on one horizontal line; the mark of device 0 is filled and on top.

    `values` has the value of each device by its index.
    """
    if not values:
        return
    axes.plot([min(values.values()), max(values.values())], [y, y], color=colour, linewidth=1.6)
    rest = [value for device, value in values.items() if device]
    axes.plot(rest, [y] * len(rest), marker, color=colour, markerfacecolor=svg.BACKGROUND, markersize=7)
    if 0 in values:
        axes.plot([values[0]], [y], marker, color=colour, markersize=6)


def _mark(marker: str, colour: str, filled: bool, label: str) -> Line2D:
    face = colour if filled else svg.BACKGROUND
    return Line2D([], [], linestyle="", marker=marker, color=colour, markerfacecolor=face, markersize=6.5, label=label)


def steps(rows: Sequence[Row], trials: Sequence[Trial]) -> Section:
    """Return the section that shows all steps of each case, one line of ticks per round; warm-up steps are circles."""
    series: dict[Case, list[Trial]] = {}
    for trial in trials:
        if trial.trusted and trial.source is Source.MEASURED and trial.timed:
            series.setdefault(trial.case, []).append(trial)
    measured = [row for row in rows if row.source is Source.MEASURED and row.case in series]
    panels, left_out = small_multiples.split([row for row in measured if row.step], per=12)
    return Section(
        "steps", "All timed steps",
        "One tick per timed step, and one line of ticks per round (a fresh process). The band is the 95% interval of "
        "the median step. Open circles are warm-up steps, which do not count.",
        [_steps(facet, series, f"steps{i}") for i, facet in enumerate(panels)],
        left_out if panels else "No steps were recorded.",
    )  # fmt: skip


def _steps(facet: small_multiples.Facet, series: Mapping[Case, Sequence[Trial]], key: str) -> Panel:
    groups = [series[row.case][:ROUNDS] for row in facet.rows]
    values = [words.ms(row.step) if row.step else "" for row in facet.rows]
    figure, axes, tops = svg.lanes(facet.names, values, [22 + 9 * len(group) for group in groups], keys=1)
    timed = [seconds * 1e3 for group in groups for trial in group for seconds in trial.timed]
    low, high = _scale(axes, min(timed), max(timed))
    for row, group, top in zip(facet.rows, groups, tops, strict=True):
        if row.step and naming.drawable(row.step):
            _interval(axes, row.step, top + 17, top + 17 + 9 * len(group))
        for number, trial in enumerate(group):
            _round(axes, trial, top + 18 + 9 * number, low, high)
    axes.set_xlabel("milliseconds of one step")
    svg.legend(figure, _step_keys(), 4)
    said = "; ".join(f"{name}: median {value}" for name, value in zip(facet.names, values, strict=True))
    drawing = svg.render(figure, key=key, title=f"All timed steps: {facet.title}", description=said)
    return Panel(facet.title, drawing, _thinned(facet, series), facet.labels)


def _interval(axes: Axes, step: Estimate, top: float, bottom: float) -> None:
    """Draw the median step as a vertical line and its interval as a band, from `top` to `bottom`."""
    colour = svg.ROLES[Role.WRAPPER]
    axes.fill_betweenx([top, bottom], step.low * 1e3, step.high * 1e3, color=colour, alpha=0.35, linewidth=0)
    axes.plot([step.value * 1e3] * 2, [top, bottom], color=colour, linewidth=1.6)


def _scale(axes: Axes, low: float, high: float) -> tuple[float, float]:
    """Set the time axis to the range from `low` to `high` with some room, and return the ends of the axis.

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
    return edges


def _round(axes: Axes, trial: Trial, y: float, low: float, high: float) -> None:
    """Draw the timed steps of one round as ticks, and its warm-up steps as circles, or as arrows beyond the axis.

    `y` is the top edge of the ticks; `low` and `high` are the ends of the axis in milliseconds.
    """
    timed = sorted(seconds * 1e3 for seconds in trial.timed)
    count = min(TICKS, len(timed))
    chosen = [timed[round(i * (len(timed) - 1) / max(1, count - 1))] for i in range(count)]
    vertices = [point for x in chosen for point in ((x, y), (x, y + 7))]
    axes.add_patch(
        PathPatch(
            Path(vertices, [Path.MOVETO, Path.LINETO] * count),
            edgecolor=svg.FOREGROUND,
            facecolor="none",
            linewidth=0.9,
        )
    )
    warm = [step.seconds * 1e3 for step in trial.steps if step.warmup]
    inside = [x for x in warm if low <= x <= high]
    beyond = [high if x > high else low for x in warm if not low <= x <= high]
    axes.plot(inside, [y + 3.5] * len(inside), "o", color=svg.MUTED, markerfacecolor="none", markersize=4.5)
    for edge in sorted(set(beyond)):
        axes.plot([edge], [y + 3.5], ">" if edge == high else "<", color=svg.MUTED, markersize=5)


def _step_keys() -> list[Line2D]:
    return [
        Line2D([], [], linestyle="", marker="|", color=svg.FOREGROUND, markersize=8, label="step"),
        Line2D([], [], color=svg.ROLES[Role.WRAPPER], linewidth=2, label="median"),
        Line2D(
            [], [], linestyle="", marker="o", color=svg.MUTED, markerfacecolor="none", markersize=4.5, label="warm-up"
        ),
        Line2D([], [], linestyle="", marker=">", color=svg.MUTED, markersize=5, label="warm-up, beyond"),
    ]


def _thinned(facet: small_multiples.Facet, series: Mapping[Case, Sequence[Trial]]) -> str:
    """Return a caption that states which steps and rounds are drawn, if not all are."""
    groups = [series[row.case] for row in facet.rows]
    said = []
    if any(len(trial.timed) > TICKS for group in groups for trial in group):
        said.append(
            f"Of a round with more than {TICKS} timed steps, {TICKS} are drawn: the fastest, the slowest, and evenly "
            "chosen others."
        )
    if any(len(group) > ROUNDS for group in groups):
        said.append(f"Only the first {words.count(ROUNDS, 'round')} of a case are drawn.")
    return " ".join(said) or "All timed steps."
