"""Ladder: the gain of each rung over the rung below, from the rounds that measured both.

A rung is the place of a schedule in the ladder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from dpbench.analysis import stats, summary
from dpbench.analysis.summary import Row
from dpbench.records import Case, plan, registry
from dpbench.records.estimate import Estimate
from dpbench.records.grouping import grouped
from dpbench.records.registry import Role
from dpbench.records.schedule import Schedule, known

ENOUGH = 3
"""The least number of measured rungs for which a ladder is computed."""


@dataclass(frozen=True, kw_only=True)
class RungGain:
    """The gain of a rung over a lower one, whose schedule is `over`.

    `ratio` is the speed ratio, above 1 if steps become faster; `gain_s` is the time saved in
    seconds per step. `phase` changed most, by `phase_s` seconds per step, negative if it became
    shorter.
    """

    over: str
    ratio: Estimate
    gain_s: Estimate
    verdict: str
    phase: str
    phase_s: float


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One measured rung, with its row.

    `change` is its gain over the nearest lower measured rung, None for the lowest. `over_ddp` is
    DDP's step time over the rung's, None if DDP was not measured or the devices are emulated.
    """

    row: Row
    change: RungGain | None
    over_ddp: Estimate | None

    @property
    def name(self) -> str:
        """Return the schedule."""
        return self.row.case.schedule

    @property
    def step(self) -> Estimate:
        """Return the rung's median step time in seconds."""
        assert self.row.step is not None
        return self.row.step


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """The rungs of one model at one batch size and device count, in ladder order.

    `fastest` has the shortest median step. `ddp` is the row of this strategy on the same work, and
    `limit` that of `single` on one device's share of the batch; None if not measured. `lost` are
    the rows of schedules without a result.
    """

    case: Case
    rungs: tuple[Rung, ...]
    fastest: Rung
    ddp: Row | None
    limit: Row | None
    lost: tuple[Row, ...]


def ladders(rows: Iterable[Row], looks: int = 1) -> list[Ladder]:
    """Return one ladder for each model, device count and batch size with enough measured rungs.

    The intervals hold together at each of `looks` looks at the run; see `Trial.looks`.
    """
    table = {row.key: row for row in rows}
    groups = grouped(
        ((replace(case, schedule=""), source), row)
        for (case, source), row in table.items()
        if case.traits.scheduled and case.devices > 1
    )
    result = []
    for (case, source), group in groups.items():
        measured = [row for row in group if row.step and row.series and known(row.case.schedule)]
        if len(measured) >= ENOUGH:
            rivals = {
                other: row
                for (other, whose), row in table.items()
                if whose is source and row.series
            }
            lost = tuple(row for row in group if not row.step)
            result.append(_ladder(case, measured, rivals, lost, looks))
    return result


def _ladder(
    case: Case,
    measured: Iterable[Row],
    rivals: Mapping[Case, Row],
    lost: tuple[Row, ...],
    looks: int,
) -> Ladder:
    """Return the ladder of `measured`, the rows of schedules on equal work.

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
    climbed = sorted(measured, key=lambda row: plan.place(row.case.schedule))
    # the gains of all rungs are read together
    level = stats.joint_level((len(climbed) - 1) * looks)
    rungs = tuple(_climb(climbed, ddp, level))
    fastest = min(rungs, key=lambda rung: (rung.step.doubt is not None, rung.step.value))
    return Ladder(
        case=case,
        rungs=rungs,
        fastest=fastest,
        ddp=ddp,
        lost=lost,
        limit=(rivals.get(limit) or rivals.get(replace(limit, options=()))) if limit else None,
    )


def _climb(rows: Sequence[Row], ddp: Row | None, level: float) -> Iterator[Rung]:
    """Yield the rungs in ladder order, each with its gain over the one below."""
    for below, row in pairwise([None, *rows]):
        assert row
        yield Rung(
            row=row,
            change=_change(below, row, level) if below else None,
            over_ddp=stats.ratio(ddp.series, row.series, level=level) if ddp else None,
        )


def _change(before: Row, after: Row, level: float) -> RungGain:
    """Return the gain of `after` over `before`, from the rounds in which both were measured."""
    ratio = stats.ratio(before.series, after.series, level=level)
    phase, phase_s = summary.largest(summary.changes(before.phases, after.phases))
    return RungGain(
        over=before.case.schedule,
        ratio=ratio,
        gain_s=stats.difference(before.series, after.series, level=level),
        verdict=stats.verdict(ratio),
        phase=phase,
        phase_s=phase_s,
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
