"""Strategies with one process per device: where weights are, and what a rank reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dpbench import models
from dpbench.analysis.summary import labels
from dpbench.hardware.devices import open_devices
from dpbench.measure import ranks
from dpbench.measure.worker.trial import run_together
from dpbench.records import Case, Source, Trial, no_mark, registry
from dpbench.records.registry import Reduction, Role
from dpbench.strategies import load
from tests.runs import TWO_STEPS

DDP = Case(model="mlp", strategy="ddp", devices=2, batch_size=8)


def in_ranks(
    case: Case, tmp_path: Path, look: Callable[[Any, models.Model], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Take one step in every rank of a case, and return `look(step, model)` of each."""

    def entry(rank: int) -> dict[str, Any]:
        device = open_devices("cpu", case.devices, own_processes=True)[rank : rank + 1]
        model = models.load(case.model, case.size, 0)
        with load(case.strategy).start(case, model, device, no_mark) as step:
            step(*model.batch(case.batch_size, 0))
            return look(step, model)

    return ranks.run(entry, case.devices, tmp_path, "gloo")


# ---------------------------------------------------------------- ranks


def test_each_rank_of_fsdp_keeps_its_part_of_the_weights_gradients_and_state(
    tmp_path: Path,
) -> None:
    case = replace(DDP, strategy="fsdp", optimizer="adam", devices=3, batch_size=9)

    def look(step: Any, model: models.Model) -> dict[str, Any]:
        weights = dict(model.module.named_parameters())
        state = step.updates._optimizer.state
        return {
            name: [
                p.numel(),
                p.to_local().numel(),
                p.grad.to_local().numel(),
                state[p]["exp_avg"].to_local().numel(),
            ]
            for name, p in weights.items()
        }

    found = in_ranks(case, tmp_path, look)
    whole = {
        name: p.numel() for name, p in models.load("mlp", "small", 0).module.named_parameters()
    }
    for name, count in whole.items():
        parts = [rank[name] for rank in found]
        assert {numel for numel, *_ in parts} == {count}
        for number in (1, 2, 3):
            assert sum(part[number] for part in parts) == count, "each element lies on one rank"
        assert max(local for _, local, *_ in parts) < count


def test_after_fsdp_the_module_has_whole_weights_and_gradients(tmp_path: Path) -> None:
    case = replace(DDP, strategy="fsdp")

    def entry(rank: int) -> dict[str, Any]:
        device = open_devices("cpu", 2, own_processes=True)[rank : rank + 1]
        model = models.load("mlp", "small", 0)
        with load("fsdp").start(case, model, device, no_mark) as step:
            step(*model.batch(8, 0))
        parameters = list(model.module.parameters())
        plain = [type(p) is torch.nn.Parameter and type(p.grad) is torch.Tensor for p in parameters]
        return {"plain": all(plain), "weights": [p.sum().item() for p in parameters]}

    first, second = ranks.run(entry, 2, tmp_path, "gloo")
    assert first["plain"]
    assert first == second
    assert all(map(math.isfinite, first["weights"]))


def test_only_ddp_itself_is_the_control() -> None:
    names = [
        name for name in registry.names("strategies") if registry.traits(name).role is Role.CONTROL
    ]
    assert names == ["ddp"]
    assert registry.traits("fsdp").reduction is Reduction.IN_BACKWARD


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_names_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(type(load("ddp")), "start", full)
    (done,) = run_together([DDP], TWO_STEPS, tmp_path)
    assert done.status == "oom"
    assert done.failed_device is not None


def test_predictions_that_nothing_has_checked_are_labelled() -> None:
    case = replace(DDP, strategy="fsdp", device_kind="cuda")
    assert labels(Trial(case=case, source=Source.PREDICTED)) == ("PREDICTED", "EXPERIMENTAL")
    assert labels(Trial(case=case)) == ("MEASURED",)
    assert labels(Trial(case=replace(case, strategy="ddp"), source=Source.PREDICTED)) == (
        "PREDICTED",
    )
