"""Cases: time and memory of cases on a described machine, with 80 % intervals, stored as trials."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from dpbench.predict import counts, deviations, network, profiles, simulation
from dpbench.predict.constants import (
    COMPUTE,
    DEFAULT,
    RESIDUAL,
    Constants,
    drawn,
    interval,
    priors_of,
    scaled,
)
from dpbench.predict.deviations import Deviation
from dpbench.predict.machine import Machine
from dpbench.predict.published import PublishedStep, nearest
from dpbench.predict.work import Profile
from dpbench.records import Case, Memory, Source, Span, Status, Step, Trial, plan, registry
from dpbench.records.estimate import Estimate
from dpbench.records.facts import stated
from dpbench.records.registry import Parallelism, Role
from dpbench.store import Identity

if TYPE_CHECKING:
    from dpbench.predict.memory import Traces

UNTRACED = "unknown: only dpbench's models and your own can be traced to calculate the memory"


@dataclass(frozen=True, kw_only=True)
class Need:
    """The memory that a case needs on each device.

    `memory` contains the peaks of the allocator, and `process_bytes` the totals per device that the
    driver would show; if both are unknown and empty, `reason` explains why. `fits` is None if the
    memory of the case or of the GPU is unknown. `failed_device` is the first device whose memory is
    too small. `largest` is the largest batch size that fits: 0 if none does, None if there was no
    search.
    """

    case: Case
    memory: tuple[Memory, ...] = ()
    process_bytes: tuple[int, ...] = ()
    fits: bool | None = None
    failed_device: int | None = None
    largest: int | None = None
    reason: str = ""

    def peaks(self, kind: str) -> list[int]:
        """Return the "allocated" or "reserved" peak of each device in bytes."""
        return [one.peak_bytes for one in self.memory if one.kind == kind]


def needs(cases: Sequence[Case], machine: Machine, *, largest: bool = False) -> Iterator[Need]:
    """Yield the memory that each case needs; with `largest`, also the largest batch that fits.

    Tracing takes a second or more for each distinct number of rows per device.
    """
    from dpbench.predict.memory import traces_of

    kept = lru_cache(traces_of)
    for case in cases:
        if counts.named(case.model):
            yield Need(case=case, reason=UNTRACED)
        else:
            traces = kept(counts.alone(case))
            yield _need(case, traces, int(machine.gpu.memory_bytes), largest)


def _need(case: Case, traces: Traces, capacity_bytes: int, largest: bool) -> Need:
    """`capacity_bytes` is the memory of a GPU, 0 if unknown."""
    from dpbench.predict import memory
    from dpbench.predict.allocator import OutOfDeviceMemory

    devices = memory.needed(case, traces)
    over = [one.device for one in devices if capacity_bytes and one.process_bytes > capacity_bytes]
    if over:
        # an allocator that reaches the limit frees its unused segments
        with suppress(OutOfDeviceMemory):
            devices = memory.needed(case, traces, capacity_bytes=capacity_bytes)
            over = []
    most = None
    if largest and capacity_bytes:
        most = memory.largest_batch(case, traces, capacity_bytes)
    return Need(
        case=case,
        process_bytes=tuple(one.process_bytes for one in devices),
        largest=most,
        fits=not over if capacity_bytes else None,
        failed_device=over[0] if over else None,
        memory=tuple(
            Memory(one.device, size, "replay", kind=kind)
            for one in devices
            for kind, size in (
                ("allocated", one.peak.allocated_bytes),
                ("reserved", one.peak.reserved_bytes),
            )
        ),
    )


PRICED = ("traced", "counted")
LAUNCHES = ("host_scale", "launch_s")
"""The priors on which traced and counted profiles depend: no phase is shorter than its launches."""


@dataclass(frozen=True)
class Prediction:
    """The predicted seconds of a case's step with their 80 % interval, and the step's spans.

    `profile` is the source of the profile ("measured", "given", "traced" or "counted"), `gpu` the
    name of the machine's GPUs, and `gil` whether its Python has the interpreter lock. `need` is
    None if the memory was not predicted.
    """

    case: Case
    seconds: float
    low_s: float
    high_s: float
    profile: str
    spans: tuple[Span, ...] = ()
    machine: str = ""
    gpu: str = ""
    gil: bool = True
    need: Need | None = None
    deviation: Deviation = deviations.NONE
    """What the step includes beyond the model, of which no span tells."""
    draws: tuple[float, ...] = ()
    """log(duration / seconds) in each random draw; draw i is the same in all predictions."""

    @property
    def step(self) -> Estimate:
        """Return the seconds of the step with their interval."""
        return Estimate(self.seconds, self.low_s, self.high_s, 0)

    def trial(self) -> Trial:
        """Return the prediction as a trial: OOM without steps if the case does not fit."""
        facts = {
            "profile": self.profile,
            **stated(
                machine=self.machine,
                gpu=self.gpu,
                gil="on" if self.gil else "off",
                interval_80_s=(self.low_s, self.high_s),
                error_draws=tuple(round(draw, 4) for draw in self.draws),
            ),
        }
        trial = Trial(
            case=self.case,
            source=Source.PREDICTED,
            spans=self.spans,
            started_s=time.time(),
            steps=(Step(self.seconds, False, self.seconds),),
            reason=f"predicted for {self.machine}",
            provenance=facts,
            memory=self.need.memory if self.need else (),
        )
        if self.need and self.need.fits is False:
            failed = self.need.failed_device
            return replace(
                trial,
                status=Status.OOM,
                reason=(
                    f"predicted for the machine {self.machine}: out of memory on device {failed}"
                ),
                failed_device=failed,
                steps=(),
                spans=(),
            )
        return trial


@dataclass(frozen=True)
class Predictor:
    """The inputs of predictions on one machine.

    `given` is a known step on one device as (seconds, samples).
    """

    machine: Machine
    constants: Constants = DEFAULT
    given: tuple[float, int] | None = None
    measured: Mapping[counts.Key, Profile] = field(default_factory=dict)
    """Profiles that were measured on one device, by model, size and precision."""
    lost: Mapping[Parallelism, Deviation] = field(default_factory=dict)
    """What measured steps on several GPUs of the machine lost, by their kind of parallelism."""

    def predict(self, case: Case) -> Prediction:
        """Return the prediction of one case.

        Raises UnknownMachine if the machine lacks devices or a needed value.
        """
        simulation.check(case, self.machine)
        profile = self.profile(case)
        timeline = simulation.step(case, profile, self.machine, self.constants)

        def evaluate(name: str, factor: float) -> float:
            if name == COMPUTE:
                varied_profile = profiles.slower(profile, factor)
                return simulation.step(case, varied_profile, self.machine, self.constants).seconds
            varied = replace(self, constants=scaled(self.constants, name, factor))
            # the profile itself depends on these priors
            profile_varies = name == "forward_share" or (
                profile.source in PRICED and name in LAUNCHES
            )
            varied_profile = varied.profile(case) if profile_varies else profile
            return simulation.step(case, varied_profile, self.machine, varied.constants).seconds

        priors = priors_of(case, self.machine)
        if not self.given:
            del priors["forward_share"]
        seconds = timeline.seconds
        residual = RESIDUAL[profile.source]
        if profile.source in PRICED:
            priors[COMPUTE] = residual
            residual = 0.0
        draws = drawn(seconds, evaluate, priors, residual)
        deviation = self.deviation(case)
        seconds, draws = deviation.of_step(seconds, draws)
        low_s, high_s = interval(seconds, draws)
        spans = tuple(timeline.spans())
        return Prediction(
            case,
            seconds,
            low_s,
            high_s,
            profile.source,
            spans,
            self.machine.name,
            self.machine.gpu.name,
            self.machine.host.gil,
            deviation=deviation,
            draws=draws,
        )

    def published(self, case: Case) -> list[PublishedStep]:
        """Return the step times that others measured and that are nearest to a case's."""
        link = network.link_kind(self.machine, case.devices)
        parameters = self.profile(case).parameter_bytes / 4
        return nearest(case, self.machine.gpu.name, link, parameters)

    def deviation(self, case: Case) -> Deviation:
        """Return the prior of what a case's step loses beyond the model.

        On a machine whose steps on several GPUs were measured, it is what these lost.
        """
        measured = self.lost.get(case.traits.parallelism)
        return deviations.of(case, self.machine) if measured is None else measured

    def profile(self, case: Case) -> Profile:
        """Return the measured profile of a case's model.

        Without one, the timings come from the known step `given`, or else from FLOP and bytes.
        """
        if measured := self.measured.get(counts.key(case)):
            return measured
        if self.given:
            seconds, samples = self.given
            return profiles.given(
                counts.of(case),
                seconds,
                samples,
                self.machine,
                self.constants,
                optimizer=case.optimizer,
            )
        return counts.priced(case, self.machine, self.constants)


STRATEGIES = tuple(
    registry.of_role(role) for role in (Role.BASELINE, Role.WRAPPER, Role.ENGINE, Role.CONTROL)
)
"""The default strategies of a prediction."""


def sweep(models: Sequence[str], *, observed: bool = False, **axes: object) -> list[Case]:
    """Return a case for each combination of a model and values of the axes of `plan.sweep`.

    Unlike `plan.sweep`, `models` may include models that are known by name only, and may be those
    of `observed` loops.
    """
    swept: list[Case] = []
    for model in models:
        stand_in = registry.names("models")[0] if observed or counts.named(model) else model
        cases = plan.sweep(models=(stand_in,), device_kind="cuda", **axes)  # type: ignore[arg-type]
        swept += [replace(case, model=model) for case in cases]
    return list(dict.fromkeys(swept))


def keep(path: Path, predictions: Sequence[Prediction], machine: Machine) -> str:
    """Store predictions as a run on the described machine, and return the run's id."""
    from dpbench.store import Store

    cases = [one.case for one in predictions]
    gpus = [{"name": machine.gpu.name}] * min(machine.devices, 64)
    facts = {
        "host": {"name": f"{machine.name} (described, not measured)", "cpu": machine.description},
        "gpus": {"gpus": gpus},
    }
    with Store.create(path) as store:
        return store.add(
            [one.trial() for one in predictions],
            Identity(plan.plan_hash(cases, 1), f"predicted:{machine.name}", ""),
            provenance=facts,
        )
