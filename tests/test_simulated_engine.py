"""Decisions of the engine that rest on times, on simulated GPUs, whose host calls return before the work is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from dpbench import models
from dpbench.engine import TrainStep
from tests.simulated.backend import SimulatedDevice, running
from tests.simulated.machine import Machine
from tests.simulated.timeline import Gpu


@contextmanager
def training(speeds: list[float], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Machine, TrainStep]]:
    """Yield a machine whose GPUs have these speeds, and a TrainStep with automatic chunk sizes after its choice."""
    monkeypatch.setattr(SimulatedDevice, "memory", lambda self: None)  # the choice then rests on times alone
    machine = Machine([Gpu(i, speeds=[(0.0, speed)]) for i, speed in enumerate(speeds)])
    with running(machine) as devices:
        model = models.load("mlp", "small", 0)
        net = model.module.to(devices[0].torch_device)
        with TrainStep(
            net, model.loss, lambda p: torch.optim.SGD(p, lr=0.1), devices, "reference", chunk_sizes="auto"
        ) as step:
            for _ in range(9):
                step(*model.batch(64, 0))
            yield machine, step


def test_automatic_chunk_sizes_balance_the_compute_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with training([1.0, 1.0, 0.5], monkeypatch) as (machine, step):
        first, second, slow = step.chunk_sizes or (0, 0, 0)
        machine.timeline.synchronize(machine.streams)
        start_s = machine.timeline.now()
        step(*models.load("mlp", "small", 0).batch(64, 0))
        machine.timeline.synchronize(machine.streams)
        busy = [machine.busy_s(device, start_s, machine.timeline.now()) for device in range(3)]
    assert second / slow == pytest.approx(2, rel=0.05)
    assert first < second  # device 0 also computes the loss and the update
    assert max(busy) < 1.15 * min(busy)


def test_automatic_chunk_sizes_of_equal_gpus_differ_by_the_work_of_device_0_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with training([1.0, 1.0, 1.0], monkeypatch) as (_, step):
        first, second, third = step.chunk_sizes or (0, 0, 0)
    assert second == pytest.approx(third, rel=0.01)
    assert first < second
