"""Plans: every point occurs once and in one form.

A point that cannot be run is refused with a message.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from dpbench.records import Case, options, plan, registry
from dpbench.records.schedule import Schedule

MODELS, STRATEGIES = registry.names("models"), registry.names("strategies")


def swept(**changed: Any) -> list[Case]:
    return plan.sweep(
        **{
            "models": ["mlp"],
            "strategies": ["single", "dp"],
            "devices": [1, 2],
            "batch_sizes": [64],
            **changed,
        }
    )


axes = st.fixed_dictionaries(
    {
        "models": st.lists(st.sampled_from(MODELS), min_size=1, max_size=3),
        "strategies": st.lists(st.sampled_from(STRATEGIES), min_size=1, max_size=4),
        "devices": st.lists(st.integers(1, 8), min_size=1, max_size=3),
        "size": st.sampled_from(options.SIZES),
        "precision": st.sampled_from(["fp32", "bf16", "fp16"]),
    }
)
batches = st.lists(st.integers(1, 512), min_size=1, max_size=3)


@hypothesis.given(axes, st.sampled_from(["batch_sizes", "batch_per_device"]), batches)
def test_every_case_is_once_in_the_plan_and_in_its_one_form(
    given: dict[str, Any], axis: str, sizes: list[int]
) -> None:
    cases = plan.sweep(**given, **{axis: sizes})
    assert len({case.fingerprint for case in cases}) == len(cases)
    assert {case.model for case in cases} == set(given["models"])
    assert {case.strategy for case in cases} == set(given["strategies"])
    for case in cases:
        assert plan.normalise(case) == case
        assert case.schedule == ("reference" if case.strategy == "dp" else "")
        assert not case.traits.one_device or case.devices == 1
        assert case.devices == 1 or case.devices in given["devices"]
        if axis == "batch_sizes":
            assert case.batch_size in sizes
        else:
            assert case.batch_size % case.devices == 0
            assert case.batch_size // case.devices in sizes
    for strategy in {name for name in given["strategies"] if not registry.traits(name).one_device}:
        mine = [case for case in cases if case.strategy == strategy]
        assert len(mine) == len(set(given["models"])) * len(set(given["devices"])) * len(set(sizes))


@hypothesis.given(axes, batches)
def test_the_order_of_axes_changes_no_plan(given: dict[str, Any], sizes: list[int]) -> None:
    cases = plan.sweep(**given, batch_sizes=sizes)
    backwards = plan.sweep(
        **{k: v[::-1] if isinstance(v, list) else v for k, v in given.items()},
        batch_sizes=sizes[::-1],
    )
    assert plan.plan_hash(cases, 3) == plan.plan_hash(backwards, 3)
    assert plan.plan_hash(cases, 3) != plan.plan_hash(cases, 4)
    other = dataclasses.replace(cases[0], seed=99)
    assert plan.plan_hash(cases, 3) != plan.plan_hash([other, *cases[1:]], 3)


def test_strong_scaling_keeps_the_global_batch() -> None:
    cases = swept(devices=[1, 2, 4], batch_sizes=[64])
    assert {(c.strategy, c.devices, c.batch_size) for c in cases} == {
        ("single", 1, 64),
        ("dp", 1, 64),
        ("dp", 2, 64),
        ("dp", 4, 64),
    }


def test_weak_scaling_keeps_the_batch_per_device_and_one_baseline() -> None:
    cases = swept(devices=[1, 2, 4], batch_sizes=(), batch_per_device=[32])
    assert {(c.strategy, c.devices, c.batch_size) for c in cases} == {
        ("single", 1, 32),
        ("dp", 1, 32),
        ("dp", 2, 64),
        ("dp", 4, 128),
    }


def test_colocated_replicas_have_a_baseline_that_is_not() -> None:
    cases = swept(device_kind="cuda", placement="colocated")
    assert {(c.strategy, c.devices, c.placement) for c in cases} == {
        ("single", 1, "spread"),
        ("dp", 1, "spread"),
        ("dp", 2, "colocated"),
    }


def test_schedules_are_an_axis_of_dp_alone() -> None:
    cases = swept(
        strategies=["single", "ddp", "dp"], schedules=["reference", "fastest"], devices=[2]
    )
    assert sorted((c.strategy, c.schedule) for c in cases) == [
        ("ddp", ""),
        ("dp", "fastest"),
        ("dp", "reference"),
        ("single", ""),
    ]


def test_device_ids_are_those_that_the_sweep_uses() -> None:
    cases = swept(device_kind="cuda", device_ids=[3, 1, 0], devices=[1, 2])
    assert {c.device_ids for c in cases} == {(3, 1)}


def test_users_own_models_pass_unread() -> None:
    assert swept(models=["tests.hungry:RAISES"])[0].model == "tests.hungry:RAISES"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        # what and where, the numbers, the way out
        ({"models": ["mpl"]}, ["unknown model 'mpl'", *MODELS, "did you mean 'mlp'"]),
        ({"strategies": ["ddpp"]}, ["unknown strategy 'ddpp'", *STRATEGIES, "did you mean 'ddp'"]),
        ({"schedules": ["refrence"]}, ["unknown schedule 'refrence'", "reference"]),
        ({"batch_sizes": []}, ["batch sizes", "batch per device"]),
        ({"batch_per_device": [8]}, ["batch sizes", "batch per device", "not both"]),
        ({"models": []}, ["models= is empty", *MODELS]),
        ({"strategies": []}, ["strategies= is empty", *STRATEGIES]),
        ({"devices": []}, ["devices= is empty", "such as 1,2"]),
        ({"device_ids": [0]}, ["leave out device_ids="]),
        ({"placement": "colocated"}, ["placement='colocated'", "placement='spread'"]),
        (
            {"device_kind": "cuda", "device_ids": [1, 1]},
            ["device_ids=", "[1, 1]", "placement='colocated'"],
        ),
        ({"device_kind": "cuda", "device_ids": [1]}, ["2 devices", "names only", "[1]"]),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_errors_say_what_where_and_the_way_out(changed: dict[str, Any], words: list[str]) -> None:
    with pytest.raises((ValueError, LookupError)) as caught:
        swept(**changed)
    for word in words:
        assert word in str(caught.value)


def laddered(**changed: Any) -> list[Case]:
    return plan.ladder(**{"models": ["mlp"], "devices": [2], "batch_sizes": [64], **changed})


@hypothesis.given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.sampled_from(["batch_sizes", "batch_per_device"]),
    batches,
    st.sampled_from(options.DEVICE_KINDS),
)
def test_a_ladder_has_every_schedule_and_its_rivals_once(
    devices: list[int], axis: str, sizes: list[int], kind: str
) -> None:
    given = {"batch_sizes": [], axis: sizes, "devices": devices, "device_kind": kind}
    if set(devices) == {1}:
        with pytest.raises(ValueError, match="at least two devices"):
            laddered(**given)
        return
    cases = laddered(**given)
    assert len({case.fingerprint for case in cases}) == len(cases)
    assert all(plan.normalise(case) == case for case in cases)
    dp = [case for case in cases if case.strategy == "dp"]
    works = {(case.devices, case.batch_size) for case in dp}
    assert {count for count, _ in works} == set(devices) - {1}
    for work in works:
        mine = [case.schedule for case in dp if (case.devices, case.batch_size) == work]
        assert sorted(mine) == sorted(Schedule)
    ddp = {(case.devices, case.batch_size) for case in cases if case.strategy == "ddp"}
    assert ddp == (set() if kind == "emulated" else works)


def test_the_limit_is_one_devices_share_and_a_case_apart() -> None:
    limits = [
        case for case in laddered(devices=[2, 3], batch_sizes=[12]) if case.options == plan.LIMIT
    ]
    assert [(case.strategy, case.devices, case.batch_size) for case in limits] == [
        ("single", 1, 6),
        ("single", 1, 4),
    ]
    # what is measured as a baseline is not measured again
    both = laddered(devices=[2], batch_sizes=[12, 6])
    assert [case.batch_size for case in both if case.options == plan.LIMIT] == [3]
    assert not [case for case in laddered(batch_sizes=[], batch_per_device=[8]) if case.options]
    assert not [case for case in laddered(batch_sizes=[7]) if case.options]
    shared = [case for case in laddered(device_kind="cuda", placement="colocated") if case.options]
    assert not shared, "replicas that share a GPU have no share of the work that is faster alone"


def test_equal_schedules_are_one_case() -> None:
    cases = swept(strategies=["dp"], schedules=["cached", "cached"], devices=[1, 2])
    assert [(case.schedule, case.devices) for case in cases] == [("cached", 1), ("cached", 2)]


@pytest.mark.parametrize("kind", options.DEVICE_KINDS)
def test_defaults_can_be_planned(kind: str) -> None:
    strategies = plan.default_strategies(kind)
    assert set(strategies) <= set(STRATEGIES)
    assert strategies[0] == "single"
    assert swept(strategies=strategies, device_kind=kind)


@pytest.mark.parametrize(
    ("available", "expected"),
    [(0, (1,)), (1, (1,)), (2, (1, 2)), (4, (1, 2, 4)), (5, (1, 2, 5)), (8, (1, 2, 8))],
)
def test_default_devices_fit_what_there_is(available: int, expected: tuple[int, ...]) -> None:
    assert plan.default_devices(available, "spread") == expected
    assert plan.default_devices(available, "colocated") == (1, 2)


def test_the_first_round_begins_with_what_answers_need() -> None:
    one = Case(model="a", strategy="single", batch_size=64)
    first = [
        one,
        dataclasses.replace(one, strategy="torch_dp", devices=2),
        dataclasses.replace(one, strategy="ddp", devices=2),
        dataclasses.replace(one, strategy="single_all_cores"),
    ]
    planned = [*first, *(dataclasses.replace(case, model="b") for case in first)]
    assert plan.by_need(reversed(planned), planned) == planned
