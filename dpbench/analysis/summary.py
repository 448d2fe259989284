"""Summary: derive one row per case from its trials, with all numbers that the reports show.

docs/measuring.md defines how each number is derived.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from dpbench.analysis import stats, transfers
from dpbench.hardware import foreign_load
from dpbench.records import (
    CASE_FIELDS,
    UNATTRIBUTED,
    Case,
    Fault,
    Phase,
    Source,
    Status,
    Trial,
    Verified,
    plan,
)
from dpbench.records.grouping import grouped, summed
from dpbench.records.registry import Role
from dpbench.records.trial import Doubt, Estimate, Key, by_key
from dpbench.records.work import DRAWS

PERCENTILES = (95, 99)
"""The percentiles of step durations that a row has; the median is `Row.step`."""
KERNELS = "kernels of profiled steps"
BUSY_METRICS = {"kernel_busy_s": KERNELS, "busy_s": "thread CPU time"}
"""The metrics from which busy time is taken, the best first, each with its source."""
PHASES = (*(phase.value for phase in Phase), UNATTRIBUTED)
"""The names of the parts of a step, in their order."""
COLOCATED, FAKE_GPU = "COLOCATED", "FAKE-GPU"
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Row:
    """The results of one case.

    Times are in seconds per step and sizes in bytes. Mappings by device use its index.

    `rounds` and `steps` are the numbers of rounds with a result and of timed steps. `series` has
    the durations of the timed steps by round, `step` is their median and `mean` their mean.
    `percentiles` maps `PERCENTILES` to those of all timed steps; it is empty for predictions.
    `throughput` is in samples per second, from the mean step. `phases` divides `step.value` among
    the phases and unattributed time; `floors` has the least seconds of a phase on a device, where
    they are known (`transfers.floors`). `speedup` compares with `single` at equal global work
    (`scaling` is "strong") or at equal work per device ("weak"); the intervals of all speed-ups
    over one baseline hold together. `efficiency` is the speed-up over the number of devices. `busy`
    is the time in which a device computes.
    `memory` has the peaks of the devices, and `host_bytes` is the host's. `imbalance` and
    `memory_imbalance` are the ratios of device 0's busy time and memory to the others' mean.
    `reason` explains why a round gave no result. `fault` is set if no round gave a result although
    the last trial ended normally. `lost` has the outcome of each round without a result, such as
    "timeout", or "unverified" for gradients that differ from the reference. In a report on two
    runs, `run` is "before" or "after".
    """

    case: Case
    source: Source
    status: Status
    reason: str = ""
    fault: Fault | None = None
    rounds: int = 0
    steps: int = 0
    verified: Verified | None = None
    series: stats.Rounds = field(default_factory=dict, repr=False)
    step: Estimate | None = None
    mean: Estimate | None = None
    percentiles: Mapping[int, stats.Percentile] = field(default_factory=dict)
    throughput: Estimate | None = None
    speedup: Estimate | None = None
    scaling: str = ""
    efficiency: Estimate | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    floors: transfers.Floors = field(default_factory=dict)
    busy: Mapping[int, float] = field(default_factory=dict)
    busy_source: str = ""
    memory: Mapping[int, int] = field(default_factory=dict)
    memory_source: str = ""
    host_bytes: int = 0
    imbalance: Estimate | None = None
    memory_imbalance: float | None = None
    labels: tuple[str, ...] = ()
    lost: tuple[Fault | Status, ...] = ()
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

    def least(self, phase: str) -> float:
        """Return the least seconds of a phase, on the device that needs most; 0 if unknown.

        A floor above the phase's seconds is none: the phase overlaps others, or a library has found
        a way with fewer bytes or operations.
        """
        known = [seconds for (name, _), seconds in self.floors.items() if name.value == phase]
        floor_s = max(known, default=0.0)
        return floor_s if floor_s <= self.phases.get(phase, 0.0) else 0.0


DEVICES = 8
"""Records have at least this many devices, so that those of different runs have equal names."""
BLANK = Row(
    case=Case(model="", strategy="", batch_size=1), source=Source.MEASURED, status=Status.SKIPPED
)
"""A row without results, whose case has an empty model and strategy."""


def rows(trials: Iterable[Trial]) -> list[Row]:
    """Return one row for each case and source (measured or predicted), by model and settings.

    Among equal settings, one-device strategies come first, in the order of `Role`.
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
    looks = max((trial.looks for group in groups.values() for trial in group), default=1)
    levels = {source: speedup_levels(alike, looks) for source, alike in series.items()}
    steps = {row.key: row.step for row in table if row.step}
    draws = {key: group[-1].provenance.get(DRAWS, ()) for key, group in groups.items()}
    return [_compared(row, series[row.source], levels[row.source], steps, draws) for row in table]


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
    noisy = (number for number, trial in last.items() if foreign_load.noisy(trial))
    return stats.Timed({number: list(trial.timed) for number, trial in last.items()}, noisy)


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
    series[trial.case] = stats.Timed({**known, **new}, (known.noisy - new.keys()) | new.noisy)


def parts(case: Case, series: Mapping[int, Sequence[Value]]) -> Mapping[int, Sequence[Value]]:
    """Return the rounds for estimates; each step is one in an observed loop with few rounds."""
    if not case.traits.observed or len(series) >= Estimate.ROUNDS:
        return series
    return dict(enumerate([one] for number in sorted(series) for one in series[number]))


def _row(case: Case, trials: Sequence[Trial], series: stats.Rounds) -> Row:
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
    )
    if not good:
        return row
    series = parts(case, series)
    stated = _stated(good[-1])
    step, mean = (stated, stated) if stated else (stats.median(series), stats.mean(series))
    if row.source is Source.PREDICTED:
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
        throughput=scaled(stats.inverse(mean), case.batch_size) if case.batch_size else None,
        phases=_phases(good, step.value),
        busy={device: statistics.median(values) for device, values in busy.items()},
        busy_source=source,
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


def _percentiles(series: stats.Rounds) -> dict[int, stats.Percentile]:
    return {number: stats.percentile(series, number / 100) for number in PERCENTILES}


def _stated(trial: Trial) -> Estimate | None:
    """Return the predicted step time with its stored 80 % interval, None without one."""
    interval = trial.provenance.get("interval_80_s")
    if trial.source is not Source.PREDICTED or not interval:
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
    others = [memory.get(device, 0) for device in range(1, case.working)]
    return memory[0] / statistics.mean(others) if 0 in memory and any(others) else None


def labels(trial: Trial) -> tuple[str, ...]:
    """Return the labels that must accompany a trial's numbers, such as MEASURED and CPU-ONLY."""
    case = trial.case
    names = [trial.source.value.upper()]
    # predictions for strategies with Role.OTHER were never compared with measurements
    if trial.source is Source.PREDICTED and (
        case.device_kind == "cpu" or case.traits.role is Role.OTHER
    ):
        names.append("EXPERIMENTAL")
    if case.device_kind != "cuda":
        names.append({"cpu": "CPU-ONLY"}.get(case.device_kind, case.device_kind.upper()))
    if trial.on_fake_gpus:
        names.append(FAKE_GPU)
    if case.unverified:
        names.append("UNVERIFIED")
    if case.placement == "colocated" or len({host.machine for host in trial.hosts}) < len(
        trial.hosts
    ):
        names.append(COLOCATED)
    if foreign_load.noisy(trial):
        names.append(foreign_load.NOISY)
    return tuple(names)


def all_labels(trials: Iterable[Trial]) -> tuple[str, ...]:
    """Return the labels of all trials without duplicates; NOISY is the last one."""
    found = dict.fromkeys(label for trial in trials for label in labels(trial))
    return tuple(sorted(found, key=lambda label: label == foreign_load.NOISY))


def _compared(
    row: Row,
    series: Mapping[Case, stats.Rounds],
    levels: Mapping[Case, float],
    steps: Mapping[Key, Estimate],
    draws: Mapping[Key, Sequence[float]],
) -> Row:
    """Return the row with its speed-up and efficiency; unchanged without a baseline.

    `series` has the durations of the timed steps, by round, of all cases of the same source; for
    `levels`, see `speedup_levels`. `steps` has the median step times. `draws` has random draws of
    the error of each predicted step time, none from an older version of dpbench.
    """
    base = baseline_in(row.case, series) if series[row.case] else None
    if base is None:
        return row
    work = row.case.batch_size / base.batch_size
    if row.source is Source.PREDICTED and row.step:
        home = base, row.source
        ratio = stats.quotient(steps[home], row.step, draws[home], draws[row.key])
        speedup = scaled(ratio, work)
    else:
        speedup = _speedup(row.case, base, series, levels)
    efficiency = None if row.case.traits.one_device else scaled(speedup, 1 / row.case.devices)
    return replace(
        row, speedup=speedup, scaling="strong" if work == 1 else "weak", efficiency=efficiency
    )


def _speedup(
    case: Case, base: Case, series: Mapping[Case, stats.Rounds], levels: Mapping[Case, float]
) -> Estimate:
    ratio = stats.ratio(series[base], series[case], level=levels[base])
    return scaled(ratio, case.batch_size / base.batch_size)


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
    return {base: stats.together(count * looks) for base, count in counts.items()}


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


def scaled(estimate: Estimate, factor: float) -> Estimate:
    """Return the estimate with its value and its interval multiplied by `factor`."""
    return replace(
        estimate,
        value=estimate.value * factor,
        low=estimate.low * factor,
        high=estimate.high * factor,
    )


def changes(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return by how much each phase became longer, or shorter if negative."""
    return {name: after.get(name, 0.0) - before.get(name, 0.0) for name in {**before, **after}}


def largest(changed: Mapping[str, float]) -> tuple[str, float]:
    """Return the phase that changed most, and by how much; ("", 0.0) without phases."""
    return max(sorted(changed.items()), key=lambda one: abs(one[1]), default=("", 0.0))


def _phases(trials: Sequence[Trial], step_s: float) -> dict[str, float]:
    """Return the seconds of each phase per step, scaled so that they sum to `step_s`.

    Only the middle half of each trial's timed steps, sorted by duration, is used.
    """
    total = summed(pair for trial in trials for pair in trial.ledger.middle.items())
    whole = sum(total.values())
    return {name: total[name] / whole * step_s for name in PHASES if name in total}


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


def records(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Return the numbers of each row by name; every row has the same names.

    Each estimate and percentile has the entries of `entries`. The names are the same for every run,
    except for devices beyond the first eight.
    """
    count = max([DEVICES, *(device + 1 for row in rows for device in (*row.busy, *row.memory))])
    return [_record(row, count) for row in rows]


def entries(name: str, number: Estimate | stats.Percentile | None) -> dict[str, object]:
    """Return the entries of a number in a record; all are None for None.

    They are value, low, high and withheld, the reason why reports do not show it, or None.
    """
    parts = {f"{name}_{part}": getattr(number, part, None) for part in ("value", "low", "high")}
    return parts | {f"{name}_withheld": (number.doubt or None) if number else None}


def _record(row: Row, devices: int) -> dict[str, object]:
    record: dict[str, object] = {f.name: getattr(row.case, f.name) for f in CASE_FIELDS}
    record |= {
        "status": row.outcome,
        "verified": row.verified,
        "rounds": row.rounds,
        "steps": row.steps,
    }
    for name in ("step", "mean", "throughput", "speedup", "efficiency", "imbalance"):
        record |= entries(name, getattr(row, name))
    for number in PERCENTILES:
        record |= entries(f"p{number}", row.percentiles.get(number))
    record |= {f"phase_{name}_s": row.phases.get(name) for name in PHASES}
    record |= {f"busy_{device}_s": row.busy.get(device) for device in range(devices)}
    record |= {f"memory_{device}_bytes": row.memory.get(device) for device in range(devices)}
    return record | {"scaling": row.scaling, "labels": " ".join(row.labels), "reason": row.reason}
