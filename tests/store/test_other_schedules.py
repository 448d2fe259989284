"""Trials stored under schedules that this version lacks are shown, and never recommended."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import dpbench as dp
from dpbench.analysis import commands, ladder, summary
from dpbench.analysis.answer import answers
from dpbench.records import SCHEMA, Case, Trial, schedule
from dpbench.records.resources import Resources
from dpbench.records.trial import EARLIER_ALLREDUCE
from dpbench.store import Identity, Store
from dpbench.store.export.formats import read_jsonl
from tests import exported
from tests.analysis.test_decision import SINGLE, row
from tests.golden import REPORTS

MEASURED = {"bf16_comm", "workers=pool,comm_dtype=bf16"}
PREDICTED = {"graphs", "replicas=persistent,loss=local,backward=local,graphs=on"}


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Return an earlier version's store: a measured and a predicted run with such schedules."""
    path = tmp_path / "earlier.db"
    with closing(sqlite3.connect(path)) as db:
        db.executescript(
            gzip.decompress(
                (Path(__file__).parents[1] / "data" / "store_other_schedules.sql.gz").read_bytes()
            ).decode()
        )
    return str(path)


def runs(dpbench, store: str) -> list[str]:
    """Return the ids of the runs, the latest first."""
    return [line.split()[0] for line in dpbench("list", "runs", "--store", store)[1].splitlines()]


def test_their_rows_have_the_stored_labels(dpbench, store: str) -> None:
    for run, others in zip(runs(dpbench, store), (PREDICTED, MEASURED), strict=True):
        code, out, err = dpbench("report", "--json", "--run", run, "--store", store)
        rows = json.loads(out)["cases"]
        assert (code, "unreadable" in err) == (0, False), err
        assert {
            row["case"].get("schedule") for row in rows if row["case"].get("devices") == 2
        } >= others
        page = dpbench("report", "--md", "--run", run, "--store", store)[1].replace("\\", "")
        assert all(f"[{text}]" in page for text in others)


@pytest.mark.parametrize(
    "command",
    [
        ("explain", "--all"),
        ("show",),
        ("export", "csv"),
        ("export", "jsonl"),
        ("export", "pyperf"),
        ("report", "--report", "page.html"),
        ("export", "trace", "--all", "--output", "trace.json"),
    ],
    ids=" ".join,
)
def test_every_reader_takes_them(dpbench, store: str, command: tuple[str, ...]) -> None:
    code, _, err = dpbench(*command, "--store", store)
    assert (code, "unreadable" in err) == (0, False), err


def test_they_are_no_rungs_and_the_short_table_has_them(store: str) -> None:
    with Store.read(Path(store)) as opened:
        rows = summary.rows(opened.trials())
    found = ladder.ladders(rows)
    assert {rung.name for one in found for rung in one.rungs} == {"reference", "pool", "cached"}
    assert {row.case.schedule for row in ladder.notable(rows, found)} >= MEASURED | PREDICTED


def test_no_command_measures_them() -> None:
    case = Case(model="mlp", strategy="dp", batch_size=64, devices=2, schedule="cached")
    other = Case(model="mlp", strategy="dp", batch_size=64, devices=2, schedule="bf16_comm")
    command = commands.measure([case], machine=Resources())
    assert "cached" in command
    gone = Case(model="mlp", strategy="ddp_fp16", batch_size=64, devices=2)
    assert commands.measure([case, other, gone], machine=Resources()) == command
    for stored in (other, gone):
        assert commands.measure([stored], machine=Resources()) == ""


def test_the_answer_recommends_a_schedule_that_can_run() -> None:
    best, other = row("dp", 2, 1.5, schedule="cached"), row("dp", 2, 1.9, schedule="bf16_comm")
    (answer,) = answers([SINGLE, best, other], Resources())
    assert answer.row is best
    (answer,) = answers([SINGLE, other], Resources())
    assert answer.row is None
    assert "bf16_comm" not in answer.command


# ---------------------------------------------------------------- "allreduce" of earlier versions


ALLREDUCE = replace(exported.DP, schedule="allreduce")
LADDER = REPORTS / "ladder-2-cores" / "trials.jsonl.gz"
"""A run of an earlier version, in which "allreduce" had flat storage and overlapped reductions."""


def ran(schema: int) -> list[Trial]:
    """Return three rounds of `reference` and `allreduce`, as a version with `schema` wrote them."""
    cases = (exported.DP, ALLREDUCE)
    return [
        exported.made(case, number=number, schema=schema) for case in cases for number in range(3)
    ]


@pytest.fixture
def both(tmp_path: Path) -> tuple[str, str, str]:
    """Return a store with a run of an earlier version and one of this, and the ids of the runs."""
    path = tmp_path / "both.db"
    identity = Identity("p", "h", "c")
    with Store.create(path) as opened:
        earlier, today = (
            opened.add(ran(schema), identity, provenance={}) for schema in (2, SCHEMA)
        )
    return str(path), earlier, today


def schedules(trials: Iterable[Trial]) -> set[str]:
    return {trial.case.schedule for trial in trials}


def test_a_store_gives_the_earlier_one_another_name_on_every_way_of_reading(both) -> None:
    path, *runs = both
    for run, name in zip(runs, (EARLIER_ALLREDUCE, "allreduce"), strict=True):
        with Store.read(Path(path)) as opened:
            whole, short = opened.trials(run), opened.summaries(run)
            ended = opened.outcomes(run)
            past = {one.run.id: one.trials for one in opened.past(runs[1], ())}
        for trials in (whole, short, past.get(run, whole)):
            assert schedules(trials) == {"reference", name}
        assert {case.schedule for case in ended} == {"reference", name}
        assert schedules([Trial.from_dict(one.to_dict()) for one in whole]) == {"reference", name}


def test_a_trial_that_was_begun_has_the_name_of_its_version(tmp_path: Path) -> None:
    path = tmp_path / "begun.db"
    with Store.create(path) as opened:
        run, _ = opened.begin_run(Identity("p", "h", "c"), rounds=1, provenance={})
        opened.begin_trial(run, ALLREDUCE, 0)
        assert [case.schedule for case in opened.outcomes(run)] == ["allreduce"]
        # earlier versions stored the schema only when a trial ended
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("UPDATE trial SET schema=NULL")
        assert [case.schedule for case in opened.outcomes(run)] == [EARLIER_ALLREDUCE]


def test_the_time_of_a_plan_is_not_forecast_from_the_earlier_one(both) -> None:
    path, *_ = both
    prints = {exported.DP.fingerprint: 6, ALLREDUCE.fingerprint: 3}
    with Store.read(Path(path)) as opened:
        found = opened.durations("h", prints)
    assert {name: len(found[name]) for name in prints} == prints


def test_an_export_keeps_the_two_apart_and_one_without_a_schema_is_of_an_earlier_version(
    dpbench, both, tmp_path: Path
) -> None:
    path, *runs = both
    file = tmp_path / "all.jsonl"
    assert dpbench("export", "jsonl", "--all", "--store", path, "--output", str(file))[0] == 0
    names = [{"reference", EARLIER_ALLREDUCE}, {"reference", "allreduce"}]
    assert [schedules(read_jsonl(file)[run]) for run in runs] == names
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        del line["schema"]
        if "schedule" in line["case"] and line["case"]["schedule"] == EARLIER_ALLREDUCE:
            line["case"]["schedule"] = "allreduce"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert [schedules(read_jsonl(file)[run]) for run in runs] == [names[0], names[0]]
    lines[0]["schema"] = SCHEMA + 1
    file.write_text(f"{json.dumps(lines[0])}\n")
    with pytest.raises(ValueError, match=rf"schema {SCHEMA + 1}.*update"):
        read_jsonl(file)


def test_a_comparison_has_no_common_case_of_the_two(dpbench, both) -> None:
    path, earlier, today = both
    _, out, _ = dpbench("compare", earlier[:8], today[:8], "--store", path, "--json")
    compared = [one["label"] for one in json.loads(out)["cases"]]
    assert compared == [exported.DP.label]


def test_a_run_of_an_earlier_version_opens_and_recommends_none_of_its_schedules() -> None:
    run = dp.open_trials(LADDER)
    found = {trial.case.schedule for trial in run.trials}
    assert EARLIER_ALLREDUCE in found
    assert "allreduce" not in found
    gone = found - {"", *schedule.Schedule}
    assert {"zero1", "flat_storage"} <= gone
    said = run.explain().partition("Warnings:\n")[0].partition("Remarks:\n")[0]
    assert not [name for name in gone if f'schedule="{name}"' in said or f"{name}," in said]
    assert {rung.name for one in run.analysis.ladders for rung in one.rungs} == {
        "reference",
        "pool",
        "cached",
    }
