"""Outlook: the steps on several GPUs, predicted from the steps that a run measured on one of them.

Nothing is traced, so that a report needs no torch: the sizes of the model are facts of the trials.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from dpbench.analysis import summary
from dpbench.analysis.outlook import Outlook
from dpbench.predict import counts, machine
from dpbench.predict.cases import Predictor
from dpbench.predict.stored import of_trials
from dpbench.records import Case, Trial, registry
from dpbench.records.errors import UnknownName
from dpbench.records.registry import Role
from dpbench.records.resources import Resources
from dpbench.records.work import Sizes

DEVICES = (2, 4, 8)
"""The numbers of GPUs whose steps are predicted."""


def outlook(home: Case, trials: Sequence[Trial], here: Resources) -> Outlook | None:
    """Return the predicted steps of DataParallel and ddp on `DEVICES` GPUs as the one of `here`.

    `home` is the case on one device, and each GPU processes its batch. None if it has no trusted
    trial with the sizes of its model, or other habits than a plain loop, or if the GPU is unknown.
    """
    usable = [one for one in trials if one.case == home and one.trusted and one.timed]
    sizes = next((one.facts.model for one in usable if one.facts.model), Sizes())
    if home.habits or counts.lacking(sizes):
        return None
    line = here.with_gpus(DEVICES[-1])
    try:
        target = machine.load(line)
    except UnknownName:
        return None
    profile = of_trials(counts.of_sizes(home.model, sizes), usable)
    predictor = Predictor(target, measured={counts.key(home): profile})
    several = [
        replace(
            home,
            strategy=registry.of_role(role),
            devices=devices,
            batch_size=devices * home.batch_size,
        )
        for role in (Role.WRAPPER, Role.CONTROL)
        for devices in DEVICES
    ]
    predicted = [predictor.predict(case).trial() for case in (home, *several)]
    rows = {row.case: row for row in summary.rows(predicted)}
    step_s = statistics.median(statistics.median(one.timed) for one in usable)
    return Outlook(rows=tuple(rows[case] for case in several), machine=line, step_s=step_s)
