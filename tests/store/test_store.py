"""The store's laws: trials are read bit by bit as written, and SQL can read their columns."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpbench.records import (
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
    visible,
)
from dpbench.records.plan import Parts
from dpbench.store import Identity, Store

CASE = Case(model="mlp", strategy="dp", batch_size=64, devices=2, schedule="reference")
ENDED = [status for status in Status if status is not Status.KILLED]


def make_trial(**changes) -> Trial:
    steps = tuple(Step(0.25 * (i + 1), i < 2, 10.0 + i) for i in range(5))
    spans = tuple(
        Span(i, phase, device, "host", 10.0 + i, 10.1 + i)
        for i in range(5)
        for phase in Phase
        for device in (0, 1)
    )
    samples = tuple(
        Sample(t / 7, d, m, t * d + 0.1)
        for t in range(9)
        for d in (-1, 0, 1)
        for m in ("power_w", "rss")
    )
    trial = Trial(
        case=CASE,
        verified=Verified.BITWISE,
        steps=steps,
        spans=spans,
        samples=samples,
        memory=(
            Memory(0, 123, "ledger"),
            Memory(0, 99, "ledger", "forward", "reserved"),
            Memory(-1, 1 << 40, "rss"),
        ),
        failed_device=1,
        setup={"start_s": 0.0125, "verify_s": 1.5},
        provenance={"torch": "2.13.0", "threads": 1, "nested": {"ä": [1, None]}},
        round=1,
        started_s=1.5,
    )
    return replace(trial, **changes)


def begin(
    store: Store,
    *,
    plan: str = "plan",
    host: str = "host",
    code: str = "code",
    parts: Parts | None = None,
    **changes,
) -> tuple[str, bool]:
    facts = {"rounds": 3, "provenance": {"command": "run"}}
    return store.begin_run(Identity(plan, host, code, parts), **(facts | changes))


def put(store: Store, run_id: str, trial: Trial) -> int:
    trial_id = store.begin_trial(run_id, trial.case, trial.round)
    store.end_trial(trial_id, trial)
    return trial_id


def same(found: Trial, stored: Trial) -> bool:
    """Compare two trials, except the order of their series and the start time set by the store."""
    plain = [
        replace(t, samples=tuple(sorted(t.samples, key=repr)), started_s=0.0)
        for t in (found, stored)
    ]
    return plain[0] == plain[1]


def query(path: Path, sql: str) -> list[tuple]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute(sql).fetchall()


@pytest.mark.parametrize("status", ENDED)
@pytest.mark.parametrize("verified", Verified)
def test_a_trial_comes_back_as_it_was(path, status, verified):
    trial = make_trial(status=status, verified=verified, reason="why — 'quoted'\nand a second line")
    with Store.create(path) as store:
        run_id, _ = begin(store)
        put(store, run_id, trial)
        (found,) = store.trials(run_id)
    assert same(found, trial)
    with Store.read(path) as store:
        (found,) = store.trials()
    assert same(found, trial)
    assert abs(found.started_s - time.time()) < 60


def test_a_trial_that_saw_nothing_comes_back_empty(path):
    trial = Trial(case=CASE, status=Status.SKIPPED, reason="no GPU", source=Source.PREDICTED)
    with Store.create(path) as store:
        run_id, _ = begin(store)
        put(store, run_id, trial)
        assert same(store.trials(run_id)[0], trial)


finite = st.floats(allow_nan=False, width=64)
counts = st.integers(-1, 1 << 40)
texts = st.text().map(visible.visible)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(st.builds(Step, finite, st.booleans(), finite), max_size=4),
    spans=st.lists(
        st.builds(
            Span,
            st.integers(0, 9),
            st.sampled_from(Phase),
            counts,
            st.just("cuda_event"),
            finite,
            finite,
        ),
        max_size=4,
    ),
    samples=st.lists(
        st.builds(
            Sample,
            finite,
            st.integers(-1, 3),
            st.sampled_from(["a", "ß"]),
            st.floats(-1e300, 1e300),
        ),
        max_size=6,
    ),
    memory=st.lists(st.builds(Memory, counts, counts, texts), max_size=3),
    reason=texts,
    setup=st.dictionaries(texts, finite, max_size=3),
    number=st.integers(0, 1000),
)
def test_any_finite_reading_comes_back_bit_for_bit(
    tmp_path_factory, steps, spans, samples, memory, reason, setup, number
):
    trial = Trial(
        case=CASE,
        steps=tuple(steps),
        spans=tuple(spans),
        samples=tuple(samples),
        memory=tuple(memory),
        reason=reason,
        setup=setup,
        round=number,
    )
    path = tmp_path_factory.mktemp("any") / "store.db"
    with Store.create(path) as store:
        run_id, _ = begin(store)
        put(store, run_id, trial)
        assert same(store.trials(run_id)[0], trial)


def test_a_reason_that_is_no_valid_unicode_is_stored_all_the_same(path):
    """Python puts undecodable bytes of file names into messages so.

    A user's exception may quote one.
    """
    with Store.create(path) as store:
        run_id, _ = begin(store)
        put(
            store,
            run_id,
            make_trial(status=Status.FAILED, reason="no such file: weights-\udcff.pt"),
        )
        (found,) = store.trials(run_id)
    assert found.status is Status.FAILED
    assert "no such file: weights-" in found.reason


def test_the_trials_of_one_run_are_not_another_runs(path):
    with Store.create(path) as store:
        first, _ = begin(store, plan="one")
        put(store, first, make_trial(reason="first"))
        store.end_run(first)
        second, _ = begin(store, plan="two")
        put(store, second, make_trial(reason="second"))
        assert [t.reason for t in store.trials(first)] == ["first"]
        assert [t.reason for t in store.trials(second)] == ["second"]
        assert [t.reason for t in store.trials()] == ["first", "second"]
        assert [run.id for run in store.runs()] == [second, first]
        assert store.runs()[1].provenance == {"command": "run"}


def test_a_trial_is_stored_whole_or_not_at_all(path):
    broken = make_trial(memory=(Memory(0, None, "rss"),))  # what comes after steps and spans fails
    with Store.create(path) as store:
        run_id, _ = begin(store)
        trial_id = store.begin_trial(run_id, CASE, 0)
        with pytest.raises(sqlite3.Error):
            store.end_trial(trial_id, broken)
        with Store.read(path) as reader:
            assert reader.trials() == []
        assert query(path, "SELECT status FROM trial") == [("running",)]
        for table in ("step", "span", "memory", "series"):
            assert query(path, f"SELECT count(*) FROM {table}") == [(0,)]
        store.end_trial(trial_id, make_trial())  # and the store goes on
        assert len(store.trials(run_id)) == 1


def test_what_a_trial_stores_is_plain_to_sql(path):
    """The file is the artefact that people share: case as JSON, figures in columns."""
    with Store.create(path) as store:
        run_id, _ = begin(store)
        trial_id = put(store, run_id, make_trial())
    ((case,),) = query(path, f"SELECT case_json FROM trial WHERE id={trial_id}")
    assert Case.from_dict(json.loads(case)) == CASE
    assert query(path, "SELECT sum(seconds) FROM step WHERE warmup=0") == [(3.0,)]
    assert query(path, "SELECT n, peak FROM series WHERE device=1 AND metric='power_w'") == [
        (9, 8.1)
    ]


@pytest.mark.parametrize(
    ("ends", "counted"),
    [
        ([(Status.OK, "bitwise"), (Status.OK, "bitwise")], 1),
        ([(Status.OK, "bitwise"), (Status.FAILED, "not_applicable")], 0),
        ([(Status.OK, "bitwise"), (Status.FAILED, "no")], 0),
        ([(Status.FAILED, "not_applicable"), (Status.OK, "bitwise")], 1),
        ([(Status.FAILED, "not_applicable"), (Status.OOM, "not_applicable")], 1),
        ([(Status.OK, "bitwise"), (Status.OK, "bitwise"), (Status.KILLED, "")], 1),
    ],
)
def test_of_a_slot_that_was_measured_again_the_last_trusted_trial_counts_and_all_are_kept(
    path, ends, counted
):
    case = Case(model="mlp", strategy="single", batch_size=8)
    with Store.create(path) as store:
        run_id, _ = store.begin_run(Identity("p", "h", "c"), rounds=1, provenance={})
        for number, (status, verified) in enumerate(ends):
            trial_id = store.begin_trial(run_id, case, 0)
            if status is not Status.KILLED:  # left as running: the end of the run kills it
                store.end_trial(
                    trial_id, Trial(case=case, status=status, reason=str(number), verified=verified)
                )
        store.end_run(run_id)
        (found,) = store.trials(run_id)
        assert found.reason == str(counted)
        assert store.trials() == [found]
        everything = [status for status, _ in ends if status is not Status.KILLED]
        assert [one.status for one in store.trials(run_id, superseded=True)] == everything
        assert store.counts(run_id) == {ends[counted][0]: 1}
