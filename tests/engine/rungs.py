"""The schedules on which a test runs: some in every `make test`, the others on a sample."""

from __future__ import annotations

from typing import Any

import pytest

from dpbench.records.schedule import COPYING, FASTEST, Schedule

ALWAYS = (Schedule.REFERENCE, COPYING, Schedule.SHARDED)
"""The schedules on which every `make test` runs every test: the first, the default, and the top."""
REST = (Schedule.POOL, Schedule.CACHED, Schedule.LOCAL, Schedule.ALLREDUCE, FASTEST)
EXACT = tuple(Schedule)
WRAPPED = tuple(one for one in Schedule if not one.keeps_replicas)
"""The schedules that DataParallel can have."""


def every(name: str, lowest: Schedule = Schedule.REFERENCE) -> Any:
    """Parametrize over the schedules from `lowest` up, and those that TrainStep selects."""
    chosen = [*EXACT[EXACT.index(lowest) :], COPYING, FASTEST]
    return pytest.mark.parametrize(name, params(chosen))


def params(schedules: Any) -> list[Any]:
    """Return the schedules as parameters, with the mark `rest` where `make test` takes a sample."""
    return [
        pytest.param(str(one), marks=pytest.mark.rest if one in REST else ()) for one in schedules
    ]
