"""Trials stored under schedules that this version lacks are shown, and never recommended."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dpbench.analysis import commands, ladder, summary
from dpbench.analysis.answer import answers
from dpbench.hardware.provenance import Resources
from dpbench.records import Case
from dpbench.store import Store
from tests.analysis.test_decision import SINGLE, row

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
        ("report", "--html", "page.html"),
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
