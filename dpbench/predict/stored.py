"""Stored: profiles of one device, from measured trials of the strategy `single`.

The duration of each phase is fitted as a linear function of the batch size.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dpbench.predict import counts, deviations
from dpbench.predict.cases import STRATEGIES, Predictor
from dpbench.predict.deviations import Deviation
from dpbench.predict.machine import Machine, UnknownMachine
from dpbench.predict.profiles import FIXED_SHARE
from dpbench.predict.work import Cost, Profile
from dpbench.records import UNATTRIBUTED, Case, Phase, Source, Status, Trial, registry
from dpbench.records.gpu_names import same_gpu
from dpbench.records.options import Options
from dpbench.records.registry import Parallelism, Role
from dpbench.records.resources import Resources
from dpbench.records.spelling import dashed
from dpbench.store import Store


def of_trials(counted: Profile, trials: Sequence[Trial]) -> Profile:
    """Return `counted` with timings from trials of the strategy `single`.

    The duration of a phase at a batch size is the median over the trials' typical steps. Time
    outside all phases is time in which the GPU waits for launches; it is distributed over the
    phases in proportion to their durations.
    """
    typical: dict[int, list[Mapping[str, float]]] = defaultdict(list)
    for trial in trials:
        typical[trial.case.batch_size].append(trial.ledger.typical())
    phases: dict[int, dict[Phase, float]] = {}
    for rows, steps in typical.items():
        waits_s, *parts_s = (
            statistics.median(step.get(part, 0.0) for step in steps)
            for part in (UNATTRIBUTED, *Phase)
        )
        scale = 1 + waits_s / max(sum(parts_s), 1e-12)
        phases[rows] = {phase: scale * s for phase, s in zip(Phase, parts_s, strict=True)}
    return fit_profile(counted, phases)


def fit_profile(counted: Profile, phases: Mapping[int, Mapping[Phase, float]]) -> Profile:
    """Return `counted` with timings fitted to the seconds by phase for each measured batch size."""
    rows = sorted(phases)

    def fit(phase: Phase) -> Cost:
        return fit_cost(rows, [phases[n].get(phase, 0.0) for n in rows])

    return replace(
        counted,
        source="measured",
        forward=fit(Phase.FORWARD),
        loss=fit(Phase.LOSS),
        backward=fit(Phase.BACKWARD),
        optimizer=fit(Phase.OPTIMIZER),
    )


def fit_cost(rows: Sequence[int], seconds: Sequence[float]) -> Cost:
    """Return the cost of a phase, fitted to its duration in `seconds` at each batch size in `rows`.

    The fit is seconds = fixed + sample * rows with the least sum of squared relative errors;
    neither term is negative. At a single batch size, `FIXED_SHARE` of the duration is assumed to be
    fixed.
    """
    import numpy as np
    from scipy.optimize import nnls

    points = [(n, s) for n, s in zip(rows, seconds, strict=True) if s > 0]
    if not points:
        return Cost()
    if len(points) == 1:
        ((n, s),) = points
        return Cost(s * FIXED_SHARE, s * (1 - FIXED_SHARE) / n)
    design = np.array([[1 / s, n / s] for n, s in points])
    scale = np.abs(design).max(axis=0)
    (fixed, sample), _ = nnls(design / scale, np.ones(len(points)))
    return Cost(float(fixed / scale[0]), float(sample / scale[1]))


@dataclass(frozen=True)
class Stored:
    """A profile, with the GPU and the batch sizes at which it was measured."""

    profile: Profile
    device: str
    batches: tuple[int, ...]
    wanted: str
    """The name of the GPU of the described machine."""
    basis: str = "the step on one device was MEASURED"
    """A clause that states where the seconds come from."""

    @property
    def words(self) -> str:
        """Return the profile's origin, with a warning if the described machine has another GPU."""
        sizes = (
            f"batch size{'s' if len(self.batches) > 1 else ''} {', '.join(map(str, self.batches))}"
        )
        origin = f"{self.profile.model}: {self.basis} on {self.device} ({sizes})"
        if same_gpu(self.wanted, self.device):
            return origin
        return (
            f"{origin}; the described machine has {self.wanted}, so the prediction may be far off"
        )


def read(path: Path, cases: Sequence[Case], machine: Machine) -> dict[counts.Key, Stored]:
    """Return the measured profile for each case, by key.

    It comes from the newest run in the results file that measured the case's model, size,
    precision, optimizer and kind of device on one device, which is no fake GPU. Raises
    UnknownMachine if there is none, with the command that measures it.
    """
    wanted = {counts.key(case): case for case in reversed(cases)}
    found: dict[counts.Key, Stored] = {}
    settings: set[str] = set()
    fakes = False
    with Store.read(path) as store:
        for run in store.newest():
            measured = [trial for trial in store.trials(run.id) if _usable(trial)]
            trials = [trial for trial in measured if not trial.on_fake_gpus]
            fakes |= len(trials) < len(measured)
            settings |= {_setting(trial.case) for trial in trials}
            for key, case in wanted.items():
                if key not in found and (
                    fitting := [trial for trial in trials if _setting(trial.case) == _setting(case)]
                ):
                    found[key] = _stored(case, fitting, Resources.of(run.facts).gpu, machine)
            if len(found) == len(wanted):
                return found
    missing = next(case for key, case in wanted.items() if key not in found)
    without = ", not counting those on fake GPUs, whose times mean nothing" if fakes else ""
    raise UnknownMachine(
        "{path} has no measured step of {step} on one device, which a prediction for {machine}"
        " needs (the file has: {has})",
        option="from",
        value=path,
        remedy="{measure}",
        measure=way_out(missing, path),
        path=path,
        step=_setting(missing),
        machine=machine.name,
        has=f"{', '.join(sorted(settings)) or 'no steps of the strategy single'}{without}",
    )


def lost(
    path: Path, steps: Mapping[counts.Key, Stored], machine: Machine
) -> dict[Parallelism, Deviation]:
    """Return what measured steps on several GPUs lost beyond the model, by kind of parallelism.

    These are steps of the models in `steps`, in the same file, on GPUs as the machine has. Such a
    machine needs no prior from others, so the deviation has no scale. It is the median over the
    models and numbers of devices, because one machine has one deviation.
    """
    profiles = {key: one.profile for key, one in steps.items()}
    alone = Predictor(machine, measured=profiles, lost=dict.fromkeys(Parallelism, deviations.NONE))
    measured: dict[Case, list[float]] = defaultdict(list)
    with Store.read(path) as store:
        for run in store.newest():
            if same_gpu(machine.gpu.name, Resources.of(run.facts).gpu):
                for trial in store.trials(run.id):
                    if _on_several(trial) and counts.key(trial.case) in steps:
                        measured[trial.case].append(statistics.median(trial.timed))
    logs: dict[Parallelism, list[float]] = defaultdict(list)
    for case, seconds in measured.items():
        with suppress(UnknownMachine):  # more devices than the machine has
            predicted_s = alone.predict(case).seconds
            kind = case.traits.parallelism
            logs[kind].append(math.log(statistics.median(seconds) / predicted_s))
    return {kind: Deviation(statistics.median(values)) for kind, values in logs.items()}


def way_out(case: Case, path: Path | str = "FILE") -> str:
    """Tell how to measure the one-device step that the prediction of a case needs.

    `path` is the results file to write. A model that is known by name only cannot be measured; the
    text then gives alternatives.
    """
    if counts.named(case.model):
        return (
            f"dpbench knows the model {case.model} by name only and cannot measure it: give"
            f" {dashed('step_s', 'SECONDS')}, or your own model as"
            f" {dashed('models', 'file.py:name')}"
        )
    rows = max(case.rows)
    asked = Options.of(
        models=case.model,
        strategies=registry.of_role(Role.BASELINE),
        batch_sizes=sorted({max(1, rows // 2), rows}),
        device_kind=case.device_kind,
        size=case.size,
        precision=case.precision,
        optimizer=case.optimizer,
    )
    return f"measure the step with: {asked.command(dashed('store'), str(path))}"


def _usable(trial: Trial) -> bool:
    """Whether a trial is a trusted measurement of `single` in a plain training loop."""
    return _plain(trial) and trial.case.traits.role is Role.BASELINE


def _on_several(trial: Trial) -> bool:
    """Whether a trial is a trusted measurement of a plain training loop on several real GPUs."""
    case = trial.case
    several = case.devices > 1 and case.device_kind == "cuda" and case.placement == "spread"
    return (
        several
        and _plain(trial)
        and not trial.on_fake_gpus
        and bool(trial.timed)
        and case.strategy in STRATEGIES
    )


def _plain(trial: Trial) -> bool:
    case = trial.case
    measured = trial.source is Source.MEASURED and trial.status is Status.OK and trial.trusted
    return measured and not case.options and not case.habits


def _setting(case: Case) -> str:
    """Return the model and settings on which a case's profile depends."""
    return f"{case.model} ({case.size}, {case.precision}, {case.optimizer}, {case.device_kind})"


def _stored(case: Case, trials: Sequence[Trial], device: str, machine: Machine) -> Stored:
    batches = tuple(sorted({trial.case.batch_size for trial in trials}))
    return Stored(of_trials(counts.of(case), trials), device, batches, machine.gpu.name)
