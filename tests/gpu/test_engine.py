"""The engine and the strategies on GPUs, where these differ from the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dpbench
from dpbench import models
from dpbench.engine import TrainStep
from dpbench.engine.fast.pool import Pool
from dpbench.hardware.devices import open_devices
from dpbench.hardware.devices.cuda import Nccl
from dpbench.records import Case, no_mark, registry

pytestmark = pytest.mark.gpu

every_placement = pytest.mark.parametrize(
    "ids",
    [
        pytest.param([0, 0], id="colocated"),
        pytest.param([0, 1], marks=pytest.mark.multi_gpu, id="spread"),
    ],
)


class Words(nn.Module):
    """A model whose embedding has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8, sparse=True)
        self.linear = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.embedding(x))  # type: ignore[no-any-return]


@every_placement
@pytest.mark.parametrize("schedule", ["reference", "pool", "cached"])
def test_a_training_step_has_sparse_gradients(ids: list[int], schedule: str) -> None:
    def sgd(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]

    module = Words().cuda()
    before = module.embedding.weight.detach().cpu()
    with TrainStep(module, F.cross_entropy, sgd, ids, schedule) as step:
        step(torch.randint(50, (8,)), torch.randint(3, (8,)))
        assert module.embedding.weight.grad is not None
        assert module.embedding.weight.grad.is_sparse
    assert module.embedding.weight.shape == before.shape


@every_placement
def test_a_wrapper_has_sparse_gradients(ids: list[int]) -> None:
    module = Words().cuda()
    dpbench.DataParallel(module, ids)(torch.randint(50, (8,), device="cuda")).sum().backward()
    assert module.embedding.weight.grad is not None
    assert module.embedding.weight.grad.is_sparse


@every_placement
@pytest.mark.parametrize("grad_mode", [True, False])
def test_sparse_gradients_are_reduced(ids: list[int], grad_mode: bool) -> None:
    gradients = [[torch.eye(4).to_sparse_coo().cuda(i)] for i in ids]
    with torch.set_grad_enabled(grad_mode):
        (total,) = dpbench.reduce(gradients, ids)
    assert (total.layout, total.device) == (torch.sparse_coo, torch.device("cuda:0"))


def test_a_device_uses_the_current_stream_of_its_gpu_and_thread() -> None:
    (device,) = open_devices("cuda", 1)
    usual, other = torch.cuda.current_stream(0), torch.cuda.Stream(0)
    elsewhere: list[torch.cuda.Stream] = []
    for _ in range(2):
        assert device.stream == usual
        with torch.cuda.stream(other):
            assert device.stream == other
            thread = threading.Thread(target=lambda: elsewhere.append(device.stream))
            thread.start()
            thread.join()
    assert elsewhere == [usual, usual]


def streams_of(step: Callable[[], object]) -> tuple[set[int], set[int]]:
    """Return the streams on which a step copies from the host, and those on which it computes."""
    step()  # libraries initialize their streams
    torch.cuda.synchronize()
    both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=both) as profiler:
        step()
        torch.cuda.synchronize()
    streams: dict[str, set[int]] = {"gpu_memcpy": set(), "kernel": set()}
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.activity_type() in streams and "DtoH" not in event.name():
            streams[event.activity_type()].add(event.device_resource_id())
    return streams["gpu_memcpy"], streams["kernel"]


@contextmanager
def alone() -> Iterator[None]:
    """Let this process be the only rank."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["single", "ddp", "dp", "torch_dp"])
def test_only_data_parallel_copies_its_inputs_beside_the_stream_that_computes(name: str) -> None:
    """torch.nn.DataParallel copies inputs in background streams; an ordinary loop does not."""
    case = Case(model="mlp", strategy=name, devices=1, batch_size=64, device_kind="cuda")
    model = models.load("mlp", "small", 0)
    inputs, _ = (tensor.pin_memory() for tensor in model.batch(64, 0))
    target = model.batch(64, 0)[1].cuda()
    start = registry.strategy(name).start
    with alone(), start(case, model, open_devices("cuda", 1), no_mark) as step:
        copies, kernels = streams_of(lambda: step(inputs, target))
    assert len(copies) == 1
    assert (copies <= kernels) == (name in ("single", "ddp"))


@pytest.mark.multi_gpu
@pytest.mark.parametrize("schedule", ["allreduce", "sharded"])
def test_no_collective_is_launched_while_replicas_work(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL may hang if another thread allocates memory, or loads a kernel, at that moment."""
    working, launched = list[Pool](), list[bool]()
    run, reduce = Pool.run, Nccl.all_reduce if schedule == "allreduce" else Nccl.reduce_scatter

    def noted(pool: Pool, *arguments: Any, **named: Any) -> None:
        working.append(pool)
        try:
            run(pool, *arguments, **named)
        finally:
            working.pop()

    def noting(*arguments: Any) -> None:
        launched.append(bool(working))
        reduce(*arguments)

    monkeypatch.setattr(Pool, "run", noted)
    monkeypatch.setattr(Nccl, reduce.__name__, noting)
    model = models.load("mlp", "small", 0)
    sgd = partial(torch.optim.SGD, lr=0.01)
    with TrainStep(model.module.cuda(), model.loss, sgd, [0, 1], schedule) as step:
        step(*model.batch(8, 0))
    assert launched
    assert not any(launched)


@pytest.mark.multi_gpu
def test_blocking_launches_are_refused_where_nccl_would_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    model = models.load("mlp", "small", 0)
    module, batch = model.module.cuda(), model.batch(8, 0)
    sgd = partial(torch.optim.SGD, lr=0.01)
    case = Case(model="mlp", strategy="torch_dp", devices=2, batch_size=8, device_kind="cuda")
    of_torch = registry.strategy("torch_dp")
    refused = partial(pytest.raises, RuntimeError, match="unset CUDA_LAUNCH_BLOCKING")
    with refused():
        dpbench.DataParallel(module, [0, 1])(batch[0])
    for schedule in ("copying", "fastest"):
        with refused():
            TrainStep(module, model.loss, sgd, [0, 1], schedule)(*batch)
    with refused(), of_torch.start(case, model, open_devices("cuda", 2), no_mark):
        pass
    with refused(), of_torch.infer(case, model, open_devices("cuda", 2), no_mark):
        pass
    assert dpbench.DataParallel(module, [0, 0])(batch[0]).isfinite().all()
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    assert dpbench.DataParallel(module, [0, 1])(batch[0]).isfinite().all()
