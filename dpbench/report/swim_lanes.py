"""Swim lanes: one median step of each strategy on a common time axis, with a lane per device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch, PathPatch, Rectangle
from matplotlib.path import Path

from dpbench.analysis.lanes import Bar, Lane, Lanes, PathSegment
from dpbench.analysis.report import Report
from dpbench.analysis.summary import Row
from dpbench.records import HOST, UNATTRIBUTED, Phase, words
from dpbench.records.grouping import grouped, summed
from dpbench.report import marks, naming, small_multiples, svg
from dpbench.report.section import Panel, Section

BLOCKS = 6
"""The largest number of cases per panel."""
DEVICES = 8
"""The largest number of devices drawn per case."""
HEAD, ROW, GAP = 19.0, 15.0, 4.0
"""The heights of a case's name, of a row of bars, and of the gap below a lane, in SVG units."""
LEFT = 46.0
"""The margin for the names of the lanes, in SVG units."""
PALE = 0.35
"""The opacity of a bar of another step."""
IDLE: Mapping[str, Any] = {"facecolor": svg.GRID, "edgecolor": "none", "alpha": 0.8}
NO_PHASE: Mapping[str, Any] = {"facecolor": svg.MUTED, "edgecolor": "none"}
"""The look of a stretch of the critical path in which no phase is open; it is below the lanes."""


def section(report: Report, rows: Sequence[Row], key: str = "lanes") -> Section:
    """Return the section of swim lanes: a panel for each setting and batch size; see `_groups`.

    `rows` are those of the report that are drawn. The ids in the drawings begin with `key`.
    """
    # a timed step is drawn even if its rounds are too few for an estimate; the caption then names
    # the case
    with_lanes = [row for row in rows if report.lanes_of(row)]
    facets, left_out = small_multiples.panels(_groups(with_lanes), per=BLOCKS)
    return Section(
        "lanes",
        "One median step, device by device",
        "The step closest to the medians of its round. Pale bars belong to other steps; where a"
        " lane is grey, no phase is open on the device. The critical path has the bars that the end"
        " of the step waited for; below the lanes is a line where no phase is open on any of them."
        " A bar of the optimizer at the start is zero_grad. A bar across several lanes is one"
        " operation for their devices. A tick at the top of a bar is the least time of its bytes"
        " over measured links, or of its operations at the measured peak.",
        [_panel(report, facet, f"{key}{i}") for i, facet in enumerate(facets)],
        left_out if facets else "No case has spans of a median step.",
        open=True,
    )


def _groups(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield one group of rows per setting and batch size, for one or several panels.

    A group has the cases on the largest number of devices, and the one-device cases with the same
    batch size or, if there are none, with one device's share of it.
    """
    ordered = small_multiples.order(rows)
    for group in grouped((small_multiples.setting(row.case), row) for row in ordered).values():
        alone = [row for row in group if row.case.traits.one_device]
        spread = [row for row in group if not row.case.traits.one_device]
        spread = [row for row in spread if row.case.devices > 1] or spread
        for batch in sorted({row.case.batch_size for row in spread or alone}):
            alike = [row for row in spread if row.case.batch_size == batch]
            most = max((row.case.devices for row in alike), default=1)
            sizes = {
                size: [row for row in alone if row.case.batch_size == size]
                for size in (batch, batch // most)
            }
            yield (sizes[batch] or sizes[batch // most]) + [
                row for row in alike if row.case.devices == most
            ]


def _panel(report: Report, facet: small_multiples.Facet, key: str) -> Panel:
    timelines = [lanes for row in facet.rows if (lanes := report.lanes_of(row))]
    figure = _drawing(facet, timelines)
    drawing = svg.render(
        figure,
        key=key,
        title=f"One median step: {facet.title}",
        description=" ".join(
            f"{name}: {_description(timeline)}"
            for name, timeline in zip(facet.names, timelines, strict=True)
        ),
    )
    return Panel(
        facet.title,
        drawing,
        _caption(facet, timelines),
        facet.labels,
        cases=facet.cases,
        figure=figure,
    )


def _drawing(facet: small_multiples.Facet, timelines: Sequence[Lanes]) -> marks.Drawing:
    captions = [_said(timeline) for timeline in timelines]
    heights = [
        HEAD + sum(lane.rows * ROW + GAP for lane in _shown(timeline)) + GAP
        for timeline in timelines
    ]
    phases = {
        bar.phase.value for timeline in timelines for lane in _shown(timeline) for bar in lane.bars
    }
    unattributed = any(part.bar is None for timeline in timelines for part in timeline.path)
    idle = any(lane.idle for timeline in timelines for lane in timeline.lanes)
    critical = Patch(
        facecolor="none", edgecolor=svg.FOREGROUND, linewidth=1.3, label="critical path"
    )
    keys = [
        *svg.phase_keys(phases),
        *[Patch(**NO_PHASE, label=UNATTRIBUTED)] * unattributed,
        *[Patch(**IDLE, label="idle")] * idle,
        critical,
    ]
    figure, axes, tops = svg.lanes(
        facet.names, captions, heights, keys=-(-len(keys) // 3), left=LEFT, cases=facet.cases
    )
    begin_s = min(lane.begin_s for timeline in timelines for lane in timeline.lanes)
    end_s = max(
        [
            *(timeline.seconds for timeline in timelines),
            *(bar.end_s for timeline in timelines for bar in _bars_of_step(timeline)),
        ]
    )
    width = (end_s - begin_s) * 1e3 * 1.01
    axes.set(
        xlim=(begin_s * 1e3, begin_s * 1e3 + width),
        xlabel="milliseconds after the start of the step",
    )
    for number, (timeline, top) in enumerate(zip(timelines, tops, strict=True)):
        with marks.in_lane(axes, number):
            _timeline(axes, timeline, top + HEAD, width)
    svg.amounts(axes.xaxis)
    svg.legend(figure, keys, 3)
    return figure


def _bars_of_step(timeline: Lanes) -> Iterator[Bar]:
    return (bar for lane in timeline.lanes for bar in lane.bars if not bar.step)


def _said(timeline: Lanes) -> str:
    took = f"{words.number(timeline.seconds * 1e3)} ms"
    shares = [lane.idle_share for lane in timeline.lanes if lane.device >= 0]
    return f"{took} (devices idle {_range(shares)})" if len(shares) > 1 else took


def _range(shares: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(words.percent(share) for share in (min(shares), max(shares))))


def _timeline(axes: Axes, lanes: Lanes, top: float, width: float) -> None:
    critical = summed((part.bar, part.end_s - part.start_s) for part in lanes.path)
    places: dict[Bar, tuple[float, float]] = {}
    for lane in _shown(lanes):
        svg.write_beside(axes, top + 11, _short(lane.device), LEFT, fontsize=svg.SMALL)
        for begin, end in lane.idle:
            box = _box(axes, (begin, end), (top, top + lane.rows * ROW - 1), **IDLE)
            _write(axes, ("idle",), (begin, end), top, width, svg.MUTED)
            idle = f"{_place(lane.device)} idle{_waits(lanes.path, begin, end)}"
            marks.explain(box, f"{idle}: {_extent(begin, end, lanes.seconds)}")
        for bar in lane.bars:
            y = top + bar.row * ROW
            places[bar] = y, y + ROW - 1
        top += lane.rows * ROW + GAP
    # a joint bar is drawn first, because it crosses lanes in which other bars can be beside it
    for bars in sorted(_drawn(places), key=len, reverse=True):
        edges = min(places[bar][0] for bar in bars), max(places[bar][1] for bar in bars)
        places |= dict.fromkeys(bars, edges)
        waited_s = sum(critical.get(bar, 0.0) for bar in bars)
        _bar(axes, lanes, bars, edges, waited_s, width)
    _outline(axes, lanes.path, places)
    for part in lanes.path:
        if part.bar is None:
            _box(axes, (part.start_s, part.end_s), (top - GAP, top - 1), **NO_PHASE)


def _bar(
    axes: Axes,
    lanes: Lanes,
    bars: Sequence[Bar],
    edges: tuple[float, float],
    waited_s: float,
    width: float,
) -> None:
    """Draw `bars`, which are alike, as one, with the tick at its least time if it is known.

    `edges` are its top and its bottom, and `waited_s` is how long the step waited for it.
    """
    bar, (top, bottom) = bars[0], edges
    start_s, end_s = min(one.start_s for one in bars), max(one.end_s for one in bars)
    look = svg.PHASES[bar.phase]
    pale = {"alpha": PALE} if bar.step else {}
    box = _box(axes, (start_s, end_s), edges, facecolor=look.fill, **pale)
    names = (f"joint {bar.phase}",) * bar.joint + (bar.phase.value, look.short)
    ink = svg.FOREGROUND if bar.step else look.ink
    _write(axes, names, (start_s, end_s), (top + bottom + 1 - ROW) / 2, width, ink)
    devices = ", ".join(str(one.device) for one in bars)
    place = f"devices {devices}" if len(bars) > 1 else _place(bar.device)
    on_path = f"; critical for {words.time(waited_s)}" if waited_s else ""
    floor_s = _floor(lanes, bar)
    least = f"; it needs {words.time(floor_s)} at least" if floor_s else ""
    extent = _extent(start_s, end_s, lanes.seconds)
    marks.explain(box, f"{_named(bar)} on {place}: {extent}{on_path}{least}")
    if floor_s:
        at_ms = (start_s + floor_s) * 1e3
        axes.plot([at_ms, at_ms], [top - 1, top + 3], color=svg.FOREGROUND, linewidth=1.6)


def _drawn(bars: Iterable[Bar]) -> Iterator[Sequence[Bar]]:
    """Yield the bars that are drawn as one: a bar, or those of one joint operation.

    A joint operation has one bar on each of its devices, and they overlap.
    """
    alike = grouped(((bar.phase, bar.step) if bar.joint else bar, bar) for bar in bars)
    for group in alike.values():
        operation: dict[int, Bar] = {}
        for bar in sorted(group, key=lambda bar: bar.start_s):
            ended = bool(operation) and bar.start_s >= max(b.end_s for b in operation.values())
            if ended or bar.device in operation:
                yield [*operation.values()]
                operation = {}
            operation[bar.device] = bar
        yield [*operation.values()]


def _floor(lanes: Lanes, bar: Bar) -> float:
    """Return the least seconds of a bar; 0 if unknown, or for one of several bars.

    A floor above the bar's length is none; see `Row.least`.
    """
    place = bar.phase, bar.device
    alike = [one for one in _bars_of_step(lanes) if (one.phase, one.device) == place]
    alone = len(alike) == 1 and not bar.step and not bar.joint
    floor_s = lanes.floors.get(place, 0.0) if alone else 0.0
    return floor_s if floor_s <= bar.end_s - bar.start_s else 0.0


def _waits(path: Sequence[PathSegment], begin_s: float, end_s: float) -> str:
    """Return what the step waits for in most of an interval, after a comma.

    "" if the interval is not within the step.
    """
    within = summed(
        (_cause(part.bar), overlap_s)
        for part in path
        if (overlap_s := min(part.end_s, end_s) - max(part.start_s, begin_s)) > 0
    )
    return f", {max(within, key=lambda cause: within[cause])}" if within else ""


def _cause(bar: Bar | None) -> str:
    if bar is None:
        return "while no phase is open anywhere"
    if bar.phase is Phase.DATA:
        return "waiting for data"
    return f"waiting for {bar.phase} on {_place(bar.device)}"


def trace(report: Report) -> list[dict[str, object]]:
    """Return one step of each row as events of the Trace Event Format: a process for each row."""
    events: list[dict[str, object]] = []
    drawn = [(row, lanes) for row in report.rows if (lanes := report.lanes_of(row))]
    for pid, (drawn_row, timeline) in enumerate(drawn, 1):
        label = " ".join(filter(None, [drawn_row.label, f"({timeline.source})", drawn_row.run]))
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": label}})
        tid = 0
        for lane in timeline.lanes:
            for row in range(lane.rows):
                tid += 1
                thread = {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid}
                events.append({**thread, "args": {"name": _place(lane.device)}})
                events += [
                    {
                        "ph": "X",
                        "name": _named(bar),
                        "pid": pid,
                        "tid": tid,
                        "ts": round(bar.start_s * 1e6, 3),
                        "dur": round((bar.end_s - bar.start_s) * 1e6, 3),
                    }
                    for bar in lane.bars
                    if bar.row == row
                ]
    return events


def _named(bar: Bar) -> str:
    phase = f"joint {bar.phase}" if bar.joint else bar.phase.value
    if not bar.step:
        return phase
    away = abs(bar.step)
    steps = "the step" if away == 1 else words.count(away, "step")
    return f"{phase} of {steps} {'before' if bar.step < 0 else 'after'}"


def _short(device: int) -> str:
    return f"dev {device}" if device >= 0 else _place(device)


def _place(device: int) -> str:
    if device >= 0:
        return f"device {device}"
    return "host" if device == HOST else f"host {HOST - device + 1}"


def _extent(start_s: float, end_s: float, step_s: float) -> str:
    took = end_s - start_s
    return (
        f"{words.time(took)} from {words.time(start_s)} on, {words.percent(took / step_s)} of the"
        " step"
    )


def _box(
    axes: Axes, interval: tuple[float, float], edges: tuple[float, float], **look: Any
) -> Rectangle:
    """Draw and return a box: `interval` is in seconds, and `edges` are its top and its bottom."""
    start, end = interval
    top, bottom = edges
    return svg.bar(
        axes, (start * 1e3, (end - start) * 1e3), (top, bottom - top), linewidth=0, **look
    )


def _write(
    axes: Axes,
    texts: Sequence[str],
    interval: tuple[float, float],
    y: float,
    width: float,
    ink: str,
) -> None:
    start, end = (seconds * 1e3 for seconds in interval)
    room = svg.room(end - start, width, LEFT)
    if text := next((text for text in texts if len(text) <= room), ""):
        axes.text((start + end) / 2, y + 11, text, ha="center", color=ink, fontsize=svg.SMALL)


def _outline(
    axes: Axes, path: Sequence[PathSegment], places: Mapping[Bar, tuple[float, float]]
) -> None:
    """Draw the critical path: an outline around each stretch, and lines where it changes lanes.

    `places` has the top and the bottom of each bar that is drawn.
    """
    boxes = [(part, *places[part.bar]) for part in path if part.bar and part.bar in places]
    outline = [corner for part, top, bottom in boxes for corner in _corners(part, top, bottom)]
    for (before, top, bottom), (after, next_top, next_bottom) in pairwise(boxes):
        if before.end_s == after.start_s and (bottom < next_top or next_bottom < top):
            x = after.start_s * 1e3
            ends = (bottom, next_top) if bottom < next_top else (top, next_bottom)
            outline += [(Path.MOVETO, (x, ends[0])), (Path.LINETO, (x, ends[1]))]
    if outline:
        codes, points = zip(*outline, strict=True)
        axes.add_patch(
            PathPatch(
                Path(points, codes),
                facecolor="none",
                edgecolor=svg.FOREGROUND,
                linewidth=1.3,
                joinstyle="miter",
                zorder=3,
            )
        )


def _corners(part: PathSegment, top: float, bottom: float) -> list[tuple[Any, tuple[float, float]]]:
    left, right = part.start_s * 1e3, part.end_s * 1e3
    corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
    return list(zip([Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY], corners, strict=True))


def _caption(facet: small_multiples.Facet, timelines: Sequence[Lanes]) -> str:
    sentences = []
    for name, lanes in zip(facet.names, timelines, strict=True):
        clauses = [_idle(lanes)]
        if left_out := len(lanes.lanes) - len(_shown(lanes)):
            clauses.append(
                f"{left_out} of its devices {words.verb(left_out, 'is', 'are')} not drawn"
            )
        if joint := sorted({bar.phase for bar in _bars_of_step(lanes) if bar.joint}):
            clauses.append(
                f"{words.verb(len(joint), 'its joint phase', 'its joint phases')}"
                f" ({', '.join(joint)}) {words.verb(len(joint), 'is', 'are')} one operation for all"
                " devices; the bars do not show when each device works"
            )
        if any(clauses):
            sentences.append(f"{name}: {'; '.join(filter(None, clauses))}.")
    named = zip(facet.names, facet.rows, strict=True)
    doubtful = [(name, row.step) for name, row in named if row.doubt]
    if doubtful:
        names, steps = zip(*doubtful, strict=True)
        these = words.verb(len(names), "this case", "these cases")
        few = words.withheld(*steps)
        sentences.append(f"There are {few} to compare {these} with others: {', '.join(names)}.")
    return " ".join(sentences)


def _shown(timeline: Lanes) -> Sequence[Lane]:
    return [lane for lane in timeline.lanes if lane.device < DEVICES]


def _idle(timeline: Lanes) -> str:
    first = [lane.idle_share for lane in timeline.lanes if lane.device == 0]
    rest = [lane.idle_share for lane in timeline.lanes if lane.device > 0]
    if not first or not rest:
        return ""
    others = "device 1" if len(rest) == 1 else "the others"
    return f"idle: device 0 {words.percent(first[0])}, {others} {_range(rest)}"


def _stretch(bar: Bar | None) -> str:
    return f"{_named(bar)} on {_place(bar.device)}" if bar else UNATTRIBUTED


def _description(timeline: Lanes) -> str:
    lanes = []
    for lane in _shown(timeline):
        total = summed((_named(bar), bar.end_s - bar.start_s) for bar in lane.bars)
        parts = [f"{phase} {words.time(seconds)}" for phase, seconds in total.items()]
        lanes.append(
            f"{_place(lane.device)}: {', '.join([*parts, f'idle {words.time(lane.idle_s)}'])}"
        )
    path = summed((_stretch(part.bar), part.end_s - part.start_s) for part in timeline.path)
    critical = ", ".join(f"{name} {words.time(seconds)}" for name, seconds in path.items())
    place = f"step {timeline.step} of {naming.unit(timeline.case)} {timeline.round + 1}"
    count = words.count(timeline.timed, "timed step")
    measured = f"{place}, closest to the medians of its {count}"
    which = measured if timeline.source.timed else "predicted"
    return (
        f"a step of {words.time(timeline.seconds)}, {which}. {'. '.join(lanes)}. Critical path:"
        f" {critical}."
    )
