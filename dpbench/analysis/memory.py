"""Footprint: each device's peak memory in each phase, and the excess of device 0 over the other devices."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dpbench.records import HOST, UNATTRIBUTED, Case, Phase, Source, Trial

PHASES = (*(phase.value for phase in Phase), UNATTRIBUTED)


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The memory peaks of one case.

    `peaks[phase][device]` is in bytes, the highest over the rounds; `basis` is their source. `used` is each device's
    highest memory use that NVML reported, in bytes, which includes CUDA contexts and the driver's own reserve.
    """

    case: Case
    source: Source
    basis: str
    peaks: Mapping[str, Mapping[int, int]]
    used: Mapping[int, int]

    @property
    def whole(self) -> Mapping[int, int]:
        """Return each device's highest peak over all phases, in bytes."""
        devices = sorted({device for held in self.peaks.values() for device in held})
        return {device: max(held.get(device, 0) for held in self.peaks.values()) for device in devices}

    @property
    def top(self) -> str:
        """Return the phase in which device 0 has its highest peak."""
        return max(self.peaks, key=lambda phase: (self.peaks[phase].get(0, 0), -PHASES.index(phase)))

    @property
    def excess_bytes(self) -> float | None:
        """Return device 0's highest peak minus the mean of the others' highest peaks, in bytes; None for one device."""
        others = [size for device, size in self.whole.items() if device]
        return self.whole[0] - statistics.mean(others) if others and 0 in self.whole else None

    @property
    def causes(self) -> dict[str, float]:
        """For each phase, return device 0's peak minus the mean peak of the others, in bytes; the largest is first."""
        gaps = {
            phase: held[0] - statistics.mean(size for device, size in held.items() if device)
            for phase, held in self.peaks.items()
            if 0 in held and len(held) > 1
        }
        return dict(sorted(gaps.items(), key=lambda pair: -pair[1]))


def footprints(trials: Iterable[Trial]) -> list[Footprint]:
    """Return the footprint of every case that has peaks by phase, in the order of the cases."""
    found: dict[tuple[Case, Source], dict[str, dict[int, int]]] = {}
    basis: dict[tuple[Case, Source], str] = {}
    used: dict[tuple[Case, Source], dict[int, int]] = {}
    for trial in (trial for trial in trials if trial.trusted):
        most = used.setdefault((trial.case, trial.source), {})
        for sample in trial.samples:
            if sample.metric == "memory_used_bytes" and 0 <= sample.device < len(trial.case.rows):
                most[sample.device] = max(most.get(sample.device, 0), int(sample.value))
        for peak in trial.memory:
            if peak.phase and peak.kind == "allocated" and peak.device != HOST:
                key = trial.case, trial.source
                basis[key] = peak.source
                held = found.setdefault(key, {}).setdefault(peak.phase, {})
                held[peak.device] = max(held.get(peak.device, 0), peak.peak_bytes)
    return [
        Footprint(
            case=case, source=source, basis=basis[case, source], used=dict(sorted(used[case, source].items())),
            peaks={phase: dict(sorted(peaks[phase].items())) for phase in PHASES if phase in peaks},
        )
        for (case, source), peaks in found.items()
    ]  # fmt: skip
