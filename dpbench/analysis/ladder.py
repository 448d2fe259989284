"""Ladder: compute the gain of each rung over the rung below, and the gain from each switch of a
schedule.

Each comparison changes one switch of a schedule. A comparison
uses the rounds in which both schedules were measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dpbench.analysis import stats
from dpbench.records import Case, Source, plan, registry, schedule
from dpbench.records.registry import Role
from dpbench.records.trial import Estimate

if TYPE_CHECKING:
    from dpbench.analysis.summary import Row

ENOUGH = 3
"""The least number of measured rungs for which a ladder is computed."""


@dataclass(frozen=True, kw_only=True)
class RungGain:
    """The gain of one rung over a lower rung, or of one switch over the same schedule with this
    switch set back.

    `name` is the rung or the switch, and `over` is the other schedule. `ratio` is the speed ratio,
    above 1 if the rung or switch makes steps faster. `gain_s` is the time saved in seconds per
    step. `phase` is the phase whose time changed most; `phase_s` is the change in seconds per step,
    negative if the phase became shorter.
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
    """One measured rung.

    `change` is the gain of this rung over the nearest lower rung that was measured. It is None for
    the lowest rung. `over_ddp` is the ratio of DDP's step time to the rung's step time; it is None
    if DDP was not measured, or if the devices are emulated.
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

    `fastest` is the rung with the shortest median step among those verified without a tolerance,
    and `whole` is its gain over the lowest rung. `ablations` has, for each switch of the schedule
    `base`, the gain of `base` over the same schedule with that switch set back to its first
    position. `fixed` names the switches of `base` without a measured ablation, each with the
    reason. `single` and `ddp` are the rows of these strategies on the same work. `limit` is the row
    of `single` on one device's share of the batch. These rows are None if they were not measured.
    `lost` has the rows of schedules without a result.
    """

    case: Case
    rungs: tuple[Rung, ...]
    fastest: Rung
    whole: RungGain
    base: str = ""
    ablations: tuple[RungGain, ...] = ()
    fixed: tuple[str, ...] = ()
    single: Row | None = None
    ddp: Row | None = None
    limit: Row | None = None
    lost: tuple[Row, ...] = ()

    @property
    def biggest(self) -> RungGain | None:
        """Return the largest gain of a rung over the rung below.

        None if no gain has the verdict "faster".
        """
        faster = [
            rung.change for rung in self.rungs if rung.change and rung.change.verdict == "faster"
        ]
        return max(faster, key=lambda change: change.ratio.value, default=None)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Return the rows in the ladder's figure and tables: the rungs, then `single`, DDP and the
        limit if known.
        """
        return (
            *(rung.row for rung in self.rungs),
            *filter(None, (self.single, self.ddp, self.limit)),
        )


def ladders(rows: Iterable[Row]) -> list[Ladder]:
    """Return one ladder for each model, device count and batch size that has at least three
    measured rungs.
    """
    table = {(row.case, row.source): row for row in rows}
    groups: dict[tuple[Case, Source], dict[str, Row]] = {}
    for (case, source), row in table.items():
        if case.traits.scheduled and case.devices > 1:
            groups.setdefault((replace(case, schedule=""), source), {})[case.schedule] = row
    found = []
    for (case, source), schedules in groups.items():
        steps = {name: row for name, row in schedules.items() if row.step and row.series}
        if len(steps.keys() & schedule.RUNGS.keys()) >= ENOUGH:
            rivals = {
                other: row
                for (other, whose), row in table.items()
                if whose is source and row.series
            }
            lost = tuple(row for row in schedules.values() if not row.step)
            found.append(_ladder(case, steps, rivals, lost))
    return found


def _ladder(
    case: Case, steps: Mapping[str, Row], rivals: Mapping[Case, Row], lost: tuple[Row, ...]
) -> Ladder:
    """Return the ladder of the schedules in `steps`, which maps schedules measured on equal work to
    their rows.

    `case` is their case without a schedule. `rivals` has the rows of all measured cases. `lost` has
    the rows of the schedules without a result.
    """
    limit = plan.limit(case)
    # emulated devices show host cost only: their step cannot be compared with DDP's
    ddp = (
        rivals.get(replace(case, strategy=registry.of_role(Role.CONTROL)))
        if case.device_kind != "emulated"
        else None
    )
    names = [name for name in schedule.RUNGS if name in steps]
    level = stats.together(len(names) - 1)  # about a dozen gains are read together
    rungs = tuple(_climb({name: steps[name] for name in names}, ddp, level))
    base, ablations, fixed = _ablated(steps)
    fastest = min(rungs, key=lambda rung: (rung.step.doubt is not None, rung.step.value))
    return Ladder(
        case=case,
        rungs=rungs,
        fastest=fastest,
        base=base,
        ablations=ablations,
        fixed=fixed,
        ddp=ddp,
        lost=lost,
        whole=_change(fastest.name, rungs[0].row, fastest.row, over=rungs[0].name, level=level),
        single=rivals.get(plan.alone(case, case.batch_size)),
        limit=(rivals.get(limit) or rivals.get(replace(limit, options=()))) if limit else None,
    )


def _climb(steps: Mapping[str, Row], ddp: Row | None, level: float) -> Iterator[Rung]:
    """Yield the measured rungs in ladder order, each with its gain over the nearest lower rung.

    `steps` maps the measured rungs, in this order, to their rows. `ddp` is the row of DDP, None
    without a comparison to DDP. `level` is the level of the intervals.
    """
    below = ""
    for name, row in steps.items():
        change = _change(name, steps[below], row, over=below, level=level) if below else None
        over_ddp = stats.ratio(ddp.series, row.series, level=level) if ddp else None
        yield Rung(name=name, row=row, change=change, over_ddp=over_ddp)
        below = name


def _change(name: str, before: Row, after: Row, *, over: str, level: float) -> RungGain:
    """Return the gain of `after` over `before`, from the rounds in which both were measured.

    `name` and `over` become the fields of the result with the same names. `level` is the level of
    the intervals.
    """
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


def _ablated(steps: Mapping[str, Row]) -> tuple[str, tuple[RungGain, ...], tuple[str, ...]]:
    """Return the schedule with the most measured ablations, its gain over each, and its switches
    without an ablation.

    An ablation is the schedule with one switch set back to its first position. Each switch without
    a measured ablation is given with the reason. `steps` maps measured schedules to their rows. A
    rung is often also an ablation of another rung. Therefore only ablations that are not rungs
    count when the schedule is chosen. If no schedule has such ablations, return ("", (), ()).
    """
    found: dict[str, dict[str, str]] = {}
    for text in sorted(steps):
        if (mine := schedule.known(text)) is None:
            continue
        back = schedule.ablations(mine)
        found[text] = {switch: str(one) for switch, one in back.items() if str(one) in steps}
    own = {
        text: sum(one not in schedule.RUNGS for one in ones.values())
        for text, ones in found.items()
    }
    base = max(own, key=lambda text: own[text])
    if not own[base]:
        return "", (), ()
    level = stats.together(len(found[base]))
    changes = (
        _change(switch, steps[one], steps[base], over=one, level=level)
        for switch, one in found[base].items()
    )
    best, fixed = schedule.parse(base), []
    for switch in best.turned().keys() - found[base].keys():
        missing = replace(best, **{switch: schedule.SWITCHES[switch][0]}).missing()
        fixed.append(f"{switch}: {'; '.join(missing) or 'not measured'}")
    return base, tuple(changes), tuple(sorted(fixed))


def notable(rows: Sequence[Row], found: Sequence[Ladder]) -> list[Row]:
    """Return the rows for a short overview, without most schedules of each ladder and without the
    ladders' limits.

    Of each ladder in `found`, only these are kept: the reference, the fastest rung, the schedule
    that TrainStep chose, and schedules that only another version of dpbench has. The limit of a
    ladder is the row of `single` on one device's share of the batch.
    """
    kept = {schedule.REFERENCE, *(ladder.fastest.name for ladder in found)}
    climbed = {_setting(ladder.case) for ladder in found}
    return [
        row
        for row in rows
        if row.case.options != plan.LIMIT
        and (
            not row.case.traits.scheduled
            or row.case.schedule in kept
            or schedule.known(row.case.schedule) is None  # neither a rung nor an ablation
            or _setting(row.case) not in climbed
        )
    ]


def _setting(case: Case) -> Case:
    """Return a case that is equal for all ladders of one model: schedule, devices, batch and
    placement are reset.
    """
    return replace(case, schedule="", devices=1, batch_size=1, placement="spread")


def short(text: str) -> str:
    """Return a short name of the schedule `text`: a rung's name, or the nearest rung and the
    switches that differ.

    Return `text` unchanged if it cannot be parsed, or if such a name would not list fewer switches
    than `text`.
    """
    mine = schedule.known(text)
    if mine is None:
        return text
    if str(mine) in schedule.RUNGS:
        return str(mine)
    differ = {
        rung: [s for s in schedule.SWITCHES if getattr(mine, s) != getattr(other, s)]
        for rung, other in schedule.RUNGS.items()
    }
    nearest = min(reversed(differ), key=lambda rung: len(differ[rung]))
    if len(differ[nearest]) >= len(mine.turned()):
        return text
    return (
        f"{nearest} but"
        f" {','.join(f'{switch}={getattr(mine, switch)}' for switch in differ[nearest])}"
    )


def label(case: Case) -> str:
    """Return a one-line label of a case, with its schedule shortened."""
    return replace(case, schedule=short(case.schedule)).label
