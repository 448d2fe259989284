"""`dpbench run --profile`: one more step per trial as a Chrome trace, and nothing else changed."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from dpbench.hardware.devices import open_devices
from dpbench.measure.worker import profiling, trial
from dpbench.records import Case, Effort, Status

QUICK = Effort(budget_s=0.05, warmup_steps=1, min_steps=2, max_steps=4, block_steps=2)
DP = Case(model="mlp", strategy="dp", devices=2, batch_size=16, schedule="reference")


def operators(path: Path) -> dict[int, set[str]]:
    """Return the operators of a trace by their threads."""
    found = defaultdict(set)
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") == "cpu_op":
            found[event["tid"]].add(event["name"])
    return dict(found)


@pytest.mark.usefixtures("one_server")
def test_a_profiled_run_leaves_a_trace_of_every_thread_of_every_rank_beside_the_store(
    tmp_path, folder, dpbench
):
    axes = (
        "--models",
        "mlp",
        "--strategies",
        "single,dp,ddp",
        "--devices",
        "2",
        "--batch-sizes",
        "16",
    )
    code, _, err = dpbench("run", *axes, "--rounds", "1", "--profile")
    assert code == 0, err
    [(run_id,)] = folder.query("SELECT id FROM run")
    # the step that is profiled is none of the trial's
    counts = (
        "SELECT (SELECT count(*) FROM step WHERE trial_id=id), (SELECT max(step) FROM span WHERE"
        " trial_id=id)"
    )
    assert all(steps == last + 1 for steps, last in folder.query(f"{counts} FROM trial"))
    files = {path.name: path for path in (tmp_path / "dpbench.db.traces" / run_id).iterdir()}
    cut = sorted(name.replace(name.split("-16-")[1][:8], "") for name in files)
    assert cut == [
        "mlp-ddp-x2-batch-16--r0-rank0.json",
        "mlp-ddp-x2-batch-16--r0-rank1.json",
        "mlp-dp-reference-x2-batch-16--r0.json",
        "mlp-single-x1-batch-16--r0.json",
    ]
    for name, path in files.items():
        threads = operators(path).values()
        assert any("aten::addmm" in found for found in threads), name
        if "-dp-" in name:  # both replicas' forwards, each in its thread
            assert sum("aten::addmm" in found for found in threads) == 2


def test_what_profiling_cannot_do_leaves_the_trial_as_it_is(tmp_path, capfd):
    (tmp_path / "file").touch()
    effort = Effort(**{**vars(QUICK), "trace": str(tmp_path / "file" / "trace.json")})
    done = trial.run(DP, effort, tmp_path)
    assert done.status is Status.OK, done.reason
    assert {span.step for span in done.spans} == set(range(len(done.steps)))
    assert "no trace" in capfd.readouterr().err


def test_without_the_option_nothing_is_profiled(tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "trace", lambda *_: pytest.fail("profiled"))
    assert trial.run(DP, QUICK, tmp_path).status is Status.OK


@pytest.mark.gpu
def test_a_trace_of_a_gpu_step_has_its_kernels(tmp_path):
    import torch

    devices = open_devices("cuda", 1)
    matrix = torch.randn(64, 64, device="cuda")
    profiling.trace(lambda: matrix @ matrix, devices, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
