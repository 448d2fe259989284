"""Runs of dpbench's own timing loop on a simulated machine, with the true times of its steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dpbench import models, strategies
from dpbench.analysis.report import Report
from dpbench.hardware import nvml as hardware_nvml
from dpbench.hardware.samplers import nvml as sampler
from dpbench.measure.worker import bench, facts
from dpbench.records import Case, Effort, Phase, Sample, Trial, Verified
from tests.runs import bare
from tests.simulated.backend import TrueSpan, Witness, running
from tests.simulated.machine import Machine, Nvml
from tests.trials import report_on

SIX_STEPS = Effort(budget_s=0.01, min_steps=6, max_steps=6, warmup_steps=2, block_steps=4)
EFFORT = replace(bare(SIX_STEPS), profile=True)


@dataclass(frozen=True)
class Truth:
    """The true times of a trial in seconds: its steps, its spans, the timed steps' numbers.

    A step is a pair (start, end).
    """

    steps: list[tuple[float, float]]
    spans: list[TrueSpan]
    timed: list[int]

    def step_s(self) -> float:
        """Return the median duration of the timed steps in seconds."""
        return float(np.median([self.steps[k][1] - self.steps[k][0] for k in self.timed]))

    def occupied_s(self, device: int) -> float:
        """Return the median seconds per timed step in which a phase of the device was open."""
        return float(np.median([self._open_s(device, *self.steps[k]) for k in self.timed]))

    def waits_and_works_s(self, phase: Phase) -> tuple[float, float]:
        """Return the median seconds that a phase of device 0 waits for other devices, and works.

        The medians are over the timed steps.
        """
        mine = [
            [s for s in self.spans if (s.step, s.phase, s.device) == (k, phase, 0)]
            for k in self.timed
        ]
        waits = [
            sum(max(0.0, min(s.ready_s, s.end_s) - s.start_s) for s in spans) for spans in mine
        ]
        works = [sum(s.end_s - max(s.ready_s, s.start_s) for s in spans) for spans in mine]
        return float(np.median(waits)), float(np.median(works))

    def _open_s(self, device: int, start_s: float, end_s: float) -> float:
        """Return the seconds between two times in which any span of the device was open."""
        edges = sorted(
            {
                start_s,
                end_s,
                *(min(max(t, start_s), end_s) for s in self.spans for t in (s.start_s, s.end_s)),
            }
        )
        mine = [span for span in self.spans if span.device == device]
        return sum(
            b - a for a, b in pairwise(edges) if any(s.start_s <= a and b <= s.end_s for s in mine)
        )


def case_of(count: int, strategy: str = "dp", batch: int = 32, **changed: Any) -> Case:
    """Return the case of a small model on `count` GPUs."""
    return Case(
        model="mlp",
        strategy=strategy,
        device_kind="cuda",
        devices=count,
        batch_size=batch,
        **changed,
    )


def run(machine: Machine, case: Case, effort: Effort = EFFORT) -> tuple[Trial, Truth]:
    """Time a case on a simulated machine.

    Return its trial, with the samples of NVML, and the truth.
    """
    with running(machine) as devices:
        model = models.load(case.model, case.size, case.seed)
        prepared = bench.PreparedCase(
            case=case,
            strategy=strategies.load(case.strategy),
            devices=devices[: case.devices],
            model=model,
            batches=[model.batch(case.batch_size, case.seed)],
            examples=[],
            verified=Verified.BITWISE,
            setup={},
            facts={},
        )
        began_s = machine.timeline.now()
        with bench.start_timer(prepared, effort) as timer:
            bench.run_timers([timer])
            ended_s = machine.timeline.now()
            trial = facts.with_links(timer.trial(), prepared.devices)
            clock = timer._listener
    assert isinstance(clock, Witness)
    begins = dict(clock.true_begins)
    starts = [begins.get(k, clock.true_ends[k - 1]) for k in range(len(clock.true_ends))]
    truth = Truth(
        steps=list(zip(starts, clock.true_ends, strict=True)),
        spans=clock.true_spans,
        timed=[k for k, step in enumerate(trial.steps) if not step.warmup],
    )
    samples = counters(machine, range(case.devices), began_s, ended_s)
    return replace(trial, samples=(*trial.samples, *samples)), truth


def counters(
    machine: Machine, devices: range, start_s: float, end_s: float, each_s: float = 0.01
) -> list[Sample]:
    """Return what dpbench's sampler reads from NVML every `each_s` seconds between two true times.

    NVML numbers GPUs in PCI order; the UUIDs of CUDA's devices match the readings to the replicas.
    """
    library, samples = Nvml(machine, start_s), list[Sample]()
    with pytest.MonkeyPatch.context() as patch, hardware_nvml.open_nvml(library, {}) as opened:
        assert opened is not None
        patch.setattr(sampler, "time", SimpleNamespace(perf_counter=lambda: library.at_s))
        fast, _ = sampler.readings(opened.gpus, samples)
        for library.at_s in np.arange(start_s, end_s, each_s):
            fast()
        visible = [{"index": gpu.index, "uuid": gpu.uuid} for gpu in opened.gpus]
    uuids = [library.nvmlDeviceGetUUID(number) for number in devices]
    place = hardware_nvml.replicas_of((), uuids, visible)
    return [
        replace(sample, device=place[sample.device]) for sample in samples if sample.device in place
    ]


def report_of(trials: list[Trial]) -> Report:
    """Return the report of a run with these trials."""
    return report_on(trials)


def as_rounds(trial: Trial, count: int = 3) -> list[Trial]:
    """Return `count` rounds with the measurements of `trial`.

    The simulation repeats itself exactly.
    """
    return [replace(trial, round=number) for number in range(count)]
