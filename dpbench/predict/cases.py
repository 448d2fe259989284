"""Cases: predictions of cases on a described machine, with 80 % intervals, which are stored as the trials of a run.

A need states the memory that a case takes on each device, whether the case fits, and the largest batch that fits. A
what-if is the prediction of a step after one change: another schedule or strategy, faster links, a faster host, or a
larger batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dpbench.predict import counts, cpu_model, network, profiles, quick, simulation, stored
from dpbench.predict.constants import (
    DEFAULT,
    HOST_FACTOR,
    ON_HOST,
    RESIDUAL,
    Constants,
    interval,
    priors_of,
    scaled,
)
from dpbench.records import Case, Memory, Profile, Source, Span, Status, Step, Trial, plan, registry, schedule, words
from dpbench.records.machine import Collective, Machine, UnknownMachine
from dpbench.records.registry import Role

UNTRACED = "unknown: only dpbench's models and models given by --model can be traced to calculate the memory"


@dataclass(frozen=True, kw_only=True)
class Need:
    """The memory that a case needs on each device.

    `memory` contains the peaks of the allocator, and `process_bytes` the totals per device that the driver would show;
    both are empty if the memory is not known, and `reason` then explains why. `fits` is None if the memory of the case
    or of the GPU is not known. `failed_device` is the first device whose memory is too small. `largest` is the largest
    batch size that fits: 0 if no batch fits, None if there was no search.
    """

    case: Case
    memory: tuple[Memory, ...] = ()
    process_bytes: tuple[int, ...] = ()
    fits: bool | None = None
    failed_device: int | None = None
    largest: int | None = None
    reason: str = ""

    @property
    def status(self) -> Status:
        """Return the status of a trial of the case: OOM if the case is known not to fit, else OK."""
        return Status.OOM if self.fits is False else Status.OK

    def peaks(self, kind: str) -> list[int]:
        """Return the peak of the memory of one kind ("allocated" or "reserved") in bytes, for each device."""
        return [one.peak_bytes for one in self.memory if one.kind == kind]


def needs(cases: Sequence[Case], machine: Machine, *, largest: bool = False) -> Iterator[Need]:
    """Yield the memory that each case needs; with `largest`, also search for the largest batch that fits.

    The models are traced, which takes a second or more for each distinct number of rows per device.
    """
    from dpbench.predict.memory import Traces, traces_of

    kept: dict[Case, Traces] = {}
    for case in cases:
        if counts.named(case.model):
            yield Need(case=case, reason=UNTRACED)
            continue
        key = plan.baseline(
            model=case.model, batch_size=1, size=case.size, optimizer=case.optimizer,
            precision=case.precision,
        )  # fmt: skip
        traces = kept.setdefault(key, traces_of(replace(key, device_kind=case.device_kind)))
        yield _need(case, traces, int(machine.gpu.memory_bytes), largest)


def _need(case: Case, traces: object, capacity_bytes: int, largest: bool) -> Need:
    """Return the memory that one case needs, from a replay of the allocations on its devices.

    `traces` are the traces of the case's model. `capacity_bytes` is the memory of a GPU, 0 if unknown. `largest`
    requests the search for the largest batch that fits.
    """
    from dpbench.predict import memory

    found = memory.needed(case, traces)  # type: ignore[arg-type]
    over = [one.device for one in found if capacity_bytes and one.process_bytes > capacity_bytes]
    most = None
    if largest and capacity_bytes:
        most = memory.largest_batch(lambda batch: replace(case, batch_size=batch), capacity_bytes)
    return Need(
        case=case, process_bytes=tuple(one.process_bytes for one in found), largest=most,
        fits=not over if capacity_bytes else None, failed_device=over[0] if over else None,
        memory=tuple(
            Memory(one.device, size, "replay", kind=kind)
            for one in found
            for kind, size in (("allocated", one.peak.allocated_bytes), ("reserved", one.peak.reserved_bytes))
        ),
    )  # fmt: skip


PRICED = ("traced", "counted")
LAUNCHES = (HOST_FACTOR, "launch_s")
"""The priors that change traced and counted profiles, because launches set lower bounds on their durations."""


@dataclass(frozen=True)
class Prediction:
    """The prediction of one case: the duration of a step in seconds, its 80 % interval, and the spans of the step.

    `profile` is the source of the profile ("measured", "given", "traced" or "counted"), `machine` the machine's name,
    and `need` the memory that the case needs, None if the memory was not predicted.
    """

    case: Case
    seconds: float
    low_s: float
    high_s: float
    profile: str
    spans: tuple[Span, ...] = ()
    machine: str = ""
    need: Need | None = None

    def trial(self) -> Trial:
        """Return the prediction as a trial, for reports and results files.

        If the case does not fit the memory of the devices, the trial has the status OOM and no steps.
        """
        facts = {"machine": self.machine, "profile": self.profile, "interval_80_s": [self.low_s, self.high_s]}
        memory = self.need.memory if self.need else ()
        step = Step(self.seconds, False, self.seconds)
        found = Trial(
            case=self.case, source=Source.PREDICTED, spans=self.spans, started_s=time.time(), steps=(step,),
            reason=f"predicted for {self.machine}", provenance=facts, memory=memory,
        )  # fmt: skip
        if self.need is None or self.need.status is Status.OK:
            return found
        lacking = f"predicted for the machine {self.machine}: out of memory on device {self.need.failed_device}"
        return replace(
            found, status=Status.OOM, reason=lacking, failed_device=self.need.failed_device, steps=(), spans=()
        )


@dataclass(frozen=True)
class Predictor:
    """The inputs of predictions on one machine.

    `given` is a known step on one device as (seconds, samples), or None. With `by_formula`, predictions use formulas
    instead of the simulation and have no spans.
    """

    machine: Machine
    constants: Constants = DEFAULT
    given: tuple[float, int] | None = None
    by_formula: bool = False
    measured: Mapping[counts.Key, Profile] = field(default_factory=dict)
    """Profiles that were measured on one device, by model, size and precision."""

    def predict(self, case: Case) -> Prediction:
        """Return the prediction of one case. Raises UnknownMachine if the machine file lacks a value that is needed."""
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
            if name == HOST_FACTOR:
                host = replace(self.machine.host, factor=self.machine.host.factor * factor)
                other = replace(self, machine=replace(self.machine, host=host))
            else:
                other = replace(self, constants=scaled(self.constants, name, factor))
            # the profile itself depends on these priors
            again = name == "forward_share" or (profile.source in PRICED and name in LAUNCHES)
            return other._seconds(case, other.machine, other.constants, other.profile(case) if again else profile)

        doubt = RESIDUAL[profile.source]
        priors = priors_of(case, self.machine)
        if not self.given:
            del priors["forward_share"]
        low, high = interval(seconds, evaluate, priors, doubt)
        return Prediction(case, seconds, low, high, profile.source, spans, self.machine.name)

    def unmeasured_bus(self, found: Sequence[Prediction]) -> str:
        """Return a sentence on how much narrower a measured bus would make the widest interval; "" if it is measured.

        Only cases whose devices exchange gradients between processes count; without any, return "".
        """
        several = [one for one in found if one.case.traits.ranks and one.case.devices > 1]
        if self.machine.collective or not several:
            return ""
        widest = max(several, key=lambda one: one.high_s / one.low_s)
        bus = network.bus(self.machine, widest.case.devices, self.constants)
        known = Collective(bytes_per_s=bus.bytes_per_s, start_s=self.constants.start_s, root_s=self.constants.root_s)
        measured = replace(self, machine=replace(self.machine, collective=known)).predict(widest.case)
        wide, narrow = (words.percent((one.high_s - one.low_s) / one.seconds) for one in (widest, measured))
        rate = words.number(bus.bytes_per_s / 1e9)
        return (
            f"The bus of {self.machine.name} is described and not measured ({rate} GB/s). "
            f"The interval of {widest.case.label} spans {wide} of its step; with a measured bus (--bus GB/s, or the "
            f"output of nccl-tests) it would span about {narrow}."
        )

    def _on_host(self, case: Case) -> Prediction:
        """Return the prediction of a case on logical CPU devices, from measured steps on one device."""
        profile = self.measured.get(counts.key(case))
        if profile is None:
            raise UnknownMachine(
                f"{case.label}: a prediction for the logical CPU devices of {self.machine.name} needs a measured step "
                f"on one device; use --from FILE to give a results file with such a step; {stored.way_out(case)}"
            )
        phases = cpu_model.step(case, profile, cpu_model.ProbedHost(self.machine.probe))
        seconds = sum(phases.values())
        doubt = RESIDUAL[profile.source] if len(case.rows) == 1 else ON_HOST
        low, high = interval(seconds, lambda *_: seconds, {}, doubt)
        return Prediction(case, seconds, low, high, profile.source, tuple(cpu_model.spans(phases)), self.machine.name)

    def _seconds(self, case: Case, machine: Machine, constants: Constants, profile: Profile) -> float:
        if self.by_formula or (case.strategy in quick.KNOWN and case.schedule in ("", "reference")):
            return quick.seconds(case, profile, machine, constants)
        return simulation.step(case, profile, machine, constants).seconds

    def profile(self, case: Case) -> Profile:
        """Return the profile of a case's model.

        If there is no measured profile for this model, its timings are calculated from the attribute `given`, a known
        step on one device. If `given` is None, they are calculated from FLOP and bytes.
        """
        if measured := self.measured.get(counts.key(case)):
            return measured
        if self.given:
            seconds, samples = self.given
            return profiles.given(
                counts.of(case), seconds, samples, self.machine, self.constants, optimizer=case.optimizer
            )
        return counts.priced(case, self.machine, self.constants)


def sweep(models: Sequence[str], device_kind: str = "cuda", **axes: object) -> list[Case]:
    """Return a case for each combination of a model and values of the axes.

    `axes` are further arguments of `plan.sweep`, such as strategies and batch sizes. `models` may include models that
    are known by name only, which `plan.sweep` rejects.
    """
    found: list[Case] = []
    for model in models:
        stand_in = registry.names("models")[0] if counts.named(model) else model
        cases = plan.sweep(models=(stand_in,), device_kind=device_kind, **axes)  # type: ignore[arg-type]
        found += [replace(case, model=model) for case in cases]
    return list(dict.fromkeys(found))


def strategies(machine: Machine) -> tuple[str, ...]:
    """Return the default strategies of a prediction; on logical CPU devices, torch.nn.DataParallel is left out."""
    roles = (Role.BASELINE, Role.WRAPPER, Role.ENGINE, Role.CONTROL)
    return tuple(registry.of_role(role) for role in roles if not (machine.logical and role is Role.WRAPPER))


def most_devices(machine: Machine) -> int:
    """Return the largest number of devices of a machine for which steps can be predicted."""
    return min(machine.devices, cpu_model.MOST) if machine.logical else machine.devices


def speedup(one: Prediction, others: Sequence[Prediction]) -> tuple[float, str]:
    """Return the speed-up of the prediction `one` over a single device in samples per second, and the kind of scaling.

    The prediction for a single device is one of `others`. The kind of scaling is "strong" if the single device has the
    total batch of `one`, and "weak" if the single device has the batch per device of `one`. If `others` contain no such
    prediction, return 0 and "".
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


FASTER = 4.0
"""The factor by which bus bandwidths are multiplied in the what-if with faster links.

The next PCIe generation gives a factor of 2, and NVLink instead of PCIe gives more.
"""


@dataclass(frozen=True)
class WhatIf:
    """A change of a case or of its machine, with the predicted duration of the changed step in seconds.

    `change` describes the change; `devices` and `batch` are those of the changed case. `gain` is the throughput in
    samples per second with the change, divided by the throughput without the change.
    """

    model: str
    devices: int
    batch: int
    change: str
    seconds: float
    gain: float


def what_ifs(predictor: Predictor, cases: Sequence[Case]) -> list[WhatIf]:
    """Return the what-ifs for one case of each model; the what-ifs of a model are in descending order of gain.

    For each model, the case with the most devices on one node is selected. A model without a case on two or more
    devices of one node has no what-ifs.
    """
    found = []
    for model in dict.fromkeys(case.model for case in cases):
        node = predictor.machine.gpu.count
        mine = [case for case in cases if case.model == model and 1 < case.devices <= node]
        if mine:
            most = max(mine, key=lambda case: (case.devices, case.traits.threads, case.batch_size))
            found += sorted(_of(predictor, most), key=lambda one: -one.gain)
    return found


def _of(predictor: Predictor, case: Case) -> Iterator[WhatIf]:
    """Yield the what-ifs of one case.

    The first what-if has no change: the engine runs the case with the schedule of torch.nn.DataParallel. All gains are
    relative to this what-if.
    """
    now = replace(case, strategy=registry.of_role(Role.ENGINE), schedule=schedule.REFERENCE, options=())
    profile, machine, constants = predictor.profile(now), predictor.machine, predictor.constants

    def step(other: Case, c: Constants = constants, m: Machine = machine, p: Profile = profile) -> float:
        return simulation.step(other, p, m, c).seconds

    before = step(now)

    def what_if(change: str, other: Case, seconds: float) -> WhatIf:
        gain = before / seconds * other.batch_size / now.batch_size
        return WhatIf(case.model, other.devices, other.batch_size, change, seconds, gain)

    yield what_if("unchanged: the schedule of torch.nn.DataParallel", now, before)
    for name in schedule.climb(schedule.TRAIN_STEP)[1:]:
        other = replace(now, schedule=name)
        yield what_if(f"dpbench's schedule {name}", other, step(other))
    ddp = replace(now, strategy=registry.of_role(Role.CONTROL), schedule="")
    yield what_if("DistributedDataParallel", ddp, step(ddp))
    yield what_if(f"links {FASTER:g} times as fast", now, step(now, constants.changed(bus_scale=FASTER)))
    doubled = replace(now, batch_size=2 * now.batch_size)
    yield what_if("twice the batch", doubled, step(doubled))
    half = replace(machine, host=replace(machine.host, factor=machine.host.factor / 2))
    again = replace(predictor, machine=half).profile(now)  # the launches of a traced profile are faster, too
    yield what_if("a host twice as fast", now, step(now, m=half, p=again))
