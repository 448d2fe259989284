"""Rule: the types of a diagnosis, and the context that a rule examines.

A rule compares the diagnosed case with other cases of the run. The result is evidence of a problem,
a question that the run cannot answer, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from dpbench.analysis import stats, validity
from dpbench.analysis.summary import Row, parts
from dpbench.records import Case, Phase, Source, Trial, disturbance, plan, registry
from dpbench.records.estimate import Estimate
from dpbench.records.grouping import grouped
from dpbench.records.observed import Observed
from dpbench.records.registry import Role
from dpbench.records.resources import Resources
from dpbench.records.schedule import Schedule, known
from dpbench.records.trial import by_case
from dpbench.records.work import Sizes

COMPUTE = (Phase.FORWARD.value, Phase.BACKWARD.value)
"""The phases that should become shorter with more devices."""


@dataclass(frozen=True)
class CaseContext:
    """The diagnosed case in `row`, and the run's cases with which it is compared.

    `rows` has all measured rows of the run and `trials_of` all trials by case. `machine_result` is
    what a sibling has stored on the machine.
    """

    row: Row
    rows: Mapping[Case, Row]
    trials_of: Mapping[Case, Sequence[Trial]]
    machine: Resources = field(default_factory=Resources)
    machine_result: str = ""
    _ratios: dict[Case, Estimate] = field(default_factory=dict, compare=False, repr=False)

    @property
    def trials(self) -> Sequence[Trial]:
        """Return the trials of the diagnosed case."""
        return self.trials_of.get(self.case, ())

    @property
    def case(self) -> Case:
        """Return the diagnosed case."""
        return self.row.case

    @cached_property
    def loop(self) -> Observed | None:
        """Return the facts about a user's loop; None if dpbench ran the loop itself."""
        return self.trials[-1].facts.loop if self.case.traits.judged_alone and self.trials else None

    @property
    def step_s(self) -> float:
        """Return the diagnosed case's mean step time in seconds, which phases divide."""
        assert self.row.mean is not None
        return self.row.mean.value

    @property
    def cores(self) -> int:
        """Return the number of cores that the run may use; 0 if it is unknown."""
        return self.machine.cores

    @property
    def engine(self) -> bool:
        """Return whether one process runs all devices, as in torch.nn.DataParallel."""
        return self.case.traits.threads

    @property
    def oversubscribed(self) -> bool:
        """Return whether logical CPU devices must take turns, because they outnumber the cores."""
        return validity.oversubscribed(self.case, self.cores)

    @cached_property
    def schedule(self) -> Schedule | None:
        """Return the diagnosed case's schedule; that of torch.nn.DataParallel is `reference`.

        None if TrainStep chose it, if there is none, or if another version of dpbench named it.
        """
        if self.case.traits.role is Role.WRAPPER:
            return Schedule.REFERENCE
        if not self.case.traits.scheduled:
            return None
        return known(self.case.schedule or Schedule.REFERENCE)

    @property
    def model(self) -> Sizes:
        """Return the sizes of the model; unknown from an early version."""
        return next((one.facts.model for one in self.trials if one.facts.model), Sizes())

    # -- other rows

    def other(self, **changes: object) -> Row | None:
        """Return the row of the diagnosed case with `changes`, None if not measured."""
        return self.rows.get(replace(self.case, **changes))  # type: ignore[arg-type]

    def single(self, batch: int = 0) -> Row | None:
        """Return the row of `single` (one device without a wrapper) at `batch`, None if absent.

        A `batch` of 0 means that of the diagnosed case. If need be, the row is a ladder's limit,
        which is `single` on one device's share of the ladder's batch.
        """
        alone = plan.alone(self.case, batch or self.case.batch_size)
        return self.rows.get(alone) or self.rows.get(replace(alone, options=plan.LIMIT))

    def ideal(self) -> tuple[Row, float] | None:
        """Return a one-device row and a divisor of its step time that gives perfect scaling.

        The row is on the whole batch, divided by the number of devices, or by 1 for replicas that
        share a GPU; else on one device's share of the batch, divided by 1. None if neither was
        measured, and for emulated devices, which show host cost only.
        """
        if self.case.device_kind == "emulated":
            return None
        if alone := self.single():
            return alone, 1.0 if self.case.placement == "colocated" else float(self.case.devices)
        share, rest = divmod(self.case.batch_size, self.case.devices)
        alone = None if rest else self.single(share)
        return (alone, 1.0) if alone else None

    @cached_property
    def rivals(self) -> list[Row]:
        """Return the rows of other strategies and schedules on the same work and devices."""
        setting = replace(self.case, strategy="", schedule="")
        return [
            row
            for case, row in self.rows.items()
            # a copy of every case takes long
            if (case.batch_size, case.devices) == (setting.batch_size, setting.devices)
            and case != self.case
            and replace(case, strategy="", schedule="") == setting
        ]

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Return the labels of the diagnosed case and of those compared with it."""
        others = (self.single(), self.fewer(), *self.rivals)
        found = (label for row in (self.row, *others) if row for label in row.labels)
        return tuple(dict.fromkeys(found))

    @cached_property
    def level(self) -> float:
        """Return the level at which all intervals of comparisons on the same work hold together.

        They hold together at each look of a run that stops once its answers are decided.
        """
        looks = max((trial.facts.looks for trial in self.trials), default=1)
        return stats.joint_level(len(self.rivals) * looks)

    def ratio(self, other: Row) -> Estimate:
        """Return the ratio of the diagnosed case's step time to that of another row.

        The ratio to the baseline is the inverse of the speed-up, so that findings and answers judge
        one interval.
        """
        if other.case not in self._ratios:
            speedup = self.row.speedup
            is_baseline = other.case == plan.alone(self.case, self.case.batch_size)
            self._ratios[other.case] = (
                speedup.inverse
                if speedup and is_baseline
                else stats.ratio(self.row.series, other.series, level=self.level)
            )
        return self._ratios[other.case]

    def saved(self, other: Row) -> Estimate:
        """Return the seconds per step that another case of the same work saves."""
        return stats.difference(self.row.series, other.series, level=self.level)

    def fewer(self) -> Row | None:
        """Return the row of the same case on the next smaller number of devices, at least 2.

        It has the same global batch size or, if not measured, the same batch size per device. None
        for emulated devices and for replicas that share a GPU: more of them cannot make a step
        faster.
        """
        if self.case.placement == "colocated" or self.case.device_kind == "emulated":
            return None
        for count in reversed(range(2, self.case.devices)):
            share, rest = divmod(self.case.batch_size * count, self.case.devices)
            weak = None if rest else self.other(devices=count, batch_size=share)
            if found := self.other(devices=count) or weak:
                return found
        return None

    # -- seconds

    def phase(self, *names: str) -> Estimate:
        """Return the seconds per step that the phases take together, with an interval.

        They are those of the row, which may be those of its baseline's rounds (see
        `summary.rows`).
        """
        return self.mean(lambda trial: seconds_of(trial, names)).scaled(self._in_rounds_of_baseline)

    def mean(self, of_trial: Callable[[Trial], Sequence[float]]) -> Estimate:
        """Return the mean of what `of_trial` gives for each timed step of a trial, in seconds."""
        return stats.average(self._series(self.case, of_trial))

    @property
    def _in_rounds_of_baseline(self) -> float:
        return self.step_s / stats.mean(self.row.series).value

    def share(self, *names: str) -> Estimate:
        """Return the fraction of the step that the phases take together, with an interval.

        It varies less than the seconds if a disturbance slows all phases of a step.
        """
        mine = self._series(self.case, lambda trial: seconds_of(trial, names))
        whole = self._series(self.case, lambda trial: seconds_of(trial, tuple(self.row.phases)))
        return stats.portion(mine, whole)

    def excess(self, name: str) -> Estimate | None:
        """Return the seconds per step of a phase in excess of perfect scaling, None if unknown."""
        reference = self.ideal()
        if reference is None:
            return None
        row, divisor = reference
        diagnosed = self._series(self.case, lambda trial: seconds_of(trial, [name]))
        alone = self._series(row.case, lambda trial: seconds_of(trial, [name]))
        if not diagnosed or not alone:
            return None
        found = stats.mean_difference(diagnosed, alone.scaled(1 / divisor))
        return found.scaled(self._in_rounds_of_baseline)

    def _series(self, case: Case, of_trial: Callable[[Trial], Sequence[float]]) -> stats.Timed:
        trials = [trial for trial in self.trials_of.get(case, ()) if trial.trusted and trial.timed]
        values = {trial.round: [*of_trial(trial)] for trial in trials}
        return parts(case, stats.Timed(values, *disturbance.by_round(trials)))


def seconds_of(trial: Trial, names: Sequence[str]) -> list[float]:
    """Return the seconds that these phases take together in each timed step."""
    columns = [trial.ledger.seconds[name] for name in names if name in trial.ledger.seconds]
    whole = columns[0] if len(columns) == 1 else [*map(sum, zip(*columns, strict=True))]
    return trial.by_column.timed(whole or [0.0] * len(trial.steps))


def overlap(trials: Iterable[Trial], phase: Phase) -> float | None:
    """Return the mean number of devices that run `phase` while at least one does.

    None if the trials, such as exported ones, have no spans of the phase.
    """
    found = [trial.ledger.concurrency.get(phase, (0.0, 0.0)) for trial in trials]
    apart, together = (sum(column) for column in zip(*found, strict=True)) if found else (0.0, 0.0)
    return apart / together if together else None


def contexts(
    rows: Sequence[Row],
    trials: Sequence[Trial],
    machine: Resources,
    machine_result: str = "",
) -> list[CaseContext]:
    """Return the contexts of the cases to diagnose: training steps only, which remedies change.

    They are all observed loops and, per setting, which is a case without its strategy, schedule,
    devices and batch size, the case on the most devices at each batch size: preferably that of
    torch.nn.DataParallel, or else that of the engine's lowest schedule.
    """
    measured = [
        row for row in rows if row.step and row.series and row.source.timed and row.case.trains
    ]
    # if other devices were measured too, the emulated ones only compare the engine with torch's
    # DataParallel
    measured = [row for row in measured if row.case.device_kind != "emulated"] or measured
    diagnosed = [row for row in measured if row.case.traits.judged_alone]
    several = [row for row in measured if row.case.devices > 1 and not row.case.traits.judged_alone]
    for group in grouped((_setting(row.case), row) for row in several).values():
        most = max(row.case.devices for row in group)
        batches = grouped((row.case.batch_size, row) for row in group if row.case.devices == most)
        diagnosed += [min(alike, key=_rank) for alike in batches.values()]

    rows_of = {row.case: row for row in measured}
    trials_of = by_case(trials)
    return [CaseContext(row, rows_of, trials_of, machine, machine_result) for row in diagnosed]


def _setting(case: Case) -> Case:
    """Return the case with fixed values of strategy, schedule, devices and batch size."""
    return replace(case, strategy="", schedule="", devices=1, batch_size=1)


def _rank(row: Row) -> tuple[int, tuple[int, str]]:
    """Sort torch.nn.DataParallel first, then the engine's schedules, then other strategies."""
    case = row.case
    roles = [Role.WRAPPER, Role.ENGINE]
    role = case.traits.role
    return roles.index(role) if role in roles else len(roles), plan.place(case.schedule)


SMALLEST = 0.02
"""The least cost of a finding that is shown, as a fraction of the step."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The evidence of a problem that a rule found.

    `says` is a clause that states the problem, `numbers` the figures behind it. `size_s` is its
    cost in seconds per step, None for memory or time outside the steps. If `measured`, it is the
    gain of another case; if its `source` is not timed, that of another strategy; otherwise an upper
    bound of what a remedy can save. `aside` is the problem's time outside the steps, over this time
    and all steps. `share` is the cost as a fraction of the step; None if `size_s` determines it.
    `code` and `command` apply the remedy to an observed loop.
    """

    says: str
    numbers: str
    size_s: Estimate | None
    measured: bool = False
    source: Source = Source.MEASURED
    aside: float = 0.0
    share: Estimate | None = None
    code: str = ""
    command: str = ""


@dataclass(frozen=True)
class Missing:
    """A question that a rule could not answer, and the command-line options that would."""

    what: str


Judgement = Evidence | Missing | None


@dataclass(frozen=True, kw_only=True)
class FindingRule:
    """The rule for one problem of data parallelism, and its remedy.

    `when` says in words when a case has the problem. `find` returns evidence if it has, `Missing`
    if the run lacks measurements, else None. `schedules` are those to try, the lowest first. A case
    applies the remedy if its schedule is the first of them or above it, or its strategy has one of
    the `roles`; `others` returns further such cases, on other work or devices. If `alone`, the rule
    compares the case with no other, and also judges observed loops.
    """

    key: str
    when: str
    find: Callable[[CaseContext], Judgement]
    remedy: str
    schedules: tuple[Schedule, ...] = ()
    roles: tuple[Role, ...] = ()
    others: Callable[[Case], Sequence[Case]] = lambda case: ()
    alone: bool = False

    def remedies(self, case: Case) -> list[Case]:
        """Return cases that apply the remedy: schedules, other strategies, then `others`."""
        found = [
            *remedial(case, self.schedules, self.roles),
            *map(plan.normalise, self.others(case)),
        ]
        return [one for one in found if one != case]


def remedial(case: Case, schedules: Sequence[Schedule], roles: Sequence[Role]) -> list[Case]:
    """Return the case under each of the `schedules`, and with the strategies of these roles."""
    engine = registry.of_role(Role.ENGINE)
    cases = [replace(case, strategy=engine, schedule=one.value) for one in schedules]
    cases += [
        plan.normalise(replace(case, strategy=registry.of_role(role), schedule=""))
        for role in roles
    ]
    # emulated devices belong to one process
    return [one for one in cases if not (one.device_kind == "emulated" and one.traits.ranks)]


@dataclass(frozen=True, kw_only=True)
class Cure:
    """A measured case that applies a remedy, compared with the diagnosed case.

    `ratio` is the speed ratio, above 1 if faster; `gain_s` is the time saved in seconds per step.
    """

    row: Row
    ratio: Estimate
    gain_s: Estimate
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem that a rule found in the diagnosed case.

    `share` is the cost as a fraction of the step, 0 if it costs no time. `cures` are the measured
    cases that apply the remedy, the fastest first. `code` is the Python line that applies the
    remedy, with `code_for`, what it uses; `command` measures it. Each is "" if there is none.
    """

    rule: FindingRule
    row: Row
    evidence: Evidence
    share: float
    cures: tuple[Cure, ...]
    labels: tuple[str, ...]
    code: str = ""
    code_for: str = ""
    command: str = ""

    @property
    def in_vain(self) -> bool:
        """Return whether every measured case with the remedy is decidedly slower."""
        return bool(self.cures) and all(cure.verdict == "slower" for cure in self.cures)

    @property
    def stake(self) -> float:
        """Return the cost, in or outside the steps, as a fraction of the steps; 0 for memory."""
        outside = self.evidence.aside
        return outside / (1 - outside) if 0 < outside < 1 else self.share
