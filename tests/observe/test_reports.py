"""Reports, tables, exports and comparisons of watched runs and imported traces."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dpbench import load
from dpbench.analysis.report import Report
from dpbench.cli import tables
from dpbench.records import Case, Phase, Source, Trial
from dpbench.report import figures, markdown, notebook, page, table
from dpbench.store import Naming
from tests import observed_loops as loops
from tests.exported import command, stored
from tests.trials import report_on


def report(trials: Sequence[Trial], facts: dict[str, Any] = loops.FACTS) -> Report:
    summaries = [trial.summary() for trial in trials]
    return report_on(summaries, facts)


@functools.cache
def kinds() -> dict[str, Report]:
    """Return a report of each kind of observed run."""
    unknown = loops.case(batch_size=0)
    four = loops.case(devices=4, device_kind="cuda")
    trace = loops.case(batch_size=0, device_kind="cuda", model="trace.json.gz")
    imported = loops.loop(of=trace, source=Source.IMPORTED, rounds=1, busy={0: 0.003})
    return {
        "plain": report(loops.loop()),
        "unknown batch": report(loops.loop(of=unknown)),
        "data parallel": report(
            loops.loop(loops.parallel(), four, memory=(9, 3, 3, 3)), loops.GPU_FACTS
        ),
        "imported": report(imported, loops.GPU_FACTS),
        "one step": report(loops.loop(rounds=1, steps=1)),
    }


every_kind = pytest.mark.parametrize(
    "kind", ["plain", "unknown batch", "data parallel", "imported", "one step"]
)


@every_kind
def test_every_format_shows_an_observed_run_without_comparisons(kind: str) -> None:
    found = kinds()[kind]
    for text in (
        page.render(found),
        markdown.render(found),
        tables.table(found.rows),
        notebook.render(found),
    ):
        assert "train.py" in text or "trace.json.gz" in text
        for word in ("speed-up", "effic", "not_applicable", "nan", "verified"):
            assert word not in text.partition("How it was measured")[0].rpartition("</style>")[2], (
                kind,
                word,
            )


def test_the_page_has_the_sections_that_an_observed_run_has_data_for() -> None:
    assert [one.id for one in figures.sections(kinds()["plain"])] == [
        "lanes",
        "steps",
    ]
    assert [one.id for one in figures.sections(kinds()["unknown batch"])] == [
        "lanes",
        "steps",
    ]
    assert "memory-by-phase" not in {one.id for one in figures.sections(kinds()["imported"])}


def test_an_unknown_batch_has_no_throughput_and_is_called_unknown() -> None:
    (row,) = kinds()["unknown batch"].rows
    assert row.throughput is None
    assert row.case.rows == (0,)
    assert Case(
        model="m", strategy="s", batch_size=0, devices=4, declared=loops.case(devices=4).declared
    ).label
    columns, (line,), _ = table.all_cases(kinds()["unknown batch"])
    assert dict(zip(columns, line.cells, strict=True))["batch"].text == "unknown"


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


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with an imported trace and two watched runs, one with a slower loader."""
    path = tmp_path_factory.mktemp("observed") / "dpbench.db"
    stored(path, *loops.loop(), provenance=loops.FACTS, naming=Naming(name="before"))
    slow = loops.loop(loops.with_part(Phase.DATA, 0.01), loader_workers=0, seed=1)
    stored(path, *slow, provenance=loops.FACTS, naming=Naming(name="after"))
    trace = loops.case(batch_size=0, device_kind="cuda", model="trace.json.gz")
    stored(
        path, *loops.loop(of=trace, source=Source.IMPORTED, rounds=1), provenance=loops.GPU_FACTS
    )
    return path


def test_every_command_reads_watched_runs_and_imported_traces(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    call = command(tmp_path, monkeypatch, capfd)

    def said(*arguments: object, code: int = 0) -> str:
        got, out, err = call(*arguments, "--store", store)
        assert got == code, err
        assert "Traceback" not in err
        return out

    assert "nothing stands out" in said("report", "--md", "--run", "@before")
    assert json.loads(said("report", "--json"))["cases"][0]["samples_per_s"] is None
    explained = json.loads(said("explain", "--json", "--run", "@after"))
    (answer,) = explained["answers"]
    assert (answer["choice"], answer["problem"]) == ("change the loop", "loading")
    assert answer["cost"]["value"] == pytest.approx(0.51, abs=0.005)
    said_all = " ".join(said("explain", "--all", "--run", "@after").split())
    assert answer["headline"] in said_all
    assert explained["diagnoses"][0]["findings"][0]["command"].startswith("dpbench loaders")
    said("report", "--report", tmp_path / "page.html")
    assert "IMPORTED" in (tmp_path / "page.html").read_text()
    assert "train.py" in said("list", "runs")
    assert "train.py script x1 batch 64" in said("show", "@before")
    assert "batch unknown" in said("show", "@last")
    compared = said("compare", "@before", "@after", code=1)
    assert "slower" in compared
    assert "data +" in compared
    assert "parts of one execution" in compared
    got, _, refused = call("compare", "@after", "@last", "--store", store)
    assert got == 64
    assert "trace: none, then imported" in refused
    for format in ("jsonl", "csv", "trace", "pyperf"):
        assert said("export", format, "--run", "@before")
    assert "imported" in said("export", "jsonl")
    found = load(store, "@after")
    assert found.frame["throughput_value"].notna().all()
    assert load(store).frame["throughput_value"].isna().all()
    assert load(store).answers[0].labels == ("IMPORTED",)
