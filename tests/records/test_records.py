"""Records: frozen, equal after a conversion to JSON and back, and with permanent fingerprints."""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from dpbench import records
from dpbench.records import (
    CASE_FIELDS,
    SCHEMA,
    Case,
    Memory,
    Phase,
    Sample,
    Source,
    Span,
    Status,
    Step,
    Trial,
    Verified,
    no_mark,
    visible,
)

names = st.text(min_size=1, max_size=8).map(visible.visible)
numbers = st.floats(allow_nan=False, allow_infinity=False)
small = st.integers(-1, 9)

cases = st.builds(
    Case,
    model=names,
    strategy=names,
    batch_size=st.integers(1, 10**6),
    devices=st.integers(1, 64),
    size=st.sampled_from(["small", "full"]),
    schedule=names | st.just(""),
    device_kind=st.sampled_from(["cpu", "cuda"]),
    device_ids=st.lists(st.integers(0, 7), max_size=4).map(tuple),
    placement=st.sampled_from(["spread", "colocated"]),
    precision=st.sampled_from(["fp32", "bf16"]),
    optimizer=names,
    seed=st.integers(0, 99),
    options=st.dictionaries(names, names, max_size=3).map(lambda d: tuple(sorted(d.items()))),
)
trials = st.builds(
    Trial,
    case=cases,
    source=st.sampled_from(Source),
    status=st.sampled_from(Status),
    reason=names,
    verified=st.sampled_from(Verified),
    steps=st.lists(st.builds(Step, numbers, st.booleans(), numbers), max_size=4).map(tuple),
    spans=st.lists(
        st.builds(
            Span,
            small,
            st.sampled_from(Phase),
            small,
            st.sampled_from(["host", "cuda"]),
            numbers,
            numbers,
        ),
        max_size=4,
    ).map(tuple),
    samples=st.lists(st.builds(Sample, numbers, small, names, numbers), max_size=4).map(tuple),
    memory=st.lists(st.builds(Memory, small, st.integers(0, 2**50), names), max_size=4).map(tuple),
    setup=st.dictionaries(names, numbers, max_size=3),
    provenance=st.dictionaries(names, st.none() | names | numbers | st.lists(names), max_size=3),
    round=st.integers(0, 9),
    started_s=numbers,
)


@hypothesis.given(cases)
def test_cases_survive_json(case: Case) -> None:
    there = json.loads(json.dumps(case.to_dict()))
    back = Case.from_dict(there)
    assert back == case
    assert back.fingerprint == case.fingerprint
    assert hash(back) == hash(case)


@hypothesis.given(trials)
def test_trials_survive_json(trial: Trial) -> None:
    back = Trial.from_dict(json.loads(json.dumps(trial.to_dict())))
    assert back == trial
    assert all(isinstance(span.phase, Phase) for span in back.spans)
    assert isinstance(back.verified, Verified)


@hypothesis.given(trials)
def test_trials_do_not_change_by_being_written(trial: Trial) -> None:
    before = repr(trial)
    trial.to_dict()["setup"]["planted"] = 1.0
    assert repr(trial) == before


def test_fingerprints_are_forever() -> None:
    """Constants that never change: old stores find their cases by these fingerprints."""
    assert (
        Case(model="mlp", strategy="single", batch_size=64).fingerprint
        == "1a56ad7a203a359786d86ad48c075a35dd9d4e1b96f87cc5ba32e41c770887c2"
    )
    rich = Case(
        model="resnet18",
        strategy="dp",
        batch_size=256,
        devices=4,
        schedule="reference",
        device_kind="cuda",
        device_ids=(0, 2, 4, 6),
        precision="bf16",
        options=(("a", "1"), ("b", "2")),
    )
    assert rich.fingerprint == "8c8c2b4440dbda74a05ee788260299fe760cf18a12913592a633a5a470ea8e36"


def test_a_new_axis_changes_no_old_fingerprint() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Later(Case):
        channels: str = "first"

    old = {"model": "mlp", "strategy": "dp", "batch_size": 64, "devices": 2}
    assert Later(**old).fingerprint == Case(**old).fingerprint
    assert Later(**old, channels="last").fingerprint != Case(**old).fingerprint
    assert Later.from_dict(Case(**old).to_dict()) == Later(**old)


@pytest.mark.parametrize("name", [f.name for f in CASE_FIELDS])
def test_every_field_makes_another_case(name: str) -> None:
    one = Case(model="mlp", strategy="dp", batch_size=64)
    value = getattr(one, name)
    other: Any = (
        (("k", "v"),)
        if name == "options"
        else (1,)
        if name == "device_ids"
        else value + type(value)(1)
    )
    assert dataclasses.replace(one, **{name: other}).fingerprint != one.fingerprint


def test_an_explicit_default_is_the_default() -> None:
    explicit = Case(
        model="mlp",
        strategy="dp",
        batch_size=64,
        **{
            f.name: f.default
            for f in dataclasses.fields(Case)
            if f.default is not dataclasses.MISSING
        },
    )
    assert explicit.fingerprint == Case(model="mlp", strategy="dp", batch_size=64).fingerprint


def test_unknown_fields_are_refused_with_the_known() -> None:
    with pytest.raises(
        ValueError, match=r"unknown fields of a case: colour.*known fields:.*batch_size.*strategy"
    ):
        Case.from_dict({"model": "mlp", "strategy": "dp", "batch_size": 1, "colour": "red"})


def test_a_trial_of_a_later_schema_is_refused_with_the_way_out() -> None:
    data = Trial(case=Case(model="mlp", strategy="dp", batch_size=1)).to_dict() | {
        "schema": SCHEMA + 1
    }
    with pytest.raises(ValueError, match=rf"schema {SCHEMA + 1}.*up to {SCHEMA}.*update"):
        Trial.from_dict(data)


def test_records_are_frozen() -> None:
    found = [c for _, c in inspect.getmembers(records, dataclasses.is_dataclass)]
    assert len(found) >= 7
    for record in found:
        assert record.__dataclass_params__.frozen, record


def test_a_step_begins_its_seconds_before_its_end() -> None:
    assert Step(2.5, False, 10.0).start_s == 7.5


def test_ranks_are_in_the_order_of_the_step_and_of_trust() -> None:
    first = ["data", "scatter", "replicate", "forward", "gather", "loss"]
    assert [*Phase] == [*first, "backward", "reduce", "clip", "optimizer", "read"]
    assert next(iter(Verified)) == "bitwise"
    assert list(Verified)[-1] == "no"


def test_labels_name_what_differs() -> None:
    one = Case(
        model="mlp", strategy="dp", batch_size=64, devices=2, schedule="pool", device_kind="cuda"
    )
    for part in ("mlp", "dp", "pool", "2", "cuda", "64"):
        assert part in one.label
    assert "colocated" in dataclasses.replace(one, placement="colocated").label


def test_nobody_listens_by_default() -> None:
    with no_mark(Phase.FORWARD, 0) as nothing:
        assert nothing is None
