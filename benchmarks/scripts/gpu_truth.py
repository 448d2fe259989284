"""GPU truth: measure by other means what dpbench states about steps on a GPU.

    python benchmarks/scripts/gpu_truth.py OUTPUT.json

One GPU is enough: two replicas share it. `dpbench.run` measures trials in processes of their own,
and this process takes the same steps with pieces of dpbench. After each measurement, all so far are
in OUTPUT.json, by the names that `gpu_claims.py` reads. On fake GPUs, whose times say nothing, the
model is small.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import dpbench
from dpbench import models, strategies
from dpbench.analysis import stats, summary, validity
from dpbench.hardware import gpus, samplers
from dpbench.hardware.device import Device
from dpbench.hardware.devices import float32, open_devices
from dpbench.measure.clocks import CudaClock
from dpbench.measure.worker import profiling
from dpbench.records import HOST, Case, Mark, Phase, Trial, activity, fake, no_mark
from dpbench.records.estimate import Estimate
from dpbench.records.facts import RunFacts

ROUNDS, PAIRED_ROUNDS, BATCH = 3, 4, 64
BOTH = ("dp", "torch_dp")
STEPS, TURNS, WARMUP, PROFILED = 40, 8, 10, 5
"""The steps of a block, turns of two kinds of blocks, and steps before and under the profiler."""
ENERGY_S = 5.0
PREFIX = "phase:"
"""The beginning of the names of ranges in the profile that are marks."""


def told(trial: Trial) -> dict[str, Any]:
    """Return what claims read of a trial."""
    checks = {one.key: one for one in validity.of(trial, 0)}
    marks = checks.get("marks")
    return {
        "label": f"{trial.case.strategy} x{trial.case.devices}",
        "strategy": trial.case.strategy,
        "devices": trial.case.devices,
        "round": trial.round,
        "status": trial.status,
        "reason": trial.reason,
        "gpu": trial.facts.gpu,
        "labels": summary.labels(trial),
        "step_s": statistics.median(trial.timed) if trial.timed else None,
        "phases_s": trial.ledger.typical() if trial.timed else {},
        "no_profile": trial.facts.no_profile,
        "checks": [*checks],
        "marks": marks and {"value": marks.value, **marks.about},
        "memory": [(one.device, one.phase, one.kind, one.peak_bytes) for one in trial.memory],
    }


@dataclass
class Loop:
    """A loop of a strategy's steps on one GPU, whose mark can be replaced."""

    devices: Sequence[Device]
    step: Callable[[], object]
    mark: Mark = no_mark

    def block(self, clock: CudaClock, steps: int) -> tuple[list[float], float]:
        """Return the seconds of a block's steps by events, and of the block by the host's clock."""
        with clock.block():
            began_s = time.perf_counter()
            for _ in range(steps):
                with clock.step(warmup=False):
                    self.step()
            torch.cuda.synchronize()
            host_s = time.perf_counter() - began_s
        return [one.seconds for one in clock.steps()[-steps:]], host_s


@contextmanager
def started(case: Case) -> Iterator[Loop]:
    """Start the strategy of a case, and warm it up."""
    strategy = strategies.load(case.strategy)
    shared = strategy.traits.shared_stream
    devices = open_devices("cuda", case.devices, placement=case.placement, shared_stream=shared)
    model = models.load(case.model, case.size, case.seed)
    inputs, target = model.batch(case.batch_size, case.seed)
    pinned = inputs.pin_memory(), target.pin_memory()
    loop = Loop(devices, lambda: None)

    def mark(phase: Phase, device: int) -> Any:
        return loop.mark(phase, device)

    with strategies.begin(strategy, case, model, devices, mark) as step:
        loop.step = lambda: step(*pinned)
        loop.block(CudaClock(devices), WARMUP)
        yield loop


def by_phase(clock: CudaClock, steps: Sequence[int]) -> dict[str, list[float]]:
    """Return each phase's seconds in each of these steps, as the union of its spans on GPUs."""
    spans: dict[str, dict[int, list[activity.Interval]]] = {}
    for one in clock.spans():
        if one.device != HOST and one.step in steps:
            by_step = spans.setdefault(one.phase.value, {})
            by_step.setdefault(one.step, []).append((one.start_s, one.end_s))
    return {
        phase: [activity.length(activity.union(own.get(step, ()))) for step in steps]
        for phase, own in spans.items()
    }


def profiled(loop: Loop) -> dict[str, Any]:
    """Return the phases of the same steps by CUDA events and by CUPTI, and `Profile.off_s`."""
    clock = CudaClock(loop.devices)

    @contextmanager
    def mark(phase: Phase, device: int) -> Iterator[None]:
        with torch.profiler.record_function(PREFIX + phase.value), clock.mark(phase, device):
            yield

    def step() -> None:
        with clock.step(warmup=False):
            loop.step()

    loop.mark = mark
    try:
        with clock.block():
            # replicas' forwards run in other threads
            events = profiling.record(step, loop.devices, PROFILED, all_threads=True)
    except profiling.ProfilerFailed as error:
        return {"phases": {}, "off_s": None, "withheld": str(error)}
    calls = {one.id: one.time_range for one in events if profiling.is_call(one)}
    kernels = [one for one in events if profiling.is_activity(one) and one.id in calls]
    phases = {}
    for phase, spans_s in by_phase(clock, range(1, 1 + PROFILED)).items():
        ranges = [
            one.time_range
            for one in events
            if one.name == PREFIX + phase and profiling.on_host(one)
        ]
        launched = [
            (one.time_range.start, one.time_range.end)
            for one in kernels
            if any(window.start <= calls[one.id].start <= window.end for window in ranges)
        ]
        kernels_s = activity.length(activity.union(launched)) / 1e6 / PROFILED
        phases[phase] = {"span_s": statistics.fmean(spans_s), "kernels_s": kernels_s}
    ordinals = {one.torch_device.index: one.index for one in reversed(loop.devices)}
    profile = profiling.by_step(events, ordinals, PROFILED)
    return {"phases": phases, "off_s": profile.off_s, "withheld": profile.withheld}


def sampled(loop: Loop) -> tuple[float, Estimate]:
    """Return the median step, and the ratio of steps beside the sampler to those without it."""
    clock = CudaClock(loop.devices)
    alone_s, beside_s = dict[int, list[float]](), dict[int, list[float]]()
    for turn in range(TURNS):
        for sampling in (False, True) if turn % 2 else (True, False):
            with tempfile.TemporaryDirectory() as folder:
                output = Path(folder) / "samples"
                with samplers.sampling([0], output) if sampling else nullcontext():
                    (beside_s if sampling else alone_s)[turn] = loop.block(clock, STEPS)[0]
    median_s = statistics.median(one for steps in alone_s.values() for one in steps)
    return median_s, stats.ratio(beside_s, alone_s)


def energy(loop: Loop, step_s: float) -> dict[str, float] | None:
    """Return the energy of some seconds of steps by NVML's counter, and from its power readings."""
    with (
        tempfile.TemporaryDirectory() as folder,
        samplers.sampling([0], Path(folder) / "samples") as samples,
    ):
        began_s = time.perf_counter()
        loop.block(CudaClock(loop.devices), math.ceil(ENERGY_S / step_s))
        found = samples.cut(began_s, time.perf_counter())
    counter, power = (
        [(one.time_s, one.value) for one in found if (one.metric, one.device) == (metric, 0)]
        for metric in ("energy_j", "power_w")
    )
    if len(counter) < 2 or len(power) < 2:
        return None
    start_s, end_s = counter[0][0], counter[-1][0]
    mean_w = statistics.fmean(value for at_s, value in power if start_s <= at_s <= end_s)
    return {
        "counter_j": counter[-1][1] - counter[0][1],
        "integral_j": mean_w * (end_s - start_s),
        "seconds": end_s - start_s,
    }


def measured() -> Iterator[dict[str, Any]]:
    """Yield measurements by name, one after the other."""
    is_fake = fake.fake_gpus(RunFacts.of({"gpus": gpus.describe()}))
    usable = gpus.of_torch()
    gpu = usable.gpus[0]
    yield {"fake": is_fake, "gpu": gpu["name"], "tolerance_s": activity.CLOCKS_AGREE_S}
    case = Case(
        model="mlp" if is_fake else "resnet18",
        size="small" if is_fake else "full",
        precision="tf32" if usable.vendor.trains_in("tf32", gpu) else "fp32",
        strategy="single",
        batch_size=BATCH,
        device_kind="cuda",
    )
    with tempfile.TemporaryDirectory() as folder:
        yield {
            "trials": [told(one) for one in [*trials(case, folder), *trials(case, folder, *BOTH)]]
        }
        if case.precision == "tf32":
            float32.allow_tf32()
        with started(case) as loop:
            yield from alone(loop)
            found = profiled(loop)
        two = {"strategy": "dp", "schedule": "reference", "devices": 2, "placement": "colocated"}
        with started(replace(case, batch_size=2 * BATCH, **two)) as loop:
            other = profiled(loop)
        offs = [one["off_s"] for one in (found, other) if one["off_s"] is not None]
        yield {
            "profiled": {"single": found["phases"], "dp": other["phases"]},
            "off_s": max(offs, default=None),
            "withheld": found["withheld"] or other["withheld"],
        }
        pair = trials(case, folder, *BOTH, rounds=PAIRED_ROUNDS, paired=True)
    series = [{one.round: one.timed for one in pair if one.case.strategy == name} for name in BOTH]
    if all(any(rounds.values()) for rounds in series):
        yield {"paired": share(stats.ratio(*series))}


def trials(case: Case, folder: str, *both: str, **options: Any) -> Sequence[Trial]:
    """Return trials of a case or, of strategies with two replicas, on the same GPU."""
    return dpbench.run(
        models=case.model,
        size=case.size,
        precision=case.precision,
        batch_per_device=BATCH,
        strategies=[*both] or case.strategy,
        devices=2 if both else 1,
        placement="colocated",
        store=Path(folder) / "trials.db",
        quiet=True,
        patience=0,
        **{"rounds": ROUNDS, **options},
    ).trials


def alone(loop: Loop) -> Iterator[dict[str, Any]]:
    """Yield what is measured of the plain loop on one GPU."""
    clock = CudaClock(loop.devices)
    loop.mark = clock.mark
    steps_s, host_s = loop.block(clock, STEPS)
    loop.mark = no_mark
    yield {"events_s": sum(steps_s), "host_s": host_s}
    spans = by_phase(clock, range(STEPS))
    yield {"spans_s": {name: statistics.median(each) for name, each in spans.items()}}
    step_s, ratio = sampled(loop)
    yield {"bare_s": step_s, "sampler": share(ratio)}
    if joules := energy(loop, step_s):
        yield {"energy": joules}


def share(ratio: Estimate) -> dict[str, float]:
    """Return a ratio less 1, with its interval."""
    return {name: asdict(ratio)[name] - 1 for name in ("value", "low", "high")}


def main() -> None:
    output, evidence = Path(sys.argv[1]), dict[str, Any]()
    for found in measured():
        evidence |= found
        output.write_text(json.dumps(evidence, default=str), encoding="utf-8")
        print(*found, flush=True)


if __name__ == "__main__":
    main()
