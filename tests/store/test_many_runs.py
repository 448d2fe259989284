"""A store of many runs: what a command does depends only on the runs that it shows."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dpbench.records import Case
from dpbench.store import PAST, Naming, Store, file, rows
from tests.exported import made, stored

FEW, MANY = 60, 1500
ASKED = Case(model="mlp", strategy="single", batch_size=64)
OTHER = Case(model="lstm", strategy="single", batch_size=8)
COMMIT = "c" * 40


def multiplied(path: Path, run_id: str, times: int) -> None:
    """Copy a run of one trial in the file: with other ids and names, and an earlier start each."""
    with closing(sqlite3.connect(path)) as db, db:
        run = db.execute("SELECT * FROM run WHERE id=?", (run_id,)).fetchone()
        trial = db.execute("SELECT * FROM trial WHERE run_id=?", (run_id,)).fetchone()
        names = {
            table: [name for _, name, *_ in db.execute(f"PRAGMA table_info({table})")]
            for table in ("run", "trial")
        }
        facts = json.loads(run[names["run"].index("provenance")])
        runs, trials = [], []
        for number in range(times):
            own = {"id": f"{number:032x}", "started": 1e9 + number}
            own["provenance"] = json.dumps(
                {**facts, "name": f"run{number}", "dpbench": {"commit": f"{number:040x}"}}
            )
            runs.append(
                [own.get(name, value) for name, value in zip(names["run"], run, strict=True)]
            )
            mine = {"id": None, "run_id": own["id"]}
            trials.append(
                [mine.get(name, value) for name, value in zip(names["trial"], trial, strict=True)]
            )
        db.executemany(f"INSERT INTO run VALUES ({','.join('?' * len(run))})", runs)
        db.executemany(f"INSERT INTO trial VALUES ({','.join('?' * len(trial))})", trials)


def store(path: Path, times: int, *, case: Case = OTHER) -> str:
    """Write a store with `times` runs of one trial of `case`, then one of the case ASKED.

    Return the last run's id.
    """
    first = stored(path, made(case, steps=3))
    multiplied(path, first, times)
    facts = {"dpbench": {"commit": COMMIT}, "host": {"cpu": "EPYC", "cores": 2}}
    return stored(path, made(ASKED, steps=3), provenance=facts, naming=Naming(name="asked"))


@pytest.fixture
def counted(monkeypatch):
    """Count the steps of SQLite's virtual machine, and the rows from which objects are made."""
    counts: Counter[str] = Counter()

    def connect(path: Path, address: str, original: Any = file.connect) -> file.Connection:
        db = original(path, address)
        db.set_progress_handler(lambda: counts.update(steps=1), 1)
        return db

    def reader(name: str) -> Any:
        original = getattr(rows, name)

        def read(db: file.Connection, row: int) -> Any:
            counts[name] += 1
            return original(db, row)

        return read

    monkeypatch.setattr(file, "connect", connect)
    for name in ("run", "trial", "summary", "outcome"):
        monkeypatch.setattr(rows, name, reader(name))
    return counts


@pytest.mark.parametrize(
    "command",
    [
        ("show",),
        ("show", "@last"),
        ("show", "@asked"),
        ("show", "{id}"),
        ("report", "--md"),
        ("report", "--json", "--run", "{id}"),
        ("explain", "--run", "@asked"),
        ("list", "runs", "--last", "20"),
        ("compare", "cccc", "@asked"),
        ("export", "csv", "--run", "@asked"),
        ("show", "@missing"),
    ],
    ids=" ".join,
)
def test_a_command_does_the_same_work_in_a_store_of_many_runs(
    dpbench, tmp_path, counted, command
) -> None:
    work = []
    for times in (FEW, MANY):
        path = tmp_path / f"{times}.db"
        run_id = store(path, times)
        counted.clear()
        code, _, err = dpbench(*(part.format(id=run_id[:10]) for part in command), "--store", path)
        assert code == (64 if "@missing" in command else 3 if command[0] == "compare" else 0), err
        work.append(dict(counted))
    few, many = work
    assert few["steps"] > 100
    # a look-up in an index is a little deeper
    assert many.pop("steps") < 1.2 * few.pop("steps") + 1000
    assert many == few


def test_a_report_reads_the_last_runs_of_its_cases(tmp_path, counted) -> None:
    run_id = store(tmp_path / "store.db", 4 * PAST, case=ASKED)
    counted.clear()
    with Store.read(tmp_path / "store.db") as opened:
        past = opened.past(run_id, opened.summaries(run_id))
    assert len(past) == PAST == counted["run"]
    assert past[-1].run.id == run_id
    assert [one.run.naming.name for one in past[:2]] == [
        f"run{4 * PAST - PAST + 1}",
        f"run{4 * PAST - PAST + 2}",
    ]


def test_a_forecast_reads_the_last_trials_of_its_cases(tmp_path) -> None:
    store(tmp_path / "store.db", 150, case=ASKED)
    with Store.read(tmp_path / "store.db") as opened:
        assert opened.durations("h", [OTHER.fingerprint]) == {}
        assert opened.durations("other", [ASKED.fingerprint]) == {}
        assert opened.durations("h", [ASKED.fingerprint]) == {ASKED.fingerprint: [1.5] * 100}


def test_a_store_without_indexes_is_read_and_gets_them_when_it_is_written(
    dpbench, tmp_path
) -> None:
    path = tmp_path / "store.db"
    run_id = store(path, 5)
    with closing(sqlite3.connect(path)) as db, db:
        for name in file.INDEXES:
            db.execute(f"DROP INDEX {name}")
    shown = [
        dpbench("show", asked, "--store", path)[:2]
        for asked in ("@last", "@asked", run_id[:8], "@run3")
    ]
    assert [code for code, _ in shown] == [0] * 4
    with Store.create(path):
        pass
    with closing(sqlite3.connect(path)) as db:
        indexes = {
            name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type='index'")
        }
        assert indexes >= file.INDEXES.keys()
        assert db.execute("PRAGMA user_version").fetchone() == (len(file.MIGRATIONS),)
    assert [
        dpbench("show", asked, "--store", path)[:2]
        for asked in ("@last", "@asked", run_id[:8], "@run3")
    ] == shown


def test_runs_whose_facts_sqlite_cannot_read_are_found_by_name_and_commit(
    dpbench, tmp_path
) -> None:
    """Python writes NaN into JSON, and SQLite refuses it.

    A damaged row does not keep a store from being written.
    """
    path = tmp_path / "store.db"
    facts = {"dpbench": {"commit": COMMIT}, "load": float("nan")}
    run_id = stored(path, made(ASKED), provenance=facts, naming=Naming(name="nan"))
    for damage in ("CAST('{' AS TEXT)", "x'00ff'"):
        stored(path, made(OTHER))
        with closing(sqlite3.connect(path)) as db, db:
            last = "(SELECT max(rowid) FROM run)"
            db.execute(f"UPDATE run SET provenance={damage} WHERE rowid={last}")
            for name in file.INDEXES:
                db.execute(f"DROP INDEX {name}")
    stored(path, made(OTHER))
    for asked in ("@nan", run_id[:8]):
        code, out, err = dpbench("show", asked, "--store", path, "--json")
        assert code == 0, err
        assert json.loads(out)["run"]["id"] == run_id
    code, _, err = dpbench("compare", "cccc", "@nan", "--store", path)
    assert code == 3, err
    with closing(sqlite3.connect(path)) as db:
        indexes = {
            name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type='index'")
        }
        assert indexes >= file.INDEXES.keys()


def test_an_error_names_a_few_runs(dpbench, tmp_path) -> None:
    store(tmp_path / "store.db", 100)
    code, _, err = dpbench("show", "@missing", "--store", tmp_path / "store.db")
    assert code == 64
    assert err.count("@run") == 18  # and the run asked, and the first one, which has no name
    code, _, err = dpbench("show", "0", "--store", tmp_path / "store.db")
    assert code == 64
    assert err.count("UTC") == 20


def test_the_last_runs_are_listed(dpbench, tmp_path) -> None:
    store(tmp_path / "store.db", 10)
    code, out, _ = dpbench("list", "runs", "--last", "3", "--store", tmp_path / "store.db")
    assert (code, len(out.splitlines())) == (0, 3)
    assert "@asked" in out.splitlines()[0]
    code, out, _ = dpbench(
        "list", "runs", "--last", "3", "--json", "--store", tmp_path / "store.db"
    )
    assert (code, len(json.loads(out)["runs"])) == (0, 3)
    assert dpbench("list", "models", "--last", "3")[0] == 64
