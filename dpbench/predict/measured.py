"""Measured profiles: the durations of phases on one device as lines over the batch size, fitted to stored trials."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import nnls

from dpbench.predict.profiles import FIXED_SHARE
from dpbench.records import UNATTRIBUTED, Cost, Phase, Profile, Trial, ledger


def of_trials(counted: Profile, trials: Sequence[Trial]) -> Profile:
    """Return `counted` with timings from stored trials of the strategy `single` at one batch size or several.

    The duration of a phase at one batch size is the median over the trials; each trial contributes its typical
    duration. On a GPU, time outside all phases is time in which the GPU waits for launches. This time is therefore
    spread over the phases in proportion to their durations.
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
        return fit_profile(counted, {n: {phase: scale[n] * s for phase, s in one.items()} for n, one in phases.items()})
    rows = sorted(rest)
    aside = fit_cost(rows, [rest[n] + phases[n][Phase.SCATTER] for n in rows])
    return replace(fit_profile(counted, phases), rest=aside)


def fit_profile(counted: Profile, phases: Mapping[int, Mapping[Phase, float]]) -> Profile:
    """Return `counted` with timings fitted to measured ones; `phases` maps a batch size to seconds by phase."""
    rows = sorted(phases)

    def fit(phase: Phase) -> Cost:
        return fit_cost(rows, [phases[n].get(phase, 0.0) for n in rows])

    return replace(
        counted, source="measured", forward=fit(Phase.FORWARD), loss=fit(Phase.LOSS), backward=fit(Phase.BACKWARD),
        optimizer=fit(Phase.OPTIMIZER),
    )  # fmt: skip


def fit_cost(rows: Sequence[int], seconds: Sequence[float]) -> Cost:
    """Fit seconds = fixed + sample * rows with the least sum of squared relative errors; neither term is negative.

    With a single batch size, which cannot separate the two terms, `FIXED_SHARE` of the duration is taken as fixed.
    """
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
