"""The names of schedules: what is parsed, and what other versions stored."""

from __future__ import annotations

import pytest

from dpbench.records import schedule
from dpbench.records.schedule import EFFECTS, SELECTED, Schedule


def test_the_ladder_has_six_schedules_and_each_above_the_first_says_its_change() -> None:
    assert [*map(str, Schedule)] == [
        "reference",
        "pool",
        "cached",
        "local",
        "allreduce",
        "sharded",
    ]
    assert [*EFFECTS] == [*Schedule][1:]


def test_what_is_written_is_read_back() -> None:
    for one in Schedule:
        assert schedule.parse(str(one)) is one
        assert schedule.known(str(one)) is one


def test_replicas_that_update_everywhere_are_kept() -> None:
    for one in Schedule:
        assert one.keeps_replicas >= one.updates_everywhere


def test_copying_selects_no_schedule_that_must_notice_writes() -> None:
    assert not SELECTED[schedule.COPYING].updates_everywhere
    assert SELECTED[schedule.FASTEST] is [*Schedule][-1]


@pytest.mark.parametrize("text", ["cahced", "zero1", "workers=pool,replicas=cached", *SELECTED])
def test_an_unknown_name_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(ValueError, match="unknown schedule") as caught:
        schedule.parse(text)
    assert all(str(one) in str(caught.value) for one in (text, *Schedule))
    assert schedule.known(text) is None


@pytest.mark.parametrize(
    ("text", "available"),
    [("", True), ("local", True), ("fastest", True), ("zero1", False), ("reduce=overlap", False)],
)
def test_schedules_of_other_versions_are_not_available(text: str, available: bool) -> None:
    assert schedule.available(text) == available
