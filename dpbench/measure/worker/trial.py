"""Trial: run one case in the processes that its strategy needs, and merge their results into one trial."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dpbench import models, strategies
from dpbench.hardware.devices import open_devices
from dpbench.measure import ranks
from dpbench.measure.failures import of_error
from dpbench.measure.ranks import RanksFailed
from dpbench.measure.request import Job, Request
from dpbench.measure.worker import selfcheck
from dpbench.measure.worker.loop import measure, measure_together, prepare
from dpbench.records import HOST, Case, Effort, Memory, Status, Trial, Verified, ledger, no_mark
from dpbench.records.trial import Failure
from dpbench.strategies import load


def work(request: Request) -> list[Trial]:
    """Return the trials of a request; a failure is returned as a trial with its reason."""
    if request.job is Job.MEASURE:
        return run_together(request.cases, request.effort, request.folder)
    (case,) = request.cases
    if request.job is Job.CHECK_MODEL:
        return [_caught(case, lambda: check(case))]
    assert request.self_check is not None
    settings = request.self_check
    return [_caught(case, lambda: selfcheck.measure(case, request.effort, settings))]


def run(case: Case, effort: Effort, folder: Path) -> Trial:
    """Run one case and return its trial; `folder` is scratch space for this trial only."""
    return _caught(case, lambda: _run(case, effort, folder))


def _caught(case: Case, do: Callable[[], Trial]) -> Trial:
    """Return the trial that `do` returns, or a trial that records its failure."""
    try:
        return do()
    except RanksFailed as failed:
        return _failed(case, replace(failed.failures[0], reason=str(failed)))
    except BaseException as error:
        return _failed(case, of_error(error, device_ids=case.device_ids))


def _run(case: Case, effort: Effort, folder: Path) -> Trial:
    strategy = strategies.load(case.strategy)
    if reason := strategy.skip(case):
        return Trial(case=case, status=Status.SKIPPED, reason=reason)
    if not strategy.traits.ranks:
        return measure(case, effort, strategy)

    def entry(rank: int) -> dict[str, Any]:
        # one file per rank: ranks that write their stacks to the same file overwrite each other
        faulthandler.register(signal.SIGUSR1, file=(folder / f"stacks-{rank}").open("w"), all_threads=True)
        return measure(case, effort, strategy, rank).to_dict()

    parts = ranks.run(entry, len(case.rows), folder, strategy.backend(case))
    return merge([Trial.from_dict(part) for part in parts])


def run_together(cases: Sequence[Case], effort: Effort, folder: Path) -> list[Trial]:
    """Run cases in this process, alternating between their blocks of steps, and return their trials in order.

    A case that cannot be prepared fails alone; an error in a step of one case ends all cases.
    """
    if len(cases) == 1:
        return [run(cases[0], effort, folder)]
    done, prepared_cases = {}, []
    for case in cases:
        try:
            strategy = strategies.load(case.strategy)
            if reason := strategy.skip(case):
                done[case] = Trial(case=case, status=Status.SKIPPED, reason=reason)
                continue
            prepared_cases.append(prepare(case, strategy))
        except BaseException as error:
            done[case] = _failed(case, of_error(error, device_ids=case.device_ids))
    try:
        done |= {trial.case: trial for trial in measure_together(prepared_cases, effort)}
    except BaseException as error:
        for case in (prepared.case for prepared in prepared_cases):
            failure = of_error(error, device_ids=case.device_ids)
            reason = (
                f"{failure.reason} [measured side by side with {len(prepared_cases) - 1} other(s), which ended too]"
            )
            done[case] = _failed(case, replace(failure, reason=reason))
    return [done[case] for case in cases]


def _failed(case: Case, failure: Failure) -> Trial:
    """Return a trial that records a failure of a case."""
    return Trial(
        case=case, status=failure.status, reason=failure.reason, verified=failure.verified,
        failed_device=failure.device if failure.status is Status.OOM else None,
    )  # fmt: skip


def merge(parts: Sequence[Trial]) -> Trial:
    """Return one trial from the trials of all ranks; `ledger.joined` merges steps and spans, and all samples are kept.

    The host's memory is the sum of the ranks' resident sets.
    """
    if len(parts) == 1:
        return parts[0]
    steps, spans = ledger.joined(parts)
    resident = sum(m.peak_bytes for part in parts for m in part.memory if m.device == HOST)
    of_devices = tuple(m for part in parts for m in part.memory if m.device != HOST)
    order = list(Verified)
    slowest: Callable[[str], float] = lambda stage: max(part.setup.get(stage, 0.0) for part in parts)  # noqa: E731
    return replace(
        parts[0],
        verified=max((part.verified for part in parts), key=order.index),
        steps=steps,
        spans=spans,
        samples=tuple(sample for part in parts for sample in part.samples),
        memory=(*of_devices, Memory(HOST, resident, "rss")),
        setup={stage: slowest(stage) for stage in parts[0].setup},
    )


ROWS = 2
"""The batch size of the model check's step: BatchNorm refuses a single row."""


def check(case: Case) -> Trial:
    """Build the case's model, draw its batch, and take one step of a few rows on its one device.

    Return a trial without steps. Raises the model's errors unchanged.
    """
    torch.set_num_threads(1)
    model = models.load(case.model, case.size, case.seed)
    model.batch(case.batch_size, case.seed)
    devices = open_devices(case.device_kind, 1, ids=case.device_ids)
    with load(case.strategy).start(case, model, devices, no_mark) as step:
        step(*model.batch(ROWS, case.seed))
    return Trial(case=case)
