"""Runs: `dpbench.measure.run.run` with the fields of `How` as keywords."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpbench.measure import run as runner
from dpbench.measure.run import How, Listener, Outcome
from dpbench.records import Case
from dpbench.store import Store


def run(
    cases: Sequence[Case],
    store: Store,
    *,
    cluster: Any = None,
    listen: Listener = lambda event: None,
    **how: Any,
) -> Outcome:
    return runner.run(cases, store, How(**how), cluster=cluster, listen=listen)
