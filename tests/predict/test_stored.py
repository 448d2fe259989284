"""Profiles from a results file: a device's steps in the newest run, or the message if none."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dpbench.predict import counts, machine, stored
from dpbench.predict.cases import Predictor, keep
from dpbench.predict.deviations import NONE, Deviation
from dpbench.predict.machine import UnknownMachine
from dpbench.predict.stored import of_trials
from dpbench.predict.work import Cost
from dpbench.records import Case, Phase, Source, Span, Step, Trial
from dpbench.records.registry import Parallelism
from dpbench.store import Identity, Store
from tests.exported import Command, command
from tests.records.test_options import parsed

GPU = "NVIDIA GeForce RTX 3090"


def trial(case: Case, step_s: float) -> Trial:
    """Return a trial of ten steps, a third of each forward, two thirds backward."""
    spans, steps = [], []
    for number in range(10):
        at = number * step_s
        steps.append(Step(step_s, False, at + step_s))
        spans += [
            Span(number, Phase.FORWARD, 0, "host", at, at + step_s / 3),
            Span(number, Phase.BACKWARD, 0, "host", at + step_s / 3, at + step_s),
        ]
    return Trial(case=case, verified="not_applicable", steps=tuple(steps), spans=tuple(spans))


def single(batch: int, **changed: object) -> Case:
    given = {
        "model": "mlp",
        "strategy": "single",
        "batch_size": batch,
        "device_kind": "cuda",
    } | changed
    return Case(**given)  # type: ignore[arg-type]


def write(path: Path, *runs: Sequence[tuple[Case, float]]) -> Path:
    with Store.create(path) as store:
        for number, trials in enumerate(runs):
            facts = {"host": {"cpu": "a processor"}, "gpus": {"gpus": [{"name": GPU}]}}
            run, _ = store.begin_run(
                Identity(str(number), "h", "c"), rounds=1, provenance=facts, reopen=False
            )
            for case, step_s in trials:
                store.end_trial(store.begin_trial(run, case, 0), trial(case, step_s))
            store.end_run(run)
    return path


ASKED = [Case(model="mlp", strategy="ddp", devices=2, batch_size=64, device_kind="cuda")]
MACHINE = machine.load("rtx-3090-x2")
KEY = ("mlp", "small", "fp32")


def test_seconds_are_lines_through_the_newest_runs_batch_sizes(tmp_path: Path) -> None:
    old, new = [(single(8), 9.0)], [(single(16), 0.2), (single(32), 0.3)]
    found = stored.read(write(tmp_path / "x.db", old, new), ASKED, MACHINE)[KEY]
    assert found.batches == (16, 32)
    assert found.profile.source == "measured"
    assert found.profile.forward is not None
    assert found.profile.forward.at(64) == pytest.approx(0.5 / 3, rel=0.01)
    assert found.profile.parameter_tensors > 0
    assert f"MEASURED on {GPU} (batch sizes 16, 32)" in found.words


def test_one_batch_size_leaves_a_tenth_fixed(tmp_path: Path) -> None:
    found = stored.read(write(tmp_path / "x.db", [(single(32), 0.3)]), ASKED, MACHINE)[KEY]
    assert found.profile.backward is not None
    assert found.profile.backward.at(32) == pytest.approx(0.2)
    assert found.profile.backward.fixed_s == pytest.approx(0.02)


@pytest.mark.parametrize(
    "other",
    [
        {"device_kind": "cpu"},
        {"size": "full"},
        {"precision": "bf16"},
        {"model": "vgg16"},
        {"strategy": "ddp"},
    ],
)
def test_other_steps_do_not_stand_for_a_model(tmp_path: Path, other: dict[str, str]) -> None:
    path = write(tmp_path / "x.db", [(single(32, **other), 0.3)])
    with pytest.raises(
        UnknownMachine, match=r"of mlp \(small, fp32, sgd, cuda\).*dpbench run --models mlp"
    ):
        stored.read(path, ASKED, MACHINE)


def test_a_prediction_in_the_same_file_is_no_measurement(tmp_path: Path) -> None:
    path = write(tmp_path / "x.db", [(single(32), 0.3)])
    measured = stored.read(path, ASKED, MACHINE)
    predictor = Predictor(
        MACHINE, measured={KEY: replace(measured[KEY].profile, forward=Cost(1.0))}
    )
    keep(path, [predictor.predict(single(32))], MACHINE)
    assert stored.read(path, ASKED, MACHINE) == measured
    other = tmp_path / "y.db"
    keep(other, [predictor.predict(single(32))], MACHINE)
    with pytest.raises(UnknownMachine, match=r"has no measured step of .* on one device, .* needs"):
        stored.read(other, ASKED, MACHINE)


def test_the_way_out_is_a_command_that_measures_the_case() -> None:
    case = single(3, model="vgg16", size="full", precision="bf16")
    command, _, store = (
        stored.way_out(case, "x.db").partition("dpbench run ")[2].partition(" --store ")
    )
    assert store == "x.db"
    asked = parsed(*shlex.split(command))
    assert (asked.models, asked.strategies, asked.batch_sizes) == (("vgg16",), ("single",), (1, 3))
    assert (asked.device_kind, asked.size, asked.precision) == ("cuda", "full", "bf16")
    assert "--models tests.net:net" in stored.way_out(single(3, model="tests.net:net"))
    assert "--step-s SECONDS" in stored.way_out(single(3, model="resnet50"))


def test_another_gpus_steps_are_said_to_stand_badly(tmp_path: Path) -> None:
    path = write(tmp_path / "x.db", [(single(32), 0.3)])
    same = stored.read(path, ASKED, MACHINE)[KEY]
    assert "far off" not in same.words
    other_words = replace(same, wanted="H100-SXM5-80GB", device="NVIDIA H100 80GB HBM3")
    assert "far off" not in other_words.words
    said = stored.read(path, ASKED, machine.load("dgx-a100"))[KEY].words
    assert "the described machine has A100" in said
    assert "may be far off" in said


def test_all_of_a_measured_step_is_in_the_profile(tmp_path: Path) -> None:
    """Unattributed time counts to the phases."""
    case = single(32)
    steps = tuple(Step(0.3, False, 0.3 * (i + 1)) for i in range(10))
    spans = [Span(i, Phase.FORWARD, 0, "host", 0.3 * i, 0.3 * i + 0.2) for i in range(10)]
    found = of_trials(counts.of(case), [Trial(case=case, steps=steps, spans=tuple(spans))])
    assert found.forward is not None
    assert found.forward.at(32) == pytest.approx(0.3)


def test_a_measured_step_is_what_a_prediction_starts_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "x.db", [(single(16), 0.2), (single(32), 0.3)])
    call = command(tmp_path, monkeypatch, capfd)
    options = (
        "predict",
        "--machine",
        "rtx-3090-x2",
        "--models",
        "mlp",
        "--size",
        "small",
        "--from",
        path,
        "--strategies",
        "single,ddp",
        "--devices",
        "1,2",
    )
    code, said, _ = call(*options)
    assert code == 0
    assert f"MEASURED on {GPU}" in said
    (line,) = [line for line in said.splitlines() if " single " in line and "measured" in line]
    assert line.split()[4] == "300", "milliseconds at batch 32"
    code, _, said = call(*options, "--step-s", "0.1")
    assert code != 0
    assert "leave out one of them" in said


def test_an_old_prediction_for_logical_cpu_devices_is_shown_with_its_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    case = Case(model="mlp", strategy="dp", schedule="fastest", devices=2, batch_size=64)
    old = Trial(
        case=case,
        source=Source.PREDICTED,
        steps=(Step(0.0125, False, 0.0125),),
        reason="predicted for here",
        spans=(Span(0, Phase.FORWARD, 0, "predicted", 0.0, 0.0125),),
        provenance={
            "machine": "here",
            "profile": "measured",
            "interval_80_s": [0.01, 0.015],
            "draws": [0.0] * 200,
        },
    )
    facts = {
        "host": {
            "name": "here (described, not measured)",
            "cpu": "EPYC, 2 cores: logical CPU devices",
        }
    }
    with Store.create(tmp_path / "dpbench.db") as store:
        store.add([old], Identity("p", "predicted:here", ""), provenance=facts)
    call = command(tmp_path, monkeypatch, capfd)
    code, said, _ = call("report", "--json")
    assert code == 0
    (shown,) = json.loads(said)["cases"]
    assert shown["labels"] == ["PREDICTED", "EXPERIMENTAL", "CPU-ONLY"]
    assert shown["step_s"]["value"] == 0.0125
    assert (shown["step_s"]["low"], shown["step_s"]["high"]) == (0.01, 0.015)
    for reader in (("report", "--md"), ("explain",), ("show",), ("export", "csv")):
        code, said, error = call(*reader)
        assert code == 0, error
        assert "mlp" in said


# ---------------------------------------------------------------- steps on several GPUs


def several(strategy: str, devices: int = 2, **changed: object) -> Case:
    return single(32 * devices, strategy=strategy, devices=devices, **changed)


def lost_of(tmp_path: Path, *measured: tuple[Case, float]) -> dict[Parallelism, Deviation]:
    path = write(tmp_path / "x.db", [(single(32), 0.3), *measured])
    return stored.lost(path, stored.read(path, ASKED, MACHINE), MACHINE)


def test_a_machine_measured_on_several_gpus_has_its_own_deviation(tmp_path: Path) -> None:
    nothing = dict.fromkeys(Parallelism, NONE)
    path = write(tmp_path / "a.db", [(single(32), 0.3)])
    profile = stored.read(path, ASKED, MACHINE)[KEY].profile
    alone = Predictor(MACHINE, measured={KEY: profile}, lost=nothing).predict(several("ddp"))
    found = lost_of(tmp_path, (several("ddp"), 1.3 * alone.seconds))
    assert set(found) == {Parallelism.RANKS}
    assert found[Parallelism.RANKS].mean == pytest.approx(math.log(1.3))
    own = Predictor(MACHINE, measured={KEY: profile}, lost=found).predict(several("ddp"))
    usual = Predictor(MACHINE, measured={KEY: profile}).predict(several("ddp"))
    assert own.seconds == pytest.approx(1.3 * alone.seconds)
    assert own.high_s / own.low_s == pytest.approx(alone.high_s / alone.low_s)
    assert own.high_s / own.low_s < usual.high_s / usual.low_s


@pytest.mark.parametrize(
    "other",
    [
        several("ddp", placement="colocated"),
        several("ddp", model="vgg16"),
        several("ddp", devices=4),
        single(32),
    ],
)
def test_other_steps_are_no_measurement_of_several_gpus(tmp_path: Path, other: Case) -> None:
    assert lost_of(tmp_path, (other, 9.0)) == {}


def test_steps_on_other_gpus_are_no_measurement_of_the_machine(tmp_path: Path) -> None:
    path = write(tmp_path / "x.db", [(single(32), 0.3), (several("ddp"), 0.4)])
    steps = stored.read(path, ASKED, MACHINE)
    assert stored.lost(path, steps, MACHINE)
    assert stored.lost(path, steps, machine.load("dgx-a100")) == {}


def test_the_command_replaces_the_prior_of_others_by_what_was_measured(
    tmp_path: Path, dpbench: Command
) -> None:
    path = write(tmp_path / "x.db", [(single(32), 0.3), (several("ddp"), 0.5)])
    asked = ("predict", "--machine", "rtx-3090-x2", "--models", "mlp", "--size", "small")
    asked += ("--devices", "1,2", "--batch-per-device", "32", "--from", str(path))
    code, out, err = dpbench(*asked, "--strategies", "single,ddp", "--json")
    assert code == 0, err
    (ddp,) = (one for one in json.loads(out)["cases"] if one["case"]["devices"] == 2)
    assert ddp["step_s"]["value"] == pytest.approx(0.5, rel=0.01)
    code, out, err = dpbench(*asked, "--strategies", "single,ddp")
    assert code == 0, err
    assert "measured on several GPUs" in out
