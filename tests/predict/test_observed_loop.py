"""Predictions from a watched or imported run: a profile of it, or the missing fact's name."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpbench.analysis.findings import Diagnosis
from dpbench.analysis.findings.text import headline
from dpbench.predict import counts, findings, machine, observed_loop
from dpbench.predict.cases import Predictor
from dpbench.predict.machine import UnknownMachine
from dpbench.records import Case, Phase, Source, Trial
from dpbench.records.observed import Unknown
from dpbench.store import Naming, Store
from tests import exported
from tests import observed_loops as loops
from tests.exported import command
from tests.observe.kineto_files import EXCERPTS
from tests.trials import report_on

MACHINE = machine.load("rtx-3090-x8")
GPU = loops.case(device_kind="cuda")


def loop_of(*arguments: Any, **more: Any) -> observed_loop.ObservedLoop:
    found = observed_loop.of_run(loops.loop(*arguments, **more), "NVIDIA GeForce RTX 3090")
    assert found
    return found


def test_the_profile_of_one_device_has_the_seconds_of_its_phases() -> None:
    found = loop_of(of=GPU, noise=0.0).on(MACHINE)
    assert found.batches == (64,)
    assert found.profile.source == "measured"
    assert found.profile.parameter_bytes == 4e6
    assert found.profile.forward
    assert found.profile.forward.at(64) == pytest.approx(0.004, rel=1e-3)
    assert found.words.startswith("train.py: its launches are estimated")
    assert "MEASURED" in found.words
    assert "may be far off" not in found.words


def test_data_parallel_gives_the_profile_of_a_share_of_the_batch() -> None:
    four = loops.case(devices=4, device_kind="cuda")
    found = loop_of(loops.parallel(), four, wrapper="DataParallel", noise=0.0).on(MACHINE)
    assert found.batches == (16,)
    assert found.profile.forward
    assert found.profile.forward.at(16) == pytest.approx(0.01)
    assert found.profile.loss
    assert found.profile.loss.at(16) == pytest.approx(0.001 / 4), (
        "device 0 computes the loss of all four shares"
    )


def test_ddp_divides_backward_among_its_buckets_and_does_not_repeat_it() -> None:
    profile = loop_of(of=GPU, noise=0.0).on(MACHINE).profile
    one = Case(model="train.py", strategy="single", batch_size=64, device_kind="cuda")
    two = replace(one, strategy="ddp", devices=2)
    predictor = Predictor(MACHINE, measured={("train.py", "small", "fp32"): profile})
    spans = predictor.predict(two).spans
    backward_s = sum(
        span.end_s - span.start_s
        for span in spans
        if span.phase is Phase.BACKWARD and span.device == 0
    )
    assert predictor.predict(one).seconds == pytest.approx(0.0098, rel=0.02)
    assert 0.0025 < backward_s < 0.0045, "half of 5 ms, and the cost of the concurrent reduction"


LACKING: dict[str, tuple[Callable[[], observed_loop.ObservedLoop], str]] = {
    "batch": (
        lambda: loop_of(of=replace(GPU, batch_size=0)),
        "its batch size is unknown; import its trace with batch=, or give models=",
    ),
    "model": (
        lambda: loop_of(of=GPU, facts={"model": {"parameter_tensors": 4}}),
        "its run lacks .*parameter_bytes",
    ),
    "phases": (
        lambda: loop_of(
            of=GPU, unknown=(Unknown(problem="no kernels", steps=10, hides_phases=True),)
        ),
        "its trace leaves the phases unknown",
    ),
    "precision": (lambda: loop_of(of=replace(GPU, precision="fp16")), "it used fp16"),
    "processor": (lambda: loop_of(of=loops.case()), "kind cpu"),
    "steps": (lambda: replace(loop_of(of=GPU), trials=()), "it has no usable timed step"),
}


@pytest.mark.parametrize("fact", LACKING)
def test_a_loop_that_lacks_a_fact_is_refused_with_the_fact(fact: str) -> None:
    make, said = LACKING[fact]
    with pytest.raises(
        UnknownMachine, match=f"the loop train.py cannot be the basis of a prediction.*{said}"
    ):
        make().on(MACHINE)


def test_the_command_takes_a_run_by_file_and_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "dpbench.db"
    exported.stored(
        path, *loops.loop(of=GPU), provenance=loops.GPU_FACTS, naming=Naming(name="mine")
    )
    own = [
        replace(one, provenance={k: v for k, v in one.provenance.items() if k != "observed"})
        for one in loops.loop()
    ]
    single = replace(
        own[0], case=Case(model="mlp", strategy="single", batch_size=64), source=Source.MEASURED
    )
    exported.stored(path, single, provenance=loops.GPU_FACTS, naming=Naming(name="single"))
    call = command(tmp_path, monkeypatch, capfd)
    usual = (
        "predict",
        "--machine",
        "rtx-3090-x8",
        "--devices",
        "1,2",
        "--strategies",
        "single,ddp",
        "--json",
    )
    for source in ("@mine", str(path), f"{path}:@mine"):
        code, out, err = call(*usual, "--from", source)
        assert code == 0, err
        found = json.loads(out)
        assert [one["case"]["batch_size"] for one in found["cases"]] == [64, 64, 64]
        assert all("PREDICTED" in one["labels"] for one in found["cases"])
        assert "MEASURED" in found["measured_steps"][0]
    for arguments, said in (
        (("--from", "@single"), "has no watched or imported loop"),
        (("--from", "@none"), "no run with the name"),
        (("--from", f"{path}:@mine", "--models", "mlp"), "without a run"),
    ):
        code, _, err = call(*usual, *arguments)
        assert code == 64
        assert said in err
    monkeypatch.chdir(tmp_path.parent)
    code, _, err = call(*usual, "--from", "nowhere.db")
    assert code == 2
    assert "there is no such file" in err


def diagnosis(trials: Sequence[Trial], facts: Mapping[str, Any] = loops.GPU_FACTS) -> Diagnosis:
    return report_on(trials, facts).diagnoses[0]


def test_the_gain_of_ddp_over_data_parallel_is_predicted_from_the_loop_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    four = loops.case(devices=4, device_kind="cuda")
    trials = loops.loop(loops.parallel(first=2.0), four, wrapper="DataParallel")
    loop = observed_loop.of_run([one.summary() for one in trials], "NVIDIA GeForce RTX 3090")
    assert loop
    known = findings.alternative(loop)
    assert known.low_s < known.seconds < 0.05
    assert known.seconds < known.high_s < 0.055
    assert "rtx-3090" in known.machine
    (found,) = (one for one in diagnosis(trials).findings if one.rule.key == "predicted ddp")
    assert found.labels == ("MEASURED", "PREDICTED")
    assert "is predicted to save" in headline(found)
    assert f"on {known.machine}, the slowest" in found.evidence.numbers
    assert found.evidence.size_s
    assert found.evidence.size_s.value == pytest.approx(0.0599 - known.seconds, abs=2e-4)
    slower = replace(known, seconds=0.07, low_s=0.065, high_s=0.075)
    monkeypatch.setattr(findings, "alternative", lambda loop: slower)
    assert "predicted ddp" not in {one.rule.key for one in diagnosis(trials).findings}


def test_without_a_described_machine_the_gain_of_ddp_is_a_question_with_its_reason() -> None:
    four = loops.case(devices=4, device_kind="cuda")
    facts = {**loops.GPU_FACTS, "gpus": {"gpus": [{"name": "NVIDIA GB999"}] * 4}}
    trials = loops.loop(loops.parallel(), four, wrapper="DataParallel")
    asked = (
        "whether DistributedDataParallel is faster (no described machine has 4 GPUs of the model"
    )
    assert any(f"{asked} NVIDIA GB999" in one for one in diagnosis(trials, facts).unjudged)
    (one_device,) = [diagnosis(loops.loop(of=GPU))]
    assert not any("DistributedDataParallel" in one for one in one_device.unjudged)


# ---------------------------------------------------------------- imported traces

V100, A100 = EXCERPTS / "v100-loader-workers-4.json.gz", EXCERPTS / "a100-x2-ddp-rank0.json.gz"


def test_a_trace_of_one_gpu_predicts_several_of_the_same(
    tmp_path: Path, dpbench: exported.Command
) -> None:
    """The trace is ResNet-50 on a V100 of a DGX Station, batch 32, with shapes."""
    assert dpbench("import", str(V100), "--batch", "32", "--store", "v.db")[0] == 0
    with Store.read(tmp_path / "v.db") as opened:
        (trial,) = opened.trials(next(iter(opened.newest())).id)
    model = trial.provenance["model"]
    resnet50 = counts.of(Case(model="resnet50", strategy="single", batch_size=1))
    assert model["parameter_tensors"] == resnet50.parameter_tensors
    assert model["parameter_bytes"] == resnet50.parameter_bytes
    assert model["buffer_bytes"] == resnet50.buffer_bytes
    assert model["input_bytes"] == 3 * 224 * 224 * 4 + 8
    assert model["output_bytes"] == 1000 * 4
    code, out, err = dpbench(
        *("predict", "--machine", "dgx-station-v100", "--from", "v.db", "--json"),
        *("--devices", "1,4", "--batch-per-device", "32"),
    )
    assert code == 0, err
    found = {
        (one["case"]["strategy"], one["case"]["devices"]): one for one in json.loads(out)["cases"]
    }
    alone = found["single", 1]["step_s"]["value"]
    timed = [step.seconds for step in trial.steps if not step.warmup]
    assert alone == pytest.approx(statistics.median(timed), rel=0.05)
    for strategy, most in (("ddp", 1.25), ("torch_dp", 1.6)):
        step = found[strategy, 4]["step_s"]
        assert 0.9 * alone < step["low"] < step["value"] < step["high"]
        assert alone < step["value"]
        assert step["value"] < most * alone
        assert found[strategy, 4]["profile"] == "measured"


@pytest.mark.parametrize(
    ("trace", "arguments", "said"),
    [
        (V100, (), "its batch size is unknown; import its trace with --batch"),
        (A100, ("--batch", "64"), "its trace is of one of 2 ranks"),
    ],
)
def test_a_trace_that_is_no_basis_is_refused_with_the_way_out(
    trace: Path, arguments: tuple[str, ...], said: str, dpbench: exported.Command
) -> None:
    assert dpbench("import", str(trace), *arguments, "--store", "t.db")[0] == 0
    code, _, err = dpbench("predict", "--machine", "dgx-a100", "--from", "t.db")
    assert code == 64
    assert said in err
