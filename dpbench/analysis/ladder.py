"""Ladder: the gain of each rung over the rung below, from the rounds that measured both.

A rung is the place of a schedule in the ladder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dpbench.analysis import stats
from dpbench.records import Case, plan, registry
from dpbench.records.registry import Role
from dpbench.records.schedule import Schedule, known
from dpbench.records.trial import Estimate, Key

if TYPE_CHECKING:
    from dpbench.analysis.summary import Row

ENOUGH = 3
"""The least number of measured rungs for which a ladder is computed."""


@dataclass(frozen=True, kw_only=True)
class RungGain:
    """The gain of a rung over a lower one.

    `name` is the schedule, and `over` that of the lower rung. `ratio` is the speed ratio, above 1
    if steps become faster; `gain_s` is the time saved in seconds per step. `phase` changed most, by
    `phase_s` seconds per step, negative if it became shorter.
    """

    name: str
    over: str
    ratio: Estimate
    gain_s: Estimate
    verdict: str
    phase: str = ""
    phase_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One measured rung: the schedule `name` and its row.

    `change` is its gain over the nearest lower measured rung, None for the lowest. `over_ddp` is
    DDP's step time over the rung's, None if DDP was not measured or the devices are emulated.
    """

    name: str
    row: Row
    change: RungGain | None = None
    over_ddp: Estimate | None = None

    @property
    def step(self) -> Estimate:
        """Return the rung's median step time in seconds."""
        assert self.row.step is not None
        return self.row.step


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """The rungs of one model at one batch size and device count, in ladder order.

    `fastest` has the shortest median step. `single` and `ddp` are the rows of these strategies on
    the same work, and `limit` is that of `single` on one device's share of the batch; None if not
    measured. `lost` are the rows of schedules without a result.
    """

    case: Case
    rungs: tuple[Rung, ...]
    fastest: Rung
    single: Row | None = None
    ddp: Row | None = None
    limit: Row | None = None
    lost: tuple[Row, ...] = ()


def ladders(rows: Iterable[Row], looks: int = 1) -> list[Ladder]:
    """Return one ladder for each model, device count and batch size with enough measured rungs.

    The intervals hold together at each of `looks` looks at the run; see `Trial.looks`.
    """
    table = {row.key: row for row in rows}
    groups: dict[Key, dict[str, Row]] = {}
    for (case, source), row in table.items():
        if case.traits.scheduled and case.devices > 1:
            groups.setdefault((replace(case, schedule=""), source), {})[case.schedule] = row
    result = []
    for (case, source), schedules in groups.items():
        steps = {name: row for name, row in schedules.items() if row.step and row.series}
        if len(steps.keys() & {*Schedule}) >= ENOUGH:
            rivals = {
                other: row
                for (other, whose), row in table.items()
                if whose is source and row.series
            }
            lost = tuple(row for row in schedules.values() if not row.step)
            result.append(_ladder(case, steps, rivals, lost, looks))
    return result


def _ladder(
    case: Case,
    steps: Mapping[str, Row],
    rivals: Mapping[Case, Row],
    lost: tuple[Row, ...],
    looks: int,
) -> Ladder:
    """Return the ladder of `steps`, which maps schedules measured on equal work to their rows.

    `case` is theirs without a schedule. `rivals` has the rows of all measured cases, `lost` those
    of schedules without a result.
    """
    limit = plan.limit(case)
    # emulated devices show host cost only: their step cannot be compared with DDP's
    ddp = (
        rivals.get(replace(case, strategy=registry.of_role(Role.CONTROL)))
        if case.device_kind != "emulated"
        else None
    )
    names = [one.value for one in Schedule if one in steps]
    level = stats.together((len(names) - 1) * looks)  # the gains of all rungs are read together
    rungs = tuple(_climb({name: steps[name] for name in names}, ddp, level))
    fastest = min(rungs, key=lambda rung: (rung.step.doubt is not None, rung.step.value))
    return Ladder(
        case=case,
        rungs=rungs,
        fastest=fastest,
        ddp=ddp,
        lost=lost,
        single=rivals.get(plan.alone(case, case.batch_size)),
        limit=(rivals.get(limit) or rivals.get(replace(limit, options=()))) if limit else None,
    )


def _climb(steps: Mapping[str, Row], ddp: Row | None, level: float) -> Iterator[Rung]:
    """Yield the rungs in ladder order, each with its gain over the nearest lower one."""
    below = ""
    for name, row in steps.items():
        change = _change(name, steps[below], row, over=below, level=level) if below else None
        over_ddp = stats.ratio(ddp.series, row.series, level=level) if ddp else None
        yield Rung(name=name, row=row, change=change, over_ddp=over_ddp)
        below = name


def _change(name: str, before: Row, after: Row, *, over: str, level: float) -> RungGain:
    """Return the gain of `after` over `before`, from the rounds in which both were measured."""
    ratio = stats.ratio(before.series, after.series, level=level)
    phases = {
        p: after.phases.get(p, 0.0) - before.phases.get(p, 0.0)
        for p in {**before.phases, **after.phases}
    }
    phase = max(sorted(phases), key=lambda p: abs(phases[p]), default="")
    return RungGain(
        name=name,
        over=over,
        ratio=ratio,
        gain_s=stats.difference(before.series, after.series, level=level),
        verdict=stats.verdict(ratio),
        phase=phase,
        phase_s=phases.get(phase, 0.0),
    )


def notable(rows: Sequence[Row], ladders: Sequence[Ladder]) -> list[Row]:
    """Return the rows for a short overview.

    Of each ladder, only the reference, the fastest rung, the schedule that TrainStep chose, and
    schedules that only another version of dpbench has are kept.
    """
    kept = {Schedule.REFERENCE, *(ladder.fastest.name for ladder in ladders)}
    climbed = {_setting(ladder.case) for ladder in ladders}
    return [
        row
        for row in rows
        if row.case.options != plan.LIMIT
        and (
            not row.case.traits.scheduled
            or row.case.schedule in kept
            or known(row.case.schedule) is None
            or _setting(row.case) not in climbed
        )
    ]


def _setting(case: Case) -> Case:
    """Reset schedule, devices, batch and placement: equal for all ladders of one model."""
    return replace(case, schedule="", devices=1, batch_size=1, placement="spread")
