"""Speed-up: panels with the speed-up over the number of devices, per strategy and schedule."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from dpbench.analysis.summary import Row
from dpbench.records import Case, names, words
from dpbench.records.estimate import Estimate
from dpbench.records.grouping import grouped
from dpbench.records.registry import Role
from dpbench.report import marks, naming, small_multiples, svg
from dpbench.report.marks import Drawing
from dpbench.report.section import Panel, Section

LEFT = 0.85
"""The number of devices at which the interval of one device with all cores is drawn."""
POINTS = 3
"""A panel has lines from this many different numbers of devices on, 1 included, else lanes."""
LANE = 36.0
"""The height of a lane in SVG units."""
IDEAL: Mapping[str, Any] = {"linestyle": ":", "color": svg.MUTED, "linewidth": 1.6}
BASELINE = "single: the baseline, 1×"
LINES = 8
"""The largest number of lines in one panel of speed-ups."""
MARKERS = {Role.WRAPPER: "^", Role.ENGINE: "o", Role.CONTROL: "s"}
MORE_MARKERS = ("P", "X", "v", "<", ">", "p", "h")
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))

Points = Sequence[tuple[Row, Estimate]]


def section(rows: Sequence[Row], key: str = "speedup") -> Section:
    """Return the section on speed-up, with one panel per model and amount of work.

    The ids in the drawings begin with `key`.
    """
    drawable = _both_ways([row for row in rows if naming.drawable(row.speedup)])
    levels = [row for row in drawable if row.case.traits.all_cores]
    lines = [row for row in drawable if not row.case.traits.all_cores] or levels
    panels, left_out = small_multiples.split(lines, per=LINES, key=_work, unit=_identity)
    left_out = " ".join(filter(None, (left_out, naming.withheld(row.speedup for row in rows))))
    missing = (
        "" if panels or left_out else "No case was compared with the strategy single at equal work."
    )
    return Section(
        "speedup",
        "Speed-up against ideal",
        "The step time on one device over that on several, for equal work.",
        [_panel(facet, _beside(facet, levels), f"{key}{i}") for i, facet in enumerate(panels)],
        missing or left_out,
        open=True,
        numbers=("speedup", "scaling", "efficiency"),
    )


def _identity(row: Row) -> tuple[Hashable, ...]:
    return (*small_multiples.rank(row.case), row.source, row.run)


def _both_ways(rows: Sequence[Row]) -> list[Row]:
    """Return the rows; the scaling of a one-device row becomes that of the lines that start at it.

    On one device, strong and weak scaling are the same. A one-device row at which lines of both
    kinds start is therefore returned twice. A row at which only lines of weak scaling start is
    returned once, marked as weak.
    """
    weak = {_place(row) for row in rows if row.scaling == "weak"}
    strong = {_place(row) for row in rows if row.scaling != "weak" and row.case.devices > 1}
    doubled = []
    for row in rows:
        start = replace(row, scaling="weak")
        starts_weak = row.case.devices == 1 and _place(start) in weak
        if not starts_weak or _place(row) in strong:
            doubled.append(row)
        if starts_weak:
            doubled.append(start)
    return doubled


def _place(row: Row) -> tuple[object, ...]:
    return (small_multiples.setting(row.case), *_work(row))


def _work(row: Row) -> tuple[str, int]:
    """Return the kind of scaling and the batch size: per device if weak, global if strong."""
    weak = row.scaling == "weak"
    return row.scaling, row.case.batch_size // row.case.devices if weak else row.case.batch_size


def _beside(facet: small_multiples.Facet, levels: Iterable[Row]) -> list[Row]:
    """Return those of `levels` with the panel's setting and work that it does not have already."""
    return [row for row in levels if _place(row) == _place(facet.rows[0]) and row not in facet.rows]


def _panel(facet: small_multiples.Facet, levels: Sequence[Row], key: str) -> Panel:
    """Return a panel of speed-ups: lines over the number of devices, or a lane for each case."""
    rows = [*levels, *facet.rows]
    devices = {1, *(row.case.devices for row in rows)}
    end = max(*devices, svg.extent(row.speedup for row in rows if row.speedup))
    figure, values = _lanes(rows, end) if len(devices) < POINTS else _lines(rows, end)
    scaling, batch = _work(facet.rows[0])
    work = (
        f"Weak scaling: batch {batch} per device"
        if scaling == "weak"
        else f"Strong scaling: global batch {batch}"
    )
    title = f"{facet.title}, weak scaling" if scaling == "weak" else facet.title
    drawing = svg.render(
        figure,
        key=key,
        title=f"Speed-up against ideal: {title}",
        description=f"{work}. {'; '.join(values)}.",
    )
    return Panel(
        title,
        drawing,
        f"{work}. {naming.rounds(rows)}" if scaling == "weak" else naming.rounds(rows),
        naming.labels(rows),
        cases=[row.case for row in rows],
        figure=figure,
    )


def _lanes(rows: Sequence[Row], end: float) -> tuple[Drawing, list[str]]:
    """Return a figure with a lane for each case, up to the speed-up `end`, and its values."""
    said = [_name(row, _counted(row)) for row in rows]
    values = [words.times(row.speedup) for row in rows if row.speedup]
    figure, axes, tops = svg.lanes(
        said, values, [LANE] * len(rows), keys=2, cases=[row.case for row in rows]
    )
    for number, (row, top) in enumerate(zip(rows, tops, strict=True)):
        assert row.speedup is not None
        e, middle = row.speedup, top + LANE - 11
        with marks.in_lane(axes, number):
            if row.case.devices > 1:
                axes.plot([row.case.devices] * 2, [middle - 6, middle + 6], **IDEAL)
            look = _look(row, 0)
            svg.whisker(axes, middle, e.value, (e.low, e.high), end, colour=look["color"])
            (point,) = axes.plot([e.value], [middle], **look | {"linestyle": ""})
            marks.explain(point, _said(row, e))
    base = axes.axvline(1, color=svg.ROLES[Role.BASELINE], linewidth=1.2, label=BASELINE)
    ideal = Line2D([], [], **IDEAL, label="ideal: the number of devices")
    axes.set(xlim=(0, end * 1.06), xlabel="speed-up over one device, ×")
    svg.amounts(axes.xaxis)
    svg.legend(figure, [ideal, base], 1)
    return figure, [f"{name}: {value}" for name, value in zip(said, values, strict=True)]


def _lines(rows: Sequence[Row], end: float) -> tuple[Drawing, list[str]]:
    """Return a figure with a line for each strategy, and the entries of its legend.

    The values are in the legend, where they cannot overlap. `end` is the highest speed-up drawn.
    """
    lines = grouped((_identity(row), (row, row.speedup)) for row in rows if row.speedup)
    most = max(row.case.devices for row in rows)
    figure, axes, keys = _frame(most, end * 1.06, len(lines))
    numbers: dict[str, count[int]] = {}
    for position, line in enumerate(lines.values()):
        nth = next(numbers.setdefault(line[0][0].case.strategy, count()))
        shift = (position - (len(lines) - 1) / 2) * 0.012 * most
        level = line[0][0].case.traits.all_cores
        with marks.owned(axes, _cases(line)):
            keys.append(_level(axes, line, end) if level else _line(axes, line, nth, shift, end))
    legend = svg.legend(figure, keys, 1)
    for line, text, handle in zip(
        lines.values(), legend.texts[2:], legend.legend_handles[2:], strict=True
    ):
        for artist in filter(None, (text, handle)):
            marks.own(artist, _cases(line))
    return figure, [str(one.get_label()) for one in keys]


def _cases(line: Points) -> list[Case]:
    return [row.case for row, _ in line]


def _said(row: Row, speedup: Estimate) -> str:
    name = " ".join(filter(None, (_counted(row), row.run)))
    return f"{name}: speed-up {words.times(speedup)}, {naming.basis(row)}"


def _counted(row: Row) -> str:
    """Return the strategy and its number of devices."""
    count = "" if row.case.traits.one_device else f" ×{row.case.devices}"
    return f"{names.strategy(row.case)}{count}"


def _frame(most: int, top: float, lines: int) -> tuple[Drawing, Axes, list[Line2D]]:
    """Return a figure and axes with the ideal line and the baseline, and the handles of both.

    `most` is the largest number of devices, `top` the largest speed-up, and `lines` the number of
    lines to be drawn.
    """
    bottom = svg.below(lines + 2)
    figure, axes = svg.canvas(234 + bottom, left=32, bottom=bottom, top=26)
    axes.set(xlim=(0.75, most + 0.25), ylim=(0, top), xlabel="devices")
    axes.text(0, 1.035, "speed-up over one device, ×", transform=axes.transAxes, fontsize=svg.SMALL)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    svg.amounts(axes.yaxis, 6)
    axes.grid()
    (ideal,) = axes.plot([1, most], [1, most], **IDEAL, label=f"ideal: {most}× on {most}")
    (base,) = axes.plot(
        [1],
        [1],
        "D",
        color=svg.ROLES[Role.BASELINE],
        markersize=5.5,
        label=BASELINE,
    )
    return figure, axes, [ideal, base]


def _name(row: Row, strategy: str) -> str:
    options = " ".join(f"{name}={value}" for name, value in row.case.options)
    odd = " ".join(f"[{label}]" for label in row.labels if label in svg.ODD)
    return " ".join(filter(None, (odd, strategy, options, row.run)))


def _key(row: Row, value: str) -> str:
    """Return the entry of the legend for the line that ends at a row."""
    name = _name(row, names.strategy(row.case))
    return f"{naming.clip(name, svg.COLUMNS - 4 - len(value))}: {value}"


def _level(axes: Axes, line: Points, end: float) -> Line2D:
    """Draw the speed-up of one device with all cores as a level, and its interval at the left."""
    row, last = line[-1]
    colour = svg.ROLES[Role.ALL_CORES]
    svg.whisker(axes, LEFT, last.value, (last.low, last.high), end, upright=True, colour=colour)
    label = _key(row, words.times(last))
    dashes = (3, 3) if row.run == "before" else (8, 3)
    level = axes.axhline(last.value, color=colour, linewidth=1.6, dashes=dashes, label=label)
    marks.explain(level, _said(row, last), _cases(line))
    return level


def _line(axes: Axes, line: Points, nth: int, shift: float, end: float) -> Line2D:
    """Draw the `nth` line of a strategy, and return the handle of the legend.

    The line is shifted to the right by `shift` devices so that intervals do not overlap.
    """
    row, last = line[-1]
    look = _look(row, nth)
    places = [point_row.case.devices + shift for point_row, _ in line]
    axes.plot(places, [e.value for _, e in line], **{**look, "marker": ""})
    colour = svg.colour(row.case)
    for place, (point_row, e) in zip(places, line, strict=True):
        with marks.owned(axes, [point_row.case]):
            svg.whisker(axes, place, e.value, (e.low, e.high), end, upright=True, colour=colour)
            (point,) = axes.plot([place], [e.value], **{**look, "linestyle": ""})
            marks.explain(point, _said(point_row, e), [point_row.case])
    value = f"{words.times(last)} on {row.case.devices}"
    return Line2D([], [], label=_key(row, value), **look)


def _look(row: Row, nth: int) -> dict[str, Any]:
    """Return the style of the `nth` line of a strategy, and of its points."""
    first = MARKERS.get(row.case.traits.role, "P")
    hollow = not row.source.timed or row.run == "before"
    return {
        "color": svg.colour(row.case),
        "marker": MORE_MARKERS[nth % len(MORE_MARKERS)] if nth else first,
        "markersize": 6,
        "linestyle": DASHES[nth % len(DASHES)],
        "linewidth": 1.8,
        **({"markerfacecolor": svg.BACKGROUND} if hollow else {}),
    }
