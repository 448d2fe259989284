"""Summaries: a stored summary is that of the trial's rows, and never hides damage."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dpbench.records import HOST, Case, Memory, Phase, Sample, Span, Status, Step, Trial
from dpbench.store import Identity, Store, summaries

PHASES = (Phase.SCATTER, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.REDUCE, Phase.OPTIMIZER)


def trial(seed: int = 0, steps: int = 30) -> Trial:
    """Return a trial on two devices, whose spans overlap and leave gaps at random."""
    draw = random.Random(seed)
    made, spans, at = [], [], 100.0
    for number in range(steps):
        seconds = 0.01 * draw.uniform(0.8, 1.3)
        for phase in PHASES:
            for device in (HOST, 0, 1):
                if draw.random() < 0.7:
                    start = at + seconds * draw.random()
                    spans.append(
                        Span(
                            number,
                            phase,
                            device,
                            "host",
                            start,
                            start + seconds * draw.random() / 2,
                        )
                    )
        at += seconds
        made.append(Step(seconds, number < 5, at))
    samples = tuple(
        Sample(100 + 0.01 * i, device, metric, draw.random())
        for device in (0, 1)
        for metric in ("busy_s", "memory_used_bytes")
        for i in range(40)
    )
    return Trial(
        case=Case(model="mlp", strategy="dp", devices=2, batch_size=8),
        steps=tuple(made),
        spans=tuple(spans),
        samples=samples,
        memory=(Memory(0, 10, "ledger"), Memory(1, 7, "ledger", "forward")),
        setup={"warmup": 1.5},
        provenance={"torch": "2"},
        started_s=5.0,
    )


def stored(path: Path, *trials: Trial) -> str:
    with Store.create(path) as store:
        return store.add(trials, Identity("p", "h", "c"), provenance={})


def change(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute(statement, values)
        db.commit()


def summary(path: Path, run_id: str) -> Trial:
    with Store.read(path) as store:
        (found,) = store.summaries(run_id)
    return found


def same(one: Trial, other: Trial) -> None:
    for name in ("case", "status", "steps", "memory", "setup", "provenance", "samples", "round"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.ledger.charged == other.ledger.charged
    assert one.ledger.phases == other.ledger.phases
    assert one.ledger.timed == other.ledger.timed
    assert {name: list(column) for name, column in other.ledger.seconds.items() if any(column)} == {
        name: pytest.approx(column, rel=1e-12)
        for name, column in one.ledger.seconds.items()
        if any(column)
    }
    assert {**one.ledger.occupied} == other.ledger.occupied
    assert {**one.ledger.moved} == other.ledger.moved
    assert {**one.ledger.concurrency} == {
        phase: tuple(pair) for phase, pair in other.ledger.concurrency.items()
    }
    assert one.ledger.median_step == other.ledger.median_step
    assert one.readings("busy_s", timed=True) == other.readings("busy_s", timed=True)


@pytest.mark.parametrize("steps", [30, 1, 0])
def test_a_stored_summary_is_that_of_the_rows(steps: int, tmp_path: Path) -> None:
    run_id = stored(tmp_path / "s.db", trial(steps=steps))
    with Store.read(tmp_path / "s.db") as store:
        (whole,) = store.trials(run_id)
    found = summary(tmp_path / "s.db", run_id)
    assert isinstance(found.ledger, summaries.StoredLedger)
    assert not found.spans
    same(whole.summary(), found)


def test_a_failed_trial_has_a_summary_too(tmp_path: Path) -> None:
    failed = Trial(
        case=Case(model="mlp", strategy="single", batch_size=8),
        status=Status.FAILED,
        reason="no\ud800memory",
    )
    found = summary(tmp_path / "s.db", stored(tmp_path / "s.db", failed))
    assert (found.status, found.reason, found.steps) == (Status.FAILED, "no?memory", ())


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE trial SET summary=NULL",  # an older version has written the trial
        "UPDATE trial SET summary=CAST(substr(summary, 1, length(summary) - 1) AS BLOB)",
        "UPDATE trial SET summary='text'",
        "UPDATE trial SET summary=5",
    ],
)
def test_a_missing_or_damaged_summary_is_computed_from_the_rows(
    statement: str, tmp_path: Path
) -> None:
    run_id = stored(tmp_path / "s.db", trial())
    change(tmp_path / "s.db", statement)
    found = summary(tmp_path / "s.db", run_id)
    assert not isinstance(found.ledger, summaries.StoredLedger)
    same(trial().summary(), found)


def test_a_summary_of_other_rules_is_computed_from_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summaries, "VERSION", summaries.VERSION + 1)
    run_id = stored(tmp_path / "s.db", trial())
    monkeypatch.undo()
    found = summary(tmp_path / "s.db", run_id)
    assert not isinstance(found.ledger, summaries.StoredLedger)
    same(trial().summary(), found)


def test_a_summary_of_version_2_which_lacks_the_places_of_spans_is_computed_from_the_rows(
    tmp_path: Path,
) -> None:
    run_id = stored(tmp_path / "s.db", trial())
    _, *fields, _, _ = summaries.msgspec.msgpack.decode(summaries.packed(trial()))
    change(
        tmp_path / "s.db",
        "UPDATE trial SET summary=?",
        summaries.msgspec.msgpack.encode([2, *fields]),
    )
    found = summary(tmp_path / "s.db", run_id)
    assert not isinstance(found.ledger, summaries.StoredLedger)
    same(trial().summary(), found)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("keys", [("no phase", 0)]),
        ("timed", {"no phase": 1.0}),
        ("concurrency", {"unattributed": (1.0, 1.0)}),
        ("charged", [b"\0" * 8]),
        ("seconds", bytes(8 * 30)),
        ("ends", b""),
        ("occupied", {0: b"\0" * 8}),
        ("moved", [("scatter", 0, b"\0" * 8)]),
        ("moved", [("no phase", 0, b"\0" * 8 * 28)]),
        ("median", 30),
        ("places", []),
    ],
)
def test_a_summary_that_contradicts_itself_is_computed_from_the_rows(
    field: str, value: object, tmp_path: Path
) -> None:
    run_id = stored(tmp_path / "s.db", trial())
    packed = summaries._DECODER.decode(summaries.packed(trial()))
    setattr(packed, field, value)
    change(
        tmp_path / "s.db",
        "UPDATE trial SET summary=?",
        summaries.msgspec.msgpack.encode(packed),
    )
    found = summary(tmp_path / "s.db", run_id)
    assert not isinstance(found.ledger, summaries.StoredLedger)
    same(trial().summary(), found)


def test_copies_of_a_trial_keep_its_summary(tmp_path: Path) -> None:
    run_id = stored(tmp_path / "s.db", trial())
    with Store.create(tmp_path / "t.db") as store:
        store.merge(tmp_path / "s.db")
    found = summary(tmp_path / "t.db", run_id)
    assert isinstance(found.ledger, summaries.StoredLedger)
    same(trial().summary(), found)
