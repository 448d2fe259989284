"""Runs: `dpbench.measure.run.run` with the fields of `How` as keywords, and short trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dpbench.measure import run as runner
from dpbench.measure.run import How, Listener, Outcome
from dpbench.records import Case, Effort
from dpbench.store import Store


def bare(effort: Effort) -> Effort:
    """Return the effort without what a trial measures besides its steps, which takes far longer."""
    return replace(effort, memory_by_phase=False, profile=False, marks=False, links=False)


TWO_STEPS = bare(Effort(budget_s=0.0, warmup_steps=1, min_steps=2, max_steps=2, block_steps=1))
"""Two timed steps after one of warm-up."""


def run(
    cases: Sequence[Case],
    store: Store,
    *,
    cluster: Any = None,
    listen: Listener = lambda event: None,
    **how: Any,
) -> Outcome:
    return runner.run(cases, store, How(**how), cluster=cluster, listen=listen)
