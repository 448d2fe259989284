"""The schedules on which a test runs: some in every `make test`, the others on a sample."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import pytest

from dpbench.records.schedule import COPYING, FASTEST, Schedule

WRAPPED = tuple(one for one in Schedule if not one.keeps_replicas)
"""The schedules that DataParallel can have."""
SHARE = 8
"""Of the tests with the mark `rest`, one in so many runs without `--all`."""


def every(name: str, lowest: Schedule = Schedule.REFERENCE) -> Any:
    """Parametrize over the schedules from `lowest` up, and those that TrainStep selects."""
    ladder = list(Schedule)
    return pytest.mark.parametrize(
        name, params([*ladder[ladder.index(lowest) :], COPYING, FASTEST])
    )


def params(schedules: Iterable[str]) -> list[Any]:
    """Return the schedules as parameters, with the marks of `marks`."""
    given = list(schedules)
    return [pytest.param(str(one), marks=marks(one, given)) for one in given]


def marks(schedule: str, given: Iterable[str]) -> tuple[pytest.MarkDecorator, ...]:
    """Return the mark `rest` unless a schedule is the first, the default, or the top of `given`."""
    top = max((one for one in given if one in (*Schedule,)), key=[*Schedule].index, default="")
    always = (Schedule.REFERENCE, COPYING, top)
    return () if schedule in always else (pytest.mark.rest,)


def in_sample(item: pytest.Item) -> bool:
    """Return whether a test runs without `--all`."""
    return not item.get_closest_marker("rest") or not zlib.crc32(item.nodeid.encode()) % SHARE
