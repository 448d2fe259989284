"""Stored: what one device takes, from the trials of `single` in a results file; no torch but to count the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpbench.machine import Machine, Unknown
from dpbench.predict import counts
from dpbench.records import Case, Profile, Status, Trial
from dpbench.store import Store

SINGLE = "single"


@dataclass(frozen=True)
class Stored:
    """A measured profile, and on what: a GPU's or a processor's name, and the batch sizes."""

    profile: Profile
    device: str
    batches: tuple[int, ...]

    @property
    def words(self) -> str:
        """Say what was measured."""
        sizes = ", ".join(map(str, self.batches))
        return f"{self.profile.model}: one device's step MEASURED on {self.device}, batch {sizes}"


def read(path: Path, cases: Iterable[Case], machine: Machine) -> dict[tuple[str, str, str], Stored]:
    """Return the profiles of the cases' models, from the newest run of a results file that has their steps.

    Raises Unknown where a model has none, with the command that measures them.
    """
    with Store.read(path) as store:
        runs = [(run.provenance, store.trials(run.id)) for run in store.runs()]
    found: dict[tuple[str, str, str], Stored] = {}
    for case in cases:
        key = (case.model, case.size, case.precision)
        if key not in found:
            facts, trials = next(
                ((facts, mine) for facts, trials in runs if (mine := [t for t in trials if _fits(t, case)])), ({}, [])
            )
            if not trials:
                raise Unknown(_missing(path, case, [trial for _, every in runs for trial in every], machine))
            found[key] = _stored(case, trials, _device(facts, case))
    return found


def _fits(trial: Trial, case: Case) -> bool:
    """Tell whether a trial is a step of one device of a case's model."""
    own = trial.case
    names = ["model", "precision", "optimizer", "device_kind"]
    if ":" not in case.model:  # a user's model has one size, whatever the case says
        names.append("size")
    same = all(getattr(own, name) == getattr(case, name) for name in names)
    return same and own.strategy == SINGLE and trial.status is Status.OK and not own.options and trial.trusted


def _stored(case: Case, trials: Sequence[Trial], device: str) -> Stored:
    from dpbench.predict.measured import of_trials

    return Stored(
        of_trials(counts.of(case), trials).profile, device, tuple(sorted({t.case.batch_size for t in trials}))
    )


def _device(facts: Mapping[str, Any], case: Case) -> str:
    """Return the name of the device that a run was measured on."""
    if case.device_kind == "cuda":
        return str(next((gpu.get("name") for gpu in (facts.get("gpus") or {}).get("gpus") or ()), "a GPU"))
    return str((facts.get("host") or {}).get("cpu") or "this processor")


def _missing(path: Path, case: Case, trials: Sequence[Trial], machine: Machine) -> str:
    single = {t.case for t in trials if t.case.strategy == SINGLE}
    known = sorted({f"{c.model} ({c.size}, {c.precision}, {c.device_kind})" for c in single})
    size = "" if ":" in case.model else f" --size {case.size}"
    model = f"--model {case.model}" if ":" in case.model else f"--models {case.model}"
    batch = max(2, case.batch_size // case.devices)
    return (
        f"{path} has no steps of one device for {case.model} ({case.size}, {case.precision}, {case.device_kind}), "
        f"from which {machine.name} is predicted; it has {', '.join(known) or 'no steps of the strategy single'}; "
        f"measure them: dpbench run {model}{size} --strategies {SINGLE} --batch-sizes {batch // 2},{batch} "
        f"--store {path}"
    )
