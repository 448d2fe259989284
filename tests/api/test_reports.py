"""The archive of pages: one for each run, the list of them, and the newest page with a result."""

from __future__ import annotations

import dataclasses
from html import unescape
from pathlib import Path

import pytest

from dpbench.analysis.report import Report
from dpbench.api import LATEST, reports
from dpbench.records import Case, Source, Status
from dpbench.report import page
from tests.report_rows import HOSTILE, Row, Tags, answer, made, run_of
from tests.trials import of_run

CASE = Case(model="mlp", strategy="single", batch_size=8)
LOST = Row(case=CASE, source=Source.MEASURED, status=Status.OOM, reason="no room")


def run(letter: str, started_s: float, row: Row, **changes: object) -> Report:
    provenance = {"command": f"dpbench run --models mlp --seed {letter}"}
    found = dataclasses.replace(run_of(row, trials=[]), **changes)
    return of_run(found, id=letter * 32, started=started_s, provenance=provenance)


GOOD = made(CASE, 0.1, 0.1, busy={}, phases={})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "reports"


def kept(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_run_has_a_page_of_its_own_and_the_newest_is_the_latest(folder: Path) -> None:
    older, newer = run("a", 1e9, GOOD, answers=[answer(GOOD)]), run("b", 2e9, GOOD)
    assert reports.write_report(None, newer) == LATEST
    assert reports.write_report(None, older) == Path("reports/runs/aaaaaaaaaaaa/index.html")
    found = kept(folder)
    assert set(found) == {
        "latest/index.html",
        "runs/index.html",
        "runs/aaaaaaaaaaaa/index.html",
        "runs/aaaaaaaaaaaa/run.json",
        "runs/bbbbbbbbbbbb/index.html",
        "runs/bbbbbbbbbbbb/run.json",
    }
    assert found["latest/index.html"] == found["runs/bbbbbbbbbbbb/index.html"]
    list_ = found["runs/index.html"].decode()
    links = [attributes["href"] for attributes in Tags(list_).all("a")]
    assert links == ["bbbbbbbbbbbb/index.html", "aaaaaaaaaaaa/index.html"]
    for text in (
        "2001-09-09 01:46",
        "dpbench run --models mlp --seed a",
        answer(GOOD).headline,
        "1 of 1",
    ):
        assert text in unescape(list_)
    reports.write_report(None, older)
    assert kept(folder) == found, "the same runs give the same bytes"


def test_a_run_without_a_result_never_replaces_the_latest_page(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reports.write_report(None, run("a", 1e9, GOOD)) == LATEST
    good = kept(folder)["latest/index.html"]
    assert reports.write_report(None, run("f", 2e9, LOST)) == Path(
        "reports/runs/ffffffffffff/index.html"
    )
    assert kept(folder)["latest/index.html"] == good
    err = capsys.readouterr().err
    assert str(LATEST) in err
    assert "run aaaaaaaa" in err
    assert "no result" in kept(folder)["runs/index.html"].decode()


def test_a_first_run_without_a_result_makes_no_latest_page(folder: Path) -> None:
    assert reports.write_report(None, run("f", 2e9, LOST)) == Path(
        "reports/runs/ffffffffffff/index.html"
    )
    assert not LATEST.exists()


def test_a_named_page_is_the_only_file_that_is_written(folder: Path, tmp_path: Path) -> None:
    assert (
        reports.write_report(tmp_path / "deep" / "page.html", run("f", 2e9, LOST))
        == tmp_path / "deep" / "page.html"
    )
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [
        tmp_path / "deep" / "page.html"
    ]


def test_the_list_stays_text_and_names_what_it_cannot_read(folder: Path) -> None:
    wild = made(dataclasses.replace(CASE, model=HOSTILE), 0.1, 0.1, busy={}, phases={})
    page.keep(of_run(run("a", 1e9, wild), provenance={"command": HOSTILE}), folder)
    (folder / "runs" / "older").mkdir()
    (folder / "runs" / "older" / "run.json").write_text("{}")
    page.keep(run("b", 2e9, GOOD), folder)
    list_ = (folder / "runs" / "index.html").read_text()
    assert HOSTILE not in list_
    assert unescape(list_).count(HOSTILE) == 2
    assert "cannot be read: older." in list_
