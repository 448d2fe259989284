"""Runs: `dpbench.measure.run.run` with the fields of `How` as keywords, and short trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from dpbench.measure import run as runner
from dpbench.measure.run import How, Listener, Outcome
from dpbench.measure.server import Server
from dpbench.records import Case, Effort, Trial
from dpbench.store import Store


def bare(effort: Effort) -> Effort:
    """Return the effort without what a trial measures besides its steps, which takes far longer."""
    return replace(effort, memory_by_phase=False, profile=False, marks=False, links=False)


class BareServer:
    """A server that stays open; the trials of runs measure nothing besides their steps."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def run_together(self, cases: Sequence[Case], effort: Effort, *rest: Any) -> list[Trial]:
        return self._server.run_together(cases, bare(effort), *rest)


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
