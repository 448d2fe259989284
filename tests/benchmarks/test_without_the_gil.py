"""The report without the GIL: its tables from stored pairs, and the direction of its ratios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.scripts import without_the_gil as script
from benchmarks.scripts import without_the_gil_report as report
from dpbench.analysis import stats
from dpbench.records import Case, Phase
from tests import environments

LOCK_MS = {Phase.FORWARD: 6.0, Phase.BACKWARD: 4.0}
"""What the lock adds to these phases of the step of `dp`."""
FREE_MS = {Phase.FORWARD: 10.0, Phase.BACKWARD: 20.0}


def side(gil: str, phases_ms: dict[Phase, float], number: int) -> dict[str, Any]:
    """Return one side of a pair: four steps, which differ between rounds by 1 %."""
    series = {
        phase: [round(1000 * ms * (1 + 0.01 * number))] * 4 for phase, ms in phases_ms.items()
    }
    return {"status": "ok", "reason": "", "verified": "bitwise", "gil": gil, "phases_us": series}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with four rounds of `dp`, its limit and a case that failed."""
    file = tmp_path / "cpu.jsonl.gz"
    script.append(file, environments.FACTS)
    model = next(iter(script.MODELS))
    dp = Case(model=model, strategy="dp", schedule="reference", devices=2, batch_size=16)
    locked = {phase: ms + LOCK_MS[phase] for phase, ms in FREE_MS.items()}
    alone = {phase: ms / 2 for phase, ms in FREE_MS.items()}
    failed = {"status": "failed", "reason": "no such thing", "verified": "not_applicable"}
    fsdp = Case(model=model, strategy="fsdp", devices=2, batch_size=16)
    for number in range(4):
        for case, sides in (
            (dp, [side("on", locked, number), side("off", FREE_MS, number)]),
            (script.limit(dp), [side("on", alone, number), side("off", alone, number)]),
            (fsdp, [side("on", locked, number), failed]),
        ):
            pair = {"case": case.to_dict(), "round": number, "load": "none", "sides": sides}
            script.append(file, pair)
    return tmp_path


@pytest.mark.parametrize("name", ["cpu", "emulated", "fake-gpus"])
def test_every_case_on_several_devices_has_its_limit(name: str) -> None:
    cases = script.planned(name)
    several = [case for case in cases if case.devices > 1]
    assert several
    assert {script.limit(case) for case in several} < {*cases}
    assert len({*cases}) == len(cases)


def test_a_ratio_above_one_is_faster_without_the_lock(folder: Path) -> None:
    dp, alone, fsdp = report.load(folder)["cpu"]
    assert stats.verdict(dp.gain) == "faster"
    assert dp.gain.value == pytest.approx(40 / 30)
    assert alone.gain.value == pytest.approx(1)
    assert fsdp.rounds == 0
    assert fsdp.failed[0] == "no such thing"


def test_the_costs_of_the_phases_sum_to_that_of_the_step(folder: Path) -> None:
    dp = report.load(folder)["cpu"][0]
    mean = 1.015  # of four rounds
    for phase, ms in LOCK_MS.items():
        assert dp.cost(phase).value == pytest.approx(mean * ms / 1e3)
    assert dp.cost().value == pytest.approx(mean * sum(LOCK_MS.values()) / 1e3)
    assert dp.share.value == pytest.approx(10 / 40)


def test_overlap_is_one_for_forwards_one_after_another(folder: Path) -> None:
    dp, alone, _ = report.load(folder)["cpu"]
    assert dp.overlap(alone, report.WITHOUT).value == pytest.approx(1)
    assert dp.overlap(alone, report.WITH).value == pytest.approx(10 / 16)
    assert dp.over(alone, report.WITH).value == pytest.approx(40 / 15)


def test_documents_and_figure_come_from_the_data_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "predicted", str)  # takes long, and does not come from the data
    page = folder / "README.md"
    page.write_text("Before.\n<!-- cpu -->\nold\n<!-- end -->\nAfter.\n")
    report.write(folder)
    text = page.read_text()
    assert "1.33×" in text
    assert "no such thing" in text
    assert "old" not in text
    assert text.startswith("Before.\n<!-- cpu -->\n|")
    assert text.endswith("|\n<!-- end -->\nAfter.\n")
    drawing = (folder / "phases.svg").read_bytes()
    report.write(folder)
    assert (text, drawing) == (page.read_text(), (folder / "phases.svg").read_bytes())


@pytest.mark.slow
def test_the_report_is_that_of_its_data() -> None:
    found = report.blocks(script.FOLDER)
    for document in (script.FOLDER / "README.md", report.TUTORIAL):
        text = document.read_text(encoding="utf-8")
        assert report.renewed(text, found) == text, (
            "run: python -m benchmarks.scripts.without_the_gil --table"
        )


def test_sides_without_the_lock_need_a_free_threaded_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.sysconfig, "get_config_var", lambda name: None)
    with pytest.raises(SystemExit, match="free-threaded"):
        script.measure("cpu", tmp_path / "cpu.jsonl.gz", 0.0)
    assert not [*tmp_path.iterdir()]
