"""Loaders: a sweep of a DataLoader as one HTML file that needs neither a network nor scripts to be read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from dpbench.analysis.loaders import Curve, Least, LoaderResult, Shape
from dpbench.records import words
from dpbench.records.registry import Role
from dpbench.records.trial import Estimate
from dpbench.report import naming, svg

COLOURS = (svg.ROLES[Role.ENGINE], svg.ROLES[Role.CONTROL], svg.ROLES[Role.WRAPPER], *svg.OTHERS)
COLUMNS = (
    "setting", "examples/s", "of best", "ms/batch", "first batch, ms", "next epoch, ms", "step / batch", "bound",
    "failure",
)  # fmt: skip


def render(curves: Sequence[Curve], step: Estimate | None, verdict: Sequence[str], facts: str) -> str:
    """Return the page as HTML. `facts` is one paragraph of text.

    `step` is the time in seconds of the training step that the DataLoader feeds; None if no step is compared.
    """
    jinja = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return jinja.get_template("loaders.html").render(
        verdict=verdict, facts=facts, drawing=Markup(draw(curves, step)), columns=COLUMNS, lines=lines(curves),
        intervals=words.INTERVALS,
    )  # fmt: skip


def lines(curves: Sequence[Curve]) -> list[tuple[str, ...]]:
    """Return one line of text cells per setting, in the order of `COLUMNS`."""
    points = dict.fromkeys(point for one in curves for point in one.points)
    return [_cells(point) for point in points]


def _cells(point: LoaderResult) -> tuple[str, ...]:
    seconds = [_shown(one, 1e3) for one in (point.batch, point.first, point.next_epoch)]
    bound = point.bound.value if point.demand else ""
    reason = point.reason.partition("\n")[0]
    return (
        str(point.setting),
        _shown(point.rate),
        _shown(point.of_best),
        *seconds,
        _shown(point.demand),
        bound,
        reason,
    )


def _shown(estimate: Estimate | None, scale: float = 1.0) -> str:
    """Return an estimate and its interval as text, or an empty text for None."""
    if estimate is None:
        return ""
    if estimate.doubt:
        return words.withheld(estimate)
    return f"{words.number(estimate.value * scale)} ({words.interval(estimate, scale)})"


@svg.theme()
def draw(curves: Sequence[Curve], step: Estimate | None) -> str:
    """Return a plot of the rate over the number of workers as SVG, with each knee, and the rate that the step needs."""
    bottom = svg.below(len(curves) + sum(one.shape is Shape.KNEE for one in curves) + (step is not None))
    figure, axes = svg.canvas(234 + bottom, left=44, bottom=bottom, top=26)
    axes.text(0, 1.035, "examples per second", transform=axes.transAxes, fontsize=svg.SMALL)
    axes.set(xlabel="workers")
    axes.grid()
    rates = [rate for one in curves for _, rate in _drawable(one)]
    needed = [curves[0].points[0].batch_size / step.value] if step else []
    end = max([svg.extent(rates) if rates else 1.0, *needed])
    colours = _colours(len(curves))
    keys = [key for one, colour in zip(curves, colours, strict=True) for key in _curve(axes, one, colour, end)]
    if step:
        keys.append(_demand(axes, curves[0].points[0].batch_size, step))
    axes.set_ylim(0, end * 1.06)
    axes.set_xticks(sorted({count for one in curves for count in one.counts}))
    svg.amounts(axes.yaxis, 6)
    svg.legend(figure, keys, 1)
    said = "; ".join(str(key.get_label()) for key in keys)
    return svg.render(figure, key="loaders", title="Examples per second over workers", description=said)


def _colours(count: int) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(count)]


def _drawable(one: Curve) -> list[tuple[int, Estimate]]:
    """Return the points of a curve that may be drawn, as pairs of a number of workers and a rate."""
    return [(p.setting.workers, p.rate) for p in one.points if p.rate and naming.drawable(p.rate)]


def _curve(axes: Axes, one: Curve, colour: str, end: float) -> list[Line2D]:
    """Draw one curve and its knee, with intervals cut at the `end` of the axis; return their legend handles."""
    name = naming.clip(one.family or "DataLoader", svg.COLUMNS - 4)
    shown = _drawable(one)
    axes.plot(
        [count for count, _ in shown], [e.value for _, e in shown], "o-", color=colour, markersize=6, linewidth=1.8
    )
    for count, e in shown:
        svg.whisker(axes, count, e.value, (e.low, e.high), end, upright=True, colour=colour)
    line = Line2D([], [], color=colour, marker="o", markersize=6, linewidth=1.8, label=name)
    return [line, _knee(axes, one.knee, colour)] if one.shape is Shape.KNEE else [line]


def _knee(axes: Axes, knee: Least, colour: str) -> Line2D:
    """Draw the knee as a vertical line, with its interval as a band; return the line."""
    assert knee.workers is not None
    axes.axvspan(knee.possible[0], knee.possible[-1], color=colour, alpha=0.15, linewidth=0)
    label = f"knee: {knee.workers} (95 %: {', '.join(map(str, knee.possible))})"
    return axes.axvline(knee.workers, color=colour, linewidth=1.6, dashes=(4, 3), label=label)


def _demand(axes: Axes, batch_size: int, step: Estimate) -> Line2D:
    """Draw the rate that the step needs as a horizontal line, with its interval as a band; return the line."""
    colour, rate = svg.ROLES[Role.BASELINE], batch_size / step.value
    axes.axhspan(batch_size / step.high, batch_size / step.low, color=colour, alpha=0.15, linewidth=0)
    label = f"the step needs {words.number(rate)} examples/s"
    return axes.axhline(rate, color=colour, linewidth=1.6, dashes=(8, 3), label=label)
