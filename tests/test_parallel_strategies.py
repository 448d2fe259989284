"""Strategies other than data parallelism by threads: where weights lie, and which of torch's options they use."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dpbench.strategies._layers import assign
from dpbench.strategies.data_parallel_block import largest

import dpbench
from dpbench import models
from dpbench.analysis.summary import labels
from dpbench.hardware.devices import open_devices
from dpbench.measure import ranks
from dpbench.measure.worker.trial import run_together
from dpbench.predict import cases
from dpbench.records import HOST, Case, Effort, Phase, Source, Trial, Verified, machine, no_mark, registry
from dpbench.records.registry import Reduction, Role
from dpbench.strategies import load

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
        state = step._updates._optimizer.state
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


OPTIONS = ("gradient_as_bucket_view", "static_graph")
DEFAULTS = {**dict.fromkeys(OPTIONS, False), "rounded": False}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("ddp", {}),
        ("ddp_bucket_view", {"gradient_as_bucket_view": True}),
        ("ddp_static_graph", {"static_graph": True}),
        ("ddp_fp16", {"rounded": True}),
    ],
)
def test_the_variants_of_ddp_set_torchs_options_or_round_gradients(
    name: str, changed: dict[str, bool], tmp_path: Path
) -> None:
    def look(step: Any, model: models.Model) -> dict[str, Any]:
        gradients = [p.grad for p in model.module.parameters()]
        rounded = all(torch.equal(g, g.half().float()) for g in gradients)
        return {**{option: getattr(step.wrapped, option) for option in OPTIONS}, "rounded": rounded}

    assert in_ranks(replace(DDP, strategy=name), tmp_path, look) == [{**DEFAULTS, **changed}] * 2


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


@pytest.mark.usefixtures("short_sequences")
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


# ---------------------------------------------------------------- layers on the host and on a device


def test_the_transfer_between_host_and_device_has_phases_of_its_own(tmp_path: Path) -> None:
    case = Case(model="mlp", strategy="half_cpu", batch_size=6, device_kind="emulated")
    (done,) = run_together([case], SMALL, tmp_path)
    assert (done.status, done.verified) == ("ok", Verified.BITWISE), done.reason
    spans = sorted((span for span in done.spans if span.step == 2), key=lambda span: span.start_s)
    order = [(span.phase, span.device) for span in spans]
    computes = [pair for pair in order if pair[0] not in (Phase.OPTIMIZER, Phase.LOSS)]
    assert [pair for pair, _ in itertools.groupby(computes)] == [
        (Phase.SCATTER, HOST), (Phase.FORWARD, HOST), (Phase.SCATTER, 0), (Phase.FORWARD, 0),
        (Phase.BACKWARD, 0), (Phase.GATHER, HOST), (Phase.BACKWARD, HOST),
    ]  # fmt: skip
    assert {device for phase, device in order if phase is Phase.OPTIMIZER} == {HOST, 0}
    loaded = models.load("mlp", "small", 0)
    with load("half_cpu").start(case, loaded, open_devices("emulated", 1), no_mark) as step:
        step(*loaded.batch(6, 0))
        assert {p.device.type for p in loaded.module.fc1.parameters()} == {"cpu"}
        assert {p.device.type for p in loaded.module.fc3.parameters()} == {"lazy"}


# ---------------------------------------------------------------- one block on several devices


def test_the_block_is_the_largest_child_that_is_not_the_whole() -> None:
    small, large = torch.nn.Linear(2, 2), torch.nn.Linear(9, 9)
    assert largest(torch.nn.Sequential(small, large)) == "1"
    assert largest(torch.nn.Sequential(torch.nn.Sequential(small, large))) == "0.1"
    with pytest.raises(ValueError, match="but this Sequential has none: give --strategies dp"):
        largest(torch.nn.Sequential(torch.nn.Sequential(large), torch.nn.ReLU()))


def test_only_the_block_is_split_and_it_is_unwrapped_at_the_end() -> None:
    rows: dict[str, list[int]] = {}
    case = Case(model="mlp", strategy="data_parallel_block", devices=3, batch_size=8)
    model = models.load("mlp", "small", 0)
    for name in ("fc1", "fc2", "fc3"):
        seen = rows.setdefault(name, [])
        model.module.get_submodule(name).register_forward_hook(lambda _, args, out, seen=seen: seen.append(len(out)))
    with load("data_parallel_block").start(case, model, open_devices("cpu", 3), no_mark) as step:
        step(*model.batch(8, 0))
        assert largest(models.load("mlp", "small", 0).module) == "fc1"
        assert isinstance(model.module.fc1, dpbench.DataParallel)
    assert {name: sorted(seen) for name, seen in rows.items()} == {"fc1": [2, 3, 3], "fc2": [8], "fc3": [8]}
    assert type(model.module.fc1) is torch.nn.Linear


# ---------------------------------------------------------------- layers and ranks


def test_gradient_accumulation_reduces_the_gradients_once_per_step(tmp_path: Path) -> None:
    """A communication hook is called once per bucket and reduction."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    reduced: list[int] = []

    def counted(state: Any, bucket: Any) -> Any:
        reduced.append(bucket.buffer().nbytes)
        return allreduce_hook(state, bucket)

    counted.__annotations__.clear()  # torch refuses annotations that are text

    def entry(rank: int) -> dict[str, Any]:
        case, forwards = replace(DDP, strategy="ddp_no_sync"), Counter[Phase]()

        @contextmanager
        def mark(phase: Phase, device: int) -> Iterator[None]:
            forwards[phase] += 1
            yield

        model = models.load("mlp", "small", 0)
        devices = open_devices("cpu", 2, own_processes=True)[rank : rank + 1]
        with load("ddp_no_sync").start(case, model, devices, mark) as step:
            step.wrapped.register_comm_hook(None, counted)
            step(*model.batch(8, 0))
        whole = sum(p.nbytes for p in model.module.parameters())
        return {"reductions": sum(reduced) / whole, "forwards": forwards[Phase.FORWARD]}

    assert ranks.run(entry, 2, tmp_path, "gloo") == [{"reductions": 1.0, "forwards": 2}] * 2


@pytest.mark.slow
def test_a_rank_with_two_devices_has_half_of_the_layers_on_each(tmp_path: Path) -> None:
    case = replace(DDP, strategy="ddp_model_parallel", devices=4)
    assert case.rows == (4, 4)
    (done,) = run_together([case], SMALL, tmp_path)
    assert done.verified in (Verified.BITWISE, Verified.WITHIN_TOLERANCE), done.reason
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        assert {span.device for span in done.spans if span.phase is phase} == {0, 1, 2, 3}
    assert {span.device for span in done.spans if span.phase is Phase.LOSS} == {1, 3}
    assert {span.device for span in done.spans if span.phase is Phase.REDUCE} == {0, 2}


@pytest.mark.parametrize(
    ("strategy", "changed", "reason"),
    [
        (
            "ddp_model_parallel",
            {"devices": 1},
            "needs 2 devices per rank, but the number of devices is 1: give --devices 2",
        ),
        (
            "ddp_model_parallel",
            {"devices": 3},
            "needs 2 devices per rank, but the number of devices is 3: give --devices 4",
        ),
        ("model_parallel_pipelined", {"batch_size": 9}, "but the batch size is 9: give --batch-sizes 12"),
        ("model_parallel_pipelined", {"precision": "bf16"}, "inside autocast too: leave out --precision bf16"),
        ("model_parallel_pipelined", {"precision": "fp16"}, "inside autocast too: leave out --precision fp16"),
        ("model_parallel_pipelined", {"compile": True}, "cannot record a compiled module: leave out --compile"),
        ("data_parallel_block", {"compile": True}, "would compile only the rest: leave out --compile"),
        ("half_cpu", {}, "needs an accelerator in addition to the host; without a GPU, give --device-kind emulated"),
        ("half_cpu", {"device_kind": "cuda", "precision": "bf16"}, "of device only: leave out --precision bf16"),
        ("half_cpu", {"device_kind": "cuda", "precision": "fp16"}, "of device only: leave out --precision fp16"),
        ("half_cpu", {"device_kind": "cuda", "compile": True}, "on the host and a GPU: leave out --compile"),
    ],
)
def test_strategies_say_why_they_cannot_run_a_case(strategy: str, changed: dict[str, Any], reason: str) -> None:
    assert reason in load(strategy).skip(replace(DDP, strategy=strategy, **changed))
    plain = replace(DDP, strategy=strategy, devices=2, batch_size=8, device_kind="cuda")
    assert [load(strategy).skip(replace(plain, precision=precision)) for precision in ("fp32", "tf32")] == ["", ""]


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_does_not_name_one_of_its_two_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    for strategy, known in (("ddp", True), ("ddp_model_parallel", False)):
        monkeypatch.setattr(type(load(strategy)), "start", full)
        (done,) = run_together([replace(DDP, strategy=strategy)], SMALL, tmp_path)
        assert (done.status, done.failed_device is not None) == ("oom", known)


# ---------------------------------------------------------------- a pipeline


class Residual(torch.nn.Module):
    """The input of the first layer is an input of the last layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.b(self.a(x)) + x
        return found


class Backwards(Residual):
    """The second layer runs before the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.a(self.b(x))
        return found


class Branches(Residual):
    """The control flow depends on values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.b(self.a(x)) if x.sum() > 0 else self.a(x)
        return found


@pytest.mark.parametrize(
    ("module", "fault"),
    [
        (Residual(), "stage 0 gives 2 values to later stages"),
        (Backwards(), "the layer a of stage 0 needs an output of stage 1"),
        (Branches(), "torch.fx cannot record it: TraceError"),
    ],
)
def test_a_module_that_is_no_chain_of_layers_is_refused(module: torch.nn.Module, fault: str) -> None:
    from dpbench.strategies._pipeline import stages

    make = lambda n, seed: (torch.randn(n, 4), torch.zeros(n, 4))  # noqa: E731
    model = models.Model("own", module, make, torch.nn.functional.mse_loss)
    case = Case(model="own", strategy="model_parallel_pipelined", devices=2, batch_size=8)
    with pytest.raises(ValueError, match=f"the model own is not: {fault}.*; give --strategies model_parallel"):
        stages(case, model, 2)


def test_each_rank_of_a_pipeline_has_its_layers_and_the_module_has_all_at_the_end(tmp_path: Path) -> None:
    case = replace(DDP, strategy="model_parallel_pipelined", devices=3)

    def entry(rank: int) -> dict[str, Any]:
        model = models.load("mlp", "small", 0)
        before = [p.detach().clone() for p in model.module.parameters()]
        devices = open_devices("cpu", 3, own_processes=True)[rank : rank + 1]
        with load(case.strategy).start(case, model, devices, no_mark) as step:
            loss = step(*model.batch(8, 0)).item()
            trained = [name for name, p in model.module.named_parameters() if p.grad is not None]
        after = list(model.module.parameters())
        moved = [not torch.equal(a, b) for a, b in zip(after, before, strict=True)]
        return {"trained": trained, "loss": loss, "moved": all(moved), "sum": sum(p.sum().item() for p in after)}

    found = ranks.run(entry, 3, tmp_path, "gloo")
    assert [one["trained"] for one in found] == [[f"fc{i}.weight", f"fc{i}.bias"] for i in (1, 2, 3)]
    model = models.load("mlp", "small", 0)
    inputs, target = model.batch(8, 0)
    assert [one["loss"] for one in found] == [0.0, 0.0, pytest.approx(model.loss(model.module(inputs), target).item())]
    assert all(one["moved"] for one in found)
    assert len({one["sum"] for one in found}) == 1


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


def test_a_pipeline_is_predicted_to_fill_with_micro_batches() -> None:
    """With 4 micro-batches on 4 stages, 7 of 16 slots of time are needed, and messages besides."""
    layers, pipelined = seconds("model_parallel", 4), seconds("model_parallel_pipelined", 4)
    assert 7 / 16 < pipelined / layers < 1


UNCHECKED = [
    "fsdp", "ddp_fp16", "ddp_bucket_view", "ddp_static_graph", "ddp_no_sync", "model_parallel",
    "model_parallel_pipelined",
]  # fmt: skip


@pytest.mark.parametrize("strategy", UNCHECKED)
def test_predictions_that_nothing_has_checked_are_labelled(strategy: str) -> None:
    case = Case(model="mlp", strategy=strategy, devices=2, batch_size=8, device_kind="cuda")
    assert labels(Trial(case=case, source=Source.PREDICTED)) == ("PREDICTED", "EXPERIMENTAL")
    assert labels(Trial(case=case)) == ("MEASURED",)
    assert labels(Trial(case=replace(case, strategy="ddp"), source=Source.PREDICTED)) == ("PREDICTED",)
