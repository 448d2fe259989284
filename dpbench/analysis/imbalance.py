"""Imbalance: compare device 0 with the others in quantities such as busy time or peak memory.

An index is device 0's amount over the mean of the others', or the largest amount over the mean of
all; 1 is balance. DistributedDataParallel is the control: its ranks all do the same work, so that a
difference between them is due to the machine or the measurement. docs/measuring.md defines each
quantity. A footprint has each device's peak memory in each phase of a case.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dpbench.analysis import quantities, sampled, stats, summary
from dpbench.analysis.moves import of_trial
from dpbench.records import Case, Source, Trial, fake, plan, registry, words
from dpbench.records.estimate import Estimate
from dpbench.records.grouping import grouped
from dpbench.records.ledger import PHASES
from dpbench.records.registry import Role
from dpbench.records.trial import Key, by_key
from dpbench.records.work import received, sent


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The memory peaks of one case, in bytes.

    `peaks[phase][device]` is the highest peak over the rounds; `basis` is their source, such as
    "allocator". `used` has each device's highest use according to NVML, with CUDA contexts and the
    driver's reserve; it is empty if NVML reported nothing.
    """

    case: Case
    basis: str
    peaks: Mapping[str, Mapping[int, int]]
    used: Mapping[int, int]

    @property
    def whole(self) -> Mapping[int, int]:
        """Return each device's highest peak over all phases, in bytes."""
        devices = sorted({device for held in self.peaks.values() for device in held})
        return {
            device: max(held.get(device, 0) for held in self.peaks.values()) for device in devices
        }

    @property
    def top(self) -> str:
        """Return the phase in which device 0 has its highest peak."""
        return max(
            self.peaks,
            key=lambda phase: (self.peaks[phase].get(0, 0), -PHASES.index(phase)),
        )

    @property
    def excess_bytes(self) -> float | None:
        """Return device 0's highest peak minus the others' mean, in bytes; None without either."""
        others = [size for device, size in self.whole.items() if device]
        return self.whole[0] - statistics.mean(others) if others and 0 in self.whole else None


def footprints(trials: Iterable[Trial]) -> list[Footprint]:
    """Return a footprint for each case and source with peaks by phase, in order of the trials."""
    found = []
    for (case, _), group in by_key(trial for trial in trials if trial.trusted).items():
        peaks = [
            peak
            for trial in group
            for peak in trial.memory
            if peak.phase and peak.kind == "allocated" and peak.device >= 0
        ]
        by_phase = grouped((peak.phase, (peak.device, peak.peak_bytes)) for peak in peaks)
        used = summary.highest(
            (device, int(max(values)))
            for trial in group
            for device, values in sampled.momentary(trial, "memory_used_bytes").items()
            if 0 <= device < case.working
        )
        if peaks:
            found.append(
                Footprint(
                    case=case,
                    basis=peaks[-1].source,
                    peaks={p: summary.highest(by_phase[p]) for p in PHASES if p in by_phase},
                    used=used,
                )
            )
    return found


Figures = Mapping[int, Sequence[float]]
"""The readings of a quantity by device: one per timed step, or one for the whole trial."""


@dataclass(frozen=True)
class Quantity:
    """A quantity that is compared between devices.

    `sources` has pairs of a description and a function that reads a trial, the best source first.
    """

    name: str
    unit: str
    sources: tuple[tuple[str, Callable[[Trial], Figures]], ...]

    @property
    def of_time(self) -> bool:
        """Return whether it follows from times, which mean nothing on fake GPUs."""
        return self.unit in ("s", "J")


@dataclass(frozen=True, kw_only=True)
class Index:
    """The imbalance between the devices of one case in one quantity.

    `devices` has each device's median over rounds, in the quantity's unit. `first` is device 0's
    amount over the mean of the others', `most` the largest over the mean of all. `basis` describes
    the source of the readings. `control` is the control's `first`, with which `verdict` compares.
    `floor` is the amount of `single` at the same batch size. Both are None without readings of the
    same `source` and `basis`.
    """

    case: Case
    source: Source
    quantity: str
    unit: str
    basis: str
    devices: Mapping[int, float]
    first: Estimate
    most: Estimate
    verdict: str
    control: Estimate | None = None
    floor: float | None = None


@dataclass(frozen=True)
class _Found:
    """The readings of one quantity for one case: by round, an array of shape (steps, devices).

    `basis` describes the source of the readings.
    """

    vectors: stats.Vectors
    columns: tuple[int, ...]
    basis: str

    def medians(self) -> dict[int, float]:
        """Return, for each device, the median over rounds of the median over each round's steps."""
        return dict(zip(self.columns, stats.device_medians(self.vectors).tolist(), strict=True))

    @property
    def several(self) -> bool:
        """Return whether device 0 and another device have readings, and all are positive."""
        others = self.columns[:1] == (0,) and len(self.columns) > 1
        return others and all(bool((readings > 0).all()) for readings in self.vectors.values())

    @cached_property
    def balance(self) -> stats.Balance:
        return stats.balance(self.vectors)


def indexes(trials: Iterable[Trial]) -> list[Index]:
    """Return the indexes of all cases on several devices, in the order of the trials."""
    timed = by_key(trial for trial in trials if trial.trusted and trial.timed)
    # if a round was measured again, its last trial counts
    groups = {key: {trial.round: trial for trial in group} for key, group in timed.items()}
    fakes = {key for key, group in timed.items() if any(trial.on_fake_gpus for trial in group)}
    every = []
    for quantity in QUANTITIES:
        amounts = {key: _figures(quantity, group.values()) for key, group in groups.items()}
        for key, mine in amounts.items():
            if mine and mine.several:
                index = _index(quantity, key, mine, amounts)
                if quantity.of_time and key in fakes:
                    index = replace(index, verdict=f"undecided: {fake.WHY}")
                every.append(index)
    place = {key: number for number, key in enumerate(groups)}
    return sorted(every, key=lambda index: place[index.case, index.source])


def _figures(quantity: Quantity, trials: Iterable[Trial]) -> _Found | None:
    """Return the readings of `quantity` in one case's trials from the best source that has any.

    Rounds that lack the readings of a device are left out.
    """
    for basis, read in quantity.sources:
        rounds: dict[int, Figures] = {}
        for trial in trials:
            figures = {d: v for d, v in read(trial).items() if v and 0 <= d < trial.case.working}
            if figures:
                rounds[trial.round] = figures
        columns = max((tuple(sorted(figures)) for figures in rounds.values()), key=len, default=())
        vectors = {
            number: stats.beside([figures[device] for device in columns])
            for number, figures in rounds.items()
            if tuple(sorted(figures)) == columns
        }
        if vectors:
            return _Found(summary.by_profiled_step(vectors, basis), columns, basis)
    return None


def _index(
    quantity: Quantity,
    key: Key,
    readings: _Found,
    amounts: Mapping[Key, _Found | None],
) -> Index:
    """Return the index of `quantity` for `key`; `amounts` has the readings of all cases."""
    case, source = key

    def alike(other: Case) -> _Found | None:
        found = amounts.get((other, source))
        return found if found and found.basis == readings.basis else None

    is_control = case.traits.role is Role.CONTROL
    balanced = None if is_control else alike(control_of(case))
    alone = alike(plan.alone(case, case.batch_size))
    control = balanced.balance.first if balanced and balanced.several else None
    return Index(
        case=case,
        source=source,
        quantity=quantity.name,
        unit=quantity.unit,
        basis=readings.basis,
        devices=readings.medians(),
        first=readings.balance.first,
        most=readings.balance.most,
        control=control,
        verdict="the control" if is_control else _verdict(readings.balance.first, control),
        floor=alone.medians().get(0) if alone else None,
    )


def control_of(case: Case) -> Case:
    """Return the case that trains with DistributedDataParallel on the same work and devices."""
    return replace(case, strategy=registry.of_role(Role.CONTROL), schedule="", options=())


def _verdict(first: Estimate, control: Estimate | None) -> str:
    """Return, as text, how the interval of `first` compares with that of `control`."""
    if control is None:
        return "no control"
    if first.doubt or control.doubt:
        return f"undecided: {words.withheld(first, control)}"
    if first.low > control.high:
        return "above the control"
    return (
        "below the control" if first.high < control.low else "not distinguishable from the control"
    )


def records(rows: Iterable[summary.Row], trials: Iterable[Trial]) -> list[dict[str, object]]:
    """Return the imbalance of each row of a run by name, None for unknown values.

    The names are the same for all rows of all runs.
    """
    index_of = {(index.case, index.source, index.quantity): index for index in indexes(trials)}
    return [
        {
            entry: value
            for quantity in QUANTITIES
            for entry, value in _entries(quantity, index_of.get((*row.key, quantity.name))).items()
        }
        for row in rows
    ]


def _entries(quantity: Quantity, index: Index | None) -> dict[str, object]:
    name = f"imbalance_{quantity.name.replace(', ', '_').replace(' ', '_')}"
    return {
        **quantities.entries(f"{name}_first", index.first if index else None),
        **quantities.entries(f"{name}_most", index.most if index else None),
        f"{name}_verdict": index.verdict if index else None,
    }


# ---------------------------------------------------------------- sources of the amounts


def _steps_of(metric: str) -> Callable[[Trial], Figures]:
    return lambda trial: trial.readings(metric, timed=True)


def _peak(kind: str, source: str) -> Callable[[Trial], Figures]:
    """Return a function that returns each device's peak memory over whole steps, in bytes.

    `kind` is "allocated" or "reserved"; `source` is the origin of the peaks, such as "allocator".
    """

    def read(trial: Trial) -> Figures:
        found = [m for m in trial.memory if (m.kind, m.source, m.phase) == (kind, source, "")]
        return {m.device: [m.peak_bytes] for m in found if m.device >= 0}

    return read


def _used(trial: Trial) -> Figures:
    """Return each device's highest memory use in the timed steps according to NVML, in bytes."""
    readings = sampled.momentary(trial, "memory_used_bytes")
    return {device: [max(values)] for device, values in readings.items()}


def _energy(trial: Trial) -> Figures:
    """Return each device's energy per timed step in joules, from its counter."""
    steps = len(trial.timed)
    return {device: [used / steps] for device, used in sampled.energy_j(trial).items()}


def _moved(trial: Trial) -> Figures:
    """Return the bytes that each device receives and sends in one step, computed from shapes."""
    found = of_trial(trial)
    devices = range(len(trial.case.rows)) if found else ()
    return {device: [received(found, device) + sent(found, device)] for device in devices}


QUANTITIES = (
    Quantity(
        "busy time",
        "s",
        (*((basis, _steps_of(metric)) for metric, basis in summary.BUSY_METRICS.items()),),
    ),
    Quantity(
        "occupied time", "s", (("phases open on the device", lambda trial: trial.ledger.occupied),)
    ),
    Quantity(
        "memory, allocated",
        "bytes",
        (
            ("allocator", _peak("allocated", "allocator")),
            ("ledger", _peak("allocated", "ledger")),
        ),
    ),
    Quantity("memory, reserved", "bytes", (("allocator", _peak("reserved", "allocator")),)),
    Quantity("memory, in use", "bytes", (("NVML", _used),)),
    Quantity("energy of a step", "J", (("NVML's counter", _energy),)),
    Quantity("bytes moved", "bytes", (("computed from shapes", _moved),)),
)
"""The compared quantities; conclusions rest on busy time and memory, the others corroborate."""
