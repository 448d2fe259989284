"""Schedules: one table of switches, a ladder that changes one switch per rung, and forbidden combinations."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import hypothesis
import hypothesis.strategies as st
import pytest

from dpbench.records import schedule
from dpbench.records.schedule import CUDA, RUNGS, SWITCHES, TRAIN_STEP, Schedule

any_schedule = st.fixed_dictionaries({name: st.sampled_from(positions) for name, positions in SWITCHES.items()})


def turned(one: Schedule, other: Schedule) -> set[str]:
    return {switch for switch in SWITCHES if getattr(one, switch) != getattr(other, switch)}


@hypothesis.given(any_schedule)
def test_what_is_written_is_read_back(given: dict[str, str]) -> None:
    one = Schedule(**given)
    if one != Schedule():
        assert schedule.parse(str(one)) == one
        assert schedule.parse(",".join(f"{s}={p}" for s, p in given.items())) == one


@hypothesis.given(any_schedule, st.sampled_from([(), (TRAIN_STEP,), (TRAIN_STEP, CUDA)]))
def test_an_ablation_sets_one_switch_back_and_is_legal(given: dict[str, str], here: tuple[str, ...]) -> None:
    best = Schedule(**given)
    found = schedule.ablations(best, *here)
    for switch, one in found.items():
        assert turned(one, best) == {switch}
        assert getattr(one, switch) == SWITCHES[switch][0]
        assert not one.missing(*here)
    for switch in best.turned().keys() - found.keys():
        assert replace(best, **{switch: SWITCHES[switch][0]}).missing(*here)


def test_every_rung_turns_its_one_switch_over_the_rung_it_stands_on() -> None:
    names = [name for name in RUNGS if name != "graphs"]
    for below, name in pairwise(names):
        assert turned(RUNGS[below], RUNGS[name]) == {schedule.LADDER[name][0]}
    assert turned(RUNGS["zero1"], RUNGS["graphs"]) == {"graphs", "reduce"}


@pytest.mark.parametrize("here", [(TRAIN_STEP,), (TRAIN_STEP, CUDA)])
def test_the_best_is_exact_legal_and_has_something_to_take_away(here: tuple[str, ...]) -> None:
    best = schedule.best(*here)
    assert best.exact
    assert not best.missing(*here)
    assert best.graphs == "off"
    assert len(schedule.ablations(best, *here)) >= 3


def test_without_train_step_the_best_is_what_data_parallel_can_do() -> None:
    assert schedule.best() == RUNGS["flat_storage"]


def test_the_climb_leaves_out_what_the_device_cannot_do() -> None:
    assert set(RUNGS) - set(schedule.climb(TRAIN_STEP)) == {"graphs"}
    assert schedule.climb(TRAIN_STEP, CUDA) == list(RUNGS)


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
