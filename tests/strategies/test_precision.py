"""Precision: fp16 with a GradScaler under every strategy, and TF32.

Each is refused if it has no effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dpbench import models, strategies
from dpbench.hardware.devices import open_devices
from dpbench.measure import verification
from dpbench.measure.worker import trial
from dpbench.records import Case, Status, Verified, plan
from dpbench.records.schedule import Schedule
from tests.runs import TWO_STEPS


class Net(nn.Module):
    """A net of which only the first gradient overflows fp16, with a loss scale above about 16."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.register_buffer("factors", torch.tensor([factor] + [1.0] * 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        return self.norm(hidden) + hidden * self.factors


def batch(n: int, seed: int, size: str = "small") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=generator), torch.randn(n, 8, generator=generator)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), target)


overflowing = SimpleNamespace(build=lambda size: Net(200.0), batch=batch, loss=loss)


def verdict(case: Case, strategy: Any, model: models.Model) -> verification.Verification:
    return verification.check(
        strategy.start,
        case,
        model,
        open_devices("cpu", case.devices),
        split=strategy.split,
    )


def net(factor: float) -> models.Model:
    torch.manual_seed(0)
    return models.Model("net", Net(factor), batch, loss)


FP16 = Case(model="mlp", strategy="single", batch_size=7, precision="fp16")


@pytest.mark.parametrize(
    ("strategy", "schedule"),
    [
        ("single", ""),
        ("dp", "reference"),
        ("dp", "local"),
        ("dp", "fastest"),
    ],
)
def test_fp16_has_the_gradients_of_the_reference(strategy: str, schedule: str) -> None:
    case = replace(
        FP16, strategy=strategy, schedule=schedule, devices=1 if strategy == "single" else 2
    )
    found = verdict(case, strategies.load(strategy), models.load("mlp", "small", 0))
    assert found.verified is Verified.BITWISE, str(found)


@pytest.mark.parametrize("strategy", ["single", "dp"])
def test_a_skipped_update_is_no_wrong_gradient(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffers are compared too, which every skipped step has changed."""
    steps = []
    original = verification._trained
    monkeypatch.setattr(
        verification, "_trained", lambda *given: steps.append(original(*given)) or steps[-1]
    )
    case = replace(FP16, strategy=strategy, devices=1 if strategy == "single" else 2, schedule="")
    found = verdict(case, strategies.load(strategy), net(200.0))
    assert found.verified is Verified.BITWISE, str(found)
    assert [number > 3 for _, number, _ in steps] == [True]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_skip_the_same_updates(strategy: str, tmp_path: Path) -> None:
    """Under fsdp, only one rank's shard has infinite elements, but both must skip the update."""
    case = replace(
        FP16, model=f"{__name__}:overflowing", strategy=strategy, devices=2, batch_size=11
    )
    done = trial.run(case, TWO_STEPS, tmp_path)
    assert (done.status, done.verified) == (Status.OK, Verified.BITWISE), done.reason


class Forgetful(strategies.Strategy):
    """A loop that scales the loss and steps without the GradScaler: the gradients stay scaled."""

    @contextmanager
    def start(self, case: Case, model: models.Model, devices: Any, mark: Any) -> Iterator[Any]:
        scaler = strategies.scaler_of(case)
        assert scaler is not None

        def step(inputs: Any, target: Any) -> torch.Tensor:
            model.module.zero_grad()
            with strategies.precision_of(case):
                found = model.loss(model.module(inputs), target)
            scaler.scale(found).backward()
            return found

        yield step


@pytest.mark.parametrize("schedule", list(Schedule))
def test_fp16_leaves_out_schedules_without_complete_gradients(schedule: Schedule) -> None:
    case = Case(model="mlp", strategy="dp", devices=2, batch_size=8, schedule=schedule)
    reason = strategies.load("dp").skip(replace(case, precision="fp16"))
    assert bool(reason) == schedule.updates_everywhere
    assert strategies.load("dp").skip(case) == ""


def test_gradients_that_stay_scaled_are_wrong() -> None:
    assert verdict(FP16, Forgetful(), models.load("mlp", "small", 0)).verified is Verified.NO


def test_gradients_that_always_overflow_are_a_fact_about_the_model() -> None:
    with pytest.raises(
        ValueError,
        match="overflow fp16 even if the loss is not scaled: give --precision bf16 or fp32",
    ):
        verdict(FP16, strategies.load("single"), net(60000.0))


@pytest.mark.parametrize(
    ("kind", "precision", "message"),
    [
        ("cpu", "tf32", "tf32' is for GPUs"),
        ("emulated", "tf32", "tf32' is for GPUs"),
        ("emulated", "fp16", "emulated devices have no autocast"),
    ],
)
def test_a_precision_without_effect_is_refused(kind: str, precision: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan.sweep(
            models=["mlp"],
            strategies=["single"],
            devices=[1],
            batch_sizes=[8],
            device_kind=kind,
            precision=precision,
        )


@pytest.fixture
def untouched() -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.usefixtures("untouched")
def test_tf32_is_set_on_gpus_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(FP16, precision="tf32", device_kind="cuda")
    (device,) = open_devices("cpu", 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=r"compute capability 8\.0 or higher, and .* has 7\.5"):
        trial._allow_tf32(case, device)
    assert torch.get_float32_matmul_precision() == "highest"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    trial._allow_tf32(replace(case, precision="fp32"), device)
    assert torch.get_float32_matmul_precision() == "highest"
    trial._allow_tf32(case, device)
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cudnn.allow_tf32
