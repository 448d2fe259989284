"""Heat map: utilisation over time, with one strip per case and one row per device or core."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dpbench.analysis.summary import Row
from dpbench.records import HOST, Case, Source, Trial
from dpbench.report import small_multiples, svg
from dpbench.report.svg import Panel, Section

COLUMNS = 200
"""The number of moments drawn per round."""
DEVICES = 16
"""The largest number of devices or cores drawn per case."""
PAUSE = 0.15
"""The gap between two rounds on the time axis, as a share of the longest round."""
_CORE = re.compile(r"core(\d+)_utilization_ratio")

Place = tuple[str, int]
"""The kind of a device, "GPU" or "core", and its number."""
Series = dict[Place, list[tuple[float, float]]]
"""The readings (seconds, ratio) of each device or core."""


def utilisation(rows: Sequence[Row], trials: Sequence[Trial]) -> Section:
    """Draw the utilisation of GPUs if it was sampled, otherwise of CPU cores."""
    by_case: dict[Case, list[Series]] = {}
    for trial in trials:
        if trial.source is Source.MEASURED and (series := _series(trial)):
            by_case.setdefault(trial.case, []).append(series)
    drawn = [row for row in rows if row.source is Source.MEASURED and row.case in by_case]
    panels, left_out = small_multiples.split(drawn, per=12)
    return Section(
        "utilisation", "Utilisation over time",
        "One row per GPU, or per CPU core on machines without GPUs; the rounds follow one another. "
        "A gap is time without samples.",
        [_strips(facet, by_case, f"heat{i}") for i, facet in enumerate(panels)],
        left_out if panels else "Utilisation was not sampled.",
    )  # fmt: skip


def _series(trial: Trial) -> Series:
    """Return a trial's utilisation of each GPU, or of each core if no GPU was sampled."""
    gpus: Series = {}
    cores: Series = {}
    for sample in trial.samples:
        if sample.metric == "utilization_ratio" and sample.device != HOST:
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
    axes.set(xlim=(0, max(ends) * 1.01 or 1), xlabel="seconds sampled, rounds in a row", aspect="auto")
    axes.set_ylim(sum(heights), 0)  # imshow has changed the limits
    svg.amounts(axes.xaxis)
    axes.grid(False)
    _scale(figure)
    kind = " or ".join(sorted({kind for rows in devices for kind, _ in rows}))
    said = f"Utilisation of each {kind} over time for " + ", ".join(facet.names)
    drawing = svg.render(figure, key=key, title=f"Utilisation: {facet.title}", description=said)
    more = any(len({d for series in group for d in series}) > DEVICES for group in groups)
    caption = f"One row per {kind}, number 0 on top." + (f" Only the first {DEVICES} are drawn." if more else "")
    return Panel(facet.title, drawing, caption, facet.labels)


def _length(series: Series) -> float:
    times = [time for readings in series.values() for time, _ in readings]
    return max(times) - min(times)


def _case(axes: Axes, group: Iterable[Series], devices: Sequence[Place], y: float, thick: float, pause: float) -> float:
    """Draw the rounds of one case one after another; return the end of the last one on the time axis."""
    left = 0.0
    for series in group:
        image, width = _image(series, devices)
        axes.imshow(image, extent=(left, left + width, y + thick * len(devices), y), interpolation="none", zorder=2)
        left += width + pause
    return left - pause


def _image(series: Series, devices: Sequence[Place]) -> tuple[NDArray[np.uint8], float]:
    """Return one round's strip as pixels, transparent in gaps, and its duration in seconds.

    Each reading covers the time since the previous one, but no more than three typical sampling intervals.
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


def _scale(figure: Figure) -> None:
    """Draw the legend of the colours below the plot."""
    height = figure.get_figheight() * 72
    axes = figure.add_axes((84 / svg.WIDTH, 4 / height, 120 / svg.WIDTH, 9 / height))
    axes.imshow(np.linspace(0, 1, 64)[None], cmap="cividis", aspect="auto", interpolation="none")
    axes.set_axis_off()
    figure.text(78 / svg.WIDTH, 5 / height, "idle, 0%", fontsize=svg.SMALL, ha="right")
    figure.text(210 / svg.WIDTH, 5 / height, "100%, busy", fontsize=svg.SMALL)
