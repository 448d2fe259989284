"""Damaged stores: one clear error, no traceback, and every trial that can be read is kept."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
import tracemalloc
import zlib
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from dpbench import load
from dpbench.api.reports import report_of
from dpbench.cli import showing
from dpbench.records import Case, Sample, Status
from dpbench.records.spelling import dashed
from dpbench.store import DamagedStore, Identity, Store, StoreError, UnreadableRow, file, rows
from tests import hardening
from tests.amounts import amounts
from tests.attacks import LOSSES, copied, overwrite
from tests.exported import made, stored

ROOT = Path(__file__).parents[2]
SINGLE = Case(model="mlp", strategy="single", batch_size=64)


def change(path: Path, sql: str, *values: object) -> None:
    """Change rows without the store's code."""
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(sql, values)


@pytest.mark.slow
def test_damaged_stores_show_no_traceback_and_lose_no_intact_trial() -> None:
    assert hardening.damage_stores(20) == []


@pytest.mark.slow
@pytest.mark.parametrize(("part", "count"), [("foreign", 4), ("guards", 6), ("overwritten", 6)])
def test_attacks_from_outside_lose_nothing(part, count) -> None:
    assert hardening.PARTS[part](count, 0) == []


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts processes by fork")
def test_processes_that_share_a_store_and_are_killed_lose_nothing() -> None:
    """In a process of its own, because it forks."""
    command = [sys.executable, "-m", "tests.hardening", "writers", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), (
        done.stdout[-3000:] + done.stderr
    )
    assert done.stdout.endswith("writers: 8 tried, 0 complaints\n")


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE trial SET provenance='[1]' WHERE id=2",
        "UPDATE trial SET case_json=replace(case_json, '64', '65') WHERE id=2",
        "UPDATE trial SET setup=CAST(x'7bff7d' AS TEXT) WHERE id=2",
        "UPDATE trial SET verified='perhaps' WHERE id=2",
        "UPDATE series SET times=x'00' WHERE trial_id=2",
        "UPDATE span SET device='zero' WHERE trial_id=2 AND number=3",
    ],
)
def test_an_unreadable_trial_is_listed_and_hides_no_other(dpbench, path, sql) -> None:
    stored(path, *(made(SINGLE, number=number) for number in range(3)))
    change(path, sql)
    listed: list[UnreadableRow] = []
    with Store.read(path, listed.append) as opened:
        assert [trial.round for trial in opened.trials()] == [0, 2]
    assert [(one.table, one.row) for one in listed] == [("trial", 2)]
    code, out, err = dpbench("export", "csv", "--store", path)
    assert (code, len(out.splitlines())) == (0, 2)
    # a table of cases is made from the summary of the trial, which needs no spans
    left_out = () if sql.startswith("UPDATE span") else (("trial", 2),)
    assert told(err) == [*left_out]
    assert out.splitlines()[1].split(",")[out.splitlines()[0].split(",").index("rounds")] == str(
        3 - len(left_out)
    )


def test_a_command_names_an_unreadable_row_once(dpbench, path) -> None:
    stored(path, *(made(SINGLE, number=number) for number in range(3)))
    change(path, "UPDATE trial SET case_json=replace(case_json, '64', '65') WHERE id=2")
    code, _, err = dpbench("show", "--store", path)
    assert (code, told(err)) == (0, [("trial", 2)])


def told(err: str) -> list[tuple[str, int]]:
    """Return the table and the row of each unreadable row that a command names."""
    found = re.findall(r"store\.db, row (\d+) .*?\b(run|trial)\b", err)
    return [(table, int(row)) for row, table in found]


NAMES = {"schedule": "turbo", "device_kind": "tpu", "optimizer": "lion", "placement": "elsewhere"}


@pytest.mark.parametrize("field", NAMES)
def test_names_that_only_another_version_knows_are_shown(dpbench, path, field) -> None:
    dp = Case(model="mlp", strategy="dp", devices=2, batch_size=64, schedule="reference")
    other = replace(dp, **{field: NAMES[field]})
    run_id = stored(
        path, *(made(case, number=number) for number in range(3) for case in (SINGLE, dp, other))
    )
    code, out, err = dpbench("report", "--json", "--store", path)
    assert (code, "unreadable" in err) == (0, False), err
    rows = json.loads(out)["cases"]
    assert {row["case"].get(field) for row in rows} >= {NAMES[field]}
    assert len(rows) == 3
    for command in (
        ("report", "--report", path.with_name("page.html")),
        ("explain", "--all"),
        ("show",),
    ):
        code, _, err = dpbench(*command, "--store", path)
        assert (code, err) == (0, ""), command
    assert dpbench("compare", run_id[:8], run_id[:8], "--store", path)[0] in (0, 3)


def changed_case(path: Path, **changes: object) -> None:
    """Change fields of the case of trial 2, and give it the fingerprint of the changed case."""
    with closing(sqlite3.connect(path)) as db, db:
        (text,) = db.execute("SELECT case_json FROM trial WHERE id=2").fetchone()
        data = {**json.loads(text), **changes}
        fingerprint = sha256(
            json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()
        db.execute(
            "UPDATE trial SET case_json=?, fingerprint=?, summary=NULL WHERE id=2",
            (json.dumps(data), fingerprint),
        )


def is_left_out(dpbench, path: Path, table: str = "trial") -> None:
    """Check that each command counts row 2 of a table as unreadable, and shows the rest.

    `path` is a store of three trials.
    """
    for command in (
        ("report", "--json"),
        ("report", "--report", path.with_name("page.html")),
        ("explain", "--all"),
        ("list", "runs"),
        ("show",),
        ("export", "csv"),
        ("export", "jsonl"),
        ("export", "pyperf"),
        ("export", "trace", "--all", "--output", path.with_name("trace.json")),
    ):
        code, out, err = dpbench(*command, "--store", path)
        assert (code, "Traceback" in err) == (0, False), (command, err)
        if command == ("report", "--json"):
            (warning,) = (one for one in load(path).analysis.warnings if one.key == "unreadable")
            assert (amounts(warning.text), warning.text.split()[-1]) == (["1", "2"], table)
            assert str(warning) in json.loads(out)["warnings"]


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": "two"},
        {"devices": 2.5},
        {"devices": 0},
        {"devices": 10**9},
        {"hosts": 0},
        {"batch_size": "64"},
        {"batch_size": -1},
        {"model": 3},
        {"model": ["a"]},
        {"schedule": 5},
        {"options": [["a"]]},
        {"device_ids": 3},
        {"declared": "x"},
        {"mode": 5},
        {"compile": "x"},
    ],
    ids=str,
)
def test_a_case_of_wrong_types_is_left_out_and_counted(dpbench, path, changes) -> None:
    stored(path, *(made(SINGLE, number=number) for number in range(3)))
    changed_case(path, **changes)
    is_left_out(dpbench, path)
    assert {*told(dpbench("show", "--store", path)[2])} == {("trial", 2)}


TRIAL_FACTS = (
    "hosts",
    "foreign_load",
    "model",
    "links",
    "operations",
    "data_sheet",
    "observed",
    "validity",
    "clock_error_s",
    "no_peer_access",
    "error_draws",
    "interval_80_s",
    "failed_hosts",
    "host",
    "gpus",
    "model_check",
)


@pytest.mark.parametrize(
    "sql",
    [
        "trial SET provenance='\"text\"'",
        "trial SET started=1e300",
        "trial SET started='x'",
        "trial SET round='x'",
        'trial SET setup=\'{"build_s": "x"}\'',
        "trial SET schema='x'",
        "trial SET failed_device='x'",
        "memory SET peak_bytes='x'",
        "memory SET device='x'",
        "memory SET source=x'ff'",
        "series SET n=7",
        "series SET n='x'",
        "series SET times=x'00'",
        "span SET device='x'",
        "span SET start_s='x'",
        "span SET clock=x'00'",
        "step SET seconds='x'",
        "step SET end_s='x'",
        *(f'trial SET provenance=\'{{"{name}": "x"}}\'' for name in TRIAL_FACTS),
        "trial SET provenance='{\"operations\": [1]}'",
        'trial SET provenance=\'{"operations": {"forward": 1}}\'',
    ],
)
def test_a_trial_of_wrong_types_is_left_out_and_counted(dpbench, path, sql) -> None:
    """The trial has no summary, as one of an old store."""
    stored(path, *(made(SINGLE, number=number) for number in range(3)))
    change(path, f"UPDATE {sql} WHERE {'id' if sql.startswith('trial') else 'trial_id'}=2")
    change(path, "UPDATE trial SET summary=NULL WHERE id=2")
    is_left_out(dpbench, path)


@pytest.mark.parametrize("peak_per_s", [1e9, 0.0])
def test_keys_of_a_newer_version_and_a_peak_of_0_are_read(dpbench, path, peak_per_s) -> None:
    stored(path, *(made(SINGLE, number=number) for number in range(3)))
    known = {"forward": 1e3, "backward": 2e3, "peak_per_s": peak_per_s, "of_a_newer_version": 1}
    link = {"source": -1, "target": 0, "bytes": 8, "seconds": [1.0], "of_a_newer_version": 1}
    facts = {"operations": known, "links": [link]}
    change(path, "UPDATE trial SET provenance=?", json.dumps(facts))
    code, out, err = dpbench("report", "--md", "--store", path)
    assert code == 0, err
    assert "left out" not in out + err


@pytest.mark.parametrize("seconds", [1e300, float("inf"), 0.0])
def test_a_step_of_an_impossible_duration_is_no_result(dpbench, path, seconds) -> None:
    stored(path, *(made(SINGLE, number=number) for number in range(3)))
    change(path, "UPDATE step SET seconds=? WHERE trial_id=2", seconds)
    change(path, "UPDATE trial SET summary=NULL WHERE id=2")
    for command in (
        ("report", "--md"),
        ("explain", "--all"),
        ("export", "csv"),
        ("export", "trace", "--all"),
    ):
        code, _, err = dpbench(*command, "--store", path)
        assert code == 0, (command, err)


RUN_FACTS = (
    "host",
    "gpus",
    "packages",
    "variables",
    "dpbench",
    "project",
    "noisy",
    "foreign_load",
    "hosts",
    "tags",
)


@pytest.mark.parametrize(
    "sql",
    [
        "started=1e300",
        "started=-1.0",
        "started='x'",
        "rounds='x'",
        "provenance='\"text\"'",
        "provenance='[]'",
        "provenance='{\"name\": 5}'",
        "provenance='{\"command\": 5}'",
        'provenance=\'{"dpbench": {"commit": 5}}\'',
        'provenance=\'{"gpus": {"gpus": [1]}}\'',
        'provenance=\'{"tags": {"a": 1}}\'',
        'provenance=\'{"hosts": {"machines": [{"name": "a"}]}}\'',
        "provenance='{\"host\": null}'",
        *(f'provenance=\'{{"{name}": "x"}}\'' for name in RUN_FACTS),
    ],
)
def test_a_run_of_wrong_types_is_left_out_and_counted(dpbench, path, sql) -> None:
    stored(path, made(SINGLE))
    stored(path, made(SINGLE))
    change(path, f"UPDATE run SET {sql} WHERE rowid=2")
    first = stored(path, made(SINGLE))
    is_left_out(dpbench, path, "run")
    code, out, err = dpbench("list", "runs", "--store", path)
    assert (code, len(out.splitlines()), told(err)) == (0, 2, [("run", 2)])
    assert out.startswith(first[:12])


def bomb(length: int) -> bytes:
    """Return zeros, compressed to a thousandth of their length."""
    pressing = zlib.compressobj(9)
    return b"".join(
        [*(pressing.compress(bytes(2**20)) for _ in range(length // 2**20)), pressing.flush()]
    )


@pytest.mark.parametrize("stated", [6, 2**40])
@pytest.mark.parametrize("summarized", [False, True])
def test_a_series_is_decompressed_as_far_as_its_row_states(path, stated, summarized) -> None:
    stored(path, *(made(SINGLE, number=number) for number in range(3)))
    change(
        path, "UPDATE series SET times=?, readings=times, n=? WHERE trial_id=2", bomb(2**26), stated
    )
    if not summarized:
        change(path, "UPDATE trial SET summary=NULL WHERE id=2")
    listed: list[UnreadableRow] = []
    tracemalloc.start()
    try:
        with Store.read(path, listed.append) as opened:
            assert [trial.round for trial in opened.trials()] == [0, 2]
            assert [trial.round for trial in opened.summaries(opened.runs()[0].id)] == [0, 2]
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()
    assert {(one.table, one.row) for one in listed} == {("trial", 2)}
    assert str(stated) in listed[0].why


def test_the_longest_series_is_read_whole(path, monkeypatch) -> None:
    samples = tuple(Sample(float(number), 0, "power_w", number * 0.1) for number in range(1000))
    stored(path, made(SINGLE, samples=samples))
    for most, found in ((1000, [samples]), (999, [])):
        monkeypatch.setattr(rows, "MOST_READINGS", most)
        with Store.read(path, lambda row: None) as opened:
            assert [tuple(trial.samples) for trial in opened.trials()] == found


def test_page_markdown_json_and_python_list_the_rows_that_could_not_be_read(dpbench, path) -> None:
    run_id = stored(path, *(made(SINGLE, number=number) for number in range(4)))
    stored(path, made(SINGLE))
    for sql in (
        "trial SET verified='perhaps' WHERE id IN (2, 4)",
        "run SET started='x' WHERE rowid=2",
    ):
        change(path, f"UPDATE {sql}")
    (warning,) = (one for one in load(path, run_id).analysis.warnings if one.key == "unreadable")
    said = str(warning)
    assert amounts(said) == ["3", "2", "2", "4"]
    page = path.with_name("page.html")
    assert dpbench("report", "--run", run_id, "--report", page, "--store", path)[0] == 0
    assert page.read_text(encoding="utf-8").count(said) == 1
    assert said in dpbench("report", "--run", run_id, "--md", "--store", path)[1]
    assert said in dpbench("report", "--run", run_id, "--json", "--store", path)[1]
    assert said in load(path, run_id).warnings
    change(path, "DELETE FROM run WHERE rowid=2")
    change(path, "DELETE FROM trial WHERE id IN (2, 4)")
    assert "unreadable" not in [one.key for one in load(path, run_id).analysis.statements]


@pytest.mark.parametrize("sql", ["provenance='{\"tags\": 3}'", "started='x'"])
def test_an_unreadable_run_is_listed_and_hides_no_other(dpbench, path, sql) -> None:
    stored(path, made(SINGLE))
    second = stored(path, made(SINGLE))
    change(path, f"UPDATE run SET {sql} WHERE rowid=1")
    code, out, err = dpbench("list", "runs", "--store", path)
    assert (code, len(out.splitlines())) == (0, 1)
    assert out.startswith(second[:12])
    assert told(err) == [("run", 1)]


def test_a_store_that_fails_the_quick_check_is_not_written(path) -> None:
    stored(path, *(made(SINGLE, number=number) for number in range(3)))
    data = bytearray(path.read_bytes())
    data[-4096:-4000] = bytes(96)
    path.write_bytes(data)
    with pytest.raises(DamagedStore, match=r"Page \d+.*sqlite3 .*store\.db"):
        Store.create(path)
    assert path.read_bytes() == data


def test_a_long_reason_is_cut_to_its_head_and_tail_and_names_no_file(path) -> None:
    reason = "head " + "x" * 1_000_000 + " tail"
    stored(path, made(SINGLE, status=Status.FAILED, reason=reason))
    with Store.read(path) as opened:
        (trial,) = opened.trials()
    assert trial.reason.startswith("head x")
    assert re.search(r"x\n\[(\d+) .*\]\nx", trial.reason)[1] == "992010", "characters"
    assert trial.reason.endswith("x tail")
    assert not any(one.is_dir() for one in path.parent.iterdir())


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("how", LOSSES)
def test_a_store_that_is_lost_while_a_worker_runs_is_noticed_and_its_trials_are_kept(
    path, how, before
) -> None:
    """Whoever overwrites the file keeps what he puts there, and the run its trials."""
    with Store.create(path) as opened:
        run_id, _ = opened.begin_run(Identity("p", "h", "c"), rounds=2, provenance={})
        content = copied(path, how)
        for number in range(before):
            opened.end_trial(
                opened.begin_trial(run_id, SINGLE, number), made(SINGLE, number=number)
            )
        with Store.create(path):
            pass  # another writer makes SQLite forget the pages that this one has written
        number = opened.begin_trial(run_id, SINGLE, before)
        there = overwrite(path, how, content)
        word = "deleted or replaced" if how in ("deleted", "replaced") else "was overwritten"
        with pytest.raises(StoreError, match=word) as raised:
            opened.end_trial(number, made(SINGLE, number=before))
        for attempt in (
            lambda: opened.begin_trial(run_id, SINGLE, 1),
            lambda: opened.annotate(run_id, "noisy", {}),
            lambda: opened.end_run(run_id),
        ):
            with pytest.raises(StoreError, match=word) as again:
                attempt()
            assert str(again.value) == str(raised.value)
    (kept,) = path.parent.glob("store.db.kept-*")
    assert f"{before + 1} trial" in str(raised.value)
    assert f"dpbench merge {kept}" in str(raised.value)
    with Store.read(kept) as copy:
        assert [trial.round for trial in copy.trials()] == [*range(before + 1)]
        assert {trial.case for trial in copy.trials()} == {SINGLE}
    with closing(sqlite3.connect(kept)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert (path.read_bytes() if path.exists() else b"") == there
    assert not path.with_name("store.db-wal").exists(), "SQLite would merge it into the new file"
    with Store.create(path.with_name("new.db")) as new:
        assert new.merge(kept).trials >= before + 1


@pytest.mark.parametrize("how", LOSSES)
def test_a_store_that_is_lost_between_two_trials_is_noticed_before_the_next(path, how) -> None:
    with Store.create(path) as opened:
        run_id, _ = opened.begin_run(Identity("p", "h", "c"), rounds=2, provenance={})
        content = copied(path, how)
        opened.end_trial(opened.begin_trial(run_id, SINGLE, 0), made(SINGLE))
        there = overwrite(path, how, content)
        with pytest.raises(StoreError, match="1 trial is kept"):
            opened.begin_trial(run_id, SINGLE, 1)
    (kept,) = path.parent.glob("store.db.kept-*")
    with Store.read(kept) as copy:
        assert [trial.case for trial in copy.trials()] == [SINGLE]
    assert (path.read_bytes() if path.exists() else b"") == there


def test_a_store_that_is_overwritten_while_a_trial_is_stored_is_noticed_by_reading_it_back(
    path, monkeypatch
) -> None:
    """The checkpoint itself hides that another program has written to the file."""
    original = file.checkpoint

    def overwritten(db: file.Connection) -> None:
        os.truncate(path, 0)
        original(db)

    with Store.create(path) as opened:
        run_id, _ = opened.begin_run(Identity("p", "h", "c"), rounds=2, provenance={})
        number = opened.begin_trial(run_id, SINGLE, 0)
        monkeypatch.setattr(file, "checkpoint", overwritten)
        with pytest.raises(StoreError, match="was overwritten"):
            opened.end_trial(number, made(SINGLE))
        monkeypatch.undo()
    (kept,) = path.parent.glob("store.db.kept-*")
    with Store.read(kept) as copy:
        assert len(copy.trials()) == 1


def test_a_kept_store_replaces_no_earlier_one(path) -> None:
    for _ in range(2):
        path.unlink(missing_ok=True)
        with Store.create(path) as opened:
            run_id, _ = opened.begin_run(Identity("p", "h", "c"), rounds=2, provenance={})
            number = opened.begin_trial(run_id, SINGLE, 0)
            path.unlink()
            with pytest.raises(StoreError, match="deleted"):
                opened.end_trial(number, made(SINGLE))
    assert len([*path.parent.glob("store.db.kept-*")]) == 2


def test_a_trial_without_a_copy_is_told_with_the_option_of_the_command_line(
    path, monkeypatch, caplog
) -> None:
    error = StoreError("no room", option="store", remedy="give another file with {}")

    def full() -> file.Connection:
        raise error

    monkeypatch.setattr(file, "open_spare", full)
    with Store.create(path) as opened:
        run_id, _ = opened.begin_run(Identity("p", "h", "c"), rounds=2, provenance={})
        opened.end_trial(opened.begin_trial(run_id, SINGLE, 0), made(SINGLE))
    assert error.told(dashed) in caplog.text
    assert "--store" in caplog.text


def test_what_other_writers_change_is_no_loss(path) -> None:
    """Other connections merge the log into the file, and so does a VACUUM."""
    with Store.create(path) as opened:
        run_id, _ = opened.begin_run(Identity("p", "h", "c"), rounds=2, provenance={})
        for number in range(3):
            trial_id = opened.begin_trial(run_id, SINGLE, number)
            gone = stored(path, made())
            with Store.create(path) as other:
                other.remove([gone])
            with closing(sqlite3.connect(path)) as db:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            opened.end_trial(trial_id, made(SINGLE, number=number))
        opened.end_run(run_id)
    with Store.read(path) as opened:
        assert [trial.round for trial in opened.trials()] == [0, 1, 2]
    assert [*path.parent.glob("store.db.kept-*")] == []


def test_a_page_that_cannot_be_written_does_not_hide_the_result(path, capsys) -> None:
    run_id = stored(path, made(SINGLE))
    with Store.read(path) as opened:
        report = report_of(opened.runs()[0], opened.summaries(run_id))
    assert not showing.try_report(path / "below-a-file" / "page.html", report, path)
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("report: not written")
    assert last.startswith("error: ")
    assert "page.html" in last
