"""Autograd through the engine, and the caller's settings and hooks in the replicas."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbench.engine import DataParallel
from dpbench.engine.fast import stages
from dpbench.engine.fast.pool import Pool
from dpbench.engine.fast.stages import in_stages
from dpbench.engine.parallel_apply import Spawn, Workers
from dpbench.hardware.devices import resolve
from tests.engine.chunked import Chunked
from tests.engine.nets import cpus, made, mlp
from tests.engine.plain.test_data_parallel import wave

# ---------------------------------------------------------------- thread settings


class Probe(nn.Module):
    """Remember the torch settings that each replica ran under."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: list[tuple[Any, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(
            (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
                torch.is_autocast_cache_enabled(),
            )
        )
        return self.layer(x)


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("enter", "grad", "inference", "dtype"),
    [
        (nothing, True, False, None),
        (torch.no_grad, False, False, None),
        (torch.inference_mode, False, True, None),
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16), True, False, torch.bfloat16),
        (lambda: torch.autocast("cpu", dtype=torch.float16), True, False, torch.float16),
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16, enabled=False), True, False, None),
    ],
    ids=["plain", "no_grad", "inference", "bf16", "fp16", "disabled"],
)
@pytest.mark.parametrize("n", [1, 3])
def test_replicas_run_under_the_callers_settings(
    enter: Any, grad: bool, inference: bool, dtype: Any, n: int
) -> None:
    module = Probe()
    with enter():
        output = DataParallel(module, cpus(n))(torch.randn(6, 4))
    assert module.seen == [(grad, inference, dtype is not None, dtype, True)] * n
    assert output.dtype == (dtype or torch.float32)
    assert output.is_inference() == inference
    assert output.requires_grad == grad


@pytest.mark.parametrize("workers", [Spawn(), Pool()], ids=["threads", "pool"])
def test_the_call_between_two_stages_runs_under_the_callers_settings(workers: Workers) -> None:
    seen: list[tuple[bool, bool]] = []

    def between() -> None:
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        in_stages(lambda i: None, between, lambda i: None, resolve(cpus(3)), workers)
    assert seen == [(False, True)]


class LastFirst:
    """Workers for two devices: device 0 begins a stage only after device 1 has ended it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived = threading.Event()
        self.other: threading.Thread | None = None
        workers = self

        class Meeting(stages.Meeting):
            def goes_on(self, i: int) -> bool:
                if i == 1:
                    workers.arrived.set()
                    return super().goes_on(i)
                decision = super().goes_on(i)
                workers.other.join(10)
                return decision

        monkeypatch.setattr(stages, "Meeting", Meeting)

    def run(
        self,
        job: Callable[[int], None],
        count: int,
        starting: Any = None,
        stop: Callable[[], None] | None = None,
    ) -> None:
        self.other = threading.Thread(target=job, args=(1,))
        self.other.start()
        assert self.arrived.wait(10)
        job(0)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("failing", [1, 2])
def test_a_device_that_fails_early_stops_no_other_device_in_the_same_stage(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[int, int]] = []

    def stage(number: int, i: int) -> None:
        ran.append((number, i))
        if number == failing:
            raise ValueError(f"device {i}")

    with pytest.raises(ValueError, match="device 0"):
        in_stages(
            partial(stage, 1), None, partial(stage, 2), resolve(cpus(2)), LastFirst(monkeypatch)
        )
    assert ran == [(number, i) for number in range(1, failing + 1) for i in (1, 0)]


def test_autocast_cache_setting_reaches_the_replicas() -> None:
    module = Probe()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        DataParallel(module, cpus(2))(torch.randn(6, 4))
    assert [seen[-1] for seen in module.seen] == [False, False]


def test_bf16_gradients_equal_chunked_reference() -> None:
    module, x = made("mlp", 8)
    plain = copy.deepcopy(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = [one(x) for one in (DataParallel(module, cpus(2)), Chunked(plain, 2))]
    for output in outputs:
        wave(output.float()).backward()
    assert torch.equal(*outputs)
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


# ---------------------------------------------------------------- autograd


def penalised(forward: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the gradients of a loss that contains gradients by input and by weights."""
    output = forward(x)
    weights = list(module.parameters())
    inner = torch.autograd.grad(output.square().sum(), [x, *weights], create_graph=True)
    loss = output.sum() + sum(g.square().sum() for g in inner)
    return list(torch.autograd.grad(loss, weights))


@pytest.mark.parametrize("n", [2, 3])
def test_double_backward_equals_single(n: int) -> None:
    module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    for ours, theirs in zip(
        penalised(DataParallel(module, cpus(n)), module, x),
        penalised(module, module, x),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_hooks_run_once_per_replica_and_parameter_hooks_once() -> None:
    module, x = made("mlp", 6)
    calls: Counter[str] = Counter()
    module.register_forward_pre_hook(lambda *_: calls.update(["pre"]))
    module[0].register_forward_hook(lambda *_: calls.update(["forward"]))
    module[2].register_full_backward_hook(lambda *_: calls.update(["backward"]))
    whole: list[Tensor] = []
    module[0].weight.register_hook(lambda g: whole.append(g.clone()))
    DataParallel(module, cpus(3))(x).sum().backward()
    assert calls == {"pre": 3, "forward": 3, "backward": 3}
    assert len(whole) == 1
    assert torch.equal(whole[0], module[0].weight.grad)


def test_a_wrapper_inside_a_module_takes_part() -> None:
    head, x = nn.Linear(5, 2), torch.randn(6, 12)
    body = mlp()
    plain = copy.deepcopy(body)
    wave(nn.Sequential(DataParallel(body, cpus(2)), head)(x)).backward()
    wave(head(Chunked(plain, 2)(x))).backward()
    for ours, theirs in zip(body.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
