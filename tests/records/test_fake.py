"""Fake GPUs: a run on them carries FAKE-GPU wherever its times are shown, and decides nothing."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dpbench as dp
from benchmarks.scripts import gallery
from dpbench.analysis import comparison, frames, imbalance, summary
from dpbench.analysis.decision import Basis, Choice, decide, questions
from dpbench.analysis.findings import text
from dpbench.analysis.forecasts import forecasts
from dpbench.cli import tables
from dpbench.doctor import probe
from dpbench.hardware import nvml
from dpbench.predict import machine
from dpbench.records import Case, Memory, Phase, Source, Status, Trial, fake
from dpbench.records.facts import TrialFacts
from dpbench.store import Store
from tests import observed_loops as loops
from tests.analysis.test_comparison import report, rounds
from tests.exported import Command, command, stored
from tests.trials import trial_of

NAMED = {"gpus": [{"name": "Fake GPU", "index": i} for i in range(2)]}
DRIVEN = {"driver": "580.00.fake", "gpus": [{"name": "NVIDIA A100", "index": i} for i in range(2)]}
REAL = {"driver": "580.65", "gpus": DRIVEN["gpus"]}
HOST = {"name": "bench-07", "cpu": "EPYC", "cores": 8, "system": "Linux", "machine": "x86_64"}
SINGLE = Case(model="mlp", strategy="single", batch_size=64, device_kind="cuda")
DDP = Case(model="mlp", strategy="ddp", devices=2, batch_size=64, device_kind="cuda")
FAST = rounds((SINGLE, 0.02, 0.04), (DDP, 0.01, 0.02))
"""A run in which ddp on two GPUs is twice as fast as one GPU."""
LABELS = ["MEASURED", "FAKE-GPU"]

both = pytest.mark.parametrize("gpus", [NAMED, DRIVEN], ids=["by name", "by driver"])


def facts(gpus: dict[str, Any]) -> dict[str, Any]:
    return {"host": HOST, "gpus": gpus, "packages": {"torch": "2.14.1"}}


def kept(folder: Path, gpus: dict[str, Any], trials: Sequence[Trial] = FAST) -> Path:
    """Return a store with one run on these GPUs."""
    stored(folder / "dpbench.db", *trials, provenance=facts(gpus))
    return folder / "dpbench.db"


@pytest.fixture
def dpbench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Command:
    return command(tmp_path, monkeypatch, capfd)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"gpus": NAMED}, True),
        ({"gpus": DRIVEN}, True),
        ({"gpu": "Fake GPU 80GB"}, True),
        ({"fake_gpus": True, "gpu": "NVIDIA A100"}, True),
        ({"gpus": REAL}, False),
        ({"gpus": {"gpus": [{"name": "Fake GPU"}, {"name": "NVIDIA A100"}]}}, False),
        ({"gpus": {"gpus": [], "physical_gpus": 0}}, False),
        ({}, False),
    ],
)
def test_gpus_are_fake_if_the_driver_or_all_names_say_so(
    found: dict[str, Any], expected: bool
) -> None:
    assert fake.fake_gpus(TrialFacts.of(found)) is expected


@both
def test_the_facts_of_a_stored_run_label_its_trials(tmp_path: Path, gpus: dict[str, Any]) -> None:
    cpu = replace(SINGLE, device_kind="cpu")
    out = Trial(case=replace(DDP, devices=4), status=Status.OOM, reason="out of memory")
    path = kept(tmp_path, gpus, [*FAST, out, *rounds((cpu, 0.02, 0.04))])
    for read in (Store.trials, Store.summaries):
        with Store.read(path) as opened:
            trials = read(opened, opened.runs()[0].id)
        for trial in trials:
            on_gpus = trial.case.device_kind == "cuda"
            assert ("FAKE-GPU" in summary.labels(trial)) is on_gpus
    rows = {row.case: row for row in summary.rows(trials)}
    assert "FAKE-GPU" in rows[out.case].labels, "also a case without a result"


def test_real_gpus_and_predictions_for_them_have_no_such_label(tmp_path: Path) -> None:
    predicted = [replace(one, source=Source.PREDICTED, round=0) for one in FAST[:1]]
    with Store.read(kept(tmp_path, REAL, [*FAST, *predicted])) as opened:
        found = opened.trials()
    assert {summary.labels(one) for one in found} == {("MEASURED",), ("PREDICTED",)}


@both
def test_a_run_on_fake_gpus_is_no_answer_and_says_why(tmp_path: Path, gpus: dict[str, Any]) -> None:
    run = dp.load(kept(tmp_path, gpus))
    (question,) = questions(summary.rows(run.trials))
    assert decide(question).basis is Basis.FAKE_GPU
    (answer,) = run.answers
    assert (answer.choice, answer.row) == (Choice.UNKNOWN, None)
    assert fake.WHY in answer.headline
    assert answer.epoch_s(10**6) == (None, None)
    assert fake.WHY in answer.epoch(10**6)
    assert answer.command.startswith("dpbench predict ")
    assert "FAKE-GPU" in answer.labels
    assert "fake" in {one.key for one in run.analysis.remarks}
    (diagnosis,) = run.analysis.diagnoses
    assert diagnosis.findings == ()
    assert fake.WHY[1:] in " ".join(text.render([diagnosis]).split())


def test_no_imbalance_of_times_is_judged_on_fake_gpus_but_that_of_memory_is() -> None:
    def trials(**facts: Any) -> list[Trial]:
        dp = replace(DDP, strategy="torch_dp")
        return [
            replace(
                trial_of(
                    case,
                    [0.01] * 4,
                    round=number,
                    provenance=facts,
                    parts=[(Phase.FORWARD, 0, 0.0, most), (Phase.FORWARD, 1, 0.0, 0.5)],
                ),
                memory=tuple(
                    Memory(device, int(1e6 * size), "allocator")
                    for device, size in enumerate((most, 0.5))
                ),
            )
            for number in range(3)
            for case, most in ((dp, 0.9), (DDP, 0.5))
        ]

    verdicts = {
        fakes: {
            index.quantity: index.verdict
            for index in imbalance.indexes(trials(**{"fake_gpus": fakes}))
            if index.case.strategy == "torch_dp"
        }
        for fakes in (False, True)
    }
    assert {*verdicts[False].values()} == {"above the control"}
    assert verdicts[True].pop("memory, allocated") == "above the control"
    assert verdicts[True]
    assert all(fake.WHY in verdict for verdict in verdicts[True].values())


def test_the_same_times_on_real_gpus_are_an_answer(tmp_path: Path) -> None:
    (answer,) = dp.load(kept(tmp_path, REAL)).answers
    assert (answer.choice, answer.row and answer.row.case) == (Choice.USE, DDP)


@pytest.mark.sibling("observe")
def test_a_loop_watched_on_fake_gpus_is_no_answer(tmp_path: Path) -> None:
    loop = loops.loop(of=loops.case(device_kind="cuda"))
    answers = {}
    for name, gpus in (("fake", DRIVEN), ("real", REAL)):
        (tmp_path / name).mkdir()
        (answers[name],) = dp.load(kept(tmp_path / name, gpus, loop)).answers
    assert (answers["real"].choice, answers["fake"].choice) == (Choice.KEEP, Choice.UNKNOWN)
    assert fake.WHY in answers["fake"].headline
    assert "FAKE-GPU" in answers["fake"].labels
    assert answers["fake"].epoch_s(10**6) == (None, None)


# -- every form carries the label


@both
def test_tables_and_pages_carry_the_label(
    tmp_path: Path, gpus: dict[str, Any], dpbench: Command
) -> None:
    kept(tmp_path, gpus)
    for table in (dpbench("show")[1], tables.table(dp.load("dpbench.db").analysis.rows)):
        lines = [line for line in table.splitlines() if re.match(r" *mlp.* +(single|ddp) ", line)]
        assert len(lines) == 2
        shared = re.search("^all cases: .*MEASURED FAKE-GPU$", table, re.M)
        assert shared or all("MEASURED FAKE-GPU" in line for line in lines)
    shown = json.loads(dpbench("show", "--json")[1])
    assert [case["labels"] for case in shown["cases"]] == [LABELS] * 2
    explained = json.loads(dpbench("explain", "--json")[1])
    assert [answer["labels"] for answer in explained["answers"]] == [LABELS]
    page = dp.load("dpbench.db").report("page.html").read_text(encoding="utf-8")
    assert len(re.findall(r'class="badge FAKE-GPU"', page)) > 3
    assert ".badge.FAKE-GPU" in page
    legends = [svg for svg in re.findall(r"<svg.*?</svg>", page, re.S) if "[FAKE-GPU] ddp" in svg]
    assert legends, "the speed-up"
    assert "`FAKE-GPU`" in dpbench("report", "--md")[1]
    assert "[MEASURED FAKE-GPU]" in dpbench("explain", "--all")[1]


@both
def test_every_export_carries_the_label(
    tmp_path: Path, gpus: dict[str, Any], dpbench: Command
) -> None:
    path = kept(tmp_path, gpus)
    jsonl = [json.loads(line) for line in dpbench("export", "jsonl")[1].splitlines()]
    assert [line["labels"] for line in jsonl] == [LABELS] * len(FAST)
    rows = [*csv.DictReader(io.StringIO(dpbench("export", "csv")[1]))]
    assert [row["labels"] for row in rows] == [" ".join(LABELS)] * 2
    suite = json.loads(dpbench("export", "pyperf")[1])
    assert [one["metadata"]["labels"] for one in suite["benchmarks"]] == [" ".join(LABELS)] * 2
    trace = json.loads(dpbench("export", "trace")[1])
    assert "FAKE-GPU" in json.dumps(trace)
    assert dpbench("export", "trace", "--case", 2, "--split", "ranks")[0] == 0
    (first, *_) = sorted((tmp_path / "ranks").iterdir())
    assert "FAKE-GPU" in first.read_text(encoding="utf-8")
    with Store.read(path) as opened:
        table = frames.steps("run", opened.trials())  # the columns of the format parquet
    assert set(table["labels"]) == {" ".join(LABELS)}


def test_an_export_read_again_and_a_merged_store_keep_the_label(
    tmp_path: Path, dpbench: Command
) -> None:
    kept(tmp_path, DRIVEN)
    dpbench("export", "jsonl", "--output", "run.jsonl")
    again = dp.open_trials(tmp_path / "run.jsonl")
    assert {row.labels for row in again.analysis.rows} == {tuple(LABELS)}
    stored(tmp_path / "all.db", *FAST, provenance=facts(REAL))
    assert dpbench("merge", "dpbench.db", "--store", "all.db")[0] == 0
    with Store.read(tmp_path / "all.db") as opened:
        by_run = [{summary.labels(one) for one in opened.trials(run.id)} for run in opened.newest()]
    assert len(by_run) == 2
    assert {("MEASURED",)} in by_run
    assert {tuple(LABELS)} in by_run


# -- times on fake GPUs are compared with no others


@pytest.mark.parametrize("unlike", [False, True])
def test_a_comparison_of_fake_with_real_gpus_is_refused(tmp_path: Path, unlike: bool) -> None:
    on_fakes = [replace(one, provenance={"fake_gpus": True}) for one in FAST]
    for pair in ((on_fakes, FAST), (FAST, on_fakes)):
        with pytest.raises(ValueError, match="FAKE-GPU"):
            comparison.between(*map(report, pair), unlike=unlike)
    (line, *_) = comparison.between(report(on_fakes), report(on_fakes)).lines
    assert "FAKE-GPU" in line.labels


def test_the_command_that_compares_them_ends_with_wrong_usage(
    tmp_path: Path, dpbench: Command
) -> None:
    first = stored(tmp_path / "dpbench.db", *FAST, provenance=facts(DRIVEN))
    second = stored(tmp_path / "dpbench.db", *FAST, provenance=facts(REAL))
    code, out, said = dpbench("compare", first[:12], second[:12], "--unlike")
    assert (code, out) == (64, "")
    assert said.startswith("error: ")
    assert "FAKE-GPU" in said


def test_no_prediction_rests_on_times_on_fake_gpus(tmp_path: Path, dpbench: Command) -> None:
    arguments = ("predict", "--machine", "rtx-3090-x8", "--models", "mlp", "--size", "small")
    arguments += ("--devices", "1", "--batch-sizes", "64", "--from", "dpbench.db")
    kept(tmp_path, REAL)
    assert dpbench(*arguments)[0] == 0
    (tmp_path / "dpbench.db").unlink()
    kept(tmp_path, DRIVEN)
    code, _, said = dpbench(*arguments)
    assert code == 64
    assert "fake GPUs" in said


def test_no_prediction_rests_on_a_loop_watched_on_fake_gpus(
    tmp_path: Path, dpbench: Command
) -> None:
    kept(
        tmp_path,
        DRIVEN,
        loops.loop(of=loops.case(device_kind="cuda"), facts={"model": loops.MODEL}),
    )
    code, _, said = dpbench("predict", "--machine", "rtx-3090-x8", "--from", "dpbench.db")
    assert code == 64
    assert fake.WHY in said


def test_predictions_for_fake_gpus_and_their_comparison_with_a_run_on_them_carry_the_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dpbench: Command
) -> None:
    text = machine.text_of_machine("rtx-3090-x8")
    text = re.sub(r'(?m)^name = ".*"$', 'name = "Fake GPU"', text, count=1)
    (tmp_path / "here.toml").write_text(text, encoding="utf-8")
    kept(tmp_path, NAMED)
    arguments = ("predict", "--machine", "here.toml", "--models", "mlp", "--devices", "1,2")
    arguments += ("--size", "small", "--batch-sizes", "64")
    code, out, _ = dpbench(*arguments, "--store", "dpbench.db")
    assert code == 0
    assert re.search("^all cases: .*PREDICTED FAKE-GPU$", out, re.M)
    cases = json.loads(dpbench(*arguments, "--json")[1])["cases"]
    assert {tuple(case["labels"]) for case in cases} == {("PREDICTED", "FAKE-GPU")}
    with Store.read(tmp_path / "dpbench.db") as opened:
        measured = opened.runs()[1].id
    report = dp.load(tmp_path / "dpbench.db", run=measured).analysis
    found = forecasts(report.rows, report.past, report.run.facts)
    assert found
    assert all({*LABELS, "PREDICTED"} == {*one.labels} for one in found)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [(REAL, "NVIDIA A100"), (DRIVEN, "Fake GPU NVIDIA A100"), (NAMED, "Fake GPU")],
)
def test_the_probes_file_names_fake_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: dict[str, Any], expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: gpus["gpus"][i]["name"])
    assert probe._gpu_names(2, gpus) == (expected, expected)


# -- no page of this repository is made from them


def test_the_gallery_refuses_a_run_on_fake_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = kept(tmp_path, DRIVEN)
    folder = tmp_path / "reports"
    given = ["gallery", "one", "--about", "it", "--store", str(path), "--reports", str(folder)]
    monkeypatch.setattr("sys.argv", given)
    with pytest.raises(SystemExit) as ended:
        gallery.main()
    assert ended.value.code == 2
    assert "FAKE-GPU" in capsys.readouterr().err
    assert not folder.exists()


def test_no_run_of_the_gallery_was_on_fake_gpus() -> None:
    entries = [*gallery.REPORTS.glob(f"*/{gallery.FACTS}")]
    assert entries
    for path in entries:
        assert "FAKE-GPU" not in json.loads(path.read_text(encoding="utf-8"))["labels"]


# -- on the fakes; on real GPUs, no label


SCRIPT = """
import torch
from torch import nn

model = nn.Linear(8, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(16):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(torch.randn(8, 8).cuda()), torch.randn(8, 4).cuda())
    loss.backward()
    optimizer.step()
"""


@pytest.mark.gpu
@pytest.mark.slow
def test_a_run_and_a_watched_script_carry_the_label_on_fake_gpus_alone(tmp_path: Path) -> None:
    """FAKECUDA_NAME hides the name of the fakes; the driver still says what they are."""
    (tmp_path / "train.py").write_text(SCRIPT)
    environ = {**os.environ, "PYTHONPATH": str(gallery.REPORTS.parent), "DPBENCH_PATIENCE": "0"}
    environ |= {"FAKECUDA_NAME": "NVIDIA A100"}
    run = "run --models mlp --strategies single --devices 1 --rounds 1 --batch-sizes 8 --budget 5"
    run += " --report page.html --quiet"
    for arguments in (run, "watch train.py"):
        command = [sys.executable, "-m", "dpbench", *arguments.split(), "--store", "dpbench.db"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode in (0, 3), done.stderr
    on_fakes = fake.fake_gpus(TrialFacts.of({"gpus": nvml.describe()}))
    with Store.read(tmp_path / "dpbench.db") as opened:
        of_run = [opened.trials(one.id) for one in opened.runs()]
    assert len(of_run) == 2
    for trials in of_run:
        assert trials
        assert all(("FAKE-GPU" in summary.labels(one)) is on_fakes for one in trials)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert ('class="badge FAKE-GPU"' in page) is on_fakes
