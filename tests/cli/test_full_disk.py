"""A full disk leaves the earlier pages and exports as they were, and the error names the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench.cli.options import EXIT_FAILED
from tests.disks import limited
from tests.exported import Command, made, stored

ROOM = 40 * 1024
"""Enough bytes for SQLite's own files, and not for a page or an export."""


def small_and_large(folder: Path) -> None:
    """Write a store of one short trial, and one with enough trials for long exports."""
    stored(folder / "small.db", made())
    stored(folder / "large.db", *[made(number=number, steps=40) for number in range(40)])


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("report", "--report", "page.html"), "page.html"),
        (("export", "jsonl", "--output", "out"), "out"),
        (("export", "trace", "--all", "--output", "out"), "out"),
        (("compare", "@last", "@last", "--report", "page.html"), "page.html"),
    ],
)
def test_a_file_is_written_whole_or_not_at_all(
    dpbench: Command, tmp_path: Path, words: tuple[str, ...], name: str
) -> None:
    small_and_large(tmp_path)
    file = tmp_path / name
    dpbench(*words, "--store", "small.db")
    before = file.read_bytes()
    names = {path.name for path in tmp_path.iterdir()}
    with limited(ROOM):
        code, _, err = dpbench(*words, "--store", "large.db")
    assert code == EXIT_FAILED
    assert file.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == names
    [error] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert name in error
    assert "unchanged" in error
    assert "free space" in error


def test_a_set_of_files_is_written_whole_or_not_at_all(dpbench: Command, tmp_path: Path) -> None:
    stored(tmp_path / "dpbench.db", made(steps=400))
    words = ("export", "trace", "--split", "split")
    with limited(ROOM):
        assert dpbench(*words)[0] == EXIT_FAILED
    assert [*(tmp_path / "split").iterdir()] == []
    assert dpbench(*words)[0] == 0


def test_the_archive_keeps_its_pages(dpbench: Command, tmp_path: Path) -> None:
    small_and_large(tmp_path)
    assert dpbench("report", "--store", "small.db")[0] == 0
    before = {
        path: path.read_bytes() for path in (tmp_path / "reports").rglob("*") if path.is_file()
    }
    with limited(ROOM):
        assert dpbench("report", "--store", "large.db")[0] == EXIT_FAILED
    after = {
        path: path.read_bytes() for path in (tmp_path / "reports").rglob("*") if path.is_file()
    }
    assert after == before


def test_init_leaves_no_half_model_file(dpbench: Command, tmp_path: Path) -> None:
    with limited(100):
        code, out, err = dpbench("init", "net.py")
    assert (code, out) == (EXIT_FAILED, "")
    assert "net.py" in err
    assert [*tmp_path.iterdir()] == []


@pytest.mark.sibling("doctor")
def test_a_doctor_that_cannot_write_its_page_says_so_before_it_measures(
    dpbench: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpbench.doctor.examine.examine", lambda say: pytest.fail("it measured"))
    (tmp_path / "folder").mkdir()
    for option in ("--report", "--output"):
        code, _, err = dpbench("doctor", option, "folder")
        assert code == EXIT_FAILED
        assert "folder" in err
