"""Profiles from a results file: the newest run's steps of one device, and what is said where there are none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from dpbench import machine
from dpbench.machine import Unknown
from dpbench.predict import stored
from dpbench.records import Case, Phase, Span, Step, Trial
from dpbench.store import Store
from tests.exported import command

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
    given = {"model": "mlp", "strategy": "single", "batch_size": batch, "device_kind": "cuda"} | changed
    return Case(**given)  # type: ignore[arg-type]


def write(path: Path, *runs: Sequence[tuple[Case, float]]) -> Path:
    with Store.create(path) as store:
        for number, trials in enumerate(runs):
            facts = {"host": {"cpu": "a processor"}, "gpus": {"gpus": [{"name": GPU}]}}
            run, _ = store.begin_run(plan=str(number), host="h", code="c", rounds=1, provenance=facts, reopen=False)
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
    assert f"MEASURED on {GPU}, batch 16, 32" in found.words


def test_one_batch_size_leaves_a_tenth_fixed(tmp_path: Path) -> None:
    found = stored.read(write(tmp_path / "x.db", [(single(32), 0.3)]), ASKED, MACHINE)[KEY]
    assert found.profile.backward is not None
    assert found.profile.backward.at(32) == pytest.approx(0.2)
    assert found.profile.backward.fixed_s == pytest.approx(0.02)


@pytest.mark.parametrize(
    "other", [{"device_kind": "cpu"}, {"size": "full"}, {"precision": "bf16"}, {"model": "vgg16"}, {"strategy": "ddp"}]
)
def test_other_steps_do_not_stand_for_a_model(tmp_path: Path, other: dict[str, str]) -> None:
    path = write(tmp_path / "x.db", [(single(32, **other), 0.3)])
    with pytest.raises(
        Unknown, match=r"no steps of one device for mlp \(small, fp32, cuda\).*dpbench run --models mlp"
    ):
        stored.read(path, ASKED, MACHINE)


def test_a_users_model_has_one_size(tmp_path: Path) -> None:
    own = "tests.commands:net"
    path = write(tmp_path / "x.db", [(single(16, model=own), 0.2)])
    with pytest.raises(Unknown, match=r"no steps of one device for tests\.other:net"):
        stored.read(path, [single(32, model="tests.other:net", size="full")], MACHINE)
    assert stored._fits(Store.read(path).trials()[0], single(32, model=own, size="full"))


def test_a_measured_step_is_what_a_prediction_starts_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "x.db", [(single(16), 0.2), (single(32), 0.3)])
    call = command(tmp_path, monkeypatch, capfd)
    options = ("predict", "--machine", "rtx-3090-x2", "--models", "mlp", "--size", "small", "--from", path,
               "--strategies", "single,ddp", "--devices", "1,2")  # fmt: skip
    code, said, _ = call(*options)
    assert code == 0
    assert f"MEASURED on {GPU}" in said
    (line,) = [line for line in said.splitlines() if " single " in line and "measured" in line]
    assert " 300." in line, "milliseconds at batch 32"
    code, _, said = call(*options, "--step-s", "0.1")
    assert code != 0
    assert "give one of them" in said
