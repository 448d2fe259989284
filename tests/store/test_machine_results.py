"""Results on a machine, such as that of `dpbench doctor`: every run there has the last one."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dpbench.store import Store
from tests.exported import PROVENANCE, made, stored


def keep(path: Path, started_s: float = 1.7e9, host: str = "h") -> str:
    result = f"a result of {started_s}"
    with Store.create(path) as store:
        store.keep_machine_result(host, started_s, result)
    return result


def results(path: Path) -> list[str]:
    with Store.read(path) as store:
        return [run.machine_result for run in store.runs()]


def test_the_runs_on_a_machine_have_its_last_result(tmp_path: Path) -> None:
    path = tmp_path / "dpbench.db"
    stored(path, made())
    assert results(path) == [""]
    keep(path, host="another machine")
    assert results(path) == [""]
    keep(path)
    last = keep(path, 1.8e9)
    stored(path, made())
    assert results(path) == [last, last]


def test_the_runs_on_a_machine_are_found(tmp_path: Path) -> None:
    path = tmp_path / "dpbench.db"
    first, second = stored(path, made()), stored(path, made())
    with Store.read(path) as store:
        assert [run.id for run in store.newest_on("h")] == [second, first]
        assert list(store.newest_on("another machine")) == []


@pytest.mark.parametrize("into_newer", [True, False])
def test_a_merge_keeps_the_newer_result(into_newer: bool, tmp_path: Path) -> None:
    old, new = tmp_path / "old.db", tmp_path / "new.db"
    for path in (old, new):
        stored(path, made())
    keep(old, 1.7e9)
    newer = keep(new, 1.8e9)
    target, source = (new, old) if into_newer else (old, new)
    with Store.create(target) as store:
        store.merge(source)
    assert results(target) == [newer, newer]


def test_a_store_of_an_earlier_version_has_none(tmp_path: Path) -> None:
    path = tmp_path / "dpbench.db"
    stored(path, made(), provenance=PROVENANCE)
    with closing(sqlite3.connect(path)) as db, db:
        db.executescript("DROP TABLE examination; PRAGMA user_version=5")
    assert results(path) == [""]
    last = keep(path)
    assert results(path) == [last]
