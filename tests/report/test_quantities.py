"""One run in every output: each number has one value and one interval."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

import dpbench as dp
from dpbench.analysis import findings, quantities, statements, summary, validity
from dpbench.analysis.quantities import QUANTITIES
from dpbench.analysis.summary import Row
from dpbench.cli import tables
from dpbench.records import words
from dpbench.store.export import read_run
from tests import golden

SHOWN = {"step": 1e3, "speedup": 1.0}
"""The numbers that tables show with their interval, each with the factor to the unit there."""
APART = ("model", "strategy", "batch_size", "devices", "schedule", "mode")
"""What tells the cases of these runs apart."""
DOCS = Path(__file__).parents[2] / "docs" / "measuring.md"


@pytest.fixture(scope="module", params=["default", "inference"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Row], dict[str, Any]]:
    """Return the rows of a run, and what each command prints about it."""
    _, trials = read_run(golden.REPORTS / request.param / golden.TRIALS)
    folder = tmp_path_factory.mktemp("made")
    golden.store(folder / "dpbench.db", trials)
    with contextlib.chdir(folder):
        found = {
            "written": golden.printed(["report", "--report", "page.html"]),
            "md": golden.printed(["report", "--md"]),
            "json": json.loads(golden.printed(["report", "--json"])),
            "csv": golden.printed(["export", "csv"]),
            "page": Path("page.html").read_text(encoding="utf-8"),
            "frame": dp.load("dpbench.db").raw_frame.to_dict("records"),
        }
    rows = summary.rows(trials)
    return rows, found | {"terminal": tables.table(rows)}


def key(record: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(record[name]) for name in APART)


def key_of(row: Row) -> tuple[str, ...]:
    return tuple(str(getattr(row.case, name)) for name in APART)


def read(value: Any) -> float | None:
    """Return a number of an output; None if it is missing there."""
    return None if value in (None, "") or math.isnan(float(value)) else float(value)


def test_records_agree_in_value_and_interval(made: tuple[list[Row], dict[str, Any]]) -> None:
    rows, found = made
    from_csv = csv.DictReader(io.StringIO(found["csv"]))
    embedded = json.loads(re.findall(r'id="numbers">(.*?)</script>', found["page"], re.DOTALL)[0])
    outputs: dict[str, Iterable[Mapping[str, Any]]] = {
        "csv": from_csv,
        "page": [dict(zip(embedded["columns"], one, strict=True)) for one in embedded["rows"]],
        "frame": found["frame"],
    }
    for name, records in outputs.items():
        by_case = {key(record): record for record in records}
        assert len(by_case) == len(rows), name
        for row in rows:
            for quantity in QUANTITIES:
                for entry, value in quantity.entries(row).items():
                    if not entry.endswith("withheld"):
                        assert read(by_case[key_of(row)][entry]) == value, (name, row.label, entry)


def test_json_has_the_numbers_of_the_records(made: tuple[list[Row], dict[str, Any]]) -> None:
    rows, found = made
    in_json = {case["label"]: case for case in found["json"]["cases"]}
    assert in_json.keys() == {row.label for row in rows}
    for row in rows:
        for quantity in QUANTITIES:
            found, name = in_json[row.label], quantity.name
            if re.fullmatch(r"p\d+", quantity.key):  # a percentile
                found, name = found["percentiles_s"], quantity.key[1:]
                found.setdefault(name, None)
            number, facts = quantity.of(row), found[name]
            parts = [facts and facts[part] for part in ("value", "low", "high")]
            assert parts == [getattr(number, part, None) for part in ("value", "low", "high")]


@pytest.mark.parametrize("output", ["terminal", "md", "page"])
def test_tables_show_the_value_and_interval_of_the_record(
    output: str, made: tuple[list[Row], dict[str, Any]]
) -> None:
    rows, found = made
    text = re.sub(r"<[^>]*>|\s+", " ", found[output])
    text = re.sub(r"\s+", " ", text)
    for row in rows:
        for quantity in QUANTITIES:
            number, scale = quantity.of(row), SHOWN.get(quantity.key)
            if number is None or number.doubt or scale is None:
                continue
            value, interval = words.number(number.value * scale), words.interval(number, scale)
            assert re.search(
                rf"(?<![\d.]){re.escape(value)}×?(?: weak)? \(?{re.escape(interval)}", text
            ), (row.label, quantity.key)


def test_the_documents_define_each_number_as_the_code_does() -> None:
    table = quantities.definitions()
    assert table in DOCS.read_text(encoding="utf-8"), f"docs/measuring.md needs:\n{table}"


@pytest.mark.sibling("observe")
def test_the_documents_list_each_statement_with_its_condition() -> None:
    table = statements.definitions()
    assert table in DOCS.read_text(encoding="utf-8"), f"docs/measuring.md needs:\n{table}"
    keys = [one.key for one in statements.kinds()] + [rule.key for rule in validity.RULES]
    assert len({*keys}) == len(keys)


@pytest.mark.sibling("observe")
def test_the_documents_list_each_finding_with_its_condition() -> None:
    table = findings.definitions()
    assert table in DOCS.read_text(encoding="utf-8"), f"docs/measuring.md needs:\n{table}"
    keys = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)
    assert len({*keys}) == len(keys)
