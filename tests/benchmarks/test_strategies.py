"""The strategies in benchmarks/strategies: each runs and verifies, and does what its name says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dpbench
from benchmarks.strategies.data_parallel_block import largest
from benchmarks.strategies.layers import assign
from dpbench import models
from dpbench.hardware.devices import open_devices
from dpbench.measure import ranks
from dpbench.measure.worker.trial import run_together
from dpbench.predict import machine, simulation
from dpbench.predict.tasks import Unpredictable
from dpbench.predict.work import Profile
from dpbench.records import HOST, Case, Phase, Trial, Verified, no_mark, registry
from dpbench.strategies import Strategy
from tests import commands
from tests.runs import TWO_STEPS

FOLDER = Path(__file__).parents[2] / "benchmarks" / "strategies"
IN_RANKS = {Phase.SCATTER, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.REDUCE, Phase.OPTIMIZER}
LAYERED = IN_RANKS - {Phase.REDUCE}
PHASES: dict[str, tuple[str, int, set[Phase]]] = {
    "data_parallel_block": ("cpu", 2, IN_RANKS | {Phase.REPLICATE, Phase.GATHER}),
    "ddp_bucket_view": ("cpu", 2, IN_RANKS),
    "ddp_fp16": ("cpu", 2, IN_RANKS),
    "ddp_model_parallel": ("cpu", 4, IN_RANKS),
    "ddp_no_sync": ("cpu", 2, IN_RANKS),
    "ddp_static_graph": ("cpu", 2, IN_RANKS),
    "half_cpu": ("emulated", 1, LAYERED),
    "model_parallel": ("cpu", 2, LAYERED),
    "pipelined": ("cpu", 2, LAYERED),
}
"""For each strategy: the kind and number of devices on which the tests run it, and its phases."""
WITHOUT_DEVICES = {"ddp_bf16", "ddp_sync_bn"}
"""Strategies that need distinct GPUs."""


def named(file: str) -> str:
    return f"{FOLDER / file}.py:strategy"


def load(file: str) -> Strategy:
    strategy: Strategy = registry.strategy(named(file))
    return strategy


def case_of(file: str, **changed: Any) -> Case:
    declared = registry.declared(named(file))
    usual = {
        "model": "mlp",
        "strategy": named(file),
        "devices": 2,
        "batch_size": 9,
        "declared": declared,
    }
    return Case(**{**usual, **changed})


def trial_of(tmp_path: Path, file: str, **changed: Any) -> Trial:
    kind, devices, _ = PHASES[file]
    case = case_of(file, **{"device_kind": kind, "devices": devices, **changed})
    (done,) = run_together([case], TWO_STEPS, tmp_path)
    assert done.status == "ok", done.reason
    return done


def test_every_file_is_tested() -> None:
    files = {path.stem for path in FOLDER.glob("*.py")} - {"layers"}
    assert files == {*PHASES} | WITHOUT_DEVICES


@pytest.mark.parametrize("file", PHASES)
def test_each_strategy_is_verified_and_has_its_phases(file: str, tmp_path: Path) -> None:
    done = trial_of(tmp_path, file)
    assert done.verified in (Verified.BITWISE, Verified.WITHIN_TOLERANCE), done.reason
    assert {span.phase for span in done.spans} == PHASES[file][2]
    assert {span.device for span in done.spans if span.phase is Phase.BACKWARD} == (
        {HOST, 0} if file == "half_cpu" else {*range(done.case.devices)}
    )


@pytest.mark.slow
def test_the_command_line_runs_a_file_that_imports_its_neighbours(tmp_path: Path) -> None:
    with commands.folder(tmp_path) as folder:
        axes = ("--devices", "2", "--batch-sizes", "8", "--rounds", "1")
        done = folder.do(
            "run",
            "--models",
            "mlp",
            "--strategies",
            "single",
            "--strategy",
            named("pipelined"),
            *axes,
        )
        assert done.returncode == 0, done.stderr
        ended = folder.query("SELECT verified FROM trial")
        assert ended == [("bitwise",)] * 2


def test_no_file_is_predicted() -> None:
    """A step that is not described as tasks has no prediction."""
    profile = Profile(
        model="mlp",
        parameter_tensors=6,
        parameter_bytes=1000,
        buffer_bytes=10,
        input_bytes=50.0,
        output_bytes=4.0,
    )
    for file in PHASES:
        with pytest.raises(Unpredictable):
            simulation.step(case_of(file, device_kind="cuda"), profile, machine.load("rtx-3090-x8"))


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("ddp_model_parallel", {"devices": 3}),
        ("ddp_bf16", {}),
        ("ddp_bf16", {"device_kind": "emulated"}),
        ("ddp_bf16", {"device_kind": "cuda", "placement": "colocated"}),
        ("ddp_sync_bn", {}),
        ("ddp_sync_bn", {"device_kind": "emulated"}),
        ("data_parallel_block", {"compile": True}),
        ("half_cpu", {}),
        ("half_cpu", {"device_kind": "cuda", "precision": "bf16"}),
        ("half_cpu", {"device_kind": "cuda", "compile": True}),
    ],
)
def test_a_case_that_a_strategy_cannot_run_is_skipped(file: str, changed: dict[str, Any]) -> None:
    assert load(file).skip(case_of(file, **changed))
    assert load(file).skip(case_of(file, device_kind="cuda")) == ""


def trials_on_gpus(folder: commands.Folder, file: str, model: str) -> list[Trial]:
    """Run the strategy in a file on two GPUs, and return the trials of the strategy.

    The command is a process of its own, because ranks are forked before CUDA starts.
    """
    axes = ("--models", model, "--devices", "2", "--batch-sizes", "16", "--size", "small")
    chosen = ("--strategies", "single", "--strategy", named(file), "--device-kind", "cuda")
    folder.do("run", *axes, *chosen, "--rounds", "1", "--quiet")
    trials = list(dpbench.load(folder.store).trials)
    return [trial for trial in trials if trial.case.strategy == named(file)]


@pytest.mark.multi_gpu
@pytest.mark.parametrize(("file", "model"), [("ddp_bf16", "mlp"), ("ddp_sync_bn", "resnet18")])
def test_a_strategy_that_needs_gpus_is_verified_and_has_its_phases(
    file: str, model: str, tmp_path: Path
) -> None:
    with commands.folder(tmp_path) as folder:
        (done,) = trials_on_gpus(folder, file, model)
        assert done.status == "ok", done.reason
        assert done.verified in (Verified.BITWISE, Verified.WITHIN_TOLERANCE)
        assert {span.phase for span in done.spans} == IN_RANKS


@pytest.mark.multi_gpu
def test_a_model_without_batchnorm_is_not_timed_as_synchronized(tmp_path: Path) -> None:
    with commands.folder(tmp_path) as folder:
        (done,) = trials_on_gpus(folder, "ddp_sync_bn", "mlp")
        assert done.status == "failed"
        assert "no BatchNorm" in done.reason


# ---------------------------------------------------------------- layers over devices


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ([1, 1, 1], 2, [0, 1, 1]),
        ([1] * 8, 4, [0, 0, 1, 1, 2, 2, 3, 3]),
        ([100, 1, 1], 3, [0, 1, 2]),  # every device gets a layer while there are enough
        ([1, 1, 100], 3, [0, 1, 2]),
        ([10, 0, 0, 0], 2, [0, 1, 1, 1]),
        ([0, 0], 2, [0, 1]),
    ],
)
def test_layers_are_assigned_in_order_and_in_about_equal_groups(
    sizes: list[int], count: int, expected: list[int]
) -> None:
    assert assign(sizes, count) == expected


@pytest.mark.usefixtures("short_sequences")
@pytest.mark.parametrize("model", registry.names("models"))
def test_the_layers_of_every_model_are_on_their_devices(model: str, tmp_path: Path) -> None:
    done = trial_of(tmp_path, "model_parallel", model=model, device_kind="emulated", batch_size=6)
    assert done.verified is Verified.BITWISE
    loaded = models.load(model, "small", 0)
    with load("model_parallel").start(
        done.case, loaded, open_devices("emulated", 2), no_mark
    ) as step:
        step(*loaded.batch(6, 0))
        assert {p.device.index for p in loaded.module.parameters()} == {0, 1}
        assert all(
            p.grad.device == p.device for p in loaded.module.parameters() if p.grad is not None
        )
    assert not any(part._forward_pre_hooks for part in loaded.module.modules())


def test_more_devices_than_layers_are_refused() -> None:
    model = models.load("embedding", "small", 0)
    with (
        pytest.raises(ValueError, match="2 layers for 3 devices"),
        load("model_parallel").start(
            case_of("model_parallel"), model, open_devices("cpu", 3), no_mark
        ),
    ):
        pass


def test_a_nested_sequential_is_split_and_a_shared_layer_is_placed_once() -> None:
    shared = nn.Linear(4, 4)
    net = nn.Sequential(
        nn.Sequential(shared, nn.ReLU(), nn.Linear(4, 4)), nn.Sequential(shared, nn.Linear(4, 4))
    )
    make = lambda n, seed: (torch.randn(n, 4), torch.zeros(n, 4))  # noqa: E731
    model = models.Model("nested", net, make, nn.functional.mse_loss)
    case = case_of("model_parallel", devices=3, device_kind="emulated")
    with load("model_parallel").start(case, model, open_devices("emulated", 3), no_mark) as step:
        assert step(*model.batch(3, 0)).isfinite()
        assert [p.device.index for p in net.parameters()] == [0, 0, 1, 1, 2, 2]


def test_the_first_half_of_the_layers_is_on_the_host() -> None:
    model = models.load("mlp", "small", 0)
    case = case_of("half_cpu", devices=1, device_kind="emulated")
    with load("half_cpu").start(case, model, open_devices("emulated", 1), no_mark) as step:
        step(*model.batch(9, 0))
        assert {p.device.type for p in model.module.get_submodule("fc1").parameters()} == {"cpu"}
        assert {p.device.type for p in model.module.get_submodule("fc3").parameters()} == {"lazy"}


# ---------------------------------------------------------------- one block on several devices


def test_the_block_is_the_largest_child_that_is_not_the_whole() -> None:
    small, large = nn.Linear(2, 2), nn.Linear(9, 9)
    assert largest(nn.Sequential(small, large)) == "1"
    assert largest(nn.Sequential(nn.Sequential(small, large))) == "0.1"
    with pytest.raises(ValueError, match="give --strategies dp"):
        largest(nn.Sequential(nn.Sequential(large), nn.ReLU()))


def test_only_the_block_is_split_and_it_is_unwrapped_at_the_end() -> None:
    rows: dict[str, list[int]] = {}
    model = models.load("mlp", "small", 0)
    assert largest(model.module) == "fc1"
    for name in ("fc1", "fc2", "fc3"):
        seen = rows.setdefault(name, [])
        model.module.get_submodule(name).register_forward_hook(
            lambda _, args, out, seen=seen: seen.append(len(out))
        )
    case = case_of("data_parallel_block", devices=3, batch_size=8)
    with load("data_parallel_block").start(case, model, open_devices("cpu", 3), no_mark) as step:
        step(*model.batch(8, 0))
        assert isinstance(model.module.fc1, dpbench.DataParallel)
    assert {name: sorted(seen) for name, seen in rows.items()} == {
        "fc1": [2, 3, 3],
        "fc2": [8],
        "fc3": [8],
    }
    assert type(model.module.fc1) is nn.Linear


# ---------------------------------------------------------------- variants of ddp


def in_ranks(file: str, tmp_path: Path, look: Any, mark: Any = no_mark) -> list[dict[str, Any]]:
    """Take one step in two ranks, and return each rank's result of `look(step, model)`."""

    def entry(rank: int) -> dict[str, Any]:
        device = open_devices("cpu", 2, own_processes=True)[rank : rank + 1]
        model = models.load("mlp", "small", 0)
        with load(file).start(case_of(file, batch_size=8), model, device, mark) as step:
            return dict(look(step, model))

    return ranks.run(entry, 2, tmp_path, "gloo")


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("ddp_bucket_view", {"gradient_as_bucket_view": True}),
        ("ddp_static_graph", {"static_graph": True}),
        ("ddp_fp16", {"rounded": True}),
    ],
)
def test_a_variant_of_ddp_sets_its_option_or_rounds_gradients(
    file: str, changed: dict[str, bool], tmp_path: Path
) -> None:
    def look(step: Any, model: models.Model) -> dict[str, Any]:
        step(*model.batch(8, 0))
        gradients = [p.grad for p in model.module.parameters()]
        options = {
            name: getattr(step.wrapped, name)
            for name in ("gradient_as_bucket_view", "static_graph")
        }
        return {**options, "rounded": all(torch.equal(g, g.half().float()) for g in gradients)}

    usual = {"gradient_as_bucket_view": False, "static_graph": False, "rounded": False}
    assert in_ranks(file, tmp_path, look) == [{**usual, **changed}] * 2


def test_gradient_accumulation_reduces_the_gradients_once_per_step(tmp_path: Path) -> None:
    """A communication hook is called once per bucket and reduction."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    reduced_bytes: list[int] = []
    phases = Counter[Phase]()

    def counted(state: Any, bucket: Any) -> Any:
        reduced_bytes.append(bucket.buffer().nbytes)
        return allreduce_hook(state, bucket)

    counted.__annotations__.clear()  # torch refuses annotations that are text

    @contextmanager
    def mark(phase: Phase, device: int) -> Iterator[None]:
        phases[phase] += 1
        yield

    def look(step: Any, model: models.Model) -> dict[str, Any]:
        step.wrapped.register_comm_hook(None, counted)
        step(*model.batch(8, 0))
        whole = sum(p.nbytes for p in model.module.parameters())
        return {"reductions": sum(reduced_bytes) / whole, "forwards": phases[Phase.FORWARD]}

    assert in_ranks("ddp_no_sync", tmp_path, look, mark) == [{"reductions": 1.0, "forwards": 2}] * 2


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_does_not_name_one_of_its_two_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(type(load("ddp_model_parallel")), "start", full)
    (done,) = run_together([replace(case_of("ddp_model_parallel"), devices=4)], TWO_STEPS, tmp_path)
    assert (done.status, done.failed_device) == ("oom", None)
