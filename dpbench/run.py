"""Run: a plan -> fresh worker processes -> the store. Knows no torch; nothing that a worker does can end it.

Rounds: all cases once in random order, then all again, each round under a new server, so that what differs from
process to process becomes part of the interval instead of a hidden bias.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dpbench import plan, provenance, registry, samplers, validity
from dpbench.nvml import describe
from dpbench.records import HOST, Case, Effort, Sample, Status, Trial
from dpbench.server import Server
from dpbench.store import FINAL, Store

OVERHEAD_S = 1.0
"""What a trial costs beside its timed steps, until the run has seen its own."""


@dataclass(frozen=True)
class Started:
    """A run, or a trial of it, begins."""

    run_id: str
    total: int
    done: int
    case: Case | None = None
    round: int = 0


@dataclass(frozen=True)
class Ended:
    """A trial has ended and is stored."""

    trial: Trial
    done: int
    total: int
    seconds: float


Listener = Callable[[Started | Ended], None]


@dataclass(frozen=True)
class Outcome:
    """What a run came to: its trials by status, those of earlier sessions included."""

    run_id: str
    resumed: bool
    counts: dict[str, int]


def run(
    cases: Sequence[Case],
    store: Store,
    *,
    rounds: int = 3,
    effort: Effort | None = None,
    budget_s: float | None = None,
    limit_s: float = 120.0,
    retry: Iterable[str] = (),
    listen: Listener = lambda event: None,
) -> Outcome:
    """Measure every case `rounds` times and store each trial as it ends.

    `budget_s` bounds the whole run: it shortens the trials' timed parts, and what has not begun when it is spent
    is stored as skipped. `limit_s` bounds one trial. `retry` names final statuses to measure again, in the latest
    such run even if it finished. A KeyboardInterrupt leaves an unfinished run that the same call resumes.
    """
    facts = provenance.collect(describe())
    keys = {"host": provenance.host_key(facts), "code": provenance.code_key(facts)}
    again = statuses(retry)
    run_id, resumed = store.begin_run(
        plan=plan.plan_hash(cases, rounds), rounds=rounds, provenance=facts, reopen=bool(again), **keys
    )
    session = _Session(store, run_id, effort or Effort(), budget_s, limit_s, listen)
    finished = False
    try:
        session.measure(_slots(cases, rounds, run_id), store.done(run_id, retry=again), ordinals(cases))
        finished = True
    finally:
        store.end_run(run_id, "finished" if finished else "interrupted")
    return Outcome(run_id, resumed, store.counts(run_id))


def statuses(names: Iterable[str]) -> tuple[str, ...]:
    """Return final statuses as they are; ValueError for any other name."""
    given = tuple(names)
    for name in given:
        if name not in FINAL:
            raise ValueError(registry.unknown("status to retry", name, sorted(FINAL)))
    return given


def _slots(cases: Sequence[Case], rounds: int, seed: str) -> list[list[tuple[Case, int]]]:
    """Return each round's trials in an order of its own, the same one for a resumed run."""
    generator = random.Random(seed)
    return [[(case, number) for case in generator.sample(cases, len(cases))] for number in range(rounds)]


def ordinals(cases: Sequence[Case]) -> list[int]:
    """Return the GPUs that the cases use, for the samplers to watch."""
    used: set[int] = set()
    for case in cases:
        if case.device_kind == "cuda":
            count = case.devices if case.placement == "spread" else 1
            used.update(case.device_ids[:count] or range(count))
    return sorted(used)


class _Session:
    """One run in progress: its budget, its counts, and the one measuring process at a time."""

    def __init__(
        self, store: Store, run_id: str, effort: Effort, budget_s: float | None, limit_s: float, listen: Listener
    ) -> None:
        self._store, self._run_id, self._effort, self._limit_s = store, run_id, effort, limit_s
        self._listen = listen
        self._deadline = None if budget_s is None else time.perf_counter() + budget_s
        self._overhead_s = OVERHEAD_S
        self._done = self._total = 0

    def measure(
        self, slots: Sequence[Sequence[tuple[Case, int]]], done: set[tuple[str, int]], ordinals: Sequence[int]
    ) -> None:
        """Go through all rounds, leaving out the slots that are done."""
        self._total, self._done = sum(map(len, slots)), len(done)
        self._listen(Started(self._run_id, self._total, self._done))
        scratch = Path(tempfile.mkdtemp(prefix="dpbench-"))
        try:
            with samplers.sampling(ordinals, scratch / "samples.jsonl") as series:
                for row in slots:
                    pending = [(case, number) for case, number in row if (case.fingerprint, number) not in done]
                    if pending:
                        with Server(scratch) as server:
                            for case, number in pending:
                                self._one(server, case, number, series)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _one(self, server: Server, case: Case, number: int, series: samplers.Series) -> None:
        """Measure and store one trial."""
        self._listen(Started(self._run_id, self._total, self._done, case, number))
        trial_id = self._store.begin_trial(self._run_id, case, number)
        began = time.perf_counter()
        effort = self._affordable()
        if effort is None:
            reason = "the run's budget was spent before this trial; give a larger --budget"
            trial = Trial(case=case, status=Status.SKIPPED, reason=reason, round=number)
        else:
            trial = server.run(case, effort, number, self._limit_s)
        ended = time.perf_counter()
        trial = _checked(replace(trial, samples=trial.samples + _watched(series, began, ended, trial)))
        self._store.end_trial(trial_id, trial)
        if trial.status is Status.OK:
            timed = sum(step.seconds for step in trial.steps)
            self._overhead_s += 0.3 * (ended - began - timed - self._overhead_s)
        self._done += 1
        self._listen(Ended(trial, self._done, self._total, ended - began))

    def _affordable(self) -> Effort | None:
        """Share what is left of the budget among the trials that are left; None when nothing is."""
        if self._deadline is None:
            return self._effort
        left_s = self._deadline - time.perf_counter()
        if left_s <= 0:
            return None
        share_s = left_s / max(1, self._total - self._done) - self._overhead_s
        return replace(self._effort, budget_s=min(self._effort.budget_s, max(0.05, share_s)))


def _checked(trial: Trial) -> Trial:
    """Add what could have spoilt the trial's numbers, as facts; a trial without any has none."""
    found = validity.facts(trial, provenance.usable_cores())
    return replace(trial, provenance={**trial.provenance, "validity": found}) if found else trial


def _watched(series: samplers.Series, began: float, ended: float, trial: Trial) -> tuple[Sample, ...]:
    """Return the samplers' readings while the trial's timed steps ran; of the whole trial if there were none."""
    timed = [step for step in trial.steps if not step.warmup]
    if timed:
        began, ended = timed[0].start_s, timed[-1].end_s
    ids = trial.case.device_ids
    if not ids:
        return series.cut(began, ended)
    # samplers know GPUs by CUDA's numbers, trials by their place among the replicas
    place = {HOST: HOST} | {ordinal: index for index, ordinal in enumerate(ids)}
    return tuple(
        replace(sample, device=place[sample.device]) for sample in series.cut(began, ended) if sample.device in place
    )
