"""Collectives: the devices that may use them, and results equal to those of ordered additions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbench.engine.fast import exchange
from dpbench.engine.train_step import TrainStep
from dpbench.hardware.device import Device
from dpbench.hardware.devices import resolve
from dpbench.hardware.devices.cuda import CudaDevice
from tests.engine.fast.test_schedules import OPTIMIZERS, differing, problem, train
from tests.engine.law.sides import EVERYWHERE


class Ordered:
    """Collectives over tensors of the host, bitwise equal to ordered adds in replica order.

    Like NCCL, they refuse tensors that differ in shape or dtype between devices, and tensors that
    are not dense.
    """

    calls: list[str] = []  # noqa: RUF012  of all of them, emptied by the fixture

    def __init__(self, devices: Sequence[Any]) -> None:
        self.count = len(devices)

    def follow(self, i: int) -> None:
        assert 0 <= i < self.count

    def lead(self, i: int) -> None:
        assert 0 <= i < self.count

    def _sum(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        self._check(name, tensors)
        total = tensors[0] + tensors[1]
        for tensor in tensors[2:]:
            total += tensor
        return total

    def _check(self, name: str, tensors: Sequence[Tensor]) -> None:
        assert len(tensors) == self.count
        assert {(t.shape, t.dtype) for t in tensors} == {(tensors[0].shape, tensors[0].dtype)}
        assert all(t.is_contiguous() and t.dim() == 1 for t in tensors)
        assert len({t.data_ptr() for t in tensors}) == self.count
        self.calls.append(name)

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        total = self._sum("all_reduce", tensors)
        for tensor in tensors:
            tensor.copy_(total)

    def reduce_scatter(self, tensors: Sequence[Tensor]) -> None:
        total = self._sum("reduce_scatter", tensors).view(self.count, -1)
        for i, tensor in enumerate(tensors):
            tensor.view(self.count, -1)[i].copy_(total[i])

    def all_gather(self, tensors: Sequence[Tensor]) -> None:
        self._check("all_gather", tensors)
        whole = torch.cat([tensor.view(self.count, -1)[i] for i, tensor in enumerate(tensors)])
        for tensor in tensors:
            tensor.copy_(whole)

    def broadcast(self, tensors: Sequence[Tensor], root: int) -> None:
        self._check("broadcast", tensors)
        for i, tensor in enumerate(tensors):
            if i != root:
                tensor.copy_(tensors[root])


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """Give the host's devices collectives.

    The value tells which have been called since it was last asked.
    """

    def offered(self: Device, devices: Sequence[Any]) -> Ordered | None:
        return Ordered(devices) if len(devices) > 1 else None

    def called() -> list[str]:
        found, Ordered.calls[:] = sorted(set(Ordered.calls)), []
        return found

    monkeypatch.setattr(Device, "collectives", offered)
    called()
    yield called
    called()


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_collectives_make_the_weights_of_ordered_adds_on_every_schedule(
    n: int, together: Any
) -> None:
    expected, _ = train("odd", "reference", n, 4 * n - 1, "adamw_two_groups")
    assert not together()
    used = {
        "allreduce": {"all_reduce"},
        "sharded": {"all_gather", "broadcast", "reduce_scatter"},
    }
    for schedule in EVERYWHERE:
        assert not differing(
            expected, train("odd", schedule, n, 4 * n - 1, "adamw_two_groups")[0]
        ), schedule
        assert used[schedule] <= set(together()), schedule


@pytest.mark.parametrize("schedule", EVERYWHERE)
def test_short_batches_options_and_checkpoints_go_with_collectives(
    schedule: str, together: Any
) -> None:
    expected, _ = train("mlp", "reference", 4, 4, "adam")
    assert not differing(expected, train("mlp", schedule, 4, 4, "adam")[0])
    first, batches = {}, problem("mlp", 3, 4)[2]
    for name in (
        "reference",
        schedule,
    ):  # batches that leave devices without rows, among others that do not
        module, loss, _ = problem("mlp", 3)
        with TrainStep(module, loss, OPTIMIZERS["adam"], ["cpu"] * 3, name) as step:
            for rows, (inputs, target) in zip((3, 2, 1, 3), batches, strict=True):
                step(inputs[:rows], target[:rows])
            first[name] = {
                **module.state_dict(),
                "optimizer": step.state_dict()["optimizer"]["state"],
            }
    torch.testing.assert_close(first[schedule], first["reference"], rtol=0, atol=0)
    assert together()


@pytest.mark.parametrize(
    ("broken", "schedule"),
    [
        ("all_reduce", "allreduce"),
        ("all_gather", "sharded"),
        ("reduce_scatter", "sharded"),
    ],
)
def test_a_collective_that_does_nothing_is_seen(
    broken: str, schedule: str, together: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = train("mlp", "reference", 3, 11)
    monkeypatch.setattr(Ordered, broken, lambda *anything: None)
    assert differing(expected, train("mlp", schedule, 3, 11)[0])


def test_a_broadcast_that_does_nothing_is_seen(
    together: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are broadcast after the training loop has written them."""

    def run(schedule: str) -> nn.Module:
        module, loss, batches = problem("mlp", 11)
        with TrainStep(module, loss, OPTIMIZERS["sgd"], ["cpu"] * 3, schedule) as step:
            for inputs, target in batches:
                step(inputs, target)
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.mul_(0.5)
        return module

    expected = run("reference")
    assert not differing(expected, run("sharded"))
    monkeypatch.setattr(Ordered, "broadcast", lambda *anything: None)
    assert differing(expected, run("sharded"))


def _cuda(index: int, ordinal: int) -> CudaDevice:
    """Return a CUDA device as far as it can be made without CUDA."""
    device = CudaDevice.__new__(CudaDevice)
    device.index, device.ordinal, device.torch_device = (
        index,
        ordinal,
        torch.device("cuda", ordinal),
    )
    return device


def test_only_distinct_gpus_have_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dpbench.hardware.devices.cuda.Nccl", lambda devices: ("nccl", len(devices))
    )
    monkeypatch.setattr("dpbench.hardware.devices.cuda.nccl.is_available", lambda tensors: True)
    monkeypatch.setattr("dpbench.hardware.devices.cuda.torch.empty", lambda *_, **__: None)
    weights = [torch.zeros(3), torch.zeros(2, 2, dtype=torch.float16)]
    spread = [_cuda(0, 0), _cuda(1, 1), _cuda(2, 2)]
    assert exchange.choose(spread, weights) == ("nccl", 3)
    assert exchange.choose([_cuda(0, 0), _cuda(1, 0)], weights) is None
    assert exchange.choose(spread[:1], weights) is None
    assert exchange.choose(spread, [torch.zeros(4, 4)[:, ::2]]) is None
    assert exchange.choose(spread, [torch.zeros(2, dtype=torch.complex64)]) is None
    assert exchange.choose(spread, [torch.zeros(2).to_sparse()]) is None
    monkeypatch.setattr("dpbench.hardware.devices.cuda.nccl.is_available", lambda tensors: False)
    assert exchange.choose(spread, weights) is None
    for ids in (["cpu", "cpu"], ["emulated:0", "emulated:1"]):
        assert exchange.choose(resolve(ids), weights) is None


def test_blocking_launches_are_refused_on_distinct_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpbench.hardware.devices.cuda._has_nccl", lambda: True)
    spread, shared = [_cuda(0, 0), _cuda(1, 1)], [_cuda(0, 0), _cuda(1, 0)]
    for value in ("1", "2"):
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", value)
        with pytest.raises(RuntimeError, match="unset CUDA_LAUNCH_BLOCKING"):
            spread[0].can_collect(spread)
        assert not shared[0].can_collect(shared)
    for value in ("0", ""):
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", value)
        assert spread[0].can_collect(spread)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setattr("dpbench.hardware.devices.cuda._has_nccl", lambda: False)
    assert spread[0].can_collect(spread)
