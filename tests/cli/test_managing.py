"""Runs have names and tags, and are listed, shown, removed, and merged from other stores."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from dpbench.cli import shapes
from dpbench.records import Case, Status, Trial
from dpbench.store import Identity, Naming, Store, StoreError
from dpbench.store.copying import PARTS, Merged
from dpbench.store.file import MIGRATIONS
from tests import environments
from tests.exported import DP, PROVENANCE, is_error, made
from tests.store.test_store import query

SINGLE = Case(model="mlp", strategy="single", batch_size=64)
Run = Callable[..., str]


def add(
    path: Path, *trials: Trial, plan: str = "", end: str = "finished", naming: Naming | None = None
) -> str:
    """Store trials as a run of a plan, which is a new plan unless given; return the run's id."""
    with Store.create(path, naming) as store:
        run_id, _ = store.begin_run(
            Identity(plan or str(time.time_ns()), "h", "c"), rounds=3, provenance=PROVENANCE
        )
        for trial in trials:
            store.end_trial(store.begin_trial(run_id, trial.case, trial.round), trial)
        if end:
            store.end_run(run_id, end)
    return run_id


def rows(path: Path) -> dict[str, list[tuple]]:
    """Return the content of a store without the numbers that a file gives to its trials."""
    own = {"run": "id", "trial": "started"} | dict.fromkeys(PARTS, "")
    with closing(sqlite3.connect(path)) as db:
        found = {}
        for table in own:
            names = [
                name
                for _, name, *_ in db.execute(f"PRAGMA table_info({table})")
                if name != "trial_id"
            ]
            names.remove("id") if table == "trial" else None
            found[table] = sorted(
                db.execute(f"SELECT {', '.join(names)} FROM {table}").fetchall(), key=repr
            )
    return found


# -- names and tags


def test_a_name_and_tags_are_part_of_what_is_resumed_and_a_run_without_them_has_the_plain_plan(
    path,
):
    namings = [Naming(), Naming(name="a"), Naming(name="b"), Naming(name="a", tags={"k": "1"})]
    ids = [add(path, made(), plan="p", end="interrupted", naming=one) for one in namings]
    assert len(set(ids)) == 4
    again = [
        add(path, made(number=1), plan="p", end="", naming=replace(one, command="c"))
        for one in namings
    ]
    assert again == ids, "the same name and tags resume the run, whatever the command is"
    assert query(path, "SELECT plan FROM run ORDER BY rowid")[0] == ("p",), (
        "as older versions stored it"
    )
    with Store.read(path) as store:
        found = {run.id: run.naming for run in store.runs()}
    assert [found[run_id] for run_id in ids] == namings


@pytest.mark.parametrize("word", ["last", "@a", "a b", "-a", "_a", "a/b", "a\n"])
def test_a_name_that_could_not_be_given_back_is_refused_before_anything_is_made(
    dpbench, tmp_path, word
):
    last = is_error(*dpbench("run", "--models", "mlp", f"--name={word}"))
    assert repr(word) in last or "last" in last
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--tag", "k"], ["'k'", "driver=550"]),
        (["--tag", "=v"], ["'=v'"]),
        (["--tag", "k="], ["'k='"]),
        (["--tag", "k=1", "--tag", "k=2"], ["twice"]),
        (["--tag", "a b=1"], ["tag", "'a b'"]),
    ],
)
def test_a_tag_that_is_none_is_an_error_that_names_it(dpbench, tmp_path, given, words):
    last = is_error(*dpbench("run", "--models", "mlp", *given))
    assert all(word in last for word in words), last
    assert list(tmp_path.iterdir()) == []


# -- which run is meant


@pytest.fixture
def three(tmp_path):
    """The ids of three runs in dpbench.db, the oldest first; the last two have the same name."""
    path = tmp_path / "dpbench.db"
    named = Naming(name="nightly", tags={"driver": "550"}, command="dpbench run --models mlp")
    failed = made(SINGLE, number=1, status=Status.FAILED)
    return (
        add(path, made(SINGLE), naming=Naming(name="base")),
        add(path, made(SINGLE), failed, made(DP), naming=named),
        add(path, made(), naming=named),
    )


def test_a_run_is_named_by_last_by_name_and_by_the_beginning_of_its_id(dpbench, three):
    first, second, third = three

    def shown(*asked: str) -> str:
        code, out, err = dpbench("show", *asked, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)["run"]["id"]

    assert [shown(), shown("@last"), shown("@base"), shown(second[:10])] == [
        third,
        third,
        first,
        second,
    ]
    for reader in (("report", "--md"), ("explain",), ("export", "jsonl")):
        assert dpbench(*reader, "--run", "@base")[1] == dpbench(*reader, "--run", first)[1] != "", (
            reader
        )
    assert dpbench("compare", "@base", second[:8])[1] == dpbench("compare", first, second)[1] != ""


def test_an_unknown_and_an_ambiguous_run_are_errors_with_the_way_out(dpbench, three):
    first, second, third = three
    for asked in ("@weekly", "@", "zzz"):
        last = is_error(*dpbench("show", asked))
        assert asked.removeprefix("@") in last
        assert (
            f"its runs are: {third[:8]} @nightly, {second[:8]} @nightly, {first[:8]} @base" in last
        )
    for command in (
        ("show", "@nightly"),
        ("compare", "@base", "@nightly"),
        ("rm", "@nightly", "--yes"),
    ):
        last = is_error(*dpbench(*command))
        assert "@nightly matches 2 runs" in last
        assert f"{second[:12]} (2" in last
        assert f"{third[:12]} (2" in last
    assert len(dpbench("list", "runs")[1].splitlines()) == 3


# -- list and show


def test_list_runs_shows_what_a_run_is(dpbench, three):
    lines = dpbench("list", "runs")[1].splitlines()
    assert [line.split()[0] for line in lines] == [one[:12] for one in reversed(three)]
    named = ["@nightly", "mlp", "secret-host", "dpbench run --models mlp"]
    assert re.split("  +", lines[1])[2:] == ["no commit", "2 cases", "finished", *named]
    assert lines[2].endswith("@base     mlp  secret-host  -")
    found = json.loads(dpbench("list", "runs", "--json")[1])
    assert found["schema"] == shapes.SCHEMA
    one = found["runs"][1]
    assert (one["id"], one["name"], one["tags"]) == (three[1], "nightly", {"driver": "550"})
    assert (one["cases"], one["models"], one["host"], one["cpu"]) == (
        2,
        ["mlp"],
        "secret-host",
        "EPYC",
    )


def test_show_has_the_facts_of_a_run_and_the_status_of_each_case(dpbench, three):
    out = dpbench("show", three[1][:8])[1]
    facts = dict(
        re.split(r" +", line, maxsplit=1) for line in out.splitlines() if not line.startswith(" ")
    )
    assert (facts["run"], facts["name"], facts["tags"]) == (three[1], "@nightly", "driver=550")
    assert (facts["command"], facts["host"]) == ("dpbench run --models mlp", "secret-host, EPYC")
    (line,) = (line for line in out.splitlines() if SINGLE.label in line)
    assert re.split("  +", line)[1:] == [SINGLE.label, "1 ok, 1 failed", "MEASURED CPU-ONLY"]
    found = json.loads(dpbench("show", three[1][:8], "--json")[1])
    assert [(one["label"], one["trials"]) for one in found["cases"]] == [
        (SINGLE.label, {"ok": 1, "failed": 1}),
        (DP.label, {"ok": 1}),
    ]
    assert found["cases"][1]["case"]["devices"] == 2


def test_a_report_has_the_name_and_the_tags_of_its_run(dpbench, three):
    out = dpbench("report", "--md", "--run", three[1])[1].replace("\\", "")
    assert re.search(rf"^- run: {three[1][:12]} .*nightly$", out, re.M), "an @ would mention a user"
    assert "- tags: driver=550\n" in out
    assert "tags" not in dpbench("report", "--md", "--run", "@base")[1]


# -- rm


def test_rm_removes_a_run_and_nothing_else(dpbench, three, tmp_path):
    path, profiles = tmp_path / "dpbench.db", tmp_path / "dpbench.db.traces"
    for run_id in three:
        (profiles / run_id).mkdir(parents=True)
    other = tmp_path / "other.db"
    assert dpbench("merge", path, "--store", other)[0] == 0
    code, out, err = dpbench("rm", "@base", three[1][:9], "--yes")
    assert (code, out) == (0, "removed 2 runs from dpbench.db\n"), err
    assert query(path, "SELECT id FROM run") == [(three[2],)]
    assert [one.name for one in profiles.iterdir()] == [three[2]]
    assert path.stat().st_size < other.stat().st_size
    dpbench("rm", three[0], three[1], "--yes", "--store", other)
    assert rows(path) == rows(other), "no row of a removed run is left"
    assert {table: len(found) for table, found in rows(path).items() if not found} == {}


@pytest.mark.parametrize(("said", "code", "left"), [("y\n", 0, 2), ("n\n", 130, 3), ("", 130, 3)])
def test_rm_asks(dpbench, three, monkeypatch, said, code, left):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    ended, out, err = dpbench("rm", "@last")
    assert ended == code
    assert ("removed 1 run" in out) is (left == 2)
    assert ("--yes" in err) is (left == 3)
    assert three[2][:12] in err
    assert len(dpbench("list", "runs")[1].splitlines()) == left


def test_a_run_that_is_measured_now_is_neither_removed_nor_merged(dpbench, three, tmp_path):
    with Store.create(tmp_path / "dpbench.db") as store:
        busy, _ = store.begin_run(Identity("p", "h", "c"), rounds=1, provenance={})
        before = rows(tmp_path / "dpbench.db")
        for command in (
            ("rm", busy, three[0], "--yes"),
            ("merge", "dpbench.db", "--store", "other.db"),
        ):
            last = is_error(*_without_lines(dpbench(*command)), expected=2)
            assert f"process {os.getpid()} on " in last
            assert "is adding trials" in last
            assert busy[:12] in last
        assert rows(tmp_path / "dpbench.db") == before


def _without_lines(done: tuple[int, str, str]) -> tuple[int, str, str]:
    """Leave out the lines with the runs that a command has listed before its error."""
    code, out, err = done
    return code, out, err[err.index("error: ") :]


# -- merge


def test_merge_copies_every_bit_and_a_second_time_nothing(dpbench, three, tmp_path):
    path, other = tmp_path / "dpbench.db", tmp_path / "deep" / "other.db"
    mine = add(tmp_path / "mine.db", made(), made(number=1))
    for store in (other, tmp_path / "mine.db"):
        for runs, trials in ((3, 5), (0, 0)):
            code, out, err = dpbench("merge", path, "--store", store)
            assert (code, err) == (0, "")
            assert f"{runs} runs and {trials} trials added" in out
    assert rows(other) == rows(path)
    with Store.read(tmp_path / "mine.db") as store:
        assert {run.id for run in store.runs()} == {mine, *three}
        assert [trial.round for trial in store.trials(mine)] == [0, 1]


def test_a_store_of_the_first_schema_is_merged(path, tmp_path):
    run_id = add(path, replace(made(), failed_device=None))
    old = tmp_path / "old.db"
    add(old, made(SINGLE))
    with closing(sqlite3.connect(old)) as db:
        db.executescript(
            "ALTER TABLE memory DROP COLUMN phase; ALTER TABLE memory DROP COLUMN kind;"
            "ALTER TABLE trial DROP COLUMN failed_device; DROP TABLE examination;"
            "PRAGMA user_version=1"
        )
    assert len(MIGRATIONS) > 1
    with Store.read(old) as store:
        expected = store.trials()
    with Store.create(path) as store:
        assert store.merge(old) == Merged(1, 1, 0)
        assert [trial for trial in store.trials() if trial.case == SINGLE] == expected
        assert len(store.trials(run_id)) == 1


def test_a_store_with_checksums_is_written_and_merged(path, tmp_path):
    """Versions 3 and 4 of the schema have checksums of rows, which this version does not update."""
    old = tmp_path / "old.db"
    run_id = add(old, made(), plan="p", end="interrupted")
    with closing(sqlite3.connect(old)) as db:
        db.executescript(
            "ALTER TABLE run ADD COLUMN checksum INTEGER;"
            "ALTER TABLE trial ADD COLUMN checksum INTEGER;"
            "ALTER TABLE trial ADD COLUMN parts_checksum INTEGER;"
            "ALTER TABLE trial ADD COLUMN summary_checksum INTEGER;"
            "UPDATE run SET checksum=1; UPDATE trial SET checksum=2, summary_checksum=3;"
            "DROP TABLE examination; PRAGMA user_version=4"
        )
    with Store.create(path) as store:
        assert store.merge(old) == Merged(1, 1, 0)
    assert query(old, "PRAGMA user_version") == [(4,)], "a store that is only read is not changed"
    assert add(old, made(number=1), plan="p") == run_id
    with Store.create(path) as store:
        assert store.merge(old) == Merged(0, 1, 1)
        assert [trial.round for trial in store.trials(run_id)] == [0, 1]
    with Store.create(old) as store:
        assert store.merge(path) == Merged(0, 0, 1)
        assert [trial.round for trial in store.trials(run_id)] == [0, 1]
    assert query(old, "SELECT trial.checksum FROM trial ORDER BY id") == [(2,), (None,)]


def test_a_store_that_an_earlier_version_wrote_with_checksums_is_read_and_merged(path, tmp_path):
    old = tmp_path / "old.db"
    with closing(sqlite3.connect(old)) as db:
        db.executescript((Path(__file__).parents[1] / "data" / "store_schema4.sql").read_text())
    with Store.create(path) as store:
        store.merge(old)
    for file in (old, path):
        with Store.read(file) as store:
            (run,) = store.runs()
            good, oom = store.trials(run.id)
            assert [trial.status for trial in store.summaries(run.id)] == [Status.OK, Status.OOM]
        assert (len(good.steps), len(good.spans), len(good.samples)) == (3, 12, 12)
        assert (good.failed_device, oom.reason) == (1, "no memory")


@pytest.fixture
def copies(path, tmp_path):
    """Two copies of an interrupted run with one trial, and the run's id."""
    run_id = add(path, made(), plan="p", end="interrupted")
    copy = tmp_path / "copy.db"
    copy.write_bytes(path.read_bytes())
    return path, copy, run_id


def test_a_copy_that_was_continued_gives_its_trials_and_its_end(copies):
    path, copy, run_id = copies
    # a new round, and the old one once more
    assert add(copy, made(number=1), made(), plan="p") == run_id
    with Store.create(path) as store:
        assert store.merge(copy) == Merged(0, 2, 1)
        assert store.merge(copy) == Merged(0, 0, 1)
        assert store.runs()[0].status == "finished"
    assert rows(path)["trial"] == rows(copy)["trial"]
    with Store.create(copy) as store:
        assert store.merge(path) == Merged(0, 0, 1)


@pytest.mark.parametrize("more", [[], [made(number=1)]], ids=["no trial", "one trial"])
def test_an_older_copy_that_ended_later_leaves_a_finished_run_finished(copies, more):
    path, copy, run_id = copies
    assert add(path, *more, plan="p") == run_id
    assert add(copy, plan="p", end="interrupted") == run_id
    for store, other in ((path, copy), (copy, path)):
        with Store.create(store) as opened:
            opened.merge(other)
            assert opened.runs()[0].status == "finished"
            assert len(opened.trials(run_id)) == 1 + len(more)


def test_a_finished_run_that_was_measured_further_elsewhere_has_the_end_from_there(copies):
    """Its plan has grown, or failed trials are repeated: whoever repeats the command goes on."""
    path, copy, run_id = copies
    assert add(copy, made(SINGLE), plan="p", end="interrupted") == run_id
    assert add(path, plan="p") == run_id
    with Store.create(path) as store:
        assert store.merge(copy) == Merged(0, 1, 1)
        assert store.runs()[0].status == "interrupted"


def test_copies_that_were_continued_apart_are_not_mixed(copies):
    path, copy, run_id = copies
    for store in (path, copy):
        assert add(store, made(SINGLE), made(number=1), plan="p") == run_id
    extra = add(copy, made())
    before = rows(path)
    with Store.create(path) as store, pytest.raises(StoreError) as refused:
        store.merge(copy)
    said = str(refused.value)
    for case, number in ((SINGLE, 1), (DP, 2)):
        assert f"run {run_id[:12]}, {case.label}, round {number}:" in said
    assert "dpbench rm" in said
    assert rows(path) == before, "nothing is merged, not even the run without a conflict"
    assert extra not in {run for (run,) in query(path, "SELECT id FROM run")}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("UPDATE run SET code='other'", "`code` is 'c' in this store and 'other' in the other"),
        (
            "UPDATE step SET seconds=9 WHERE step=3",
            "trial 1 of this store and trial 1 of the other differ",
        ),
        *(
            (f"UPDATE {change}", "differ in their results")
            for change in (
                "trial SET verified='no'",
                "trial SET failed_device=1",
                "span SET end_s=9 WHERE number=3",
                "memory SET peak_bytes=9",
                "series SET mean=9 WHERE device=0",
            )
        ),
        ("DELETE FROM span WHERE number=3", "differ in their results"),
        ("DELETE FROM memory", "differ in their results"),
    ],
)
def test_a_copy_that_was_changed_is_an_error_that_names_the_rows(copies, change, words):
    path, copy, run_id = copies
    with closing(sqlite3.connect(copy)) as db, db:
        db.execute(change)
    with Store.create(path) as store, pytest.raises(StoreError, match=re.escape(words)) as refused:
        store.merge(copy)
    assert run_id[:12] in str(refused.value)


@pytest.mark.parametrize("name", environments.CHANGED)
def test_copies_of_a_run_from_two_environments_are_not_mixed(path, tmp_path, name):
    run_id = add(path, made(), plan="p", end="interrupted")
    copy = tmp_path / "copy.db"
    copy.write_bytes(path.read_bytes())
    for store, facts in ((path, environments.FACTS), (copy, environments.facts(name))):
        with closing(sqlite3.connect(store)) as db, db:
            db.execute("UPDATE run SET provenance=?", (json.dumps(facts),))
    with Store.create(path) as store:
        if name not in environments.FORBIDS:
            assert store.merge(copy) == Merged(0, 0, 1)
            return
        told = environments.TOLD[name]
        with pytest.raises(StoreError, match=f"run {run_id[:12]}: {told} .* in this store"):
            store.merge(copy)


def test_a_store_is_not_merged_into_itself_nor_from_nothing(dpbench, three, tmp_path):
    assert "itself" in is_error(*dpbench("merge", tmp_path / "dpbench.db"))
    assert "no store at" in is_error(*dpbench("merge", "none.db", "--store", "new.db"), expected=2)
    assert not (tmp_path / "new.db").exists()
