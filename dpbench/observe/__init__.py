"""Observe: make trials of training loops, from a watched script or a profiler trace.

The timed steps of a loop are cut into consecutive parts, stored as the rounds of its case. The
parts show the variation in one process, not that between processes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from dpbench.records import Trial
from dpbench.records.siblings import Sibling
from dpbench.records.trial import only

SIBLING = Sibling(
    commands={
        "watch": "dpbench.observe.commands:watch",
        "import": "dpbench.observe.commands:import_",
    },
    functions={"watch": "dpbench.observe.watching:watch"},
    rules="dpbench.observe.findings:RULES",
    statements="dpbench.observe.statements:KINDS",
    answers="dpbench.observe.verdict:answers",
)
PARTS = 5
"""The largest number of parts into which the steps of a loop are cut."""


def parts(trial: Trial, least: int = 1) -> list[Trial]:
    """Return a trial cut into at most `PARTS` parts with at least `least` timed steps each.

    The first part also has the warm-up steps. A trial with fewer timed steps is one part.
    """
    warm = next(
        (number for number, step in enumerate(trial.steps) if not step.warmup), len(trial.steps)
    )
    timed = len(trial.steps) - warm
    count = max(1, min(PARTS, timed // least))
    cuts = [0, *(warm + timed * part // count for part in range(1, count)), len(trial.steps)]
    return [
        _part(trial, number, first, last) for number, (first, last) in enumerate(pairwise(cuts))
    ]


def _part(trial: Trial, number: int, first: int, last: int) -> Trial:
    part = only(trial, range(first, last))
    after_s = trial.steps[first - 1].end_s if first else float("-inf")
    until_s = part.steps[-1].end_s if part.steps else 0.0
    return replace(
        part,
        round=number,
        samples=tuple(one for one in trial.samples if after_s < one.time_s <= until_s),
        setup={"steps_s": sum(step.seconds for step in part.steps)},
    )
