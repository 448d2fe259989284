"""The readers of observed loops: reports, tables, exports and comparisons of watched runs and imported traces."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest

from dpbench.analysis.report import Report
from dpbench.cli import progress
from dpbench.records import Case, Source, Trial
from dpbench.report import figures, markdown, notebook, page, table
from tests import observed_loops as loops


def report(trials: Sequence[Trial], facts: dict[str, Any] = loops.FACTS) -> Report:
    summaries = [trial.summary() for trial in trials]
    return Report.of(summaries, run_id="ab" * 16, started_s=1.7e9, provenance=facts)


@functools.cache
def kinds() -> dict[str, Report]:
    """Return a report of each kind of observed run."""
    unknown = loops.case(batch_size=0)
    four = loops.case(devices=4, device_kind="cuda")
    trace = loops.case(batch_size=0, device_kind="cuda", model="trace.json.gz")
    imported = loops.loop(of=trace, source=Source.IMPORTED, rounds=1, busy={0: 0.003})
    return {
        "plain": report(loops.loop()), "unknown batch": report(loops.loop(of=unknown)),
        "data parallel": report(loops.loop(loops.parallel(), four, memory=(9, 3, 3, 3)), loops.GPU_FACTS),
        "imported": report(imported, loops.GPU_FACTS), "one step": report(loops.loop(rounds=1, steps=1)),
    }  # fmt: skip


every_kind = pytest.mark.parametrize("kind", ["plain", "unknown batch", "data parallel", "imported", "one step"])


@every_kind
def test_every_format_shows_an_observed_run_without_comparisons(kind: str) -> None:
    found = kinds()[kind]
    for text in (page.render(found), markdown.render(found), progress.table(found.rows), notebook.render(found)):
        assert "train.py" in text or "trace.json.gz" in text
        for word in ("speed-up", "effic", "not_applicable", "nan", "verified"):
            assert word not in text.partition("How it was measured")[0].rpartition("</style>")[2], (kind, word)


def test_the_page_has_the_sections_that_an_observed_run_has_data_for() -> None:
    assert [one.id for one in figures.sections(kinds()["plain"])] == ["lanes", "throughput", "phases", "steps"]
    assert [one.id for one in figures.sections(kinds()["unknown batch"])] == ["lanes", "phases", "steps"]
    assert "memory-by-phase" not in {one.id for one in figures.sections(kinds()["imported"])}


def test_an_unknown_batch_has_no_throughput_and_is_called_unknown() -> None:
    (row,) = kinds()["unknown batch"].rows
    assert row.throughput is None
    assert row.case.rows == (0,)
    assert Case(model="m", strategy="s", batch_size=0, devices=4, declared=loops.case(devices=4).declared).label
    columns, (line,) = table.all_cases(kinds()["unknown batch"])
    assert dict(zip(columns, line.cells, strict=True))["batch"].text == "unknown"
    assert dict(zip(columns, line.cells, strict=True))["samples/s"].text == ""


def test_an_imported_trace_is_labelled_and_its_few_steps_are_parts() -> None:
    (row,) = kinds()["imported"].rows
    assert row.labels == ("IMPORTED",)
    assert row.rounds == 1
    assert row.step
    assert row.step.n == 10
    assert not row.step.doubt
    assert "IMPORTED" in page.render(kinds()["imported"])
    (one,) = kinds()["one step"].rows
    assert one.doubt, "one step has no interval"
