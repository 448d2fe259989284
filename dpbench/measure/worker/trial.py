"""One case -> one trial: launch the processes that its strategy needs, and join what they measured."""

from __future__ import annotations

import faulthandler
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from dpbench.analysis import ledger
from dpbench.measure import ranks
from dpbench.measure.ranks import RanksFailed
from dpbench.measure.ranks.failures import explain
from dpbench.measure.worker import modelcheck, selfcheck
from dpbench.measure.worker.loop import measure, measure_together, prepare
from dpbench.records import HOST, Case, Effort, Memory, Status, Trial, Verified, plan, registry


def run(case: Case, effort: Effort, folder: Path) -> Trial:
    """Run one case; a failure is a trial too, with its reason. `folder` is scratch space of this trial alone."""
    strategy = registry.load("strategies", case.strategy)
    if reason := _skip(strategy, case):
        return Trial(case=case, status=Status.SKIPPED, reason=reason)
    try:
        return _run(case, effort, strategy, folder)
    except RanksFailed as failed:
        return _failed(case, failed.failures[0].status, str(failed))
    except BaseException as error:
        return _failed(case, *explain(error))


def _run(case: Case, effort: Effort, strategy: ModuleType, folder: Path) -> Trial:
    """Measure a case, or do what its options ask for in its place."""
    if case.options == plan.CHECK:
        return modelcheck.check(case)
    if dict(case.options).get("role") == selfcheck.ROLE:
        return selfcheck.measure(case, effort)
    if not hasattr(strategy, "backend"):
        return measure(case, effort, strategy)

    def entry(rank: int) -> dict[str, Any]:
        # one file for each rank: ranks that write their stacks into the same file overwrite each other
        faulthandler.register(signal.SIGUSR1, file=(folder / f"stacks-{rank}").open("w"), all_threads=True)
        return measure(case, effort, strategy, rank).to_dict()

    parts = ranks.run(entry, len(case.rows), folder, strategy.backend(case))
    return merge([Trial.from_dict(part) for part in parts])


def run_together(cases: Sequence[Case], effort: Effort, folder: Path) -> list[Trial]:
    """Run cases side by side in this process: those that can be prepared; an error in a step ends all of them."""
    if len(cases) == 1:
        return [run(cases[0], effort, folder)]
    done, subjects = {}, []
    for case in cases:
        strategy = registry.load("strategies", case.strategy)
        if reason := _skip(strategy, case):
            done[case] = Trial(case=case, status=Status.SKIPPED, reason=reason)
            continue
        try:
            subjects.append(prepare(case, strategy))
        except BaseException as error:
            done[case] = _failed(case, *explain(error))
    try:
        done |= {trial.case: trial for trial in measure_together(subjects, effort)}
    except BaseException as error:
        status, reason = explain(error)
        beside = f"{reason} [measured side by side with {len(subjects) - 1} other(s), which ended too]"
        done |= {subject.case: _failed(subject.case, status, beside) for subject in subjects}
    return [done[case] for case in cases]


def _skip(strategy: ModuleType, case: Case) -> str:
    """Return why a strategy cannot run a case; empty when it can."""
    reason: str = getattr(strategy, "skip", lambda case: "")(case)
    return reason


def _failed(case: Case, status: Status, reason: str) -> Trial:
    """Return the trial of a case that ended in an error."""
    return Trial(
        case=case, status=status, reason=reason, verified=_verified(reason),
        failed_device=failed_device(case, reason) if status == Status.OOM else None,
    )  # fmt: skip


def failed_device(case: Case, reason: str) -> int | None:
    """Return the index of the device that a reason names, rank before replica before device; None if it names none."""
    for named in (r"^rank (\d+): ", r"out of memory on replica (\d+) "):
        if found := re.search(named, reason):
            return int(found.group(1))
    found = re.search(r"out of memory on device (?:cuda|emulated):(\d+)", reason)
    if found is None:
        return None
    ordinal = int(found.group(1))
    return case.device_ids.index(ordinal) if ordinal in case.device_ids else ordinal


def _verified(reason: str) -> Verified:
    return Verified.NO if "its gradients are wrong" in reason else Verified.NOT_APPLICABLE


def merge(parts: Sequence[Trial]) -> Trial:
    """Join the ranks' trials; see `ledger.joined` for their steps and spans. Samples are all kept."""
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
