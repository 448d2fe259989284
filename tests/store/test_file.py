"""The store leaves files of other programs unchanged, and migrates older stores."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from dpbench.records import Memory, Status
from dpbench.records.errors import UsageError
from dpbench.store import Store, StoreError
from dpbench.store import file as module
from tests.store.test_store import begin, make_trial, put, query, same

NEWER = len(module.MIGRATIONS) + 1


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


# -- other files


def newer(path: Path, kind: str) -> None:
    """Make a newer dpbench's file: closed in either journal mode, or killed with its log left."""
    code = f"""
import os, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA journal_mode={"DELETE" if kind == "journal" else "WAL"}")
db.execute("CREATE TABLE future (x)")
db.execute("PRAGMA user_version={NEWER}")
db.execute("INSERT INTO future VALUES (1)")
if {kind == "killed"}: os._exit(0)
db.close()
"""
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


@pytest.mark.parametrize("kind", ["journal", "wal", "killed"])
@pytest.mark.parametrize("open_", [Store.create, Store.read], ids=["create", "read"])
def test_a_newer_file_is_refused_before_anything_is_written(path, kind, open_):
    newer(path, kind)
    before = contents(path.parent)
    with pytest.raises(StoreError) as refused:
        open_(path)
    words = str(refused.value)
    for part in (str(path), str(NEWER), str(NEWER - 1), "update", "store="):
        assert part in words
    del refused
    after = contents(path.parent)
    # the lock's shared memory is no data, but it must not be left where none was
    assert after.keys() == before.keys()
    assert {k: v for k, v in after.items() if "-shm" not in k} == {
        k: v for k, v in before.items() if "-shm" not in k
    }


@pytest.mark.parametrize(
    "bytes_", [b"model,seconds\n" * 500, b"SQLite format 3\0" + b"\xff" * 5000, b"x"]
)
@pytest.mark.parametrize("open_", [Store.create, Store.read], ids=["create", "read"])
def test_a_file_that_is_no_database_is_refused_and_left_alone(path, bytes_, open_):
    path.write_bytes(bytes_)
    with pytest.raises(StoreError) as refused:
        open_(path)
    assert str(path) in str(refused.value)
    assert "store=" in str(refused.value) or "dpbench" in str(refused.value)
    del refused
    assert contents(path.parent) == {path.name: bytes_}


@pytest.mark.parametrize("kind", ["empty", "foreign"])
def test_reading_a_database_that_is_no_store_says_so(path, kind):
    path.touch()
    if kind == "foreign":
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("CREATE TABLE cookies (x)")
    with pytest.raises(StoreError, match=str(path)), Store.read(path) as reader:
        reader.runs()


def test_somebody_elses_database_is_not_written_into(path):
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE run (mine)")
        db.execute("CREATE TABLE cookies (x)")
    before = contents(path.parent)
    with pytest.raises(StoreError, match=str(path)):
        Store.create(path)
    assert contents(path.parent) == before


@pytest.mark.parametrize("open_", [Store.create, Store.read], ids=["create", "read"])
def test_a_directory_is_refused(path, open_):
    path.mkdir()
    with pytest.raises(StoreError, match=str(path)):
        open_(path)


def test_a_store_below_a_file_is_refused(path):
    path.write_text("a file")
    with pytest.raises(StoreError, match="another file with store="):
        Store.create(path / "store.db")


@pytest.mark.parametrize("name", [":memory:", "file:other.db", "file:other.db?mode=memory"])
def test_a_name_that_sqlite_takes_for_no_path_is_wrong_usage(dpbench, tmp_path, name):
    """A run would be measured into memory, or into a file of another name, and not be found."""
    for command in (
        ("run", "--models", "mlp", "--strategies", "single", "--rounds", "1"),
        ("list", "runs"),
        ("rm", "@last", "--yes"),
    ):
        code, out, err = dpbench(*command, "--store", name)
        assert (code, out) == (64, ""), command
        last = err.splitlines()[-1]
        assert last.startswith("error: ")
        assert name in last
        assert "give" in last
    for open_ in (Store.create, Store.read):
        with pytest.raises(UsageError, match=re.escape(name)):
            open_(Path(name))
    assert list(tmp_path.iterdir()) == []
    with Store.create(tmp_path / name.replace("?", "")) as opened:
        begin(opened)  # within another folder it is a file as any other


def test_a_missing_store_is_not_made_by_reading(path):
    with pytest.raises(StoreError, match=r"dpbench run.*store="):
        Store.read(path)
    assert not path.exists()


def test_missing_folders_are_made_by_writing(path):
    deep = path.parent / "a" / "b" / "store.db"
    with Store.create(deep):
        assert deep.exists()


# -- migrations


def test_an_older_file_is_brought_up_with_its_trials(path, monkeypatch):
    with Store.create(path) as store:
        run_id, _ = begin(store)
        put(store, run_id, make_trial())
    monkeypatch.setattr(
        module, "MIGRATIONS", (*module.MIGRATIONS, "CREATE TABLE note (text TEXT);")
    )
    with Store.create(path) as store:
        assert same(store.trials(run_id)[0], make_trial())
    assert query(path, "PRAGMA user_version") == [(NEWER,)]
    assert query(path, "SELECT count(*) FROM note") == [(0,)]


@pytest.mark.parametrize("writes", [False, True], ids=["read only", "migrated"])
def test_a_file_of_schema_1_is_read_as_what_it_holds(path, writes):
    """The file is what the code of schema 1 wrote."""
    with closing(sqlite3.connect(path)) as db:
        db.executescript((Path(__file__).parents[1] / "data" / "store_schema1.sql").read_text())
    if writes:
        with Store.create(path) as store:
            store.trials()
            put(store, store.runs()[0].id, make_trial())
    with Store.read(path) as store:
        good, oom, *rest = store.trials()
    assert query(path, "PRAGMA user_version") == [(len(module.MIGRATIONS) if writes else 1,)]
    assert good.memory == (
        Memory(0, 300, "allocator"),
        Memory(1, 100, "allocator"),
        Memory(-1, 1000, "rss"),
    )
    assert (len(good.steps), len(good.spans), len(good.samples), good.schema) == (3, 6, 6, 1)
    assert (oom.status, oom.failed_device) == (Status.OOM, None)
    assert [same(trial, make_trial()) for trial in rest] == [True] * writes


def test_a_migration_that_fails_changes_nothing(path, monkeypatch):
    with Store.create(path) as store:
        run_id, _ = begin(store)
        put(store, run_id, make_trial())
    good = module.MIGRATIONS
    monkeypatch.setattr(
        module, "MIGRATIONS", (*good, "CREATE TABLE note (text TEXT); CREATE TABLE run (twice);")
    )
    with pytest.raises(StoreError, match=str(path)):
        Store.create(path)
    assert query(path, "PRAGMA user_version") == [(NEWER - 1,)]
    assert query(path, "SELECT name FROM sqlite_master WHERE name='note'") == []
    monkeypatch.setattr(module, "MIGRATIONS", good)
    with Store.create(path) as store:
        assert len(store.trials(run_id)) == 1
