"""Schedules: one table of switches, a ladder of one switch per rung, and forbidden combinations."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import hypothesis
import hypothesis.strategies as st
import pytest

from dpbench.records import schedule
from dpbench.records.schedule import RUNGS, SWITCHES, Schedule

any_schedule = st.fixed_dictionaries(
    {name: st.sampled_from(positions) for name, positions in SWITCHES.items()}
)


def turned(one: Schedule, other: Schedule) -> set[str]:
    return {switch for switch in SWITCHES if getattr(one, switch) != getattr(other, switch)}


@hypothesis.given(any_schedule)
def test_what_is_written_is_read_back(given: dict[str, str]) -> None:
    one = Schedule(**given)
    if one != Schedule():
        assert schedule.parse(str(one)) == one
        assert schedule.parse(",".join(f"{s}={p}" for s, p in given.items())) == one


@hypothesis.given(any_schedule)
def test_an_ablation_sets_one_switch_back_and_is_legal(given: dict[str, str]) -> None:
    best = Schedule(**given)
    found = schedule.ablations(best)
    for switch, one in found.items():
        assert turned(one, best) == {switch}
        assert getattr(one, switch) == SWITCHES[switch][0]
        assert not one.missing()
    for switch in best.turned().keys() - found.keys():
        assert replace(best, **{switch: SWITCHES[switch][0]}).missing()


def test_every_rung_changes_its_one_switch_over_the_rung_below_and_is_legal() -> None:
    for below, name in pairwise(RUNGS):
        assert turned(RUNGS[below], RUNGS[name]) == {schedule.LADDER[name][0]}
        assert not RUNGS[name].missing()


def test_the_highest_rung_has_something_to_set_back() -> None:
    assert len(schedule.ablations(RUNGS[schedule.BEST])) >= 3


def test_the_rungs_up_to_flat_storage_need_no_train_step() -> None:
    without = [name for name, one in RUNGS.items() if not one.missing(train_step=False)]
    assert without == ["reference", "pool", "cached", "flat_storage"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cahced", ["unknown schedule 'cahced'", "cached", "workers=pool,replicas=cached"]),
        ("wrokers=pool", ["unknown switch 'wrokers'", "workers"]),
        ("workers=poll", ["workers must be one of", "pool", "'poll'"]),
        ("workers=pool,workers=serial", ["sets workers twice"]),
    ],
)
def test_errors_name_what_is_known(text: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match=words[0]) as caught:
        schedule.parse(text)
    assert all(word in str(caught.value) for word in words), caught.value
