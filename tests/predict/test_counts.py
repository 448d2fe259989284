"""Counts: traced and counted one-device steps against published ones, and untraceable models."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.prediction import formula, named_models
from dpbench.predict import cases, counts, machine, profiles
from dpbench.predict.cases import Predictor
from dpbench.records import Case, Phase

TABLE = Path(__file__).parents[1] / "data" / "published.csv"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "name"), [("RTX 2080 Ti", "rtx-2080-ti-x4"), ("TITAN RTX", "titan-rtx-x4")]
)
@pytest.mark.parametrize("model", ["resnet18", "vgg16"])
def test_traced_steps_of_one_device_are_within_a_third_of_published_ones(
    gpu: str, name: str, model: str
) -> None:
    with TABLE.open() as file:
        (row,) = (
            row
            for row in csv.DictReader(file)
            if (row["gpu"], row["model"], row["n_gpu"], row["precision"])
            == (gpu, model, "1", "fp32")
            and row["group"].startswith("RYU")
            and "backward" in row["timed"]
        )
    on = machine.load(name)
    slow = replace(on, host=replace(on.host, factor=3.1))  # a host of 2019
    batch = int(row["batch_per_gpu"])
    case = Case(model=model, size="full", strategy="single", batch_size=batch, device_kind="cuda")
    profile = Predictor(slow).profile(case)
    assert profile.source == "traced"
    timed = formula.seconds(case, profile, slow, phases=frozenset(Phase) - {Phase.OPTIMIZER})
    assert 0.65 < timed / (float(row["value"]) / 1e3) < 1.35


GPUS = {
    "RTX 2080 Ti": "rtx-2080-ti-x4",
    "TITAN RTX": "titan-rtx-x4",
    "V100-SXM2": "dgx-1-v100",
    "V100-SXM2-16GB": "dgx-1-v100",
    "V100-DGXS": "dgx-station-v100",
    "RTX 3090": "rtx-3090-x2",
    "A100-SXM4-40GB": "dgx-a100",
}


def counted_off() -> Iterator[tuple[str, float]]:
    """Yield each published one-device step's group and log(predicted / published), by counts."""
    with TABLE.open() as file:
        table = [row for row in csv.DictReader(file) if row["n_gpu"] == "1" and row["gpu"] in GPUS]
    for row in table:
        model, said = row["model"], row["precision"].lower()
        precision = next((name for name in ("fp16", "fp32", "tf32") if said.startswith(name)), "")
        precision = "fp16" if said.startswith("amp") else precision
        forward_alone = row["group"].startswith("RY") and "backward" not in row["timed"]
        found = named_models.find(model, None, row["precision"])
        # BERT's published steps are of shorter sequences than those that were traced
        if (
            not (precision and row["batch_per_gpu"])
            or row["metric"] == "epoch_s"
            or forward_alone
            or "bert" in model
            or row["group"] == "LTF2080TI"  # 96 rows of one model of GPU, in TensorFlow
            or found.known != "traced"
        ):
            continue
        if counts.row_of(model) is None:
            continue
        on, batch = machine.load(GPUS[row["gpu"]]), int(float(row["batch_per_gpu"]))
        # the host factor that was fitted to most of these machines
        slow = replace(on, host=replace(on.host, factor=3.1))
        profile = profiles.counted(found.profile, slow, precision)
        phases = frozenset(Phase) - ({Phase.OPTIMIZER} if row["optimizer"] == "none" else set())
        case = Case(model=model, strategy="single", batch_size=batch)
        timed, value = formula.seconds(case, profile, slow, phases=phases), float(row["value"])
        published = value / 1e3 if row["metric"] == "step_ms" else batch / value
        yield row["group"], math.log(timed / published)


def test_counted_steps_are_off_by_as_much_as_the_docs_say() -> None:
    found = list(counted_off())
    every = [abs(off) for _, off in found]
    busy = [abs(off) for group, off in found if not group.startswith("RY")]
    assert (len(every), len(busy)) == (162, 34)
    assert 0.6 < statistics.median(every) < 0.75, "half of them by a factor of two"
    assert statistics.median(off for _, off in found) < 0, "too fast"
    assert 0.3 < statistics.quantiles(busy, n=5)[-1] < 0.45, "a fifth by a third"


class Weighted:
    """A model that hides a tensor in its loss: fake tensors do not know it."""

    weight = torch.ones(10)

    @staticmethod
    def build(size: str) -> torch.nn.Module:
        return torch.nn.Linear(64, 10)

    @staticmethod
    def batch(n: int, seed: int, size: str) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(n, 64), torch.zeros(n, dtype=torch.int64)

    loss = torch.nn.CrossEntropyLoss(weight=weight)


def test_a_model_that_cannot_be_traced_is_counted_and_said_to_be() -> None:
    predictor = cases.Predictor(machine.load("dgx-a100"))
    case = Case(
        model="tests.predict.test_counts:Weighted",
        strategy="single",
        batch_size=8,
        device_kind="cuda",
    )
    assert predictor.predict(case).profile == "counted"
    given = replace(predictor, given=(0.05, 8)).predict(case)
    assert given.seconds == pytest.approx(0.05)
