"""Rule: the types of a diagnosis, and the context of the case that it examines.

A rule examines one case, together with the other cases of the run that it is compared with. It returns evidence, from
which a finding is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from dpbench.analysis import stats
from dpbench.analysis.summary import Row
from dpbench.records import Case, Phase, Source, Trial, ledger, plan, registry, schedule
from dpbench.records.registry import Role
from dpbench.records.trial import Estimate

PhaseSeconds = list[dict[str, float]]
"""For each timed step, the duration of each phase in seconds."""
COMPUTE = (Phase.FORWARD.value, Phase.BACKWARD.value)
"""The phases whose time more devices should shorten."""


@dataclass(frozen=True)
class CaseContext:
    """The row of the diagnosed case, and all rows and trials of the run by case.

    `cores` is the number of cores that the run may use, 0 for unknown.
    """

    row: Row
    rows: Mapping[Case, Row]
    trials_of: Mapping[Case, Sequence[Trial]]
    cores: int = 0

    @property
    def trials(self) -> Sequence[Trial]:
        """Return the trials of the diagnosed case."""
        return self.trials_of.get(self.case, ())

    @property
    def case(self) -> Case:
        """Return the diagnosed case."""
        return self.row.case

    @property
    def step_s(self) -> float:
        """Return the median duration of a step in seconds; every diagnosed case has one."""
        assert self.row.step is not None
        return self.row.step.value

    @property
    def engine(self) -> bool:
        """Return whether one process runs all devices, as in DataParallel."""
        return self.case.traits.threads

    @property
    def oversubscribed(self) -> bool:
        """Return whether the devices must take turns on the cores."""
        return bool(self.cores) and self.case.device_kind == "cpu" and len(self.case.rows) > self.cores

    @cached_property
    def schedule(self) -> schedule.Schedule | None:
        """Return the schedule of the case; None if TrainStep chose it or if the strategy has no schedule."""
        if self.case.traits.role is Role.WRAPPER:
            return schedule.Schedule()
        if not self.case.traits.scheduled or self.case.schedule == schedule.FASTEST:
            return None
        return schedule.parse(self.case.schedule or schedule.REFERENCE)

    @property
    def model(self) -> Mapping[str, float]:
        """Return the stored facts about the model, in counts and bytes; empty for trials of early versions."""
        return next((t.provenance["model"] for t in self.trials if t.provenance.get("model")), {})

    # -- other rows

    def other(self, **changes: object) -> Row | None:
        """Return the row of the case with these fields changed; None if that case was not measured."""
        found = self.rows.get(replace(self.case, **changes))  # type: ignore[arg-type]
        return found if found and found.step and found.series else None

    def single(self, batch: int = 0) -> Row | None:
        """Return the row of one device at the batch size `batch`, by default the case's; None if it was not measured.

        If `single` was not measured at this batch size, the row of a ladder's limit at this batch size is used.
        """
        alone = plan.alone(self.case, batch or self.case.batch_size)
        found = self.rows.get(alone) or self.rows.get(replace(alone, options=plan.LIMIT))
        return found if found and found.step and found.series else None

    def all_cores(self) -> Row | None:
        """Return the row of one device with all cores at the same batch size; None if it was not measured."""
        return self.other(strategy=registry.of_role(Role.ALL_CORES), schedule="", devices=1)

    def ideal(self) -> tuple[Row, float] | None:
        """Return a one-device row and a divisor: with perfect scaling, a step takes the row's time over the divisor.

        If one device was measured at equal global work, the divisor is the number of devices, or 1 for replicas that
        share a GPU. Otherwise the row is that of one device's share of the batch, and the divisor is 1. Return None if
        neither was measured, and for emulated devices, which show host cost only.
        """
        if self.case.device_kind == "emulated":
            return None
        if alone := self.single():
            return alone, 1.0 if self.case.placement == "colocated" else float(self.case.devices)
        share, rest = divmod(self.case.batch_size, self.case.devices)
        alone = None if rest else self.single(share)
        return (alone, 1.0) if alone else None

    def rivals(self) -> list[Row]:
        """Return the other rows that were measured on the same devices with the same work."""
        mine = replace(self.case, strategy="", schedule="")
        return [
            row
            for case, row in self.rows.items()
            if row.series and case != self.case and replace(case, strategy="", schedule="") == mine
        ]

    def fewer(self) -> Row | None:
        """Return the row with the next smaller number of devices, at least two, at equal work in total or per device.

        Return None if there is none, or if more devices cannot be faster because they share a GPU or are emulated.
        """
        if self.case.placement == "colocated" or self.case.device_kind == "emulated":
            return None
        found = []
        for count in range(2, self.case.devices):
            share, rest = divmod(self.case.batch_size * count, self.case.devices)
            same = self.other(devices=count)
            weak = None if rest else self.other(devices=count, batch_size=share)
            found += [row for row in (same or weak,) if row]
        return found[-1] if found else None

    # -- seconds

    def phase(self, *names: str) -> Estimate:
        """Return the seconds per step that the ledger charges to these phases, with an interval over the rounds."""
        value = sum(self.row.phases.get(name, 0.0) for name in names)
        return around(value, stats.median(self._series(self.case, names)))

    def excess(self, name: str) -> Estimate | None:
        """Return the seconds per step that a phase takes beyond perfect scaling; None if perfect scaling is unknown."""
        found = self.ideal()
        if found is None:
            return None
        (row, divisor), mine = found, self._series(self.case, [name])
        alone = scaled(self._series(row.case, [name]), 1 / divisor)
        value = self.row.phases.get(name, 0.0) - row.phases.get(name, 0.0) / divisor
        return around(value, stats.difference(mine, alone)) if mine and alone else None

    def _series(self, case: Case, names: Sequence[str]) -> dict[int, list[float]]:
        """Return the seconds that these phases take in each timed step of a case, by round."""
        timed = {trial.round: _timed(trial) for trial in self.trials_of.get(case, ()) if trial.trusted}
        return {
            number: [sum(phases.get(name, 0.0) for name in names) for phases in steps]
            for number, steps in timed.items()
            if steps
        }


def _timed(trial: Trial) -> PhaseSeconds:
    """Return the seconds by phase of each timed step."""
    return [phases for step, phases in zip(trial.steps, ledger.of_trial(trial), strict=True) if not step.warmup]


def around(value: float, rough: Estimate) -> Estimate:
    """Return an estimate of `value` with the interval of `rough`, extended if it does not contain the value.

    The value comes from the ledger, the interval from medians over rounds.
    """
    return replace(rough, value=value, low=min(rough.low, value), high=max(rough.high, value))


def share_of(seconds: Estimate, share: float) -> Estimate:
    """Return an estimate multiplied by a fraction, with its interval."""
    return replace(seconds, value=seconds.value * share, low=seconds.low * share, high=seconds.high * share)


def overlap(trials: Iterable[Trial], phase: Phase) -> float:
    """Return the mean number of devices that run a phase concurrently, while at least one runs it; 0 without spans."""
    found = [trial.ledger.concurrency.get(phase, (0.0, 0.0)) for trial in trials]
    apart, together = (sum(column) for column in zip(*found, strict=True)) if found else (0.0, 0.0)
    return apart / together if together else 0.0


def scaled(series: stats.Rounds, factor: float) -> dict[int, list[float]]:
    """Return a series with every value multiplied by a factor."""
    return {number: [one * factor for one in steps] for number, steps in series.items()}


def contexts(rows: Sequence[Row], trials: Sequence[Trial], cores: int) -> list[CaseContext]:
    """Return the cases to diagnose: per setting and batch size, one on the most devices, by preference DataParallel."""
    measured = [row for row in rows if row.step and row.series and row.source is Source.MEASURED]
    # beside other devices, emulated ones only compare the engine with torch's DataParallel
    measured = [row for row in measured if row.case.device_kind != "emulated"] or measured
    by_case = {row.case: row for row in measured}
    of_case: dict[Case, list[Trial]] = {}
    for trial in trials:
        of_case.setdefault(trial.case, []).append(trial)
    groups: dict[Case, list[Row]] = {}
    for row in measured:
        if row.case.devices > 1:
            groups.setdefault(_setting(row.case), []).append(row)
    found = []
    for group in groups.values():
        most = max(row.case.devices for row in group)
        batches: dict[int, list[Row]] = {}
        for row in group:
            if row.case.devices == most:
                batches.setdefault(row.case.batch_size, []).append(row)
        for alike in batches.values():
            found.append(CaseContext(min(alike, key=_rank), by_case, of_case, cores))
    return found


def _setting(case: Case) -> Case:
    """Return the case after a reset of every field that may differ between the cases of one setting."""
    return replace(case, strategy="", schedule="", devices=1, batch_size=1)


def _rank(row: Row) -> tuple[int, tuple[int, str]]:
    """Return the sort key of a candidate: torch's DataParallel first, then the engine's schedules, then the rest."""
    case = row.case
    roles = [Role.WRAPPER, Role.ENGINE]
    role = case.traits.role
    return roles.index(role) if role in roles else len(roles), plan.place(case.schedule)


SMALLEST = 0.02
"""The fraction of a step below which a finding is not shown."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The evidence of a rule: a clause that states the problem, the numbers behind it, and the cost of the problem.

    `size_s` is in seconds per step. If `measured`, `size_s` is the measured gain of a change. Otherwise it is an upper
    bound: the total cost of the problem, which is the most that a remedy can save. `size_s` is None if the problem
    costs memory but no time.
    """

    says: str
    numbers: str
    size_s: Estimate | None
    measured: bool = False


@dataclass(frozen=True)
class Missing:
    """A question that a rule could not answer, with the options that would answer it."""

    what: str


Judgement = Evidence | Missing | None


@dataclass(frozen=True, kw_only=True)
class FindingRule:
    """One cause of lost time in data parallelism, and its remedy.

    `switches` (switch -> positions) and `roles` (of strategies) identify the cases of the same work that apply the
    remedy. If such cases were measured, their gain is shown; otherwise `needs` gives the options that measure them.
    """

    name: str
    when: Callable[[CaseContext], Judgement]
    remedy: str
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    roles: tuple[Role, ...] = ()
    needs: str = ""


@dataclass(frozen=True, kw_only=True)
class Cure:
    """A case that applies a remedy, compared with the diagnosed case: speed ratio, seconds saved, and verdict."""

    row: Row
    ratio: Estimate
    gain_s: Estimate
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem that a rule found: its evidence, its size as a fraction of the step, and its measured remedies."""

    rule: FindingRule
    row: Row
    evidence: Evidence
    share: float
    cures: tuple[Cure, ...]
    labels: tuple[str, ...]
