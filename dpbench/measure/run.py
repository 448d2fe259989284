"""Run: measure the cases of a plan in fresh worker processes and store their trials.

A failure of a worker never ends the run. Each round measures its cases once, in random order.
Unless cases are paired, each round has a new server process, from which its workers are forked.
Differences between processes therefore widen the confidence intervals instead of biasing the
results. This module does not import torch.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dpbench.analysis import validity
from dpbench.hardware import foreign_load, provenance, samplers
from dpbench.hardware.gpus import describe
from dpbench.hardware.nvml import replicas_of
from dpbench.measure import checks
from dpbench.measure.budget import Budget, on_gpus
from dpbench.measure.noise import Noise
from dpbench.measure.once import Once
from dpbench.measure.rounds import RunRounds, needed_rounds
from dpbench.measure.scratch import folder
from dpbench.measure.server import Server
from dpbench.measure.stopping import Fixed, RoundsRule
from dpbench.records import (
    HOST,
    Case,
    Effort,
    Sample,
    Status,
    Trial,
    disturbance,
    plan,
    session,
    signals,
    sources,
)
from dpbench.records.facts import stated
from dpbench.records.load import GpuLoad, Load, Measured, OfCores
from dpbench.records.spelling import dashed
from dpbench.records.trial import SPENT
from dpbench.records.words import count
from dpbench.records.words import time as time_text
from dpbench.store import FINISHED, INTERRUPTED, OPEN, Identity, Store, inside

if TYPE_CHECKING:
    from dpbench.measure.checks import TrialRunner
    from dpbench.measure.cluster import Cluster

GOES_ON = f"; the same command, also with another {dashed('budget')}, goes on with"


@dataclass(frozen=True)
class Started:
    """A run (`case` is None) or one of its trials has started.

    `done` is the number of trials that have ended, and `total` that of all trials planned so far;
    0 if the number of rounds is open.
    """

    run_id: str
    total: int
    done: int
    case: Case | None = None
    round: int = 0


@dataclass(frozen=True)
class Ended:
    """A trial has ended and is stored; `done` of the run's `total` trials have ended.

    `seconds` is the trial's duration, or its equal share if one worker measured several cases.
    `left_s` is the expected duration of the rest of the run in seconds; None if it is unknown. It
    may grow: where trials take longer than those before them, and where rounds are added.
    """

    trial: Trial
    done: int
    total: int
    seconds: float
    left_s: float | None = None


@dataclass(frozen=True)
class Note:
    """A message of one line to show to the user during a run."""

    text: str


Listener = Callable[[Started | Ended | Note], None]


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    `resumed` is True if trials were added to an earlier run of the same plan. `counts` has the
    number of trials by status, including those of earlier sessions; repeated trials count once.
    """

    run_id: str
    resumed: bool
    counts: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class How:
    """How a run measures its cases.

    `rounds` is the number of rounds, or the rule that selects the cases of each round. Without
    `paired`, each round has a separate server process, from which its workers are forked. With
    `paired`, all rounds use one server process, and cases that can share a worker are measured in
    one worker, which runs their blocks of steps in turn. `effort` limits the steps and the time of
    each trial (None: the defaults), and `limit_s` the duration of one trial in seconds.

    `budget_s` limits the duration of the run in seconds (None: no limit). On CPUs, the timed part
    of each trial is shortened to fit this budget. On GPUs, a rule that goes on until answers are
    settled leaves out the least needed cases (see `plan.units`), and otherwise, whole rounds
    after the first are left out. Trials that have not started when the budget is spent are left
    out, too, but for the first of the call. A rule that goes on until answers are settled begins no
    further round, beyond those that every case needs, that is expected to end more than `settle_s`
    seconds after the call.

    `patience_s` is the longest wait in seconds, before the first trial, until other processes use
    little of the cores (None: the environment variable DPBENCH_PATIENCE, or the default); it is
    never more than half of the budget. In a fixed number of rounds, trials during which they used
    too much are measured once more at the end, if the budget permits; if `patience_s` is 0, they
    are only labelled as noisy.

    `retry` has names of statuses: trials that ended with one of them are measured again, even if
    the latest run of this plan has finished. `traces` is a folder for profiles (None: no profiles):
    after the timed steps of each trial, one more step is profiled and written to
    traces/<run>/<case>-r<round>.json, with one file per rank.
    """

    rounds: int | RoundsRule = 3
    paired: bool = False
    effort: Effort | None = None
    budget_s: float | None = None
    settle_s: float = math.inf
    limit_s: float = 120.0
    retry: Collection[str] = ()
    patience_s: float | None = None
    traces: Path | None = None


def run(
    cases: Sequence[Case],
    store: Store,
    how: How = How(),
    *,
    cluster: Cluster | None = None,
    listen: Listener = lambda event: None,
) -> Outcome:
    """Measure every case, store each trial as soon as it ends, and return the result of the run.

    If trials that every case needs are left out, which is said, or if an answer is then not
    settled, the status of the run is `open`, and the same call goes on with it. A case that was not
    measured at all then has a trial with the status `skipped`. A plan that only adds cases or
    rounds to that of the latest run goes on with it, even if it has finished (see `needed_rounds`).

    `cluster` has the ranks of a launch by torchrun or srun, which then measure the cases. `listen`
    is called with every event. After a KeyboardInterrupt, or if signals from outside have ended
    both attempts at a trial, the same call resumes the run. Raises OSError if temporary files
    cannot be written; the trials that have ended stay stored.
    """
    began_s = time.perf_counter()
    facts = collect(cluster)
    patience_s = foreign_load.patience(how.patience_s)
    rule = Fixed(how.rounds) if isinstance(how.rounds, int) else how.rounds
    run_id, resumed = store.begin_run(
        identity(cases, rule, facts, paired=how.paired),
        rounds=rule.name if isinstance(rule.name, int) else 0,
        provenance=facts,
        reopen=bool(how.retry),
    )
    status = INTERRUPTED
    try:
        # the ranks of a cluster measure their own machines
        gpus = [] if cluster else ordinals(cases)
        waits_s = patience_s if how.budget_s is None else min(patience_s, how.budget_s / 2)
        load = foreign_load.wait(waits_s, lambda words: listen(Note(words)), cases, gpus)
        earlier = store.facts(run_id).noisy
        noise = Noise(_before(earlier.get("before", ""), load, cases))
        store.annotate(run_id, "foreign_load", msgspec.to_builtins(load.cores))
        store.annotate(run_id, "noisy", earlier | noise.reasons())
        growth = store.growth(run_id)
        done = measured(store, run_id, how.retry)
        deadline_s = began_s + (math.inf if how.budget_s is None else how.budget_s)
        needed = needed_rounds(cases, rule.least, growth.joined)
        budget = Budget(
            deadline_s=deadline_s,
            settle_by_s=min(began_s + how.settle_s, deadline_s),
            settles=rule.looks > 1,
            effort=how.effort or Effort(),
        )
        session = _Session(
            rounds=RunRounds(
                cases=cases,
                needed=needed,
                rule=rule,
                budget=budget,
                paired=how.paired,
                done=done,
                begun=store.begun(run_id),
            ),
            how=how,
            store=store,
            run_id=run_id,
            noise=noise,
            once=Once(needed),
            patience_s=patience_s,
            listen=listen,
            cluster=cluster,
            visible=facts["gpus"].get("gpus", ()),
            gpus=gpus,
            gpu_loads=load.gpus,
            looks=rule.looks * (1 + growth.looks),
            models=checks.Models(how.limit_s),
        )
        for trial in store.trials(run_id, superseded=True) if done else ():
            session.take(trial)
        try:
            session.measure()
        finally:
            store.annotate(run_id, "noisy", noise.reasons())
        # the same command goes on with a run of which a trial was killed
        if session.killed <= store.done(run_id):
            status = OPEN if session.open else FINISHED
    finally:
        store.end_run(run_id, status)
    return Outcome(run_id, resumed, store.counts(run_id))


def collect(cluster: Cluster | None) -> dict[str, Any]:
    """Return the facts about this machine, its software and a launch's ranks."""
    return provenance.collect(describe()) | ({"hosts": cluster.facts()} if cluster else {})


def identity(
    cases: Sequence[Case], rule: RoundsRule, facts: dict[str, Any], *, paired: bool
) -> Identity:
    """Return the identity of a run."""
    parts = plan.Parts.of(cases, rule.name, *["paired"] * paired)
    code = provenance.code_key(facts, sources.names_of(cases))
    return Identity(parts.whole, provenance.host_key(facts), code, parts)


def measured(store: Store, run_id: str, retry: Iterable[str]) -> set[tuple[str, int]]:
    """Return (fingerprint, round) of each trial of a run that is not measured again.

    A skipped one is, because a budget may have been spent before it.
    """
    return store.done(run_id, retry=[*retry, Status.SKIPPED])


def _before(earlier: str, load: Measured, cases: Sequence[Case]) -> str:
    """Return which high loads there were before the earlier sessions of a run and before this."""
    loaded = disturbance.told(load, cases) if disturbance.busy(load, cases) else ""
    if loaded in earlier:
        return earlier
    return f"{earlier}; {loaded}" if earlier else loaded


def ordinals(cases: Sequence[Case]) -> list[int]:
    """Return the sorted ordinals of all GPUs that the cases use."""
    return sorted({gpu for case in cases if case.device_kind == "cuda" for gpu in case.gpus})


@dataclass(kw_only=True)
class _Session:
    """One call of `run`: it measures the rounds, stores their trials and tells of them."""

    rounds: RunRounds
    how: How
    store: Store
    run_id: str
    noise: Noise
    once: Once
    patience_s: float
    listen: Listener
    cluster: Cluster | None
    visible: Sequence[Mapping[str, Any]]
    gpus: Sequence[int]
    gpu_loads: Sequence[GpuLoad]
    looks: int
    models: checks.Models
    open: bool = False
    """Whether trials were left out, on which an answer depends or which every case needs."""
    killed: set[tuple[str, int]] = field(default_factory=set)
    """The trials that a signal from outside has ended, as pairs (case fingerprint, round)."""
    _scratch: Path = field(init=False)
    _samples: samplers.SampleFile = field(init=False)
    _lasting: TrialRunner | None = None
    """The workers of all rounds, where cases are paired."""

    @property
    def _budget(self) -> Budget:
        return self.rounds.budget

    def measure(self) -> None:
        """Measure the rule's rounds, except what earlier sessions have measured."""
        self._tell_start()
        with ExitStack() as stack:
            self._scratch = stack.enter_context(folder())
            self._samples = stack.enter_context(
                samplers.sampling(self.gpus, self._scratch / "samples.jsonl")
            )
            if self.how.paired:
                self._lasting = stack.enter_context(self._workers())
            for number, pending in self.rounds.pending():
                if not self._round(pending, number):
                    break
            # where the number of rounds is open, further rounds replace those under load
            if not self._budget.settles and self.patience_s > 0:
                self._repeat()

    def _tell_start(self, case: Case | None = None, number: int = 0) -> None:
        rounds = self.rounds
        self.listen(Started(self.run_id, rounds.total, rounds.ended, case, number))

    @contextmanager
    def _workers(self) -> Iterator[TrialRunner]:
        """Yield what starts the workers of a round.

        A new server per round widens the intervals by a server's effect. In paired cases, which
        have one server, the effect cancels.
        """
        if self._lasting:
            yield self._lasting
            return
        with self.cluster.workers() if self.cluster else Server(self._scratch) as server:
            yield server

    def _round(self, pending: Sequence[Case], number: int) -> bool:
        """Measure the pending cases of a round, and return whether the run may go on."""
        rounds = self.rounds
        if number and rounds.leaves_out(pending, number):
            rounds.expect(pending, number)
            kept = rounds.fitting(pending, number)
            self._drop([case for case in pending if case not in kept], number)
            pending = kept
            if not pending:
                return True
        if number and not self._budget.allows(pending, needed=rounds.are_needed(pending, number)):
            self._leave_out(pending, number)
            return False
        if number and self.gpus:
            # a GPU that stays in use is waited for only once
            in_use = any(load.busy for load in self.gpu_loads)
            self._look(0.0 if in_use else self.patience_s, pending)
        with self._workers() as server:
            if not rounds.leaves_out(pending, number):
                pending = self._refuse(pending, number, server)
            rounds.expect(pending, number)
            left = self._measured(pending, number, server)
        short = self._budget.shortage()
        if short and not left and number == 0 and not on_gpus(pending):
            self.listen(Note(short))
        if left:
            self._leave_out(left, number, rest=True)
        return not left

    def _refuse(self, cases: Sequence[Case], number: int, server: TrialRunner) -> list[Case]:
        """Check the models, and return the cases whose model passes.

        The others are dropped, each with a failed trial.
        """
        for line in () if self._budget.spent() else self.models.check(cases, server):
            self.listen(Note(line))
        failed = {case: trial for case in cases if (trial := self.models.failed(case, number))}
        for case, trial in failed.items():
            self.store.end_trial(self.store.begin_trial(self.run_id, case, number), trial)
        self.rounds.forget(failed)
        return [case for case in cases if case not in failed]

    def take(self, trial: Trial) -> None:
        """Pass a trial to all that depends on the trials so far."""
        self.rounds.rule.add(trial)
        self.once.add(trial)
        self.noise.add(trial)
        if trial.status is Status.KILLED:
            self.killed.add((trial.case.fingerprint, trial.round))

    def _look(self, patience_s: float, cases: Sequence[Case]) -> None:
        """Wait for a low foreign load, and keep what others use of the GPUs.

        The wait takes at most half of what is left of the budget.
        """
        self.gpu_loads = foreign_load.wait(
            max(0.0, min(patience_s, self._budget.left_s / 2)),
            lambda words: self.listen(Note(words)),
            cases,
            self.gpus,
        ).gpus

    def _repeat(self) -> None:
        """Repeat trials that ran under too much foreign load, as long as budget is left.

        Trials that shared a worker with one of them are repeated too. Results use the new trials;
        the old ones stay stored.
        """
        slots = set(self.noise.repeatable())
        rounds = self.rounds
        if not slots or self._budget.spent():
            return
        self._look(self.patience_s, rounds.cases)
        with self._workers() as server:
            for number in sorted({number for _, number in slots}):
                measured = [case for case in rounds.cases if self.noise.measured(case, number)]
                for group in rounds.groups(measured):
                    if slots & {(case, number) for case in group} and not self._budget.spent():
                        rounds.total += len(group)
                        self._group(group, number, server)

    def _measured(self, cases: Sequence[Case], number: int, server: TrialRunner) -> list[Case]:
        """Measure each case once, and return those that are left when the budget is spent."""
        ahead = self.rounds.shuffled(cases, number, self.run_id)
        if self.rounds.leaves_out(cases, number):
            return self._measured_by_need(ahead, number, server)
        groups = self.rounds.groups(ahead)
        while groups and not self._budget.spent():
            self._group(groups.pop(0), number, server)
        return [case for group in groups for case in group]

    def _measured_by_need(
        self, cases: Sequence[Case], number: int, server: TrialRunner
    ) -> list[Case]:
        """Measure the cases that fit into the budget, and leave the others out.

        Each trial may change what fits, because it tells how long others take. A model is checked
        before its first trial. Return the cases that are left when the budget is spent.
        """
        ahead = list(cases)
        checked: set[str] = set()
        while ahead and not self._budget.spent():
            fitting = self.rounds.fitting(ahead, number)
            if not fitting:
                self._drop(ahead, number)
                ahead = []
            elif (model := fitting[0].model) not in checked:
                checked.add(model)
                mine = [case for case in ahead if case.model == model]
                refused = {*mine} - {*self._refuse(mine, number, server)}
                ahead = [case for case in ahead if case not in refused]
            else:
                self._group(fitting[:1], number, server)
                ahead.remove(fitting[0])
        return ahead

    def _group(self, group: Sequence[Case], number: int, server: TrialRunner) -> None:
        """Measure the cases in one worker."""
        signals.check()
        self._tell_start(group[0], number)
        ids = [self.store.begin_trial(self.run_id, case, number) for case in group]
        began = time.perf_counter()
        effort = replace(
            self.once.left(self._budget.trial(group), group, number),
            trace=self._trace(group[0], number) if len(group) == 1 else "",
        )
        before = foreign_load.snapshot()
        trials = server.run_together(group, effort, number, self.how.limit_s)
        load = foreign_load.since(before)
        ended = time.perf_counter()
        self._budget.took(trials, ended - began)
        for trial_id, trial in zip(ids, trials, strict=True):
            samples = (*trial.samples, *_watched(self._samples, began, ended, trial, self.visible))
            # the load that the ranks of a cluster measured takes precedence
            facts = {**self._load_facts(trial, load), **trial.provenance}
            checked = _checked(replace(trial, samples=samples, provenance=facts))
            self.store.end_trial(trial_id, checked)
            self.take(checked)
            self.rounds.ended += 1
            seconds = (ended - began) / len(group)
            left_s = self._budget.remaining_s()
            self.listen(Ended(checked, self.rounds.ended, self.rounds.total, seconds, left_s))

    def _load_facts(self, trial: Trial, load: OfCores) -> dict[str, Any]:
        """Return what others used during a trial, and how long the GPU computes in a step."""
        mine = ordinals([trial.case])
        found = {
            "looks": self.looks if self.looks > 1 else None,
            "foreign_load": load if isinstance(load, Load) else None,
            "foreign_gpus": tuple(gpu for gpu in self.gpu_loads if gpu.gpu in mine),
            # only the first round is profiled
            "gpu_busy_s": disturbance.gpu_busy_s(trial) or self.once.busy_s(trial.case),
        }
        return stated(**{name: value for name, value in found.items() if value})

    def _trace(self, case: Case, number: int) -> str:
        if self.how.traces is None:
            return ""
        words = re.sub(r"[^\w.,=]+", "-", case.label).strip("-")
        folder = inside(self.how.traces.absolute(), self.run_id)
        return str(folder / f"{words}-{case.fingerprint[:8]}-r{number}.json")

    def _leave_out(self, cases: Sequence[Case], number: int, *, rest: bool = False) -> None:
        """Record that no further trial is measured; say so if every case needed it.

        `cases` are those of round `number`, or only the `rest` of them. The answers name cases
        without any trial.
        """
        rounds = self.rounds
        rounds.total = rounds.ended
        if not rounds.are_needed(cases, number):
            self.open = self.open or bool(rounds.rule.unsettled())
            return
        begun = self._begun()
        without = [case for case in cases if case.fingerprint not in begun]
        self._skip(without, number)
        if len(without) == len(cases):
            return
        last = max(rounds.needed[case].stop for case in cases)
        named = f"rounds {number + 1} to {last}" if number + 1 < last else f"round {number + 1}"
        usual_s = self._budget.usual_s(Counter(cases))
        why = (
            "the budget is spent"
            if self._budget.spent()
            else f"one round of {count(len(cases), 'case')} takes about {time_text(usual_s)}, and"
            f" {time_text(self._budget.left_s)} of the budget is left"
        )
        self.listen(Note(f"{'the rest of ' * rest}{named} left out: {why}{self._goes_on('them')}"))

    def _goes_on(self, them: str) -> str:
        """Return a clause on how to go on with what is left out, "" for a session's model."""
        own = any(session.is_of(case.model) for case in self.rounds.cases)
        return "" if own else f"{GOES_ON} {them}"

    def _begun(self) -> set[str]:
        """Return the fingerprints of the cases with a trial that was not skipped."""
        return {case for case, _ in measured(self.store, self.run_id, ())}

    def _skip(self, cases: Iterable[Case], number: int) -> None:
        """Leave the run open, and record that a round of the cases was left out.

        Cases of which all trials were skipped have such a record, or cannot run here.
        """
        self.open = True
        skipped = {case for case, _ in self.store.done(self.run_id)} - self._begun()
        for case in cases:
            if case.fingerprint not in skipped:
                why = f"{SPENT} had no time for it{self._goes_on('it')}"
                trial = Trial(case=case, status=Status.SKIPPED, reason=why, round=number)
                trial_id = self.store.begin_trial(self.run_id, case, number)
                self.store.end_trial(trial_id, trial)

    def _drop(self, cases: Sequence[Case], number: int) -> None:
        """Leave out cases for which the budget has no time beside more needed ones.

        The answers name them.
        """
        if cases:
            self._skip(cases, number)
            self.rounds.forget(cases)


def _checked(trial: Trial) -> Trial:
    found = validity.facts(trial, provenance.usable_cores())
    return trial.adding(stated(validity=found)) if found else trial


def _watched(
    series: samplers.SampleFile,
    began: float,
    ended: float,
    trial: Trial,
    visible: Sequence[Mapping[str, Any]],
) -> tuple[Sample, ...]:
    """Return the GPUs' readings from `began` to `ended`, and the host's during the timed steps.

    Some counters of GPUs are averages or totals, of which the timed steps have a part only with the
    readings around them. Without timed steps, all readings are returned. `visible` are NVML's facts
    about the GPUs that CUDA shows.
    """
    start_s, end_s = trial.window
    # samplers identify GPUs by CUDA ordinal, trials by the index of the replica
    place = {
        HOST: HOST,
        **replicas_of(trial.case.device_ids, trial.facts.gpu_uuids, visible),
    }
    return tuple(
        replace(sample, device=place[sample.device])
        for sample in series.cut(began, ended)
        if sample.device in place and (sample.device != HOST or start_s <= sample.time_s <= end_s)
    )
