"""Cases: predictions for a described machine, each a trial as a measurement would give, with its interval."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dpbench import plan, registry
from dpbench.machine import Machine
from dpbench.predict import features, intervals, profiles, quick, simulation
from dpbench.predict.constants import DEFAULT, Constants
from dpbench.predict.needs import Need
from dpbench.records import Case, Profile, Source, Span, Status, Step, Trial

SINGLE = "single"


@dataclass(frozen=True)
class Prediction:
    """A case's step in seconds, its 80 % interval, and the spans of one step."""

    case: Case
    seconds: float
    low_s: float
    high_s: float
    profile: str
    spans: tuple[Span, ...] = ()
    machine: str = ""
    need: Need | None = None

    def trial(self) -> Trial:
        """Return the prediction as a trial, which reports show as they show a measured one."""
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
    """Predicts cases on one machine. `given` is the known step of one device: seconds and samples."""

    machine: Machine
    constants: Constants = DEFAULT
    given: tuple[float, int] | None = None
    by_formula: bool = False
    profiles: Mapping[tuple[str, str, str], Profile] = field(default_factory=dict)
    """Profiles without a traced or given one of their own: by model, size and precision."""

    def predict(self, case: Case) -> Prediction:
        """Return one case's prediction; raises Unknown for what the machine does not say."""
        profile = self.profile(case)
        seconds = self._seconds(case, self.machine, self.constants, profile)
        spans: tuple[Span, ...] = ()
        if not self.by_formula:
            line = simulation.step(case, profile, self.machine, self.constants)
            seconds, spans = line.seconds, tuple(line.spans())

        def evaluate(name: str, factor: float) -> float:
            if name == intervals.HOST:
                host = replace(self.machine.host, factor=self.machine.host.factor * factor)
                return self._seconds(case, replace(self.machine, host=host), self.constants, profile)
            changed = intervals.scaled(self.constants, name, factor)
            if name == "forward_share":  # the profile was split with it
                other = replace(self, constants=changed).profile(case)
                return self._seconds(case, self.machine, changed, other)
            return self._seconds(case, self.machine, changed, profile)

        doubt = intervals.RESIDUAL[profile.source]
        priors = intervals.of(case.strategy)
        if not self.given:
            del priors["forward_share"]
        low, high = intervals.interval(seconds, evaluate, priors, doubt)
        return Prediction(case, seconds, low, high, profile.source, spans, self.machine.name)

    def _seconds(self, case: Case, machine: Machine, constants: Constants, profile: Profile) -> float:
        if self.by_formula or (case.strategy in quick.KNOWN and case.schedule in ("", "reference")):
            return quick.seconds(case, profile, machine, constants)
        return simulation.step(case, profile, machine, constants).seconds

    def profile(self, case: Case) -> Profile:
        """Return what a case's model costs: from the known step of one device, or from counts and peaks."""
        key = (case.model, case.size, case.precision)
        counted = self.profiles.get(key) or counts(*key)
        if counted.forward is not None:
            return counted
        if self.given:
            seconds, samples = self.given
            return profiles.given(counted, seconds, samples, self.machine, self.constants, optimizer=case.optimizer)
        return profiles.traced(counted, self.machine, case.precision)


def counts(model: str, size: str, precision: str) -> Profile:
    """Return a model's counts: of dpbench's own models and a user's by tracing (this loads torch), others by name."""
    if ":" not in model and model not in registry.names("models"):
        found = features.find(model, None, precision)
        if found.known == "estimated" or not features.exact(model):
            raise LookupError(
                f"{registry.unknown('model', model, sorted({*registry.names('models'), *features.names()}))}; "
                "your own is --model package.module:name"
            )
        return found.profile
    from dpbench import models

    loaded = models.load(model, size, 0)
    counted = models.profile(loaded)
    modules, buffers = list(loaded.module.modules()), list(loaded.module.buffers())
    leaves = sum(1 for module in modules if not list(module.children()))
    return replace(
        counted, modules=len(modules), buffer_tensors=len(buffers), forward_launches=2 * leaves,
        backward_launches=2 * leaves,
        gradient_bytes=tuple(p.nbytes for p in reversed(list(loaded.module.parameters()))),
    )  # fmt: skip


def sweep(models: Sequence[str], **axes: object) -> list[Case]:
    """Return the product of the axes as cases for models that a plan knows, and for those known by name alone."""
    found: list[Case] = []
    for model in models:
        stand_in = model if ":" in model or model in registry.names("models") else registry.names("models")[0]
        cases = plan.sweep(models=(stand_in,), device_kind="cuda", **axes)  # type: ignore[arg-type]
        found += [replace(case, model=model) for case in cases]
    return list(dict.fromkeys(found))


def speedup(one: Prediction, others: Sequence[Prediction]) -> tuple[float, str]:
    """Return how many times as fast a case is as one device alone, at equal work in all or a device; 0 without one."""
    case = one.case
    for scaling, batch in (("strong", case.batch_size), ("weak", case.batch_size / case.devices)):
        for other in others:
            base = other.case
            if base.strategy == SINGLE and base.batch_size == batch and base.model == case.model:
                return other.seconds / one.seconds * (case.batch_size / batch), scaling
    return 0.0, ""


def keep(path: Path, predictions: Sequence[Prediction], machine: Machine) -> str:
    """Store predictions as a run of the machine that they are for; return the run's id."""
    from dpbench.store import Store

    found = [one.case for one in predictions]
    gpus = [{"name": machine.gpu.name}] * min(machine.devices, 64)
    facts = {
        "host": {"name": f"{machine.name} (described, not here)", "cpu": machine.description}, "gpus": {"gpus": gpus},
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
