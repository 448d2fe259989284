"""History: the step time of a case over the store's commits, and the changes that asv detects."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dpbench.analysis import stats, summary
from dpbench.records import Case, Source, Trial
from dpbench.records.trial import Estimate
from dpbench.store.runs import PastRun

COMMITS = 3
"""The smallest number of commits that make a history."""


@dataclass(frozen=True, kw_only=True)
class CommitPoint:
    """The step time of a case at one commit, over the rounds of all runs of this commit.

    `commit` is the beginning of the commit's hash, and `runs` are the ids of the runs.
    """

    commit: str
    runs: tuple[str, ...]
    step: Estimate
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Level:
    """The points from index `first` to `end` - 1, without a detected change, and their median."""

    first: int
    end: int
    seconds: float


@dataclass(frozen=True)
class History:
    """The points of a case, by the first runs of their commits, and the levels between changes.

    `levels` is None if asv, which detects changes of the step time, is not installed.
    """

    case: Case
    points: tuple[CommitPoint, ...]
    levels: tuple[Level, ...] | None

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the labels of all points without duplicates."""
        return tuple(dict.fromkeys(label for point in self.points for label in point.labels))


def histories(
    cases: Iterable[Case], past: Sequence[PastRun], provenance: Mapping[str, Any]
) -> tuple[History, ...]:
    """Return the history of each case with a step time at `COMMITS` commits or more.

    `provenance` has the facts of the current run, and `past` are runs on the same hardware. Left
    out are runs with another torch, with uncommitted changes, or without a commit, commits whose
    step time is in doubt, and trials that took only a few steps (`Trial.slow`) where those of the
    newest run did not, or the other way round.
    """
    torch = (provenance.get("packages") or {}).get("torch")
    usable = [
        (commit, one)
        for one in past
        if (commit := _commit(one.run.provenance))
        and (one.run.provenance.get("packages") or {}).get("torch") == torch
    ]
    if len({commit for commit, _ in usable}) < COMMITS:
        return ()
    shown = []
    for case in cases:
        points = _points(case, usable)
        if len(points) >= COMMITS:
            shown.append(History(case, points, _levels([point.step for point in points])))
    return tuple(shown)


def _commit(facts: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the commits of dpbench and of a run's project, "" for an unknown one.

    None if both are unknown, or if one checkout has uncommitted changes.
    """
    both = [facts.get(name) or {} for name in ("dpbench", "project")]
    if any(one.get("dirty") for one in both) or not any(one.get("commit") for one in both):
        return None
    code, project = (str(one.get("commit", "")) for one in both)
    return code, project


def _points(case: Case, past: Iterable[tuple[tuple[str, str], PastRun]]) -> tuple[CommitPoint, ...]:
    measured = [
        (commit, past_run.run.id, trial)
        for commit, past_run in past
        for trial in past_run.trials
        if trial.case == case and trial.source is Source.MEASURED
    ]
    groups: dict[tuple[str, str], dict[str, list[Trial]]] = {}
    for commit, run, trial in measured:
        if trial.slow == measured[-1][2].slow:
            groups.setdefault(commit, {}).setdefault(run, []).append(trial)
    by_project = len({project for _, project in groups}) > 1
    points = []
    for (code, project), runs in groups.items():
        every = [
            list(steps.values()) for trials in runs.values() if (steps := summary.measured(trials))
        ]
        rounds = dict(enumerate(steps for run in every for steps in run))
        if not rounds or (step := stats.median(rounds)).doubt or not math.isfinite(step.high):
            continue
        labels = summary.all_labels(
            trial for trials in runs.values() for trial in summary.shown(trials)
        )
        name = "+".join(
            filter(None, (code[:8], project[:8] if by_project and project != code else ""))
        )
        points.append(
            CommitPoint(
                commit=name or project[:8],
                runs=tuple(runs),
                step=step,
                labels=labels,
            )
        )
    return tuple(points)


def _levels(points: Sequence[Estimate]) -> tuple[Level, ...] | None:
    """Return the levels between the changes that asv detects, None without asv.

    With few points, asv makes nearly every point a level, so a change counts only if the intervals
    of the two points next to it do not overlap.
    """
    try:
        from asv.step_detect import detect_steps
    except ImportError:
        return None
    widths = [point.high - point.low for point in points]
    least = max(widths) * 1e-3 or 1.0  # an interval without width would have an infinite weight
    detected = detect_steps(
        [point.value for point in points], [1 / max(width, least) for width in widths]
    )
    starts = [first for first, *_ in detected if first and _apart(points[first - 1], points[first])]
    edges = pairwise([0, *starts, len(points)])
    return tuple(
        Level(a, b, statistics.median(point.value for point in points[a:b])) for a, b in edges
    )


def _apart(one: Estimate, other: Estimate) -> bool:
    return one.high < other.low or other.high < one.low
