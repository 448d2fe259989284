"""The bench: one case under diagnosis, and every other case of the run that sheds light on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dpbench.analysis import stats
from dpbench.analysis.summary import Row
from dpbench.records import Case, Phase, Source, Trial, ledger, plan, registry, schedule
from dpbench.records.estimate import Estimate
from dpbench.records.traits import Role

Ledger = list[dict[str, float]]
"""Seconds by phase of each timed step."""
COMPUTE = (Phase.FORWARD.value, Phase.BACKWARD.value)
"""The phases that more devices should shorten."""


@dataclass(frozen=True)
class Bench:
    """The subject's row, all rows and trials of the run by case, and the cores that it could use (0: unknown)."""

    row: Row
    rows: Mapping[Case, Row]
    trials_of: Mapping[Case, Sequence[Trial]]
    cores: int = 0

    @property
    def trials(self) -> Sequence[Trial]:
        """Return the subject's trials."""
        return self.trials_of.get(self.case, ())

    @property
    def case(self) -> Case:
        """Return the subject's case."""
        return self.row.case

    @property
    def step_s(self) -> float:
        """Return the median step; only what has one is diagnosed."""
        assert self.row.step is not None
        return self.row.step.value

    @property
    def engine(self) -> bool:
        """Tell whether the subject is a DataParallel: one process, whose device 0 leads."""
        return self.case.traits.threads

    @property
    def oversubscribed(self) -> bool:
        """Tell whether devices must take turns on the cores."""
        return bool(self.cores) and self.case.device_kind == "cpu" and len(self.case.rows) > self.cores

    @cached_property
    def schedule(self) -> schedule.Schedule | None:
        """Return the subject's switches; None where TrainStep chose them itself."""
        if self.case.traits.role is Role.WRAPPER:
            return schedule.Schedule()
        if not self.case.traits.scheduled or self.case.schedule == schedule.FASTEST:
            return None
        return schedule.parse(self.case.schedule or schedule.REFERENCE)

    @property
    def model(self) -> Mapping[str, float]:
        """Return what the worker told of the model: counts and bytes; empty for trials of old."""
        return next((t.provenance["model"] for t in self.trials if t.provenance.get("model")), {})

    # -- other rows

    def other(self, **changes: object) -> Row | None:
        """Return the measured row of a case that differs from the subject's so."""
        found = self.rows.get(replace(self.case, **changes))  # type: ignore[arg-type]
        return found if found and found.step and found.series else None

    def single(self, batch: int = 0) -> Row | None:
        """Return one device's row at a batch, by default the subject's; the ladder's limit serves as well."""
        alone = plan.alone(self.case, batch or self.case.batch_size)
        found = self.rows.get(alone) or self.rows.get(replace(alone, options=plan.LIMIT))
        return found if found and found.step and found.series else None

    def all_cores(self) -> Row | None:
        """Return the row of one device with all cores at the subject's batch."""
        return self.other(strategy=registry.of_role(Role.ALL_CORES), schedule="", devices=1)

    def ideal(self) -> tuple[Row, float] | None:
        """Return one device's row and what to divide it by for the step of perfect scaling.

        At equal global work that is the count of devices, of which replicas that share a GPU have one; else the row is
        of one device's share. Emulated devices have no such step: theirs is host cost.
        """
        if self.case.device_kind == "emulated":
            return None
        if alone := self.single():
            return alone, 1.0 if self.case.placement == "colocated" else float(self.case.devices)
        share, rest = divmod(self.case.batch_size, self.case.devices)
        alone = None if rest else self.single(share)
        return (alone, 1.0) if alone else None

    def rivals(self) -> list[Row]:
        """Return what else was measured on the same devices with the same work."""
        mine = replace(self.case, strategy="", schedule="")
        return [
            row
            for case, row in self.rows.items()
            if row.series and case != self.case and replace(case, strategy="", schedule="") == mine
        ]

    def fewer(self) -> Row | None:
        """Return the same on the next smaller count of devices above one, at equal global or equal work a device.

        None where more devices are not meant to be faster: they share a GPU, or are emulated.
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
        """Return the seconds of the step that the ledger gives these phases, with an interval over the rounds."""
        value = sum(self.row.phases.get(name, 0.0) for name in names)
        return around(value, stats.median(self._series(self.case, names)))

    def excess(self, name: str) -> Estimate | None:
        """Return by how many seconds a phase takes longer than with perfect scaling; None without one device's."""
        found = self.ideal()
        if found is None:
            return None
        (row, divisor), mine = found, self._series(self.case, [name])
        alone = scaled(self._series(row.case, [name]), 1 / divisor)
        value = self.row.phases.get(name, 0.0) - row.phases.get(name, 0.0) / divisor
        return around(value, stats.difference(mine, alone)) if mine and alone else None

    def _series(self, case: Case, names: Sequence[str]) -> dict[int, list[float]]:
        """Return the seconds that some phases take of each timed step of a case, by round."""
        timed = {trial.round: _timed(trial) for trial in self.trials_of.get(case, ()) if trial.trusted}
        return {
            number: [sum(phases.get(name, 0.0) for name in names) for phases in steps]
            for number, steps in timed.items()
            if steps
        }


def _timed(trial: Trial) -> Ledger:
    """Return the ledgers of the timed steps."""
    return [phases for step, phases in zip(trial.steps, ledger.of_trial(trial), strict=True) if not step.warmup]


def around(value: float, rough: Estimate) -> Estimate:
    """Return the ledger's own number, with the interval of medians over rounds, which need not hold it."""
    return replace(rough, value=value, low=min(rough.low, value), high=max(rough.high, value))


def share_of(seconds: Estimate, share: float) -> Estimate:
    """Return a share of some seconds, with its interval."""
    return replace(seconds, value=seconds.value * share, low=seconds.low * share, high=seconds.high * share)


def overlap(trials: Iterable[Trial], phase: Phase) -> float:
    """Return how many devices are in a phase at once, on average over the time that any is; 0 without spans."""
    found = [trial.ledger.concurrency.get(phase, (0.0, 0.0)) for trial in trials]
    apart, together = (sum(column) for column in zip(*found, strict=True)) if found else (0.0, 0.0)
    return apart / together if together else 0.0


def scaled(series: stats.Rounds, factor: float) -> dict[int, list[float]]:
    """Return a series times a factor."""
    return {number: [one * factor for one in steps] for number, steps in series.items()}


def benches(rows: Sequence[Row], trials: Sequence[Trial], cores: int) -> list[Bench]:
    """Return what is diagnosed: of each setting and batch the DataParallel that users have, on the most devices."""
    measured = [row for row in rows if row.step and row.series and row.source is Source.MEASURED]
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
            found.append(Bench(min(alike, key=_rank), by_case, of_case, cores))
    return found


def _setting(case: Case) -> Case:
    """Return what the subjects of one diagnosis share."""
    return replace(case, strategy="", schedule="", devices=1, batch_size=1)


def _rank(row: Row) -> tuple[int, tuple[int, str]]:
    """Order what could be diagnosed: DataParallel as users have it, then its schedules, then the rest."""
    case = row.case
    roles = [Role.WRAPPER, Role.ENGINE]
    role = case.traits.role
    return roles.index(role) if role in roles else len(roles), plan.place(case.schedule)
