"""Alternatives: one process per GPU, predicted for observed loops that run several in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpbench.predict import counts, observed_loop, stored
from dpbench.predict.cases import Predictor
from dpbench.records import Case, Trial, machine, registry
from dpbench.records.machine import UnknownMachine
from dpbench.records.observed import Alternative
from dpbench.records.registry import Role
from dpbench.records.trial import Estimate


def alternatives(
    trials: Sequence[Trial], facts: Mapping[str, Any]
) -> dict[Case, Alternative | str]:
    """Predict one process per GPU for each loop in which one process runs several GPUs.

    The links of the loop's machine are unknown. Therefore, all described machines with enough GPUs
    of the same model are predicted, and the slowest prediction is returned. Without such a machine,
    or if the loop cannot be predicted, the value is the reason as text.
    """
    predictions: dict[Case, Alternative | str] = {}
    for case in dict.fromkeys(trial.case for trial in trials):
        if (
            case.traits.observed
            and case.traits.threads
            and case.devices > 1
            and case.device_kind == "cuda"
        ):
            loop = observed_loop.of_run([trial for trial in trials if trial.case == case], facts)
            if loop and loop.trials:
                predictions[case] = _alternative(loop)
    return predictions


def _alternative(loop: observed_loop.ObservedLoop) -> Alternative | str:
    device = stored.gpu_of(loop.facts)
    described = [machine.load(name) for name in machine.names()]
    fitting = [
        candidate
        for candidate in described
        if loop.case.devices <= candidate.gpu.count and stored.alike(candidate.gpu.name, device)
    ]
    if not fitting:
        return (
            f"no described machine has {loop.case.devices} GPUs of the model {device}; describe"
            " your machine in a file, and run dpbench predict --machine FILE.toml --from RUN"
        )
    observed = loop.case
    case = Case(
        model=observed.model,
        strategy=registry.of_role(Role.CONTROL),
        batch_size=observed.batch_size,
        devices=observed.devices,
        device_kind=observed.device_kind,
        precision=observed.precision,
    )
    predicted = []
    for candidate in fitting:
        try:
            measured = {counts.key(case): loop.on(candidate).profile}
            predicted.append(Predictor(candidate, measured=measured).predict(case))
        except UnknownMachine as error:
            return str(error)
    worst = max(predicted, key=lambda prediction: prediction.seconds)
    step = Estimate(worst.seconds, worst.low_s, worst.high_s, 0)
    return Alternative(
        step=step, basis=f"on {worst.machine}, the slowest described machine with this GPU"
    )
