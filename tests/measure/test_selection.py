"""The cases that options select: names of dpbench and of the user's objects, and printed names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from dpbench.measure.selection import cases_of
from dpbench.records import Case, names, plan, registry
from dpbench.records.options import Options
from dpbench.records.schedule import SELECTED, Schedule
from tests.records.test_options import parsed
from tests.strategies.test_users_own import MINE


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE.replace("FACTOR", "1.0"))
    (tmp_path / "net.py").write_text("net = big = None\n")


def selected(*words: str) -> list[Case]:
    """Return the cases of a `dpbench run` with these arguments on two CPU devices."""
    found, _ = cases_of(parsed(*words, "--devices", "2", "--device-kind", "cpu"))
    return found


def hashed(cases: Iterable[Case]) -> str:
    return plan.plan_hash(cases, "auto")


def test_names_and_files_are_one_option_in_any_order_and_under_both_names() -> None:
    ways = (
        "--models mlp,net.py:net --strategies single,mine.py:chunks",
        "--models net.py:net --models mlp --strategies mine.py:chunks,single",
        "--models mlp --model net.py:net --strategies single --strategy mine.py:chunks",
    )
    plans = [selected(*words.split()) for words in ways]
    assert {(case.model, case.strategy) for case in plans[0]} == {
        (model, strategy)
        for model in ("mlp", "net.py:net")
        for strategy in ("single", "mine.py:chunks")
    }
    assert len({hashed(cases) for cases in plans}) == 1


def test_own_strategies_alone_are_measured_beside_the_default_ones() -> None:
    usual = selected("--models", "mlp")
    own = selected("--models", "mlp", "--strategy", "mine.py:chunks")
    assert {case.strategy for case in own} == {
        "mine.py:chunks",
        *(case.strategy for case in usual),
    }
    both = selected("--models", "mlp", "--strategies", "dp,mine.py:chunks")
    assert {case.strategy for case in both} == {"dp", "mine.py:chunks"}


EARLIER = {
    "--models mlp --strategies single,dp --schedules reference,cached": "bd4f4a57b4d19ad2",
    "--models mlp --model net.py:net --strategies single,dp": "d8fe7662349ff689",
    "--models mlp --strategy mine.py:chunks": "28e08248976af0fd",
    "--model net.py:net --model net.py:big --strategies ddp": "10d8d675f166c304",
    "--together mlp,net.py:net": "aed7146a67bf1446",
}
"""Commands for which a version with two options each for models and strategies had these plans."""


@pytest.mark.parametrize("words", EARLIER, ids=str)
def test_a_stored_command_of_before_has_the_same_plan(words: str) -> None:
    assert hashed(selected(*words.split()))[:16] == EARLIER[words]


def printed() -> list[Case]:
    """Return a case of each strategy, and of each schedule of the engine."""
    schedules = [*Schedule, *SELECTED]
    return [
        Case(model="mlp", strategy=name, batch_size=64, devices=2, schedule=written)
        for name in registry.names("strategies")
        for written in (schedules if registry.traits(name).scheduled else [""])
    ]


@pytest.mark.parametrize("case", printed(), ids=names.strategy)
def test_a_printed_name_of_a_strategy_is_accepted(case: Case) -> None:
    _, in_label, *_ = case.label.split()
    expected = plan.normalise(replace(case, device_kind="cpu"))
    for name in (names.strategy(case), in_label):
        options = Options.of(models="mlp", strategies=name, devices=2, device_kind="cpu")
        assert cases_of(options)[0] == [expected]
        assert selected("--models", "mlp", "--strategies", name) == [expected]


def test_a_schedule_in_brackets_goes_before_that_of_the_option() -> None:
    cases = selected(
        *("--models", "mlp", "--strategies", "dp[cached],dp,ddp", "--schedules", "local,pool")
    )
    assert [(case.strategy, case.schedule) for case in cases] == [
        ("dp", "cached"),
        ("dp", "local"),
        ("dp", "pool"),
        ("ddp", ""),
    ]
