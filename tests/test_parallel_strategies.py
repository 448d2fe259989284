"""Strategies other than data parallelism by threads: where weights lie, and which of torch's options they use."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from dpbench.predict import cases
from dpbench.records import Case, Effort, Phase, Source, Trial, Verified, machine, no_mark, registry
from dpbench.records.registry import Reduction, Role
from dpbench.strategies import load
from dpbench.strategies.model_parallel import assign

SMALL = Effort(budget_s=0.05, min_steps=3, max_steps=5, warmup_steps=1, block_steps=1)
DDP = Case(model="mlp", strategy="ddp", devices=2, batch_size=8)


def in_ranks(case: Case, tmp_path: Path, look: Callable[[Any, models.Model], dict[str, Any]]) -> list[dict[str, Any]]:
    """Take one step in every rank of a case, and return what `look` finds in each, given the step and the model."""

    def entry(rank: int) -> dict[str, Any]:
        device = open_devices("cpu", case.devices, own_processes=True)[rank : rank + 1]
        model = models.load(case.model, case.size, 0)
        with load(case.strategy).start(case, model, device, no_mark) as step:
            step(*model.batch(case.batch_size, 0))
            return look(step, model)

    return ranks.run(entry, case.devices, tmp_path, "gloo")


# ---------------------------------------------------------------- ranks


def test_each_rank_of_fsdp_keeps_its_part_of_the_weights_gradients_and_state(tmp_path: Path) -> None:
    case = replace(DDP, strategy="fsdp", optimizer="adam", devices=3, batch_size=9)

    def look(step: Any, model: models.Model) -> dict[str, Any]:
        weights = dict(model.module.named_parameters())
        state = step._optimizer.state
        return {
            name: [p.numel(), p.to_local().numel(), p.grad.to_local().numel(), state[p]["exp_avg"].to_local().numel()]
            for name, p in weights.items()
        }

    found = in_ranks(case, tmp_path, look)
    whole = {name: p.numel() for name, p in models.load("mlp", "small", 0).module.named_parameters()}
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


@pytest.mark.parametrize(
    ("name", "option"), [("ddp_bucket_view", "gradient_as_bucket_view"), ("ddp_static_graph", "static_graph")]
)
def test_the_variants_of_ddp_set_torchs_options(name: str, option: str, tmp_path: Path) -> None:
    for strategy, expected in ((name, True), ("ddp", False)):
        found = in_ranks(
            replace(DDP, strategy=strategy), tmp_path, lambda step, model: {"on": getattr(step.wrapped, option)}
        )
        assert [rank["on"] for rank in found] == [expected, expected]


def test_ddp_fp16_rounds_gradients(tmp_path: Path) -> None:
    def look(step: Any, model: models.Model) -> dict[str, Any]:
        gradients = [p.grad for p in model.module.parameters()]
        return {"rounded": all(torch.equal(g, g.half().float()) for g in gradients)}

    for strategy, expected in (("ddp_fp16", True), ("ddp", False)):
        assert in_ranks(replace(DDP, strategy=strategy), tmp_path, look)[0]["rounded"] is expected


def test_ddp_bf16_names_what_it_needs() -> None:
    case = replace(DDP, strategy="ddp_bf16")
    assert load("ddp_bf16").skip(case) == "torch's bf16_compress_hook needs NCCL, and thus distinct GPUs"
    assert load("ddp_bf16").skip(replace(case, device_kind="cuda")) == ""
    assert "NCCL" in load("ddp_bf16").skip(replace(case, device_kind="cuda", placement="colocated"))
    assert "one process per rank" in load("ddp_bf16").skip(replace(case, device_kind="emulated"))


def test_only_ddp_itself_is_the_control() -> None:
    names = [name for name in registry.names("strategies") if registry.traits(name).role is Role.CONTROL]
    assert names == ["ddp"]
    assert registry.traits("fsdp").reduction is Reduction.IN_BACKWARD


# ---------------------------------------------------------------- model_parallel


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ([1, 1, 1], 2, [0, 1, 1]),
        ([1] * 8, 4, [0, 0, 1, 1, 2, 2, 3, 3]),
        ([100, 1, 1], 3, [0, 1, 2]),  # every device gets a child while there are enough
        ([1, 1, 100], 3, [0, 1, 2]),
        ([10, 0, 0, 0], 2, [0, 1, 1, 1]),
        ([5], 3, [0]),
        ([0, 0], 2, [0, 1]),
        ([], 2, []),
    ],
)
def test_children_are_assigned_in_order_and_in_about_equal_groups(
    sizes: list[int], count: int, expected: list[int]
) -> None:
    assert assign(sizes, count) == expected


@pytest.mark.parametrize(
    ("model", "devices"), [*((model, 2) for model in registry.names("models")), ("mlp", 3), ("embedding", 3)]
)
def test_layers_are_on_their_devices_and_the_step_is_that_of_one_device(
    model: str, devices: int, tmp_path: Path
) -> None:
    case = Case(model=model, strategy="model_parallel", devices=devices, batch_size=6, device_kind="emulated")
    (done,) = run_together([case], SMALL, tmp_path)
    if (model, devices) == ("embedding", 3):
        assert "embedding has 2 layer(s) for 3 devices: give --devices 2 or fewer" in done.reason
        return
    assert (done.status, done.reason if done.status != "ok" else "") == ("ok", "")
    assert done.verified is Verified.BITWISE
    forward = {span.device for span in done.spans if span.phase is Phase.FORWARD}
    assert forward == set(range(devices))
    assert {span.device for span in done.spans if span.phase is Phase.BACKWARD} == forward
    loaded = models.load(model, "small", 0)
    with load("model_parallel").start(case, loaded, open_devices("emulated", devices), no_mark) as step:
        step(*loaded.batch(6, 0))
        found = {p.device.index for p in loaded.module.parameters()}
        assert found == set(range(devices))
        assert all(p.grad.device == p.device for p in loaded.module.parameters() if p.grad is not None)
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in loaded.module.modules())


def test_a_layer_that_is_used_twice_is_placed_once() -> None:
    shared, marks = torch.nn.Linear(4, 4), Counter[Phase]()
    net = torch.nn.Sequential(torch.nn.Sequential(shared, torch.nn.Linear(4, 4)), torch.nn.Sequential(shared))

    @contextmanager
    def mark(phase: Phase, device: int) -> Iterator[None]:
        marks[phase] += 1
        yield

    make = lambda n, seed: (torch.randn(n, 4), torch.zeros(n, 4))  # noqa: E731
    model = models.Model("shared", net, make, torch.nn.functional.mse_loss)
    case = Case(model="shared", strategy="model_parallel", devices=2, batch_size=3)
    with load("model_parallel").start(case, model, open_devices("cpu", 2), mark) as step:
        step(*model.batch(3, 0))
    assert marks[Phase.FORWARD] == 3


def test_a_nested_sequential_is_split() -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    net = torch.nn.Sequential(inner, torch.nn.Linear(4, 2))
    make = lambda n, seed: (torch.randn(n, 4), torch.zeros(n, 2))  # noqa: E731
    model = models.Model("nested", net, make, torch.nn.functional.mse_loss)
    case = Case(model="nested", strategy="model_parallel", devices=3, batch_size=3, device_kind="emulated")
    with load("model_parallel").start(case, model, open_devices("emulated", 3), no_mark) as step:
        assert step(*model.batch(3, 0)).isfinite()
        assert [p.device.index for p in net.parameters()] == [0, 0, 1, 1, 2, 2]


# ---------------------------------------------------------------- predictions


def seconds(strategy: str, devices: int = 4) -> float:
    described = machine.load("rtx-3090-x8")
    predictor = cases.Predictor(described)
    asked = cases.sweep(["bert-base"], strategies=(strategy,), devices=(devices,), batch_per_device=(8,))
    return predictor.predict(asked[0]).seconds


def test_rounded_gradients_take_half_of_the_transfer() -> None:
    plain, rounded = seconds("ddp"), seconds("ddp_fp16")
    assert rounded < 0.95 * plain
    assert rounded > seconds("single", 1)


def test_layers_on_several_devices_are_predicted_to_be_no_faster_for_the_same_work() -> None:
    """In weak scaling, n devices do n times the work, one device after the other."""
    assert seconds("model_parallel", 4) > 3.5 * seconds("model_parallel", 1)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp_fp16", "ddp_bucket_view", "ddp_static_graph", "model_parallel"])
def test_predictions_that_nothing_has_checked_are_labelled(strategy: str) -> None:
    case = Case(model="mlp", strategy=strategy, devices=2, batch_size=8, device_kind="cuda")
    assert labels(Trial(case=case, source=Source.PREDICTED)) == ("PREDICTED", "EXPERIMENTAL")
    assert labels(Trial(case=case)) == ("MEASURED",)
    assert labels(Trial(case=replace(case, strategy="ddp"), source=Source.PREDICTED)) == ("PREDICTED",)
