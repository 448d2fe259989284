"""Foreign stores: a file from elsewhere is checked in names and structure as well as in values."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpbench.store import Store, StoreError, UnreadableRow
from dpbench.store.runs import inside
from tests.attacks import ENDLESS, IDS, STRUCTURES, crafted, entries, restructured
from tests.exported import is_error, made, stored
from tests.marked import patience, poll

ROOT = Path(__file__).parents[2]


# -- ids that are paths


@pytest.mark.parametrize("run_id", [*IDS, b"f" * 32, "f" * 32 + "\n", "f" * 32 + "\0/.."])
def test_a_run_whose_id_is_not_of_our_form_is_unreadable_and_nothing_outside_is_touched(
    dpbench, tmp_path, run_id
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    path = tmp_path / "store.db"
    (tmp_path / "store.db.traces").mkdir()
    (tmp_path / "store.db.traces" / "precious").touch()
    stored(path, made())
    crafted(path, run_id.format(outside=outside) if isinstance(run_id, str) else run_id)
    before = entries(tmp_path)
    for command in (
        ("rm", "@last", "--yes", "--store", path),
        ("report", "--store", path),
        ("merge", path, "--store", tmp_path / "other.db"),
    ):
        code, _, err = dpbench(*command)
        assert code != 0, command
        assert f"{path}, row 1 " in err, (command, err)
        (tmp_path / "other.db").unlink(missing_ok=True)
        assert entries(tmp_path) == before, command
    with Store.read(path) as opened, pytest.raises(UnreadableRow, match="id"):
        opened.runs()


@pytest.mark.parametrize("run_id", ["{outside}", "../outside", "..", ".", "", "a/b", "a\0b"])
def test_no_id_becomes_a_path_outside_the_folder_of_the_runs(tmp_path, run_id) -> None:
    """The second guard, for ids that were not read from a row."""
    outside = tmp_path / "outside"
    outside.mkdir()
    run_id = run_id.format(outside=outside)
    with pytest.raises(ValueError, match="id"):
        inside(tmp_path / "runs", run_id)
    path = tmp_path / "store.db"
    stored(path, made())
    with Store.create(path) as opened, pytest.raises(ValueError, match="id"):
        opened.remove([run_id])
    assert outside.exists()
    assert inside(tmp_path / "runs", "7f3a") == tmp_path / "runs" / "7f3a"


def test_profiles_behind_a_link_are_not_the_stores_own(path) -> None:
    run_id = stored(path, made())
    profiles = path.with_name("elsewhere") / run_id
    profiles.mkdir(parents=True)
    path.with_name("store.db.traces").symlink_to(profiles.parent)
    with Store.create(path) as opened:
        opened.remove([run_id])
    assert profiles.exists()


# -- structure


@pytest.mark.parametrize("named", STRUCTURES)
def test_a_store_with_more_than_plain_tables_is_refused_by_name(dpbench, path, named) -> None:
    stored(path, made())
    restructured(path, STRUCTURES[named])
    before = path.read_bytes()
    for command in (
        ("list", "runs", "--store", path),
        ("rm", "@last", "--yes", "--store", path),
        ("merge", path, "--store", path.with_name("other.db")),
    ):
        last = is_error(*dpbench(*command), expected=2)
        assert named in last, command
        assert str(path) in last
        assert "--store" in last
    with pytest.raises(StoreError, match=named):
        Store.create(path)
    assert path.read_bytes() == before


def test_plain_tables_that_others_add_are_no_fault(path) -> None:
    """As those of ANALYZE and of sqlite3's .recover."""
    stored(path, made())
    restructured(path, "ANALYZE; CREATE TABLE lost_and_found (rootpgno INTEGER, pgno INTEGER)")
    with Store.create(path) as opened:
        assert len(opened.trials()) == 1


# -- slow statements


@pytest.mark.parametrize(
    ("number", "installed"),
    [(signal.SIGINT, False), (signal.SIGINT, True), (signal.SIGTERM, True)],
    ids=["notebook", "command", "command ended by SIGTERM"],
)
def test_a_signal_ends_a_statement_that_runs_for_ever(path, number, installed) -> None:
    stored(path, made())
    code = f"""
import sys
import time
from pathlib import Path
from dpbench.records import signals
from dpbench.store import Store
{"signals.install()" * installed}
with Store.read(Path(sys.argv[1])) as opened:
    try:
        print("begun", flush=True)
        opened._db.execute({ENDLESS!r}).fetchone()
    except KeyboardInterrupt as end:
        print(type(end).__name__)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == "begun\n"
        time.sleep(0.5)  # most often, the statement runs now
        process.send_signal(number)
        assert poll(lambda: process.poll() is not None, patience(20))
        expected = "EndedBySignal\n" if installed else "KeyboardInterrupt\n"
        assert process.stdout.read() == expected
    finally:
        process.kill()
        process.communicate()
