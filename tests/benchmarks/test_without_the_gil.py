"""The report without the GIL: its tables from stored pairs, and the direction of its ratios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.scripts import without_the_gil as script
from benchmarks.scripts import without_the_gil_report as report
from dpbench.analysis import stats
from dpbench.records import Case, Phase, Trial
from dpbench.records.series import Step
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
    assert fsdp.failure(report.SIDES) == (
        "failed with the lock in 0 and without it in 4 (no such thing) of 4 rounds"
    )


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


def pair(folder: Path, name: str, number: int, *sides: dict[str, Any], load: str = "none") -> None:
    """Add a pair of `dp` to a set."""
    file = folder / f"{name}.jsonl.gz"
    if not file.exists():
        script.append(file, environments.FACTS)
    model = next(iter(script.MODELS))
    dp = Case(model=model, strategy="dp", schedule="reference", devices=2, batch_size=16)
    said = {"case": dp.to_dict(), "round": number, "load": load, "sides": sides}
    script.append(file, said)


def test_a_side_that_failed_in_some_rounds_is_said(tmp_path: Path) -> None:
    failed = {"status": "failed", "reason": "one | two\n<!-- end -->", "verified": "no"}
    for number in range(4):
        for name in ("cpu", "control"):
            sides = [side("on", FREE_MS, number), side("off", FREE_MS, number)]
            pair(tmp_path, name, number, sides[0], failed if number == 1 else sides[1])
    found = report.blocks(tmp_path)
    for name in ("answer", "cpu", "without the lock"):
        text = " ".join(found[name].split())
        assert r"with the lock in 0 and without it in 1 (one \| two" in text
        assert "of 4 rounds" in text
    assert "on the second in 1" in found["control"]
    for text in found.values():
        assert "<!-- end" not in text
        for block in text.split("\n\n"):
            lines = [line for line in block.splitlines() if line.startswith("|")]
            assert len({line.count("|") for line in lines}) < 2


@pytest.mark.parametrize("stored", [True, False])  # data from before trials stated their load
def test_noisy_rounds_are_left_out_and_counted(tmp_path: Path, stored: bool) -> None:
    loads = {2: "other processes took 40% and other virtual machines 1% of 2 cores"}
    for number in range(4):
        busy = number in loads
        longer = {phase: ms * (9 if busy else 1) for phase, ms in FREE_MS.items()}
        sides = [side("on", longer, 0), side("off", FREE_MS, 0)]
        if stored:
            foreign = {"foreign": 0.4 * busy, "steal": 0.0, "cores": 2, "seconds": 9.0}
            sides = [one | {"foreign_load": foreign} for one in sides]
        quiet = "other processes took 0% of 2 cores"
        text = quiet if stored else loads.get(number, quiet)
        pair(tmp_path, "cpu", number, *sides, load=text)
    (dp,) = report.load(tmp_path)["cpu"]
    assert (dp.rounds, dp.left_out, dp.noisy) == (3, 1, 0)
    assert dp.gain.value == pytest.approx(1)
    assert "| 3, 1 NOISY left out |" in report.blocks(tmp_path)["cpu"]


def test_noisy_rounds_that_remain_decide_nothing(tmp_path: Path) -> None:
    locked = {phase: ms + LOCK_MS[phase] for phase, ms in FREE_MS.items()}
    for number in range(4):
        load = f"other processes took {40 * (number > 1)}% of 2 cores"
        sides = [side("on", locked, number), side("off", FREE_MS, number)]
        pair(tmp_path, "cpu", number, *sides, load=load)
    (dp,) = report.load(tmp_path)["cpu"]
    assert dp.counted == "4, 2 NOISY"
    assert stats.verdict(dp.gain) == "undecided"
    assert "(4 rounds each), of `host`: 1 undecided. These data cannot tell" in report.answer(
        {"cpu": [dp]}
    )
    assert dp.gain.noisy
    assert dp.cost().noisy
    assert dp.share.noisy


def test_what_is_decided_by_phase_holds_for_all_phases_together(tmp_path: Path) -> None:
    for number, cost_ms in enumerate((1.0, 2.0, 3.0, 4.0)):
        locked = {**FREE_MS, Phase.FORWARD: FREE_MS[Phase.FORWARD] + cost_ms}
        pair(tmp_path, "cpu", number, side("on", locked, 0), side("off", FREE_MS, 0))
    (dp,) = report.load(tmp_path)["cpu"]
    assert dp.cost(Phase.FORWARD).low > 0
    assert report.most(dp, stats.CONFIDENCE)
    assert not report.most(dp, stats.joint_level(2))
    text = report.blocks(tmp_path)["answer"]
    assert "no phase is decidedly shorter" in text
    assert "of 1 step of DataParallel (4 rounds each), of `host`: 1 faster without the lock" in text
    assert "cannot tell" not in text
    row = text.splitlines()[4]
    assert "| backward, 62% (" in row
    assert row.endswith("| – |")


def test_phases_that_the_lock_shortens_and_lengthens_are_counted(folder: Path) -> None:
    (dp, *_) = report.load(folder)["cpu"]
    assert report.by_phase([dp, dp], 0.95) == (
        "By phase, of 2 steps: forward is shorter without the lock in 2 and longer in 0;"
        " backward is shorter without the lock in 2 and longer in 0."
    )


def test_only_sides_without_the_lock_count_as_checked_without_it(folder: Path) -> None:
    for number in range(3):
        pair(folder, "control", number, *[side("on", FREE_MS, number)] * 2)
    cpu, control = report.circumstances(folder).splitlines()
    assert "without the lock, compared with the reference: bitwise (8 times)." in cpu
    assert "Gradients" not in control
    assert "Not stored: the code that measured it" in cpu


def test_a_trial_keeps_its_foreign_load(folder: Path) -> None:
    load = {"foreign": 0.3, "steal": 0.0, "cores": 2, "seconds": 2.0}
    trial = Trial(
        case=report.load(folder)["cpu"][0].case,
        steps=(Step(seconds=0.5, warmup=False, end_s=1.0),),
        provenance={"gil": "on", "foreign_load": load},
    )
    assert script.plain(trial, "1")["foreign_load"] == load


def test_pairs_of_other_code_or_variables_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHON_GIL", raising=False)  # as `measure` does
    file, now = tmp_path / "control.jsonl.gz", script.facts("control")
    for changed, text in (
        ({"code": "old"}, "other code"),
        ({"fakes": {"FAKECUDA_DEVICES": "3"}}, "other variables of fake GPUs"),
        ({"python": "3.9.1"}, "another environment"),
    ):
        file.unlink(missing_ok=True)
        script.append(file, now | changed)
        with pytest.raises(SystemExit, match=text):
            script.measure("control", file, 0.0)


def test_unknown_facts_and_the_lock_of_the_interpreter_refuse_nothing() -> None:
    now = script.facts("control")
    assert script.unlikeness(now | {"gil": "off"}, now | {"gil": "on"}) == ""
    earlier = {name: value for name, value in now.items() if name not in ("code", "fakes")}
    assert script.unlikeness(earlier, now) == ""
    assert "FAKECUDA_*" in script.unknown_facts(earlier)
    assert script.unknown_facts(now) == ""


@pytest.mark.slow
def test_the_report_is_that_of_its_data() -> None:
    assert {*report.load(script.FOLDER)} == {*script.SETS}
    found = {**report.blocks(script.FOLDER), "predicted": report.predicted()}
    assert not {*found.values()} & {report.MISSING, "Not predicted."}
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
