"""Cases: predictions of the cases of a plan on a described machine, with 80 % intervals, as trials of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dpbench.predict import counts, cpu_model, intervals, profiles, quick, simulation, stored
from dpbench.predict.constants import DEFAULT, Constants
from dpbench.predict.needs import Need
from dpbench.records import Case, Profile, Source, Span, Status, Step, Trial, plan, registry
from dpbench.records.machine import Machine, UnknownMachine
from dpbench.records.traits import Role

PRICED = ("traced", "counted")
LAUNCHES = (intervals.HOST, "launch_s")
"""Priors that a traced or counted profile depends on, because launches limit a net of many small kernels."""


@dataclass(frozen=True)
class Prediction:
    """The prediction of one case: the duration of a step in seconds, its 80 % interval, and the spans of one step."""

    case: Case
    seconds: float
    low_s: float
    high_s: float
    profile: str
    spans: tuple[Span, ...] = ()
    machine: str = ""
    need: Need | None = None

    def trial(self) -> Trial:
        """Return the prediction as a trial, for reports and results files."""
        facts = {"machine": self.machine, "profile": self.profile, "interval_80_s": [self.low_s, self.high_s]}
        memory = self.need.memory if self.need else ()
        step = Step(self.seconds, False, self.seconds)
        found = Trial(
            case=self.case, source=Source.PREDICTED, spans=self.spans, started_s=time.time(), steps=(step,),
            reason=f"predicted for {self.machine}", provenance=facts, memory=memory,
        )  # fmt: skip
        if self.need is None or self.need.status is Status.OK:
            return found
        lacking = f"predicted for {self.machine}: out of memory on device {self.need.failed_device}"
        return replace(
            found, status=Status.OOM, reason=lacking, failed_device=self.need.failed_device, steps=(), spans=()
        )


@dataclass(frozen=True)
class Predictor:
    """The inputs of predictions on one machine. `given` is a known step on one device, as (seconds, samples)."""

    machine: Machine
    constants: Constants = DEFAULT
    given: tuple[float, int] | None = None
    by_formula: bool = False
    measured: Mapping[counts.Key, Profile] = field(default_factory=dict)
    """Profiles measured on a device of this kind."""

    def predict(self, case: Case) -> Prediction:
        """Return the prediction of one case. Raises UnknownMachine if the machine file lacks a required number."""
        if self.machine.logical:
            return self._on_host(case)
        simulation.check(case, self.machine)
        profile = self.profile(case)
        seconds = self._seconds(case, self.machine, self.constants, profile)
        spans: tuple[Span, ...] = ()
        if not self.by_formula:
            line = simulation.step(case, profile, self.machine, self.constants)
            seconds, spans = line.seconds, tuple(line.spans())

        def evaluate(name: str, factor: float) -> float:
            if name == intervals.HOST:
                host = replace(self.machine.host, factor=self.machine.host.factor * factor)
                other = replace(self, machine=replace(self.machine, host=host))
            else:
                other = replace(self, constants=intervals.scaled(self.constants, name, factor))
            # the profile itself depends on these priors
            again = name == "forward_share" or (profile.source in PRICED and name in LAUNCHES)
            return other._seconds(case, other.machine, other.constants, other.profile(case) if again else profile)

        doubt = intervals.RESIDUAL[profile.source]
        priors = intervals.of(case)
        if not self.given:
            del priors["forward_share"]
        low, high = intervals.interval(seconds, evaluate, priors, doubt)
        return Prediction(case, seconds, low, high, profile.source, spans, self.machine.name)

    def _on_host(self, case: Case) -> Prediction:
        """Return the prediction of a case on logical CPU devices, from measured steps on one device."""
        profile = self.measured.get(counts.key(case))
        if profile is None:
            raise UnknownMachine(
                f"{case.label}: {self.machine.name} has logical CPU devices; a prediction for these needs a measured "
                f"step on one device: {stored.way_out(case)}, then give --from FILE"
            )
        phases = cpu_model.step(case, profile, cpu_model.ProbedHost(self.machine.probe))
        seconds = sum(phases.values())
        doubt = intervals.RESIDUAL[profile.source] if len(case.rows) == 1 else intervals.ON_HOST
        low, high = intervals.interval(seconds, lambda *_: seconds, {}, doubt)
        return Prediction(case, seconds, low, high, profile.source, tuple(cpu_model.spans(phases)), self.machine.name)

    def _seconds(self, case: Case, machine: Machine, constants: Constants, profile: Profile) -> float:
        if self.by_formula or (case.strategy in quick.KNOWN and case.schedule in ("", "reference")):
            return quick.seconds(case, profile, machine, constants)
        return simulation.step(case, profile, machine, constants).seconds

    def profile(self, case: Case) -> Profile:
        """Return the profile of a case's model: measured, split from a known step, or counted from FLOP and bytes."""
        if measured := self.measured.get(counts.key(case)):
            return measured
        if self.given:
            seconds, samples = self.given
            return profiles.given(
                counts.of(case), seconds, samples, self.machine, self.constants, optimizer=case.optimizer
            )
        return counts.priced(case, self.machine, self.constants)


def sweep(models: Sequence[str], device_kind: str = "cuda", **axes: object) -> list[Case]:
    """Return the product of the axes as cases; `models` may include models that are known by name only."""
    found: list[Case] = []
    for model in models:
        stand_in = registry.names("models")[0] if counts.named(model) else model
        cases = plan.sweep(models=(stand_in,), device_kind=device_kind, **axes)  # type: ignore[arg-type]
        found += [replace(case, model=model) for case in cases]
    return list(dict.fromkeys(found))


def strategies(machine: Machine) -> tuple[str, ...]:
    """Return the default strategies of a prediction; torch.nn.DataParallel is left out on logical CPU devices."""
    roles = (Role.BASELINE, Role.WRAPPER, Role.ENGINE, Role.CONTROL)
    return tuple(registry.of_role(role) for role in roles if not (machine.logical and role is Role.WRAPPER))


def most_devices(machine: Machine) -> int:
    """Return the largest device count for which predictions on a machine exist."""
    return min(machine.devices, cpu_model.MOST) if machine.logical else machine.devices


def speedup(one: Prediction, others: Sequence[Prediction]) -> tuple[float, str]:
    """Return the speed-up of `one` over a single device, and the kind of scaling.

    The kind is "strong" (equal total batch) or "weak" (equal batch per device). Without a prediction for one device to
    compare with, return 0 and "".
    """
    case = one.case
    for scaling, batch in (("strong", case.batch_size), ("weak", case.batch_size / case.devices)):
        for other in others:
            base = other.case
            if base.traits.role is Role.BASELINE and base.batch_size == batch and base.model == case.model:
                return other.seconds / one.seconds * (case.batch_size / batch), scaling
    return 0.0, ""


def keep(path: Path, predictions: Sequence[Prediction], machine: Machine) -> str:
    """Store predictions in a results file, as a run on the described machine; return the id of the run."""
    from dpbench.store import Store

    found = [one.case for one in predictions]
    gpus = [] if machine.logical else [{"name": machine.gpu.name}] * min(machine.devices, 64)
    facts = {
        "host": {"name": f"{machine.name} (described, not here)", "cpu": machine.description},
        "gpus": {"gpus": gpus},
        "sources": dict(machine.sources),
    }  # fmt: skip
    with Store.create(path) as store:
        run_id, _ = store.begin_run(
            plan=plan.plan_hash(found, 1), host=f"predicted:{machine.name}", code="", rounds=1, provenance=facts,
            reopen=False,
        )  # fmt: skip
        for one in predictions:
            store.end_trial(store.begin_trial(run_id, one.case, 0), one.trial())
        store.end_run(run_id)
    return run_id
