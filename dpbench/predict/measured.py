"""Measured profiles: what a model's phases and ops cost on the device at hand, fitted over several batch sizes.

Phases are timed by the marks of the strategy `single`, without a profiler. Ops are taken from torch.profiler in steps
of their own, because it slows them down: they tell the parts of a phase, and the marks tell the whole.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from dpbench import models
from dpbench.hardware.device import Device
from dpbench.hardware.devices import open_devices
from dpbench.measure import clocks
from dpbench.predict.profiles import FIXED_SHARE
from dpbench.records import UNATTRIBUTED, Case, Cost, Phase, Profile, Trial, ledger, registry
from dpbench.records.traits import Role
from dpbench.strategies import Step, single

WARMUP_STEPS, STEPS, PROFILED_STEPS = 3, 15, 3
PREFIX = "phase:"


@dataclass(frozen=True)
class OpTime:
    """The ops of one name in one phase of one step: how many, and their seconds on the host and on the device.

    Host seconds are those of the op itself, without the ops that it calls; under the profiler, which adds to them.
    """

    phase: Phase
    name: str
    count: float
    host_s: float
    kernel_s: float


@dataclass(frozen=True)
class OpCost:
    """A group of ops over the batch: seconds on the host and on the device."""

    phase: Phase
    name: str
    count: float
    host: Cost
    kernel: Cost


@dataclass(frozen=True)
class Measured:
    """A model on one device: phases without a profiler, ops under it, and the seconds that both were fitted to.

    `phases` maps each batch size to the median seconds of its phases; `residual` is the largest relative distance of
    the fitted phases above 5 % of a step from those.
    """

    profile: Profile
    ops: tuple[OpCost, ...]
    phases: Mapping[int, Mapping[Phase, float]]
    residual: float


def measure(case: Case, batches: Sequence[int], *, with_ops: bool = True) -> Measured:
    """Measure a case's model on its first device at several batch sizes.

    Raises ValueError for fewer than two sizes; three and more show where the line through them is none.
    """
    if len(set(batches)) < 2:
        raise ValueError(f"a line over the batch needs two batch sizes or more, got {[*batches]}")
    phases: dict[int, Mapping[Phase, float]] = {}
    ops: dict[int, list[OpTime]] = {}
    for rows in sorted(set(batches)):
        one = replace(case, strategy=registry.of_role(Role.BASELINE), batch_size=rows, devices=1)
        phases[rows] = phase_seconds(one)
        if with_ops:
            ops[rows] = op_seconds(one)
    model = models.load(case.model, case.size, case.seed)
    profile = fit_profile(models.profile(model), phases)
    profile = replace(
        profile, modules=sum(1 for _ in model.module.modules()), buffer_tensors=_count(model.module.buffers())
    )
    return Measured(profile, tuple(_groups(ops)), phases, _residual(profile, phases))


def of_trials(counted: Profile, trials: Sequence[Trial]) -> Measured:
    """Return the profile that stored trials of the strategy `single` at several batch sizes make; no torch is run.

    A phase's seconds are the median over all trials of one batch size of those of their typical steps. What no phase
    covers is, on a GPU, time in which it waits for launches: it counts to the phases, in proportion.
    """
    steps: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trial in trials:
        typical = ledger.typical(trial)
        for part in (*(phase.value for phase in Phase), UNATTRIBUTED):
            steps[trial.case.batch_size][part].append(typical.get(part, 0.0))
    parts = {n: {part: statistics.median(values) for part, values in found.items()} for n, found in steps.items()}
    phases = {n: {phase: seconds[phase.value] for phase in Phase} for n, seconds in parts.items()}
    rest = {n: seconds[UNATTRIBUTED] for n, seconds in parts.items()}
    if trials[0].case.device_kind == "cuda":
        scale = {n: 1 + rest[n] / max(sum(phases[n].values()), 1e-12) for n in phases}
        phases = {n: {phase: scale[n] * s for phase, s in found.items()} for n, found in phases.items()}
        profile = fit_profile(counted, phases)
    else:
        rows = sorted(rest)
        aside = fit_cost(rows, [rest[n] + phases[n][Phase.SCATTER] for n in rows])
        profile = replace(fit_profile(counted, phases), rest=aside)
    return Measured(profile, (), phases, _residual(profile, phases))


def fit_profile(counted: Profile, phases: Mapping[int, Mapping[Phase, float]]) -> Profile:
    """Return a counted profile with its seconds fitted to measured phases."""
    rows = sorted(phases)

    def fit(phase: Phase) -> Cost:
        return fit_cost(rows, [phases[n].get(phase, 0.0) for n in rows])

    return replace(
        counted, source="measured", forward=fit(Phase.FORWARD), loss=fit(Phase.LOSS), backward=fit(Phase.BACKWARD),
        optimizer=fit(Phase.OPTIMIZER),
    )  # fmt: skip


def fit_cost(rows: Sequence[int], seconds: Sequence[float]) -> Cost:
    """Fit seconds = fixed + sample * rows, neither below zero, to the least sum of squared relative distances."""
    known = [(n, s) for n, s in zip(rows, seconds, strict=True) if s > 0]
    if not known:
        return Cost()
    if len(known) == 1:
        ((n, s),) = known
        return Cost(s * FIXED_SHARE, s * (1 - FIXED_SHARE) / n)
    design = np.array([[1 / s, n / s] for n, s in known])
    scale = np.abs(design).max(axis=0)
    (fixed, sample), _ = nnls(design / scale, np.ones(len(known)))
    return Cost(float(fixed / scale[0]), float(sample / scale[1]))


def phase_seconds(case: Case) -> dict[Phase, float]:
    """Return the median seconds of each phase of an ordinary step on one device."""
    with _running(case) as (step, batch, devices, listen):
        listener = clocks.choose(devices)
        listen(listener.mark)
        with listener.block():
            for i in range(WARMUP_STEPS + STEPS):
                with listener.step(warmup=i < WARMUP_STEPS):
                    step(*batch)
    rows = ledger.of_trial(Trial(case=case, steps=listener.steps(), spans=listener.spans()))[WARMUP_STEPS:]
    return {phase: statistics.median(row.get(phase.value, 0.0) for row in rows) for phase in Phase}


def op_seconds(case: Case) -> list[OpTime]:
    """Return the ops of a step by phase and name, the longest first, as the profiler sees them."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if case.device_kind == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with _running(case) as (step, batch, devices, listen):
        listen(_named)
        for _ in range(WARMUP_STEPS):
            step(*batch)
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(PROFILED_STEPS):
                step(*batch)
            devices[0].synchronize()
    found: dict[tuple[Phase, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    events = list(profiler.events() or ())
    spans = [(e.time_range.start, e.time_range.end, Phase(e.name.removeprefix(PREFIX))) for e in events if _is_phase(e)]
    for event in events:
        # kernels are counted with the op that started them
        if event.device_type.name != "CPU" or _is_phase(event):
            continue
        phase = next((p for start, end, p in spans if start <= event.time_range.start < end), None)
        if phase is not None:
            row = found[phase, event.name]
            row[0] += 1
            row[1] += event.self_cpu_time_total / 1e6
            row[2] += event.self_device_time_total / 1e6
    ops = [OpTime(phase, name, *(value / PROFILED_STEPS for value in row)) for (phase, name), row in found.items()]
    return sorted(ops, key=lambda op: -(op.host_s + op.kernel_s))


def _is_phase(event: Any) -> bool:
    return str(event.name).startswith(PREFIX)


def _named(phase: Phase, device: int) -> AbstractContextManager[Any]:
    """Mark a phase for the profiler."""
    return torch.profiler.record_function(PREFIX + phase.value)


Listen = Callable[[Callable[[Phase, int], AbstractContextManager[Any]]], None]


@contextmanager
def _running(case: Case) -> Iterator[tuple[Step, tuple[Any, Any], Sequence[Device], Listen]]:
    """Yield a step of `single`, its batch, its devices, and a function that says who listens to its marks."""
    devices = open_devices(case.device_kind, 1, ids=case.device_ids)
    model = models.load(case.model, case.size, case.seed)
    listening: list[Callable[[Phase, int], AbstractContextManager[Any]]] = []

    def mark(phase: Phase, device: int) -> AbstractContextManager[Any]:
        return listening[-1](phase, device)

    with single.STRATEGY.start(case, model, devices, mark) as step:
        yield step, model.batch(case.batch_size, case.seed), devices, listening.append


def _groups(ops: Mapping[int, Sequence[OpTime]]) -> Iterator[OpCost]:
    """Yield each group of ops with its seconds as lines over the batch."""
    rows = sorted(ops)
    table = {(op.phase, op.name, n): op for n in rows for op in ops[n]}
    for phase, name in dict.fromkeys((op.phase, op.name) for op in ops[rows[-1]] if rows) if rows else ():
        found = [table.get((phase, name, n)) for n in rows]
        host = fit_cost(rows, [op.host_s if op else 0.0 for op in found])
        kernel = fit_cost(rows, [op.kernel_s if op else 0.0 for op in found])
        yield OpCost(phase, name, found[-1].count if found[-1] else 0.0, host, kernel)


def _residual(profile: Profile, phases: Mapping[int, Mapping[Phase, float]]) -> float:
    """Return how far the lines are from what was measured, at worst, over the phases that matter."""
    worst = 0.0
    for rows, seconds in phases.items():
        whole = sum(seconds.values())
        for phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER):
            cost: Cost | None = getattr(profile, phase.value)
            if cost and seconds[phase] > 0.05 * whole:
                worst = max(worst, abs(cost.at(rows) / seconds[phase] - 1))
    return worst


def _count(values: Iterator[Any]) -> int:
    return sum(1 for _ in values)
