"""Timeline: the sections on step distribution, utilisation, and device 0 against the others."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
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
from dpbench.records.registry import Role
from dpbench.records.trial import Estimate
from dpbench.report import marks, naming, small_multiples, svg
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
"""The utilisation of each GPU or core, as pairs of a time in seconds and a ratio from 0 to 1."""
Round = tuple[Series, str]
"""The utilisation in a round, and its mean as text."""


def utilisation(report: Report, rows: Sequence[Row]) -> Section:
    """Return the section on utilisation over time, of GPUs if sampled, else of CPU cores."""
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
        [_strips(facet, rounds_of, f"heat{i}") for i, facet in enumerate(panels)],
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
    ends = [
        _case(axes, name, group, places, top + 17, thick, pause)
        for name, group, places, top in zip(facet.names, groups, devices, tops, strict=True)
    ]
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


def imbalance(rows: Sequence[Row]) -> Section:
    """Return the section that compares device 0 with the others in busy time and known memory."""
    panels = []
    notes = []
    for kind, draw in (("busy", _busy), ("memory", _memory)):
        drawn = [row for row in rows if len(getattr(row, kind)) > 1]
        facets, left_out = small_multiples.split(drawn, per=12)
        panels += [draw(facet, f"{kind}{i}") for i, facet in enumerate(facets)]
        if not facets and kind == "memory" and panels:
            notes.append("Memory is not compared, because it is not known per device.")
        notes.append(left_out)
    if not panels:
        notes = ["No case with several devices has busy time or memory per device."]
    return Section(
        "imbalance",
        "Device 0 against the others",
        "DataParallel gathers outputs on device 0. The filled bar is device 0, and the hollow bar"
        " is the mean of the other devices. The number next to a case's name is the ratio of the"
        " two.",
        panels,
        " ".join(filter(None, notes)),
    )


def _busy(facet: small_multiples.Facet, key: str) -> Panel:
    values = [words.times(row.imbalance) if row.imbalance else "" for row in facet.rows]
    amounts = [
        {device: seconds * 1e3 for device, seconds in row.busy.items()} for row in facet.rows
    ]
    drawing = _pairs(
        facet,
        values,
        amounts,
        svg.ROLES[Role.ENGINE],
        "milliseconds of one step",
        key=key,
        title=f"Busy time of device 0: {facet.title}",
    )
    sources = ", ".join(sorted({row.busy_source for row in facet.rows if row.busy_source}))
    caption = f"{_sentence(facet)} Source of busy time: {sources or 'unknown'}.".strip()
    return Panel(f"Busy time, {facet.title}", drawing, caption, facet.labels, cases=facet.cases)


def _sentence(facet: small_multiples.Facet) -> str:
    """Return a sentence on the case with the highest ratio of busy times; "" if none is known."""
    known_ratios = [
        (row.imbalance, row.memory_imbalance, name)
        for row, name in zip(facet.rows, facet.names, strict=True)
        if row.imbalance and naming.drawable(row.imbalance)
    ]
    if not known_ratios:
        return ""
    ratio, memory, name = max(known_ratios, key=lambda one: one[0].value)
    if ratio.low <= 1 <= ratio.high:
        same = "device 0 shows no difference from the others"
        return f"With {name}, which has the highest ratio, {same}: {words.times(ratio)}."
    longer = "longer" if ratio.value > 1 else "shorter"
    holds = f", and holds {words.number(memory)}× their memory" if memory is not None else ""
    share = words.percent(abs(ratio.value - 1))
    return (
        f"With {name}, device 0 works {share} {longer} than the mean of the others"
        f" ({words.times(ratio)}){holds}."
    )


def _memory(facet: small_multiples.Facet, key: str) -> Panel:
    ratios = [row.memory_imbalance for row in facet.rows]
    values = [f"{words.number(ratio)}×" if ratio is not None else "" for ratio in ratios]
    unit, scale = words.binary(max(max(row.memory.values()) for row in facet.rows))
    amounts = [{device: size / scale for device, size in row.memory.items()} for row in facet.rows]
    drawing = _pairs(
        facet,
        values,
        amounts,
        svg.ROLES[Role.CONTROL],
        f"peak memory, {unit}",
        key=key,
        title=f"Peak memory of device 0: {facet.title}",
    )
    sources = ", ".join(sorted({row.memory_source for row in facet.rows if row.memory_source}))
    caption = f"Source: {sources or 'unknown'}."
    return Panel(f"Peak memory, {facet.title}", drawing, caption, facet.labels, cases=facet.cases)


def _pairs(
    facet: small_multiples.Facet,
    values: Sequence[str],
    amounts: Sequence[Mapping[int, float]],
    colour: str,
    unit: str,
    *,
    key: str,
    title: str,
) -> str:
    """Draw a pair of bars per case: the amount of device 0, and the mean of the other devices.

    `amounts` has the amount of each device in `unit`, by case, and `values` has the texts next to
    the cases' names.
    """
    several = max(map(len, amounts)) > 2
    figure, axes, tops = svg.lanes(
        facet.names, values, [47] * len(values), keys=2 if several else 1, cases=facet.cases
    )
    for row, name, by_device, top in zip(facet.rows, facet.names, amounts, tops, strict=True):
        rest = [amount for device, amount in by_device.items() if device]
        means = [("device 0", by_device.get(0, 0.0), top + 24, colour)]
        if rest:
            means.append(("mean of the others", sum(rest) / len(rest), top + 36, svg.BACKGROUND))
        for device, amount, y, face in means:
            bar = svg.bar(
                axes, (0, amount), (y - 4.5, 9), facecolor=face, edgecolor=colour, linewidth=1.2
            )
            marks.explain(
                bar, f"{name}, {device}: {words.number(amount)} {unit}, {naming.basis(row)}"
            )
        if len(rest) > 1:
            axes.plot(
                [min(rest), max(rest)],
                [top + 36] * 2,
                "|-",
                color=svg.FOREGROUND,
                linewidth=1.2,
                markersize=6,
            )
    most = max(amount for by_device in amounts for amount in by_device.values())
    axes.set(xlim=(0, most * 1.04 or 1), xlabel=unit)
    svg.amounts(axes.xaxis)
    keys: list[Patch | Line2D] = [
        Patch(facecolor=colour, edgecolor=colour, label="device 0"),
        Patch(facecolor=svg.BACKGROUND, edgecolor=colour, label="mean of the others"),
    ]
    if several:
        keys.append(
            Line2D(
                [], [], marker="|", color=svg.FOREGROUND, linewidth=1.2, label="range of the others"
            )
        )
    svg.legend(figure, keys, 2)
    each = [
        ", ".join(f"device {device} {words.number(amount)}" for device, amount in by_device.items())
        for by_device in amounts
    ]
    description = "; ".join(
        f"{name}: {text} {unit}" for name, text in zip(facet.names, each, strict=True)
    )
    return svg.render(figure, key=key, title=title, description=description)


ROUNDS = 5
"""The largest number of rounds drawn per case."""
DASHES = ("-", (0, (6, 2)), (0, (3, 1.5)), (0, (1.2, 1.2)), (0, (6, 2, 1.2, 2)))
"""The line style of each round."""
CURVE = 50
"""The height of a curve in SVG units, and the largest number of steps from which it is drawn."""
LEFT = 46.0
"""The margin for the labels of the curves' axes, in SVG units."""
OUTLIER = 3.0
"""An outlier is farther than this multiple of the interquartile range from the quartiles."""


def steps(report: Report, rows: Sequence[Row]) -> Section:
    """Return the section on the distribution of step times, with a curve per round."""
    measured = [row for row in rows if row.source.timed and row.step and _timed(report, row)]
    panels, left_out = small_multiples.split(measured, per=8)
    return Section(
        "steps",
        "Distribution of step times",
        "A curve shows the share of a round's timed steps that take at most the time on the axis."
        f" {naming.processes(rows)} The band is the 95% interval of the median step. Warm-up steps"
        " do not count.",
        [_steps(report, facet, f"steps{i}") for i, facet in enumerate(panels)],
        left_out if panels else "No steps were recorded.",
    )


def _timed(report: Report, row: Row) -> list[Trial]:
    return [trial for trial in report.trials_of(row) if trial.trusted and trial.timed]


def _steps(report: Report, facet: small_multiples.Facet, key: str) -> Panel:
    every_round = [_timed(report, row) for row in facet.rows]
    groups = [trials[:ROUNDS] for trials in every_round]
    values = [words.ms(row.step) if row.step else "" for row in facet.rows]
    figure, axes, tops = svg.lanes(
        facet.names, values, [CURVE + 42] * len(groups), keys=3, left=LEFT, cases=facet.cases
    )
    each = [np.sort(trial.timed) * 1e3 for group in groups for trial in group]
    end = min(
        max(times[-1] for times in each),
        svg.FARTHEST * max(float(np.median(times)) for times in each),
    )
    low, high = _scale(axes, min(times[0] for times in each), end)
    for row, name, group, top in zip(facet.rows, facet.names, groups, tops, strict=True):
        bottom = top + 24 + CURVE
        heights = {share: bottom - share * CURVE for share in (0.0, 0.5, 1.0)}
        axes.hlines([*heights.values()], low, high, color=svg.GRID, linewidth=0.8, zorder=0.5)
        for share, y in heights.items():
            svg.write_beside(
                axes, y + 4, f"{share:.0%}", LEFT, LEFT - 6, ha="right", fontsize=svg.SMALL
            )
        if row.step and naming.drawable(row.step):
            _interval(axes, row.step, bottom - CURVE, bottom)
        for trial, dashes in zip(group, DASHES, strict=False):
            curve = _curve(
                axes,
                trial,
                bottom,
                (low, high),
                {"linestyle": dashes, "color": svg.colour(row.case)},
            )
            basis = (
                f"{words.time(float(np.median(trial.timed)))} of"
                f" {words.count(len(trial.timed), 'timed step')}"
            )
            marks.explain(curve, f"{name}, round {trial.round + 1}: median {basis}")
        _warm_up(axes, group, bottom + 8, (low, high))
    axes.set_xlabel("milliseconds of one step")
    svg.legend(figure, _step_keys(max(map(len, groups))), 3)
    description = "; ".join(
        f"{name}: median {value}" for name, value in zip(facet.names, values, strict=True)
    )
    drawing = svg.render(
        figure, key=key, title=f"Distribution of step times: {facet.title}", description=description
    )
    more = any(len(trials) > ROUNDS for trials in every_round)
    caption = _left_out(facet.names, groups, high, more=more)
    return Panel(facet.title, drawing, caption, facet.labels, cases=facet.cases)


def _interval(axes: Axes, step: Estimate, top: float, bottom: float) -> None:
    low, high = step.low * 1e3, step.high * 1e3
    axes.add_patch(
        Rectangle(
            (low, top), high - low, bottom - top, facecolor=svg.MUTED, alpha=0.25, linewidth=0
        )
    )
    axes.plot([step.value * 1e3] * 2, [top, bottom], color=svg.FOREGROUND, linewidth=1.0)


def _scale(axes: Axes, low: float, high: float) -> tuple[float, float]:
    """Set the time axis to a range with a margin, and return its ends.

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


def _curve(
    axes: Axes, trial: Trial, bottom: float, ends: tuple[float, float], look: Mapping[str, Any]
) -> Line2D:
    """Draw the distribution of a round's timed steps above the height `bottom`, outliers as dots.

    `ends` are the ends of the axis in milliseconds. Where steps are beyond the end, an arrow ends
    the curve.
    """
    times = np.sort(trial.timed) * 1e3
    shares = np.arange(1, len(times) + 1) / len(times)
    inside = times <= ends[1]
    # evenly chosen shares, always with the first and the last step
    chosen = np.unique(
        np.linspace(0, inside.sum() - 1, min(CURVE, inside.sum())).round().astype(int)
    )
    heights = bottom - np.concatenate([[0.0], shares[chosen]]) * CURVE
    places = np.concatenate([times[:1], times[chosen]])
    (curve,) = axes.plot(places, heights, drawstyle="steps-post", linewidth=1.4, **look)
    first, third = np.quantile(times, [0.25, 0.75])
    far = (times < first - OUTLIER * (third - first)) | (times > third + OUTLIER * (third - first))
    if (dots := far & inside).any():
        axes.plot(
            times[dots], bottom - shares[dots] * CURVE, "o", color=look["color"], markersize=3.2
        )
    if not inside.all():
        axes.plot(
            [ends[1]], [bottom - shares[inside][-1] * CURVE], ">", color=look["color"], markersize=6
        )
    return curve


def _warm_up(axes: Axes, group: Iterable[Trial], y: float, ends: tuple[float, float]) -> None:
    low, high = ends
    warm = [
        s * 1e3
        for steps in (t.by_column for t in group)
        for s in compress(steps.seconds, steps.warmup)
    ]
    places = {round(axes.transData.transform((x, y))[0]): x for x in warm if low <= x <= high}
    inside = list(places.values())  # one of several circles at one SVG unit hides the others
    axes.plot(
        inside, [y] * len(inside), "o", color=svg.MUTED, markerfacecolor="none", markersize=4.5
    )
    for x, marker, beyond in (
        (low, "<", min(warm, default=low) < low),
        (high, ">", max(warm, default=high) > high),
    ):
        if beyond:
            axes.plot([x], [y], marker, color=svg.MUTED, markerfacecolor="none", markersize=6)


def _step_keys(rounds: int) -> list[Line2D | Patch]:
    curve: dict[str, Any] = {"color": svg.FOREGROUND, "linewidth": 1.4}
    dashes: Sequence[Any] = DASHES
    lines = [
        Line2D([], [], linestyle=dashes[i], label=f"round {i + 1}", **curve) for i in range(rounds)
    ]
    dot = {"linestyle": "", "color": svg.FOREGROUND}
    warm = {"linestyle": "", "color": svg.MUTED, "markerfacecolor": "none"}
    return [
        *lines,
        Patch(facecolor=svg.MUTED, alpha=0.25, label="median, 95%"),
        Line2D([], [], marker="o", markersize=3.2, label="outlier", **dot),  # type: ignore[arg-type]
        Line2D([], [], marker="o", markersize=4.5, label="warm-up", **warm),  # type: ignore[arg-type]
        Line2D([], [], marker=">", markersize=6, label="beyond the axis", **dot),  # type: ignore[arg-type]
    ]


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
