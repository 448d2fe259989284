"""Results of `dpbench doctor` in a store: every run on the machine has the last one."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dpbench.records.examination import Examination
from dpbench.store import Store
from tests.examined import EXAMINATION
from tests.exported import PROVENANCE, made, stored


def keep(path: Path, started_s: float = 1.7e9, host: str = "h") -> Examination:
    examination = Examination(**{**vars(EXAMINATION), "started_s": started_s})
    with Store.create(path) as store:
        store.keep_examination(host, examination)
    return examination


def examinations(path: Path) -> list[Examination | None]:
    with Store.read(path) as store:
        return [run.examination for run in store.runs()]


def test_the_runs_on_a_machine_have_its_last_examination(tmp_path: Path) -> None:
    path = tmp_path / "dpbench.db"
    stored(path, made())
    assert examinations(path) == [None]
    keep(path, host="another machine")
    assert examinations(path) == [None]
    keep(path)
    last = keep(path, 1.8e9)
    stored(path, made())
    assert examinations(path) == [last, last]


def test_the_runs_on_a_machine_are_found(tmp_path: Path) -> None:
    path = tmp_path / "dpbench.db"
    first, second = stored(path, made()), stored(path, made())
    with Store.read(path) as store:
        assert [run.id for run in store.newest_on("h")] == [second, first]
        assert list(store.newest_on("another machine")) == []


@pytest.mark.parametrize("into_newer", [True, False])
def test_a_merge_keeps_the_newer_examination(into_newer: bool, tmp_path: Path) -> None:
    old, new = tmp_path / "old.db", tmp_path / "new.db"
    for path in (old, new):
        stored(path, made())
    keep(old, 1.7e9)
    newer = keep(new, 1.8e9)
    target, source = (new, old) if into_newer else (old, new)
    with Store.create(target) as store:
        store.merge(source)
    assert examinations(target) == [newer, newer]


@pytest.mark.parametrize(
    "damage",
    [
        "'{}'",
        "'text'",
        "replace(result, '1.7', '1.7e99')",
        "replace(result, '[\"GPU 0', '[\"GPU 9')",
    ],
)
def test_a_damaged_examination_is_left_out_with_a_warning(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "dpbench.db"
    stored(path, made())
    keep(path, 1.7)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f"UPDATE examination SET result={damage}")
    assert examinations(path) == [None]
    assert "damaged" in caplog.text


def test_a_store_of_an_earlier_version_has_none(tmp_path: Path) -> None:
    path = tmp_path / "dpbench.db"
    stored(path, made(), provenance=PROVENANCE)
    with closing(sqlite3.connect(path)) as db, db:
        db.executescript("DROP TABLE examination; PRAGMA user_version=5")
    assert examinations(path) == [None]
    last = keep(path)
    assert examinations(path) == [last]
