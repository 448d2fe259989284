"""A stored examination: what it adds to the findings and the pages of the runs on its machine."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dpbench.analysis import findings, summary
from dpbench.doctor.examination import Examination, read
from dpbench.records.resources import Resources
from dpbench.report import page
from dpbench.store import Store
from tests.analysis.test_findings import dp
from tests.examined import EXAMINATION
from tests.exported import made, stored
from tests.report_rows import HOSTILE, Tags, gpu_page, gpu_run
from tests.trials import of_run


def text_of(examination: Examination) -> str:
    """Return an examination as a store keeps it."""
    return msgspec.json.encode(examination).decode()


def test_an_examined_machine_is_among_the_details() -> None:
    assert 'id="machine"' not in gpu_page()
    text = page.render(of_run(gpu_run(), machine_result=text_of(EXAMINATION)))
    _, _, details = text.partition('<details id="details">')
    section = details.partition('<section id="machine">')[2].partition("</section>")[0]
    assert "2023-11-14 22:13 UTC" in section
    assert "1 fault found" in section
    assert EXAMINATION.findings[0].says in unescape(section)
    assert 'stroke="var(--loss)"' in section
    assert '<a href="#machine">' in text


def test_texts_of_an_examination_stay_text() -> None:
    hostile = replace(EXAMINATION.findings[0], says=HOSTILE, change=HOSTILE)
    boxes = [replace(box, texts=(HOSTILE,)) for box in EXAMINATION.boxes]
    examination = replace(EXAMINATION, findings=(hostile,), boxes=tuple(boxes), labels=(HOSTILE,))
    text = page.render(of_run(gpu_run(), machine_result=text_of(examination)))
    assert HOSTILE not in text
    assert Tags(text).all("script") == Tags(gpu_page()).all("script")


def test_a_slow_link_quotes_what_the_doctor_found_about_it() -> None:
    def copies(a: int, b: int) -> dict[str, Any]:
        slower = 3.0 if (a, b) == (0, 2) else 1.0
        return {"source": a, "target": b, "bytes": 2**20, "seconds": [1e-4 * slower] * 3}

    links = [copies(a, b) for a in range(4) for b in range(a + 1, 4)]
    ids = (4, 5, 6, 7)
    trials = [
        replace(
            trial,
            case=replace(trial.case, device_kind="cuda", device_ids=ids),
            provenance={**trial.provenance, "links": links},
        )
        for trial in dp(devices=4, reduce=0.010)
    ]

    def numbers(*gpus: int) -> str:
        of_pair = replace(EXAMINATION.findings[0], gpus=gpus)
        kept = text_of(replace(EXAMINATION, findings=(of_pair,)))
        rows = summary.rows(trials)
        (diagnosis,) = findings.diagnose(rows, trials, Resources(cores=8), kept)
        (slow,) = [one for one in diagnosis.findings if one.rule.key == "slow link"]
        return slow.evidence.numbers

    known = EXAMINATION.findings[0]
    assert numbers(4, 6).endswith(f" 2023-11-14: {known.says} ({known.change})")
    assert "doctor" not in numbers(0, 2), "device 2 is GPU 6"


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
    kept = text_of(replace(EXAMINATION, started_s=1.7))
    with Store.create(path) as store:
        store.keep_machine_result("h", 1.7, kept)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f"UPDATE examination SET result={damage}")
    with Store.read(path) as store:
        (run,) = store.runs()
    assert run.machine_result not in ("", kept)
    assert read(run.machine_result) is None
    assert "damaged" in caplog.text
    text = page.render(of_run(gpu_run(), machine_result=run.machine_result))
    assert 'id="machine"' not in text


@pytest.mark.parametrize("column", [float("nan"), float("inf"), -1.0, 1e6])
def test_a_picture_of_another_size_is_left_out(column: float) -> None:
    assert read(msgspec.json.encode(EXAMINATION).decode()) == EXAMINATION
    far = msgspec.to_builtins(EXAMINATION)
    far["boxes"][0]["column"] = column
    assert read(json.dumps(far)) is None
