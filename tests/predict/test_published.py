"""Published steps: the rows of the package, and which of them stand beside a prediction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.scripts import published_steps
from dpbench.predict import cases, machine, network, published
from dpbench.predict.published import PublishedStep
from dpbench.records import Case
from dpbench.records.gpu_names import same_gpu
from dpbench.records.registry import Parallelism
from tests.exported import Command

TABLE = Path(__file__).parents[1] / "data" / "published.csv"


def case(strategy: str, devices: int, model: str = "resnet50", **changed: str) -> Case:
    return Case(
        model=model,
        strategy=strategy,
        devices=devices,
        batch_size=32 * devices,
        device_kind="cuda",
        **changed,  # type: ignore[arg-type]
    )


def near(name: str, asked: Case) -> list[PublishedStep]:
    return cases.Predictor(machine.load(name)).published(asked)


def test_the_package_has_some_hundreds_of_steps_with_their_sources() -> None:
    steps = published.steps()
    assert 200 < len(steps) < 1000
    assert all(one.source and one.model and one.gpu for one in steps)
    assert all(one.step_s > 0 and one.label == "PUBLISHED" for one in steps)
    assert {one.link for one in steps} <= {"alone", *network.LINK_KINDS}
    assert {one.devices == 1 for one in steps if one.strategy == "single"} == {True}
    assert published.FILE.stat().st_size < 200_000


def test_the_file_is_what_its_script_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = published.FILE.read_text(encoding="utf-8")
    monkeypatch.setattr(published, "FILE", tmp_path / "published.csv")
    published_steps.main(TABLE)
    assert published.FILE.read_text(encoding="utf-8") == committed


@pytest.mark.parametrize(
    ("strategy", "parallelism"), [("ddp", Parallelism.RANKS), ("torch_dp", Parallelism.THREADS)]
)
def test_the_nearest_have_the_model_and_the_gpu_or_the_link(
    strategy: str, parallelism: Parallelism
) -> None:
    found = near("rtx-3090-x8", case(strategy, 8))
    assert 0 < len(found) <= published.MOST
    for one in found:
        assert one.parallelism is parallelism
        assert same_gpu(one.gpu, "RTX 3090") or one.link == "staged"
        assert 1 / published.SIMILAR < one.parameters / 25.6e6 < published.SIMILAR


def test_the_same_machine_model_and_devices_come_first() -> None:
    first = near("rtx-3090-x8", case("ddp", 8))[0]
    assert same_gpu(first.gpu, "RTX 3090")
    assert (first.model, first.devices, first.link) == ("resnet50", 8, "staged")
    assert near("rtx-3090-x8", case("ddp", 2))[0].devices == 2


def test_precisions_of_as_many_bits_are_nearer() -> None:
    for precision, bits in (("bf16", 16), ("fp32", 32)):
        asked = case("ddp", 8, precision=precision)
        assert published.bits(near("rtx-3090-x8", asked)[0].precision) == bits


def test_one_device_stands_beside_one_device_of_the_same_gpu() -> None:
    for strategy in ("single", "ddp"):
        for one in near("rtx-3090-x8", case(strategy, 1)):
            assert (one.devices, one.strategy) == (1, "single")
            assert same_gpu(one.gpu, "RTX 3090")


def test_a_model_of_another_size_has_none() -> None:
    assert near("rtx-3090-x8", case("ddp", 8, model="llama-2-7b")) == []


def test_terminal_and_json_show_them_with_label_and_source(dpbench: Command) -> None:
    asked = ("predict", "--machine", "rtx-3090-x8", "--models", "resnet50", "--devices", "1,8")
    code, out, err = dpbench(*asked)
    assert code == 0, err
    lines = [line for line in out.splitlines() if "PUBLISHED" in line]
    assert any("RTX 3090" in line and "lambdal/deeplearning-benchmark" in line for line in lines)
    assert len(lines) == len(set(lines)), "each once"
    code, out, err = dpbench(*asked, "--json")
    assert code == 0, err
    for one in json.loads(out)["cases"]:
        asked_for = near("rtx-3090-x8", case(one["case"]["strategy"], one["case"]["devices"]))
        assert [step["source"] for step in one["published"]] == [s.source for s in asked_for]
        assert all(step["label"] == "PUBLISHED" for step in one["published"])
        assert (one["unmodelled"] > 1) == (one["case"]["devices"] > 1)
