"""Forecast: the trials of a run, and the time that they are expected to take, before anything is measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dpbench.hardware import provenance
from dpbench.hardware.nvml import describe
from dpbench.measure.options import AUTO, Options
from dpbench.measure.run import OVERHEAD_S
from dpbench.measure.stopping import LEAST
from dpbench.records import Case, Effort, words
from dpbench.records.trial import HOSTS
from dpbench.store import Store

if TYPE_CHECKING:
    from dpbench.measure.cluster import Cluster

ASSUMED_S = OVERHEAD_S + Effort().budget_s
"""The seconds of a trial with which the planner starts if it knows no trial of the case: its overhead and its steps."""
LEFT_OUT = "the check of each model, the start of the workers' server in each round, and the wait for idle cores"
"""The work of a run that is not part of its trials."""


@dataclass(frozen=True, kw_only=True)
class PlannedCase:
    """A case of the plan. `trial_s` is the median duration in seconds of its `earlier` trials; None without any."""

    case: Case
    trial_s: float | None
    earlier: int


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The plan of a run: its cases, and the number of rounds, which is the least number if a rule decides (`auto`).

    `budget_s` is the time budget of the run in seconds, None without one. `launcher` names the launcher of jobs; it is
    empty for a run without jobs.
    """

    cases: Sequence[PlannedCase]
    rounds: int
    auto: bool
    budget_s: float | None
    launcher: str = ""

    @property
    def trials(self) -> int:
        """Return the number of trials."""
        return len(self.cases) * self.rounds

    @property
    def seconds(self) -> float | None:
        """Return the expected duration of all trials in seconds; None for jobs, which wait in a queue.

        For a case without earlier trials, it has `ASSUMED_S` per trial.
        """
        if self.launcher:
            return None
        return self.rounds * sum(ASSUMED_S if one.trial_s is None else one.trial_s for one in self.cases)

    @property
    def basis(self) -> str:
        """Return the origin of `seconds`, and the work that they leave out; for jobs, the reason why it is unknown."""
        if self.launcher:
            return f"it depends on the queue of {self.launcher}"
        known = sum(one.trial_s is not None for one in self.cases)
        new = len(self.cases) - known
        parts = [f"{words.count(known, 'case')} as measured earlier on this machine"] if known else []
        if new:
            assumed = f"the planner assumes {words.time(ASSUMED_S)} per trial"
            parts.append(f"{words.count(new, 'case')} without an earlier trial, for which {assumed}")
        return f"{'; '.join(parts)}; not included: {LEFT_OUT}"


def forecast(
    options: Options, cases: Sequence[Case], durations: Mapping[str, Sequence[float]], budget_s: float | None
) -> Forecast:
    """Return the plan of a run; `durations` are those of earlier trials in seconds, by fingerprint of the case.

    `cases` and `budget_s` are the results of `options.cases_of`. Jobs have no time budget.
    """
    planned = []
    for case in cases:
        earlier = durations.get(case.fingerprint, ())
        typical = statistics.median(earlier) if earlier else None
        planned.append(PlannedCase(case=case, trial_s=typical, earlier=len(earlier)))
    return Forecast(
        cases=planned, rounds=options.rounds if isinstance(options.rounds, int) else LEAST,
        auto=options.rounds == AUTO, budget_s=None if options.launcher else budget_s, launcher=options.launcher,
    )  # fmt: skip


def earlier(path: Path, cluster: Cluster | None = None) -> dict[str, list[float]]:
    """Return the durations in seconds of the good trials that a store has from this machine, by fingerprint.

    The result is empty if there is no store at `path`.
    """
    if not path.exists():
        return {}
    facts = provenance.collect(describe()) | ({HOSTS: cluster.facts()} if cluster else {})
    with Store.read(path) as store:
        return store.durations(provenance.host_key(facts))
