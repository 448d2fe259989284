"""Damaged stores: one clear error, no traceback, and every trial that can be read is kept."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from dpbench import load
from dpbench.cli import showing
from dpbench.records import Case, Status
from dpbench.store import DamagedStore, Store, StoreError, UnreadableRow, copying
from tests import hardening
from tests.exported import made, stored

ROOT = Path(__file__).parent.parent
SINGLE = Case(model="mlp", strategy="single", batch_size=64)


def change(path: Path, sql: str, *values: object) -> None:
    """Change rows without the store's code."""
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(sql, values)


@pytest.mark.slow
def test_damaged_stores_show_no_traceback_and_lose_no_intact_trial() -> None:
    assert hardening.damage_stores(20) == []


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts processes by fork")
def test_processes_that_share_a_store_and_are_killed_lose_nothing() -> None:
    """In a process of its own, because it forks."""
    command = [sys.executable, "-m", "tests.hardening", "writers", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout[-3000:]
    assert done.stdout.endswith("writers: 8 tried, 0 complaints\n")


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE trial SET provenance='[1]', checksum=NULL WHERE id=2",
        "UPDATE trial SET case_json=replace(case_json, '64', '65'), checksum=NULL WHERE id=2",
        "UPDATE trial SET setup=CAST(x'7bff7d' AS TEXT), checksum=NULL WHERE id=2",
        "UPDATE trial SET verified='perhaps', checksum=NULL WHERE id=2",
        "UPDATE series SET times=x'00' WHERE trial_id=2",
        "UPDATE step SET seconds=seconds+1 WHERE trial_id=2 AND step=3",
        "UPDATE span SET device='zero' WHERE trial_id=2 AND number=3",
        "DELETE FROM memory WHERE trial_id=2",
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
    # a table of cases is made from the summary of the trial, which has its own checksum and the undamaged steps
    assert (f"{path}, row 2 of the table trial" in err) != sql.startswith(("UPDATE step", "UPDATE span"))
    assert out.splitlines()[1].split(",")[out.splitlines()[0].split(",").index("rounds")] == str(3 - ("row 2" in err))
    code, out, _ = dpbench("store", "check", path)
    assert code == 1
    assert "row 2 of the table trial" in out
    done = copying.recover(path, path.with_name("new.db"))
    assert (done.runs, done.trials, len(done.lost)) == (1, 2, 1)
    assert copying.check(path.with_name("new.db")) == []


def test_page_markdown_json_and_python_list_the_rows_that_could_not_be_read(dpbench, path) -> None:
    run_id = stored(path, *(made(SINGLE, number=number) for number in range(4)))
    stored(path, made(SINGLE))
    for sql in ("trial SET verified='perhaps', checksum=NULL WHERE id IN (2, 4)", "run SET started='x' WHERE rowid=2"):
        change(path, f"UPDATE {sql}")
    said = "3 rows of the store could not be read, and are left out: 2 of the table run and 2, 4 of the table trial"
    page = path.with_name("page.html")
    assert dpbench("report", "--run", run_id, "--html", page, "--store", path)[0] == 0
    assert page.read_text(encoding="utf-8").count(said) == 1
    assert said in dpbench("report", "--run", run_id, "--md", "--store", path)[1]
    assert said in dpbench("report", "--run", run_id, "--json", "--store", path)[1]
    assert any(said in one for one in load(path, run_id).warnings)
    change(path, "DELETE FROM run WHERE rowid=2")
    change(path, "DELETE FROM trial WHERE id IN (2, 4)")
    assert "could not be read" not in dpbench("report", "--run", run_id, "--md", "--store", path)[1]


@pytest.mark.parametrize("sql", ["provenance='{\"tags\": 3}', checksum=NULL", "host='other'", "started='x'"])
def test_an_unreadable_run_is_listed_and_hides_no_other(dpbench, path, sql) -> None:
    stored(path, made(SINGLE))
    second = stored(path, made(SINGLE))
    change(path, f"UPDATE run SET {sql} WHERE rowid=1")
    code, out, err = dpbench("list", "runs", "--store", path)
    assert (code, len(out.splitlines())) == (0, 1)
    assert out.startswith(second[:12])
    assert "row 1 of the table run" in err
    copying.recover(path, path.with_name("new.db"))
    with Store.read(path.with_name("new.db")) as opened:
        assert len(opened.runs()) == len(opened.trials()) == 2, "the trial of the lost run is kept"


def test_a_store_that_fails_the_quick_check_is_not_written(path) -> None:
    stored(path, *(made(SINGLE, number=number) for number in range(3)))
    data = bytearray(path.read_bytes())
    data[-4096:-4000] = bytes(96)
    path.write_bytes(data)
    with pytest.raises(DamagedStore, match=r"dpbench store recover .*store\.db --output"):
        Store.create(path)
    assert path.read_bytes() == data


def test_a_long_reason_is_cut_and_its_whole_text_is_in_a_file_that_goes_with_the_run(path) -> None:
    reason = "head " + "x" * 1_000_000 + " tail"
    run_id = stored(path, made(SINGLE, status=Status.FAILED, reason=reason))
    log = path.with_name("store.db.logs") / run_id / "1.txt"
    with Store.read(path) as opened:
        (trial,) = opened.trials()
    assert trial.reason.startswith("head x")
    assert trial.reason.endswith("x tail")
    assert str(log) in trial.reason
    assert len(trial.reason) < 4096 + len(str(log))
    assert log.read_text(encoding="utf-8") == reason
    with Store.create(path) as opened:
        opened.remove([run_id])
    assert not log.exists()


def test_a_long_reason_is_cut_also_where_no_file_can_be_written(path) -> None:
    path.with_name("store.db.logs").write_text("in the way", encoding="utf-8")
    stored(path, made(SINGLE, status=Status.FAILED, reason="x" * 5000))
    with Store.read(path) as opened:
        assert "1000 characters are left out; they are lost, because" in opened.trials()[0].reason


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_store_that_is_deleted_or_replaced_during_a_run_is_noticed(path, how) -> None:
    with Store.create(path) as opened:
        run_id, _ = opened.begin_run(plan="p", host="h", code="c", rounds=2, provenance={})
        number = opened.begin_trial(run_id, SINGLE, 0)
        path.unlink()
        if how == "replaced":
            path.write_bytes(b"")
        with pytest.raises(StoreError, match=r"was deleted or replaced .* all trials so far are in") as raised:
            opened.end_trial(number, made(SINGLE))
        with pytest.raises(StoreError, match="was deleted or replaced"):
            opened.begin_trial(run_id, SINGLE, 1)
    (kept,) = path.parent.glob("store.db.kept-*")
    assert str(kept) in str(raised.value)
    with Store.read(kept) as copy:
        assert [trial.case for trial in copy.trials()] == [SINGLE]


def test_a_page_that_cannot_be_written_does_not_hide_the_result(path, capsys) -> None:
    run_id = stored(path, made(SINGLE))
    with Store.read(path) as opened:
        report = showing.report_of(opened.runs()[0], opened.summaries(run_id))
    assert not showing.try_report(path / "below-a-file" / "page.html", report, path)
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("report: not written")
    assert last.startswith("error: cannot write the page: ")
