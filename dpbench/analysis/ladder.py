"""Ladder: compute the gain of each rung over the rung below, and of each switch over the same schedule without it.

Each comparison changes one switch; the rung `graphs` also resets `reduce`. A comparison uses the rounds that both
sides have.
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
"""The least number of measured rungs that make a ladder."""


@dataclass(frozen=True, kw_only=True)
class RungGain:
    """The gain of the schedule `name` over the schedule `over`: the speed ratio and the seconds saved per step.

    `phase` is the phase that changed most. `phase_s` is its change in seconds per step; it is negative if the phase
    became shorter.
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

    `change` is the gain of this rung over the nearest lower rung that was measured and does not use CUDA graphs. It is
    None for the lowest rung. `over_ddp` is the ratio of DDP's step time to the rung's step time.
    """

    name: str
    row: Row
    change: RungGain | None = None
    over_ddp: Estimate | None = None

    @property
    def step(self) -> Estimate:
        """Return the median step; every rung has one."""
        assert self.row.step is not None
        return self.row.step


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """The rungs of one model at one batch size and device count, in ladder order.

    `fastest` is the rung with the shortest median step among those verified without a tolerance, and `whole` is its
    gain over the lowest rung. `ablations` has, for each switch of the schedule `base`, the gain of `base` over the same
    schedule with that switch set back to its first position. `fixed` names the switches of `base` without an ablation,
    each with the reason. `limit` is the row of `single` on one device's share of the batch. `lost` has the rows of
    schedules without a result.
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
        """Return the largest gain among the exact rungs with the verdict "faster"; None if there is no such rung."""
        exact = [rung.change for rung in self.rungs if rung.change and schedule.RUNGS[rung.name].exact]
        faster = [change for change in exact if change.verdict == "faster"]
        return max(faster, key=lambda change: change.ratio.value, default=None)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Return all rows that the ladder's figure and tables use: the rungs, then single, DDP and the limit."""
        return (*(rung.row for rung in self.rungs), *filter(None, (self.single, self.ddp, self.limit)))


def ladders(rows: Iterable[Row]) -> list[Ladder]:
    """Return a ladder for each model, device count and batch size with at least three measured rungs."""
    table = {(row.case, row.source): row for row in rows}
    groups: dict[tuple[Case, Source], dict[str, Row]] = {}
    for (case, source), row in table.items():
        if case.traits.scheduled and case.devices > 1:
            groups.setdefault((replace(case, schedule=""), source), {})[case.schedule] = row
    found = []
    for (case, source), schedules in groups.items():
        steps = {name: row for name, row in schedules.items() if row.step and row.series}
        if len(steps.keys() & schedule.RUNGS.keys()) >= ENOUGH:
            rivals = {other: row for (other, whose), row in table.items() if whose is source and row.series}
            lost = tuple(row for row in schedules.values() if not row.step)
            found.append(_ladder(case, steps, rivals, lost))
    return found


def _ladder(case: Case, steps: Mapping[str, Row], rivals: Mapping[Case, Row], lost: tuple[Row, ...]) -> Ladder:
    """Return the ladder of the schedules in `steps`, which were measured on equal work."""
    limit = plan.limit(case)
    # emulated devices show host cost only: their step cannot be compared with DDP's
    ddp = rivals.get(replace(case, strategy=registry.of_role(Role.CONTROL))) if case.device_kind != "emulated" else None
    rungs = tuple(_climb(steps, ddp))
    base, ablations, fixed = _ablated(steps, plan.conditions(case.device_kind))
    # about a dozen gains are read together: correct their verdicts for multiple comparisons
    climbed = iter(_together([rung.change for rung in rungs if rung.change]))
    rungs = tuple(replace(rung, change=next(climbed)) if rung.change else rung for rung in rungs)
    ablations = tuple(_together(ablations))
    fastest = _fastest(rungs)
    return Ladder(
        case=case, rungs=rungs, fastest=fastest, base=base, ablations=ablations, fixed=fixed, ddp=ddp, lost=lost,
        whole=_change(fastest.name, rungs[0].row, fastest.row, over=rungs[0].name),
        single=rivals.get(plan.alone(case, case.batch_size)),
        limit=(rivals.get(limit) or rivals.get(replace(limit, options=()))) if limit else None,
    )  # fmt: skip


def _together(changes: Sequence[RungGain]) -> list[RungGain]:
    """Return the gains with verdicts corrected for multiple comparisons."""
    found = stats.verdicts([change.ratio for change in changes])
    return [replace(change, verdict=verdict) for change, verdict in zip(changes, found, strict=True)]


def _climb(steps: Mapping[str, Row], ddp: Row | None) -> Iterator[Rung]:
    """Yield the measured rungs, each with its gain over the nearest lower one that does not use CUDA graphs."""
    below = ""
    for name in (name for name in schedule.RUNGS if name in steps):
        row = steps[name]
        change = _change(name, steps[below], row, over=below) if below else None
        yield Rung(name=name, row=row, change=change, over_ddp=stats.ratio(ddp.series, row.series) if ddp else None)
        if schedule.RUNGS[name].graphs == "off":
            below = name


def _fastest(rungs: Sequence[Rung]) -> Rung:
    exact = [rung for rung in rungs if schedule.RUNGS[rung.name].exact]
    return min(exact or rungs, key=lambda rung: (rung.step.doubt is not None, rung.step.value))


def _change(name: str, before: Row, after: Row, *, over: str) -> RungGain:
    """Return the gain of `after` over `before`, from the rounds that both rows have."""
    ratio = stats.ratio(before.series, after.series)
    phases = {p: after.phases.get(p, 0.0) - before.phases.get(p, 0.0) for p in {*before.phases, *after.phases}}
    phase = max(sorted(phases), key=lambda p: abs(phases[p]), default="")
    return RungGain(
        name=name, over=over, ratio=ratio, gain_s=stats.difference(before.series, after.series),
        verdict=stats.verdict(ratio), phase=phase, phase_s=phases.get(phase, 0.0),
    )  # fmt: skip


def _ablated(steps: Mapping[str, Row], conditions: Sequence[str]) -> tuple[str, tuple[RungGain, ...], tuple[str, ...]]:
    """Return the schedule with the most ablations, its gain over each, and why its other switches have no ablation.

    A rung is often also an ablation of another rung. Therefore only ablations that are not rungs themselves count when
    the schedule is chosen. If no schedule has such ablations, return ("", (), ()).
    """
    found: dict[str, dict[str, str]] = {}
    for text in steps.keys() - {schedule.FASTEST}:
        back = schedule.ablations(schedule.parse(text), *conditions)
        found[text] = {switch: str(one) for switch, one in back.items() if str(one) in steps}
    own = {text: sum(one not in schedule.RUNGS for one in ones.values()) for text, ones in found.items()}
    base = max(sorted(own), key=lambda text: own[text])
    if not own[base]:
        return "", (), ()
    changes = (_change(switch, steps[one], steps[base], over=one) for switch, one in found[base].items())
    best, fixed = schedule.parse(base), []
    for switch in best.turned().keys() - found[base].keys():
        missing = replace(best, **{switch: schedule.SWITCHES[switch][0]}).missing(*conditions)
        fixed.append(f"{switch}: {'; '.join(missing) or 'not measured'}")
    return base, tuple(changes), tuple(sorted(fixed))


def notable(rows: Sequence[Row], found: Sequence[Ladder]) -> list[Row]:
    """Return the rows, without limits, and with only the notable schedules of each ladder.

    The notable schedules are the reference, the fastest rung and the schedule that TrainStep chose.
    """
    kept = {schedule.REFERENCE, schedule.FASTEST, *(ladder.fastest.name for ladder in found)}
    climbed = {_setting(ladder.case) for ladder in found}
    return [
        row
        for row in rows
        if row.case.options != plan.LIMIT
        and (not row.case.traits.scheduled or row.case.schedule in kept or _setting(row.case) not in climbed)
    ]


def _setting(case: Case) -> Case:
    """Return the case after a reset of every field that may differ between the ladders of one model."""
    return replace(case, schedule="", devices=1, batch_size=1, placement="spread")


def short(text: str) -> str:
    """Return a short name of the schedule `text`: a rung's name, or the nearest rung and the switches that differ.

    `text` is returned unchanged if it cannot be parsed, or if such a name would not list fewer switches.
    """
    try:
        mine = schedule.parse(text)
    except ValueError:
        return text
    if str(mine) in schedule.RUNGS:
        return str(mine)
    differ = {
        rung: [s for s in schedule.SWITCHES if getattr(mine, s) != getattr(other, s)]
        for rung, other in schedule.RUNGS.items()
        if other.graphs == mine.graphs
    }
    nearest = min(reversed(differ), key=lambda rung: len(differ[rung]))
    if len(differ[nearest]) >= len(mine.turned()):
        return text
    return f"{nearest} but {','.join(f'{switch}={getattr(mine, switch)}' for switch in differ[nearest])}"


def label(case: Case) -> str:
    """Return a one-line label of a case, with its schedule shortened."""
    return replace(case, schedule=short(case.schedule)).label
