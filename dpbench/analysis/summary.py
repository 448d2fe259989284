"""Summary: derive one row per case from its trials, with all numbers that the reports show.

docs/measuring.md defines how each number is derived.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dpbench.analysis import peak, sampled, stats, transfers
from dpbench.analysis.peak import AtPeak
from dpbench.records import (
    Case,
    Fault,
    Source,
    Status,
    Trial,
    Verified,
    disturbance,
    plan,
)
from dpbench.records.estimate import Doubt, Estimate
from dpbench.records.grouping import grouped, summed
from dpbench.records.ledger import PHASES
from dpbench.records.registry import Role
from dpbench.records.trial import SPENT, Key, by_key

PERCENTILES = (95, 99)
"""The percentiles of step durations that a row has; the median is `Row.step`."""
KERNELS = "kernels of profiled steps"
BUSY_METRICS = {"kernel_busy_s": KERNELS, "busy_s": "thread CPU time"}
"""The metrics from which busy time is taken, the best first, each with its source."""
COLOCATED, FAKE_GPU, NO_GIL, UNCLEAR = "COLOCATED", "FAKE-GPU", "NO-GIL", "UNCLEAR"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The results of one case.

    Times are in seconds per step and sizes in bytes. Mappings by device use its index.

    `rounds` and `steps` are the numbers of rounds with a result and of timed steps. `series` has
    the durations of the timed steps by round, `step` is their median and `mean` their mean.
    `percentiles` maps `PERCENTILES` to the median over rounds of each round's; it lacks those for
    which a round has too few steps, and is empty for predictions.
    `throughput` is in samples per second, from the mean step. `phases` divides `mean.value` among
    the phases and unattributed time; `floors` has the least seconds of a phase on a device, where
    they are known (`transfers.floors`). `speedup` compares with `single` at equal global work
    (`scaling` is "strong") or at equal work per device ("weak"); the intervals of all speed-ups
    over one baseline hold together. `efficiency` is the speed-up over the number of devices. `busy`
    is the time in which a device computes. `at_peak` is the step at the peaks of its GPUs,
    and `energy` the joules that all GPUs use for a sample.
    `memory` has the peaks of the devices, and `host_bytes` is the host's. `imbalance` and
    `memory_imbalance` are the ratios of device 0's busy time and memory to the others' mean.
    `reason` explains why a round gave no result. `fault` is set if no round gave a result although
    the last trial ended normally. `lost` has the outcome of each round without a result, such as
    "timeout", or "unverified" for gradients that differ from the reference. `left_out` is whether
    the run had no time for the case, or for rounds of it that others have. In a report on two runs,
    `run` is "before" or "after".
    """

    case: Case
    source: Source
    status: Status
    reason: str = ""
    fault: Fault | None = None
    rounds: int = 0
    steps: int = 0
    verified: Verified | None = None
    series: stats.Timed = field(default_factory=stats.Timed, repr=False)
    step: Estimate | None = None
    mean: Estimate | None = None
    percentiles: Mapping[int, Estimate] = field(default_factory=dict)
    throughput: Estimate | None = None
    speedup: Estimate | None = None
    scaling: str = ""
    efficiency: Estimate | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    floors: transfers.Floors = field(default_factory=dict)
    busy: Mapping[int, float] = field(default_factory=dict)
    busy_source: str = ""
    at_peak: AtPeak | None = None
    energy: Estimate | None = None
    memory: Mapping[int, int] = field(default_factory=dict)
    memory_source: str = ""
    host_bytes: int = 0
    imbalance: Estimate | None = None
    memory_imbalance: float | None = None
    labels: tuple[str, ...] = ()
    lost: tuple[Fault | Status, ...] = ()
    left_out: bool = False
    run: str = ""

    @property
    def key(self) -> Key:
        """Return the case and the source, which no other row of a run has."""
        return self.case, self.source

    @property
    def label(self) -> str:
        """Return the label of the case."""
        return self.case.label

    @property
    def colocated(self) -> bool:
        """Return whether replicas share a GPU, or hosts a machine, so that nothing can speed up."""
        return COLOCATED in self.labels

    @property
    def on_fake_gpus(self) -> bool:
        """Return whether the GPUs were fake, so that times mean nothing."""
        return FAKE_GPU in self.labels

    @property
    def outcome(self) -> str:
        """Return "ok" if the case has a result, else its fault or status, such as "oom"."""
        return (self.fault or self.status).value

    @property
    def doubt(self) -> Doubt | None:
        """Return why the step time must not be shown; None if it may be or is missing."""
        return self.step.doubt if self.step else None

    @property
    def peak_share(self) -> Estimate | None:
        """Return the share of the GPUs' peak that a step reaches; None if unknown or above 1."""
        share = self._peak_share
        return share if share and share.value <= 1 else None

    @property
    def peak_source(self) -> str:
        """Return the label and the source of the peak of `peak_share`; "" without a share."""
        if self.peak_share is None or self.at_peak is None:
            return ""
        return f"IMPORTED: {self.at_peak.source}"

    @property
    def impossible_share(self) -> Estimate | None:
        """Return a share of peak that is decidedly above 1; None without one."""
        share = self._peak_share
        return share if share and not share.doubt and share.low > 1 else None

    @property
    def _peak_share(self) -> Estimate | None:
        if self.step is None or self.at_peak is None:
            return None
        return self.step.inverse.scaled(self.at_peak.seconds)

    def least(self, phase: str) -> float:
        """Return the least seconds of a phase, on the device that needs most; 0 if unknown.

        A floor above the phase's seconds is none: the phase overlaps others, or a library has found
        a way with fewer bytes or operations.
        """
        known = [seconds for (name, _), seconds in self.floors.items() if name.value == phase]
        floor_s = max(known, default=0.0)
        return floor_s if floor_s <= self.phases.get(phase, 0.0) else 0.0


BLANK = Row(
    case=Case(model="", strategy="", batch_size=1), source=Source.MEASURED, status=Status.SKIPPED
)
"""A row without results, whose case has an empty model and strategy."""


def rows(trials: Iterable[Trial]) -> list[Row]:
    """Return one row for each case and source (measured or predicted), by model and settings.

    Among equal settings, one-device strategies come first, in the order of `Role`. A case that
    lacks rounds of its baseline has the times that all of these rounds would have had: the
    baseline's, divided by the speed-up in the rounds that both have.
    """
    groups = by_key(sorted(trials, key=lambda trial: order(trial.case)))
    by_source = {
        source: {case: group for (case, origin), group in groups.items() if origin is source}
        for source in Source
    }
    series = {
        source: {case: measured(group) for case, group in alike.items()}
        for source, alike in by_source.items()
    }
    table = [
        replace(
            _row(case, group, series[source][case]),
            floors=transfers.floors(case, by_source[source]),
        )
        for (case, source), group in groups.items()
    ]
    looks = max((trial.facts.looks for group in groups.values() for trial in group), default=1)
    levels = {source: speedup_levels(alike, looks) for source, alike in series.items()}
    known = {row.key: row for row in table}
    draws = {key: group[-1].facts.error_draws for key, group in groups.items()}
    return [_compared(row, series[row.source], levels[row.source], known, draws) for row in table]


def order(case: Case) -> tuple[object, ...]:
    """Return the key of a case by which rows are sorted."""
    roles = [*Role]
    rank = roles.index(case.traits.role) if case.traits.one_device else len(roles)
    return (
        case.model,
        case.size,
        case.device_kind,
        case.precision,
        rank,
        case.strategy,
        plan.place(case.schedule),
        case.devices,
        case.batch_size,
        case.loader,
    )


def measured(trials: Iterable[Trial]) -> stats.Timed:
    """Return, by round, the seconds of the timed steps of the last trial that may be shown."""
    last = {trial.round: trial for trial in trials if trial.trusted and trial.timed}
    steps = {number: list(trial.timed) for number, trial in last.items()}
    return stats.Timed(steps, *disturbance.by_round(last.values()))


def shown(trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials behind a case's numbers: each round's last trusted one with timed steps."""
    trusted = [trial for trial in trials if trial.trusted]
    timed = {trial.round for trial in trusted if trial.timed}
    return list({trial.round: trial for trial in trusted if trial.round in timed}.values())


def add(series: dict[Case, stats.Timed], trial: Trial) -> None:
    """Add the timed steps of an ended trial to its case, in place of an earlier trial of the round.

    A trial whose numbers must not be shown adds nothing.
    """
    known = series.get(trial.case, stats.Timed())
    new = measured([trial])
    kept = known.of(known.keys() - new.keys())
    series[trial.case] = stats.Timed(
        {**kept, **new}, kept.noisy | new.noisy, {**kept.taken, **new.taken}
    )


def parts(case: Case, series: stats.Timed) -> stats.Timed:
    """Return the rounds for estimates; each step is one if one execution has few parts."""
    if not case.traits.in_parts or len(series) >= Estimate.ROUNDS:
        return series
    steps = [(number, one) for number in sorted(series) for one in series[number]]
    taken = {place: series.taken.get(number, 0.0) for place, (number, _) in enumerate(steps)}
    return stats.Timed({place: [one] for place, (_, one) in enumerate(steps)}, (), taken)


def _row(case: Case, trials: Sequence[Trial], series: stats.Timed) -> Row:
    good = shown(trials)
    last = (good or trials)[-1]
    row = Row(
        case=case,
        source=last.source,
        status=last.status,
        fault=last.fault,
        reason=next((why for trial in trials if (why := trial.refusal)), ""),
        rounds=len(series),
        steps=sum(map(len, series.values())),
        labels=all_labels(good or [last]),
        lost=_lost(trials, series),
        left_out=any(trial.reason.startswith(SPENT) for trial in trials),
    )
    if not good:
        return row
    series = parts(case, series)
    stated = _stated(good[-1])
    step, mean = (stated, stated) if stated else (stats.median(series), stats.mean(series))
    if not row.source.timed:
        step = replace(step, n=0)
        mean = replace(mean, n=0)
    busy, source = _busy(good)
    memory = _memory(good)
    return replace(
        row,
        series=series,
        verified=(
            None
            if case.traits.loads
            else max((trial.verified for trial in good), key=list(Verified).index)
        ),
        step=step,
        mean=mean,
        percentiles=_percentiles(series) if row.source.timed else {},
        throughput=mean.inverse.scaled(case.batch_size) if case.batch_size else None,
        phases=_phases(good, mean.value),
        busy={device: statistics.median(values) for device, values in busy.items()},
        busy_source=source,
        at_peak=next(filter(None, map(peak.at_peak, good)), None),
        energy=_energy(good),
        memory={device: size for device, size in memory.items() if device >= 0},
        memory_source=next((m.source for t in good for m in t.memory if m.device >= 0), ""),
        host_bytes=max((size for device, size in memory.items() if device < 0), default=0),
        imbalance=_imbalance(good, source) if source else None,
        memory_imbalance=_memory_imbalance(case, memory),
    )


def _lost(trials: Sequence[Trial], series: stats.Rounds) -> tuple[Fault | Status, ...]:
    latest = {trial.round: trial for trial in trials}
    ended = [trial for number, trial in sorted(latest.items()) if number not in series]
    return tuple(
        Fault.UNVERIFIED if trial.verified is Verified.NO else trial.fault or trial.status
        for trial in ended
        if trial.status not in (Status.SKIPPED, Status.KILLED)
    )


def _percentiles(series: stats.Rounds) -> dict[int, Estimate]:
    found = {number: stats.percentile(series, number) for number in PERCENTILES}
    return {number: one for number, one in found.items() if one}


def _stated(trial: Trial) -> Estimate | None:
    """Return the predicted step time with its stored 80 % interval, None without one."""
    interval = trial.facts.interval_80_s
    if trial.source.timed or not interval:
        return None
    low_s, high_s = interval
    return Estimate(trial.steps[-1].seconds, low_s, high_s, 0)


def _memory(trials: Sequence[Trial]) -> dict[int, int]:
    """Return, by device (or HOST), the highest peak of allocated memory in bytes."""
    return highest(
        (memory.device, memory.peak_bytes)
        for trial in trials
        for memory in trial.memory
        if memory.kind == "allocated" and not memory.phase
    )


def highest(sizes: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return the highest of the sizes of each device, given in pairs of a device and a size."""
    return {device: max(found) for device, found in sorted(grouped(sizes).items())}


def _memory_imbalance(case: Case, memory: Mapping[int, int]) -> float | None:
    """Return device 0's peak over the mean of the others that have rows of the batch.

    None if a peak of either is unknown.
    """
    working = range(case.working)
    if not all(device in memory for device in working):
        return None
    others = [memory[device] for device in working[1:]]
    return memory[0] / statistics.mean(others) if any(others) else None


def labels(trial: Trial) -> tuple[str, ...]:
    """Return the labels that must accompany a trial's numbers, such as MEASURED and CPU-ONLY."""
    case = trial.case
    names = [trial.source.value.upper()]
    # predictions for strategies with Role.OTHER were never compared with measurements
    if not trial.source.timed and (case.device_kind == "cpu" or case.traits.role is Role.OTHER):
        names.append("EXPERIMENTAL")
    if case.device_kind != "cuda":
        names.append({"cpu": "CPU-ONLY"}.get(case.device_kind, case.device_kind.upper()))
    if trial.facts.gil == "off":
        names.append(NO_GIL)
    if trial.on_fake_gpus:
        names.append(FAKE_GPU)
    if (loop := trial.facts.loop) and loop.hidden:
        names.append(UNCLEAR)
    if case.unverified:
        names.append("UNVERIFIED")
    if case.placement == "colocated" or trial.facts.hosts_share:
        names.append(COLOCATED)
    if disturbance.noisy(trial):
        names.append(disturbance.NOISY)
    return tuple(names)


def all_labels(trials: Iterable[Trial]) -> tuple[str, ...]:
    """Return the labels of all trials without duplicates; NOISY is the last one."""
    found = dict.fromkeys(label for trial in trials for label in labels(trial))
    return tuple(sorted(found, key=lambda label: label == disturbance.NOISY))


def _compared(
    row: Row,
    series: Mapping[Case, stats.Rounds],
    levels: Mapping[Case, float],
    rows: Mapping[Key, Row],
    draws: Mapping[Key, Sequence[float]],
) -> Row:
    """Return the row with its speed-up and efficiency; unchanged without a baseline.

    `series` has the durations of the timed steps, by round, of all cases of the same source; for
    `levels`, see `speedup_levels`. `rows` are those of all cases. `draws` has random draws of the
    error of each predicted step time, none from an older version of dpbench.
    """
    base = baseline_in(row.case, series) if series[row.case] else None
    if base is None:
        return row
    work = row.case.batch_size / base.batch_size
    home = rows[base, row.source]
    if not row.source.timed and row.step and home.step:
        ratio = stats.quotient(home.step, row.step, draws[home.key], draws[row.key])
        speedup = ratio.scaled(work)
    else:
        speedup = _speedup(row.case, base, series, levels)
        row = _beside(row, home)
    efficiency = None if row.case.traits.one_device else speedup.scaled(1 / row.case.devices)
    return replace(
        row, speedup=speedup, scaling="strong" if work == 1 else "weak", efficiency=efficiency
    )


def _beside(row: Row, home: Row) -> Row:
    """Return a row with times that can stand beside its baseline's; see `rows`."""
    common = row.series.keys() & home.series.keys()
    if len(common) == len(home.series) or len(common) < Estimate.ROUNDS:
        return row
    assert row.mean
    assert home.step
    assert home.mean
    step = stats.quotient(home.step, stats.ratio(home.series, row.series))
    mean = stats.quotient(home.mean, stats.mean_ratio(home.series, row.series))
    change = mean.value / row.mean.value
    return replace(
        row,
        step=step,
        mean=mean,
        percentiles={number: one.scaled(change) for number, one in row.percentiles.items()},
        throughput=mean.inverse.scaled(row.case.batch_size) if row.throughput else None,
        phases={name: seconds * change for name, seconds in row.phases.items()},
    )


def _speedup(
    case: Case, base: Case, series: Mapping[Case, stats.Rounds], levels: Mapping[Case, float]
) -> Estimate:
    ratio = stats.ratio(series[base], series[case], level=levels[base])
    return ratio.scaled(case.batch_size / base.batch_size)


def speedups(series: Mapping[Case, stats.Rounds], looks: int = 1) -> dict[Case, Estimate]:
    """Return the speed-up of each measured case over its baseline in `series`, if it has one.

    `series` has the durations of the timed steps of each case in seconds, by round. For `looks`,
    see `speedup_levels`.
    """
    levels = speedup_levels(series, looks)
    bases = {case: baseline_in(case, series) for case, mine in series.items() if mine}
    return {case: _speedup(case, base, series, levels) for case, base in bases.items() if base}


def speedup_levels(series: Mapping[Case, stats.Rounds], looks: int = 1) -> dict[Case, float]:
    """Return, by baseline, the level at which the intervals of all speed-ups hold together.

    They hold together at each of `looks` looks at a run that stops once its answers are decided.
    """
    counts = Counter(
        base for case, mine in series.items() if mine and (base := baseline_in(case, series))
    )
    return {base: stats.joint_level(count * looks) for base, count in counts.items()}


def baseline_in(case: Case, series: Mapping[Case, stats.Rounds]) -> Case | None:
    """Return the baseline: `single` at the same global batch, or else at the same batch per device.

    None without one in `series`, for `single` itself, and for emulated devices.
    """
    if case.traits.role is Role.BASELINE or case.device_kind == "emulated":
        return None  # emulated devices show host cost only: a speed-up would be meaningless
    return next((base for base in homes(case) if series.get(base)), None)


def homes(case: Case) -> list[Case]:
    """Return the possible baselines: the same global batch, then the same per device."""
    if case.traits.role is Role.BASELINE:
        return [case]
    share, rest = divmod(case.batch_size, case.devices)
    return [
        plan.alone(case, batch)
        for batch in ([case.batch_size] if rest else [case.batch_size, share])
    ]


def changes(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return by how much each phase became longer, or shorter if negative."""
    return {name: after.get(name, 0.0) - before.get(name, 0.0) for name in {**before, **after}}


def largest(changed: Mapping[str, float]) -> tuple[str, float]:
    """Return the phase that changed most, and by how much; ("", 0.0) without phases."""
    return max(sorted(changed.items()), key=lambda one: abs(one[1]), default=("", 0.0))


def _phases(trials: Sequence[Trial], mean_s: float) -> dict[str, float]:
    """Return the mean seconds of each phase per timed step, which sum to `mean_s`.

    Each trial has the same weight.
    """
    total = summed(
        (name, seconds / len(trial.timed))
        for trial in trials
        for name, seconds in trial.ledger.timed.items()
    )
    whole = sum(total.values())
    return {name: total[name] / whole * mean_s for name in PHASES if name in total}


def _busy(trials: Sequence[Trial]) -> tuple[dict[int, list[float]], str]:
    """Return each device's busy seconds in the timed steps, and their source; ({}, "") if none."""
    for metric, source in BUSY_METRICS.items():
        seconds = grouped(
            (device, value)
            for trial in trials
            for device, values in trial.readings(metric, timed=True).items()
            for value in values
        )
        if seconds:
            return dict(sorted(seconds.items())), source
    return {}, ""


def _energy(trials: Sequence[Trial]) -> Estimate | None:
    """Return the joules per sample; None if no round's are known. See `stats.Timed.quiet`."""
    every = {trial.round: sampled.joules_per_sample(trial) for trial in trials}
    known = {number: [joules] for number, joules in every.items() if joules is not None}
    if not known:
        return None
    quiet = stats.Timed(known, disturbance.by_round(trials)[0]).quiet
    return replace(stats.average(quiet), noisy=bool(quiet.noisy))


def _imbalance(trials: Sequence[Trial], source: str) -> Estimate | None:
    """Return device 0's busy time over the others' mean; None without readings of both."""
    devices, vectors = busy_of(trials, source)
    return stats.balance(vectors).first if devices[:1] == (0,) and len(devices) > 1 else None


def busy_of(trials: Sequence[Trial], source: str) -> tuple[tuple[int, ...], stats.Vectors]:
    """Return the devices with work and, by round, their busy seconds, shape (steps, devices).

    `source` is a description in `BUSY_METRICS`. Both are empty if a busy time is 0, if the rounds
    have different devices, or without readings.
    """
    metric = next((name for name, words in BUSY_METRICS.items() if words == source), "")
    vectors: dict[int, stats.Array] = {}
    devices: set[tuple[int, ...]] = set()
    for trial in trials:
        # devices without rows of the batch do no work and are left out
        values = {
            d: v
            for d, v in trial.readings(metric, timed=True).items()
            if 0 <= d < trial.case.working
        }
        if values:
            devices.add(tuple(sorted(values)))
            vectors[trial.round] = stats.beside([values[device] for device in sorted(values)])
    idle = any(readings.min() <= 0 for readings in vectors.values())
    if len(devices) != 1 or idle:
        return (), {}
    return devices.pop(), by_profiled_step(vectors, source)


def by_profiled_step(vectors: stats.Vectors, source: str) -> stats.Vectors:
    """Return the readings of profiled steps with each step as a round, if few rounds have any.

    A run profiles only its first round. Readings of another source are returned unchanged.
    """
    if source != BUSY_METRICS["kernel_busy_s"] or len(vectors) >= Estimate.ROUNDS:
        return vectors
    return dict(enumerate(step[None] for number in sorted(vectors) for step in vectors[number]))
