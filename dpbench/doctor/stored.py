"""Stored: the steps that the doctor reads from a store, and the results that it keeps there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import msgspec

from dpbench.analysis import summary
from dpbench.analysis.summary import Row
from dpbench.doctor.examination import Examination
from dpbench.doctor.faults import STANDARD, Examined, Steps
from dpbench.hardware import provenance
from dpbench.records import Source, words
from dpbench.records.errors import told
from dpbench.records.registry import Role
from dpbench.records.work import Shapes
from dpbench.store import Store, StoredRun, StoreError

log = logging.getLogger(__name__)
RUNS = 20
"""The most runs among which steps are sought."""


def host_of(machine: Examined) -> str:
    """Return the host key of a machine, which its runs have."""
    gpus = msgspec.to_builtins(machine.gpus)
    return provenance.host_key({"host": provenance.host_facts(), "gpus": {"gpus": gpus}})


def steps(store: Path, host: str) -> Steps:
    """Return the steps of the last run on a machine that used several GPUs; else `STANDARD`."""
    if not store.exists():
        return STANDARD
    try:
        with Store.read(store, lambda row: log.info("%s", row)) as opened:
            for run in islice(opened.newest_on(host), RUNS):
                if found := _steps(opened, run):
                    return found
    except StoreError as error:
        log.warning("the costs are shares of %s, because %s", STANDARD.name, told(error))
    return STANDARD


def _steps(opened: Store, run: StoredRun) -> Steps | None:
    """Return the steps of a run on the most GPUs; None if it has none."""
    trials = opened.summaries(run.id)
    rows = [
        row
        for row in summary.rows(trials)
        if row.step
        and not row.step.doubt
        and row.source is Source.MEASURED
        and row.case.device_kind == "cuda"
        and row.case.devices > 1
        and row.case.trains
        and not row.on_fake_gpus
    ]
    most = max((row.case.devices for row in rows), default=0)
    rows = [row for row in rows if row.case.devices == most]
    if not rows:
        return None
    model = rows[0].case.model
    known = (Shapes.of(one.facts.model) for one in trials if one.case.model == model)
    shapes = next(filter(None, known), None)
    if shapes is None:
        return None
    alike = [row for row in rows if row.case.model == model]
    return Steps(
        name=f"a step of {model} ({words.number(shapes.parameter_bytes / 1e6)} MB of weights) of"
        f" the run {run.id[:8]}",
        weights_bytes=shapes.parameter_bytes,
        parallel_s=_shortest(alike, (Role.WRAPPER, Role.ENGINE)),
        ddp_s=_shortest(alike, (Role.CONTROL,)),
    )


def _shortest(rows: Sequence[Row], roles: Sequence[Role]) -> float:
    steps_s = (row.step.value for row in rows if row.step and row.case.traits.role in roles)
    return min(steps_s, default=0.0)


def keep(store: Path, host: str, examination: Examination) -> None:
    """Keep the result for the pages of the runs on this machine, in a store that exists."""
    if not store.exists():
        return
    try:
        with Store.create(store) as opened:
            result = msgspec.json.encode(examination).decode()
            opened.keep_machine_result(host, examination.started_s, result)
    except StoreError as error:
        log.warning("the result is not kept for the pages of runs, because %s", told(error))
