"""Forecast: the trials of a run, and the time that they are expected to take, before anything is measured."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dpbench.measure import run
from dpbench.measure.rounds import Fixed
from dpbench.measure.run import OVERHEAD_S
from dpbench.measure.stopping import LEAST, UntilPrecise
from dpbench.records import Case, Effort, words
from dpbench.records.options import AUTO, Options
from dpbench.store import Naming, Store

if TYPE_CHECKING:
    from dpbench.measure.cluster import Cluster

ASSUMED_S = OVERHEAD_S + Effort().budget_s
"""The assumed seconds of a trial of a case without earlier trials: the overhead plus the default budget for steps."""
LEFT_OUT = "the check of each model, the start of the workers' server in each round, and the wait for idle cores"
"""The work of a run that is not part of its trials."""


@dataclass(frozen=True, kw_only=True)
class PlannedCase:
    """A case of the plan, of which `left` trials are to be measured.

    `earlier` is the number of the case's earlier trials, and `trial_s` is their median duration in seconds (None
    without earlier trials).
    """

    case: Case
    left: int
    trial_s: float | None
    earlier: int


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The plan of a run: its cases, their rounds and their expected duration.

    `rounds` is the number of rounds; if `auto` is True, a rule adds rounds, and `rounds` is the least number. `resumes`
    is the id of the run to which the trials would be added; it is empty for a new run. `budget_s` is the time budget of
    the run in seconds (None: no budget). `launcher` is the name of the launcher of jobs; it is empty without jobs.
    """

    cases: Sequence[PlannedCase]
    rounds: int
    auto: bool
    resumes: str
    budget_s: float | None
    launcher: str = ""

    @property
    def trials(self) -> int:
        """Return the number of trials that are to be measured."""
        return sum(one.left for one in self.cases)

    @property
    def seconds(self) -> float | None:
        """Return the expected duration of all trials in seconds; None for jobs, which wait in a queue.

        A case without earlier trials counts with `ASSUMED_S` per trial.
        """
        if self.launcher:
            return None
        return sum(one.left * (ASSUMED_S if one.trial_s is None else one.trial_s) for one in self.cases)

    @property
    def basis(self) -> str:
        """Return a text on the origin of `seconds` and on the work that it leaves out; for jobs, why it is unknown."""
        if self.launcher:
            return f"it depends on the queue of {self.launcher}"
        known = sum(one.trial_s is not None for one in self.cases)
        new = len(self.cases) - known
        parts = [f"{words.count(known, 'case')} as measured earlier on this machine"] if known else []
        if new:
            assumed = f"the planner assumes {words.time(ASSUMED_S)} per trial"
            parts.append(f"{words.count(new, 'case')} without an earlier trial, for which {assumed}")
        return f"{'; '.join(parts)}; not included: {LEFT_OUT}"


@dataclass(frozen=True, kw_only=True)
class Known:
    """The facts that a store already has about a plan.

    `durations` has the durations in seconds of earlier trials on this machine, by fingerprint of the case. `resumes` is
    the id of the run that the plan would resume (empty if there is none), and `done` has the (fingerprint, round) pairs
    of its final trials.
    """

    durations: Mapping[str, Sequence[float]] = field(default_factory=dict)
    resumes: str = ""
    done: frozenset[tuple[str, int]] = frozenset()

    @classmethod
    def of(cls, path: Path, options: Options, cases: Sequence[Case], naming: Naming, cluster: Cluster | None) -> Known:
        """Return the facts about the plan that the store at `path` has; they are empty if the file does not exist."""
        if not path.exists():
            return cls()
        facts = run.collect(cluster)
        rule = Fixed(options.rounds) if isinstance(options.rounds, int) else UntilPrecise(options.within)
        keys = run.identity(cases, rule, facts, paired=options.paired)
        keys["plan"] = naming.identified(keys["plan"])
        with Store.read(path) as store:
            # runs of jobs are not looked up: their identity also depends on the options of the jobs
            found = None if options.launcher else store.unfinished(**keys, reopen=bool(options.retry))
            done = store.done(found, retry=options.retry) if found else ()
            return cls(durations=store.durations(keys["host"]), resumes=found or "", done=frozenset(done))


def of(
    path: Path, options: Options, cases: Sequence[Case], naming: Naming, cluster: Cluster | None, budget_s: float | None
) -> Forecast:
    """Return the plan of a run whose store is at `path`.

    `cases` and `budget_s` are the results of `selection.cases_of`. For a run of jobs, `budget_s` is ignored.
    """
    known = Known.of(path, options, cases, naming, cluster)
    rounds = options.rounds if isinstance(options.rounds, int) else LEAST
    done, planned = Counter(fingerprint for fingerprint, number in known.done if number < rounds), []
    for case in cases:
        earlier = known.durations.get(case.fingerprint, ())
        typical = statistics.median(earlier) if earlier else None
        left = rounds - done[case.fingerprint]
        planned.append(PlannedCase(case=case, left=left, trial_s=typical, earlier=len(earlier)))
    return Forecast(
        cases=planned, rounds=rounds, auto=options.rounds == AUTO, resumes=known.resumes,
        budget_s=None if options.launcher else budget_s, launcher=options.launcher,
    )  # fmt: skip
