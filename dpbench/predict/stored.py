"""Stored: profiles of one device, from measured trials of the strategy `single` or from an observed loop.

The duration of each phase is a linear function of the batch size, which is fitted to the trials. dpbench cannot build
and trace the script of an observed loop. The sizes of its model and the seconds of its phases come from the trials, and
the number of kernels that the host launches is estimated from the number of parameter tensors, as for a model that is
known by name only.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpbench.predict import counts
from dpbench.predict.profiles import FIXED_SHARE
from dpbench.records import (
    HOST,
    UNATTRIBUTED,
    Case,
    Cost,
    Phase,
    Profile,
    Source,
    Span,
    Status,
    Trial,
    ledger,
    machine,
    registry,
)
from dpbench.records.machine import Machine, UnknownMachine
from dpbench.records.observed import Alternative
from dpbench.records.registry import Role
from dpbench.records.trial import Estimate
from dpbench.store import Store

NEEDED = ("parameter_tensors", "parameter_bytes", "buffer_bytes", "input_bytes", "output_bytes")
"""The facts about the model without which a prediction is not possible, by their names in a trial's provenance."""
PRECISIONS = ("fp32", "bf16")
"""The precisions of observed loops that can be predicted."""


def of_trials(counted: Profile, trials: Sequence[Trial]) -> Profile:
    """Return `counted`, a profile without timings, with timings from trials of the strategy `single`.

    The trials have one or more batch sizes. The duration of a phase at one batch size is the median over the trials;
    each trial contributes the phase's duration in a typical step. On a GPU, time outside all phases is time in which
    the GPU waits for launches; it is distributed over the phases in proportion to their durations. On a processor, time
    outside all phases becomes the profile's `rest`, together with the duration of scatter.
    """
    steps: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trial in trials:
        typical = trial.ledger.typical()
        for part in (*(phase.value for phase in Phase), UNATTRIBUTED):
            steps[trial.case.batch_size][part].append(typical.get(part, 0.0))
    parts = {n: {part: statistics.median(values) for part, values in found.items()} for n, found in steps.items()}
    phases = {n: {phase: seconds[phase.value] for phase in Phase} for n, seconds in parts.items()}
    rest = {n: seconds[UNATTRIBUTED] for n, seconds in parts.items()}
    if trials[0].case.device_kind == "cuda":
        scale = {n: 1 + rest[n] / max(sum(phases[n].values()), 1e-12) for n in phases}
        return fit_profile(counted, {n: {phase: scale[n] * s for phase, s in one.items()} for n, one in phases.items()})
    rows = sorted(rest)
    aside = fit_cost(rows, [rest[n] + phases[n][Phase.SCATTER] for n in rows])
    return replace(fit_profile(counted, phases), rest=aside)


def fit_profile(counted: Profile, phases: Mapping[int, Mapping[Phase, float]]) -> Profile:
    """Return `counted` with timings fitted to `phases`, which maps each measured batch size to the seconds by phase."""
    rows = sorted(phases)

    def fit(phase: Phase) -> Cost:
        return fit_cost(rows, [phases[n].get(phase, 0.0) for n in rows])

    return replace(
        counted, source="measured", forward=fit(Phase.FORWARD), loss=fit(Phase.LOSS), backward=fit(Phase.BACKWARD),
        optimizer=fit(Phase.OPTIMIZER),
    )  # fmt: skip


def fit_cost(rows: Sequence[int], seconds: Sequence[float]) -> Cost:
    """Return the cost of a phase, fitted to its duration in `seconds` at each batch size in `rows`.

    The fit is seconds = fixed + sample * rows with the least sum of squared relative errors; neither term is negative.
    A single batch size cannot separate the two terms: `FIXED_SHARE` of the duration is then assumed to be fixed.
    """
    import numpy as np
    from scipy.optimize import nnls

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


@dataclass(frozen=True)
class Stored:
    """A measured profile, the name of the GPU or processor on which it was measured, and the measured batch sizes."""

    profile: Profile
    device: str
    batches: tuple[int, ...]
    wanted: str
    """The name of the device on the described machine."""
    basis: str = "the step on one device was MEASURED"
    """A clause that states where the seconds come from."""

    @property
    def words(self) -> str:
        """Return the origin of the profile as text, with a warning if the described machine has another device."""
        sizes = f"batch size{'s' if len(self.batches) > 1 else ''} {', '.join(map(str, self.batches))}"
        said = f"{self.profile.model}: {self.basis} on {self.device} ({sizes})"
        other = not alike(self.wanted, self.device)
        return f"{said}; the described machine has {self.wanted}, so the prediction may be far off" if other else said


def alike(wanted: str, device: str) -> bool:
    """Return whether the name of a device contains the first word of `wanted` that has a digit.

    Such a word identifies a GPU, for example 3090, A100 or T4.
    """
    mark = next((word for word in wanted.split() if any(c.isdigit() for c in word)), wanted)
    return mark.lower() in device.lower()


def read(path: Path, cases: Sequence[Case], machine: Machine) -> dict[counts.Key, Stored]:
    """Return the measured profile for the settings of each case, by the key of the profile.

    The settings are model, size, precision, optimizer and kind of device. The profile comes from the newest run in the
    results file that measured these settings on one device. Raises UnknownMachine if no run measured them; the message
    then gives the command that measures them.
    """
    wanted = {counts.key(case): case for case in reversed(cases)}
    found: dict[counts.Key, Stored] = {}
    known: set[str] = set()
    with Store.read(path) as store:
        for run in store.newest():
            trials = [trial for trial in store.trials(run.id) if _usable(trial)]
            known |= {_setting(trial.case) for trial in trials}
            for key, case in wanted.items():
                if key not in found and (mine := [trial for trial in trials if _setting(trial.case) == _setting(case)]):
                    found[key] = _stored(case, mine, device_of(run.provenance, case), machine)
            if len(found) == len(wanted):
                return found
    missing = next(case for key, case in wanted.items() if key not in found)
    raise UnknownMachine(
        f"{path} has no measured step of {_setting(missing)} on one device, which a prediction for {machine.name} "
        f"needs (the file has: {', '.join(sorted(known)) or 'no steps of the strategy single'}); "
        f"{way_out(missing, path)}"
    )


def way_out(case: Case, path: Path | str = "FILE") -> str:
    """Return instructions for measuring the one-device step that the prediction of a case needs.

    `path` is the results file to write. A model that is known by name only cannot be measured; the instructions then
    give alternatives.
    """
    if counts.named(case.model):
        step = "" if case.device_kind == "cpu" else "--step-s SECONDS, or "  # for GPUs only
        return (
            f"dpbench knows the model {case.model} by name only and cannot measure it: give {step}your own model as "
            "--model package.module:name"
        )
    flag = "--model" if ":" in case.model else "--models"
    precision = "" if case.precision == "fp32" else f" --precision {case.precision}"
    precision += "" if case.optimizer == "sgd" else f" --optimizer {case.optimizer}"
    rows = max(case.rows)
    batches = ",".join(map(str, sorted({max(1, rows // 2), rows})))
    return (
        f"measure the step with: dpbench run {flag} {case.model} --size {case.size}{precision} "
        f"--device-kind {case.device_kind} --strategies {registry.of_role(Role.BASELINE)} --batch-sizes {batches} "
        f"--store {path}"
    )


def _usable(trial: Trial) -> bool:
    """Return whether a trial is a successful and trusted measurement of `single` in a plain training loop."""
    case = trial.case
    measured = trial.source is Source.MEASURED and trial.status is Status.OK and trial.trusted
    return measured and case.traits.role is Role.BASELINE and not case.options and not case.habits


def _setting(case: Case) -> str:
    """Return the model and the settings of a case on which its profile depends, as text."""
    return f"{case.model} ({case.size}, {case.precision}, {case.optimizer}, {case.device_kind})"


def _stored(case: Case, trials: Sequence[Trial], device: str, machine: Machine) -> Stored:
    batches = tuple(sorted({trial.case.batch_size for trial in trials}))
    return Stored(of_trials(counts.of(case), trials), device, batches, machine.gpu.name)


def device_of(facts: Mapping[str, Any], case: Case) -> str:
    """Return the name of the GPU or processor on which a run was measured, from the run's provenance `facts`."""
    if case.device_kind == "cuda":
        return str(next((gpu.get("name") for gpu in (facts.get("gpus") or {}).get("gpus") or ()), "a GPU"))
    return str((facts.get("host") or {}).get("cpu") or "a processor")


@dataclass(frozen=True)
class ObservedLoop:
    """An observed loop: its case, its trusted trials with their spans, and the facts stored with its run."""

    case: Case
    trials: tuple[Trial, ...]
    facts: Mapping[str, Any]

    @property
    def rows(self) -> int:
        """Return the number of samples that one device processes in a step."""
        return max(self.case.rows)

    def on(self, target: Machine) -> Stored:
        """Return the loop's profile of one device, for predictions on the machine `target`.

        Raises UnknownMachine if a needed fact is missing, if the loop's precision cannot be predicted, or if the loop
        ran on another kind of device than the machine has.
        """
        self._check(target)
        device = device_of(self.facts, self.case)
        label = (self.trials[0].source.value if self.trials else Source.MEASURED.value).upper()
        of = f" (per device, on {self.case.devices} devices)" if self.case.devices > 1 else ""
        basis = f"its launches are estimated, and the phases of its steps{of} were {label} in the user's own loop"
        return Stored(self._profile(), device, (self.rows,), target.gpu.name, basis)

    def _check(self, target: Machine) -> None:
        kind = "cpu" if target.logical else "cuda"
        lacking = [name for name in NEEDED if name not in self._model]
        problems = [
            (not self.trials, "it has no usable timed step; watch more steps"),
            (not self.case.batch_size, "its batch size is unknown; give --model FILE.py:NAME and --step-s instead"),
            (bool(lacking), f"its run lacks {', '.join(lacking)}; give --model FILE.py:NAME and --step-s instead"),
            (self.case.precision not in PRECISIONS, f"it used {self.case.precision}, but only "
             f"{' and '.join(PRECISIONS)} can be predicted; watch the loop with one of these precisions"),
            (self.case.device_kind != kind, f"it ran on devices of the kind {self.case.device_kind}, but the machine "
             f"{target.name} has devices of the kind {kind}; choose another --machine"),
        ]  # fmt: skip
        if found := next((text for is_so, text in problems if is_so), ""):
            raise UnknownMachine(f"the loop {self.case.model} cannot be the basis of a prediction: {found}")

    @property
    def _model(self) -> Mapping[str, float]:
        return next((one.provenance["model"] for one in self.trials if one.provenance.get("model")), {})

    def _profile(self) -> Profile:
        """Return the profile of one device, which processes its share of the batch.

        The seconds of each phase are known, but not its FLOP. The FLOP are assumed; they only divide the seconds of a
        phase among the parts of the phase.
        """
        model = self._model
        tensors = int(model["parameter_tensors"])
        forward = int(counts.LAUNCHES * tensors)
        counted = Profile(
            model=self.case.model, parameter_tensors=tensors, parameter_bytes=int(model["parameter_bytes"]),
            buffer_bytes=int(model["buffer_bytes"]), buffer_tensors=int(model.get("buffer_tensors", 0)),
            input_bytes=model["input_bytes"], output_bytes=model["output_bytes"], forward_flop=1.0, backward_flop=2.0,
            modules=int(model.get("modules") or counts.MODULES * tensors), forward_launches=forward,
            backward_launches=int(counts.BACKWARD * forward),
        )  # fmt: skip
        if self.case.devices == 1:
            return of_trials(counted, self.trials)
        return fit_profile(counted, {self.rows: self._phases()})

    def _phases(self) -> dict[Phase, float]:
        """Return the seconds of one device in each phase of a step, for a loop on several devices.

        A forward, loss or backward on a single device, such as the loss of DataParallel, processes the samples of all
        devices. Its seconds are therefore divided by the number of devices. Ranks process their own samples only.
        """
        seconds: dict[Phase, list[float]] = defaultdict(list)
        shared: set[Phase] = set()
        for trial in self.trials:
            for spans in _timed(trial):
                each: dict[Phase, dict[int, float]] = defaultdict(lambda: defaultdict(float))
                for span in spans:
                    each[span.phase][span.device] += span.end_s - span.start_s
                for phase, by_device in each.items():
                    real = [s for device, s in by_device.items() if device != HOST] or [*by_device.values()]
                    seconds[phase].append(statistics.median(real))
                    if len(real) == 1 and not self.case.traits.ranks:
                        shared.add(phase)
        found = {phase: statistics.median(values) for phase, values in seconds.items()}
        whole = shared & {Phase.FORWARD, Phase.LOSS, Phase.BACKWARD}
        return {phase: s / self.case.devices if phase in whole else s for phase, s in found.items()}


def _timed(trial: Trial) -> Iterator[Sequence[Span]]:
    """Yield the spans of each timed step, or of the median step alone if the trial keeps no other spans."""
    if not trial.spans:
        number, found = trial.ledger.median_step or (None, ())
        yield tuple(span for span in found if span.step == number)
        return
    for step, spans in zip(trial.steps, ledger.by_step(trial.spans, len(trial.steps)), strict=True):
        if not step.warmup:
            yield spans


def alternatives(trials: Sequence[Trial], facts: Mapping[str, Any]) -> dict[Case, Alternative | str]:
    """Return, for each observed loop in which one process runs several GPUs, the prediction with one process per GPU.

    The links of the loop's machine are unknown. Therefore, all described machines with enough GPUs of the same model
    are predicted, and the slowest prediction is returned. Without such a machine, or if the loop cannot be predicted,
    the value is the reason as text.
    """
    found: dict[Case, Alternative | str] = {}
    for case in dict.fromkeys(trial.case for trial in trials):
        if case.traits.observed and case.traits.threads and case.devices > 1 and case.device_kind == "cuda":
            loop = of_run([trial for trial in trials if trial.case == case], facts)
            if loop and loop.trials:
                found[case] = _alternative(loop)
    return found


def _alternative(loop: ObservedLoop) -> Alternative | str:
    from dpbench.predict.cases import Predictor

    device = device_of(loop.facts, loop.case)
    known = [machine.load(name) for name in machine.names()]
    fitting = [one for one in known if loop.case.devices <= one.gpu.count and alike(one.gpu.name, device)]
    if not fitting:
        return (
            f"no described machine has {loop.case.devices} GPUs of the model {device}; describe your machine in a "
            "file, and run dpbench predict --machine FILE.toml --from RUN"
        )
    own = loop.case
    case = Case(
        model=own.model, strategy=registry.of_role(Role.CONTROL), batch_size=own.batch_size, devices=own.devices,
        device_kind=own.device_kind, precision=own.precision,
    )  # fmt: skip
    predicted = []
    for one in fitting:
        try:
            measured = {counts.key(case): loop.on(one).profile}
            predicted.append(Predictor(one, measured=measured).predict(case))
        except UnknownMachine as error:
            return str(error)
    worst = max(predicted, key=lambda each: each.seconds)
    step = Estimate(worst.seconds, worst.low_s, worst.high_s, 0)
    return Alternative(step=step, basis=f"on {worst.machine}, the slowest described machine with this GPU")


def of_run(trials: Sequence[Trial], facts: Mapping[str, Any]) -> ObservedLoop | None:
    """Return the observed loop of a run with these trials and facts; None for a run without an observed loop.

    If the run has several observed loops, return the one with the most timed steps.
    """
    mine: dict[Case, list[Trial]] = {}
    for trial in trials:
        if trial.case.traits.observed:
            mine.setdefault(trial.case, []).append(trial)
    if not mine:
        return None
    case = max(mine, key=lambda one: sum(len(trial.timed) for trial in mine[one]))
    good = [trial for trial in mine[case] if trial.trusted and trial.timed]
    return ObservedLoop(case, tuple(good), facts)
