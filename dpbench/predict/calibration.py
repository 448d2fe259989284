"""Calibration: the improvement of predictions if some steps on the machine are measured.

A row is one published measurement. The host factor and the bus bandwidth are fitted to the rows of some models on a
machine. The rows of the other models on that machine are then predicted: with DataParallel, each model from all others;
with DDP, all models from a single one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from dpbench.predict import quick
from dpbench.predict.constants import Constants
from dpbench.predict.scoring import rows
from dpbench.predict.scoring.published import NAMED, Matched
from dpbench.predict.scoring.score import Scored, ScoreLine, line

HOSTS = tuple(0.6 * 1.12**k for k in range(10))
"""The host factors of the grid, as ratios to the factor of published runs."""
BUSES = tuple(0.12 * 1.25**k for k in range(16))
"""The bus bandwidths of the grid, as ratios to the bandwidths of the described machine."""
FEW = 3
"""The least number of models on a machine for a leave-one-out fit."""

DOUBT = 0.002
"""The penalty per unit of a factor's absolute logarithm: a factor that the rows do not depend on stays at 1."""

Point = tuple[float, float]


def lines(matched: Sequence[Matched]) -> list[ScoreLine]:
    """Return scoreboard lines for each group of rows, predicted after a calibration on other models of the machine."""
    found = []
    for group in dict.fromkeys(one.row.group for one in matched):
        mine = [one for one in matched if one.row.group == group]
        for strategy, kinds in (("dp, other models", ("dp",)), ("one model, for the others", ("ddp",))):
            of_kind = [one for one in mine if NAMED[one.row.strategy] in kinds]
            scored = list(_left_out(of_kind) if kinds == ("dp",) else _one_for_all(of_kind))
            if scored:
                found.append(line((group, strategy, of_kind[0].row.metric), scored))
    return found


def _machines(matched: Sequence[Matched]) -> list[list[Matched]]:
    """Return the rows of each machine and precision, over all device counts."""
    found: dict[tuple[str, str, str], list[Matched]] = {}
    for one in matched:
        found.setdefault((one.row.gpu, one.row.interconnect, one.row.precision), []).append(one)
    return list(found.values())


def _left_out(matched: Sequence[Matched]) -> Iterator[Scored]:
    """Yield the rows of each model, predicted with the factors that fit the other models of its machine best."""
    for machine in _machines(matched):
        models = list(dict.fromkeys(one.row.model for one in machine))
        if len(models) < FEW:
            continue
        table = {(host, bus): [_step_s(one, host, bus) for one in machine] for host in HOSTS for bus in BUSES[4:13]}
        for model in models:
            others = [i for i, one in enumerate(machine) if one.row.model != model]
            best = _best(table, machine, others)
            yield from (_scored(one, table[best][i]) for i, one in enumerate(machine) if one.row.model == model)


def _one_for_all(matched: Sequence[Matched]) -> Iterator[Scored]:
    """Yield rows, predicted with the bus bandwidth that fits one model best: the model with the largest overhead.

    The bandwidth does not depend on the precision, so rows of all precisions are joined.
    """
    machines: dict[tuple[str, str], list[Matched]] = {}
    for one in matched:
        if not one.extrapolated:
            machines.setdefault((one.row.gpu, one.row.interconnect), []).append(one)
    for machine in machines.values():
        overhead: dict[str, float] = {}
        for one in machine:
            overhead[one.row.model] = max(overhead.get(one.row.model, 0.0), one.row.step_s / one.one_s)
        if len(overhead) < 2:
            continue
        teacher = max(overhead, key=lambda model: overhead[model])
        for count in dict.fromkeys(one.row.devices for one in machine):
            here = [one for one in machine if one.row.devices == count]
            known = [i for i, one in enumerate(here) if one.row.model == teacher]
            if known:
                table = {(1.0, bus): [_step_s(one, 1.0, bus) for one in here] for bus in BUSES}
                best = _best(table, here, known)
                yield from (_scored(one, table[best][i]) for i, one in enumerate(here) if one.row.model != teacher)


def _best(table: Mapping[Point, Sequence[float]], rows_: Sequence[Matched], use: Sequence[int]) -> Point:
    """Return the point of the grid with the least mean relative error over the rows whose indexes are in `use`."""

    def missed(point: Point) -> float:
        errors = [abs(table[point][i] / rows_[i].row.step_s - 1) for i in use]
        return sum(errors) / len(errors) + DOUBT * sum(abs(math.log(factor)) for factor in point)

    return min(table, key=missed)


def _constants(one: Matched, host: float, bus: float) -> tuple[Constants, float]:
    constants, published = rows.without(one.row.group)
    return constants.changed(bus_scale=bus), host * published


def _step_s(one: Matched, host: float, bus: float) -> float:
    """Return the duration of a row's step in seconds, by formula, with scaled host factor and bus bandwidth."""
    constants, factor = _constants(one, host, bus)
    asked = rows.question(one, constants, factor)
    machine = asked.machine.machine
    seconds = quick.seconds(asked.case, asked.profile, machine, constants, phases=asked.phases, loop=asked.loop)
    alone = rows.linear_s(asked, constants)
    return (asked.scale * seconds + (asked.accumulated - 1) * alone) / asked.accumulated


def _scored(one: Matched, seconds: float) -> Scored:
    asked = rows.question(one, *_constants(one, 1.0, 1.0))
    linear = rows.linear_s(asked)
    return Scored(one, one.row.step_s, seconds, 0.0, 0.0, linear)
