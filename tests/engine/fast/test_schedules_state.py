"""State on every schedule: checkpoints, overflows, changes between steps, a closed step."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench import DataParallel
from dpbench.engine.train_step import TrainStep
from dpbench.records.schedule import Schedule
from tests.engine import rungs
from tests.engine.fast.test_schedules import OPTIMIZERS, differing, problem
from tests.engine.law.sides import refusing


@rungs.every("rung")
def test_an_overflow_skips_the_step_on_every_device(rung: str) -> None:
    module, loss, batches = problem("mlp", 8)
    before = copy.deepcopy(module)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    inputs, target = batches[0]
    inputs[0] = float("inf")
    with (
        refusing(rung, "scaler"),
        TrainStep(module, loss, OPTIMIZERS["sgd"], ["cpu", "cpu"], rung, scaler=scaler) as step,
    ):
        step(inputs, target)
        assert not differing(before, module)
        assert scaler.get_scale() < 1024.0


@rungs.every("rung")
def test_schedulers_reach_every_devices_optimizer(rung: str) -> None:
    def run(schedule: str) -> nn.Module:
        module, loss, batches = problem("mlp", 9)
        with TrainStep(module, loss, OPTIMIZERS["sgd"], ["cpu", "cpu"], schedule) as step:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(step.optimizer, 0.5)
            for batch in batches:
                step(*batch)
                scheduler.step()
        return module

    assert not differing(run("reference"), run(rung))


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize(
    ("first", "second"),
    [("sharded", "reference"), ("reference", "sharded"), ("sharded", "allreduce")],
)
def test_checkpoints_move_between_rungs(first: str, second: str, optimizer: str) -> None:
    def halves(schedules: tuple[str, str]) -> nn.Module:
        module, loss, batches = problem("odd", 8, 6)
        with TrainStep(module, loss, OPTIMIZERS[optimizer], ["cpu", "cpu"], schedules[0]) as step:
            for batch in batches[:3]:
                step(*batch)
            state = copy.deepcopy(step.state_dict())
        resumed, _, _ = problem("odd", 8)
        with TrainStep(resumed, loss, OPTIMIZERS[optimizer], ["cpu"] * 3, schedules[1]) as step:
            step.load_state_dict(state)
            for batch in batches[3:]:
                step(*batch)
        return resumed

    assert not differing(halves(("reference", "reference")), halves((first, second)))


def test_state_has_the_same_names_and_values_on_every_rung() -> None:
    def state(rung: str) -> dict[str, Any]:
        module, loss, batches = problem("odd", 8)
        with TrainStep(module, loss, OPTIMIZERS["adam"], ["cpu", "cpu"], rung) as step:
            for batch in batches:
                step(*batch)
            return copy.deepcopy(step.state_dict()["optimizer"])

    expected = state("reference")
    for rung in [*Schedule][1:]:
        found = state(rung)
        assert found["param_groups"] == expected["param_groups"], rung
        assert found["state"].keys() == expected["state"].keys(), rung
        for number, values in expected["state"].items():
            assert values.keys() == found["state"][number].keys(), rung
            assert all(
                torch.equal(value, found["state"][number][name]) for name, value in values.items()
            ), rung


@rungs.every("rung")
def test_what_remains_is_an_ordinary_module_and_optimizer(rung: str) -> None:
    module, loss, batches = problem("odd", 8)
    threads = threading.active_count()
    with TrainStep(module, loss, OPTIMIZERS["adam"], ["cpu", "cpu"], rung) as step:
        for batch in batches:
            step(*batch)
    while threading.active_count() > threads:  # told to end, they do
        threading.Event().wait(0.001)
    plain = copy.deepcopy(module)
    optimizer = OPTIMIZERS["adam"](plain.parameters())
    optimizer.load_state_dict(copy.deepcopy(step.optimizer.state_dict()))
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert mine.untyped_storage().nbytes() == mine.nbytes
        theirs.grad = None if mine.grad is None else mine.grad.clone()
    step.optimizer.step()
    optimizer.step()
    assert not differing(module, plain)


@rungs.every("rung")
def test_changes_of_weights_modules_and_attributes_between_steps_are_seen(rung: str) -> None:
    def run(schedule: str) -> nn.Module:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.0), nn.Linear(6, 2))
        x, y = torch.randn(8, 6), torch.randn(8, 2)
        with TrainStep(module, F.mse_loss, OPTIMIZERS["sgd"], ["cpu", "cpu"], schedule) as step:
            step(x, y)
            with torch.no_grad():
                module[0].weight.mul_(0.5)
            step(x, y)
            module[1].eval()
            step(x, y)
            module[2] = nn.Tanh()
            step(x, y)
            module.load_state_dict(
                {k: v * 0.9 if v.is_floating_point() else v for k, v in module.state_dict().items()}
            )
            step(x, y)
            module[0].weight.data *= 2
            step.sync()
            step(x, y)
        return module

    assert not differing(run("reference"), run(rung))


@rungs.every("rung")
def test_a_module_that_moves_between_steps_takes_its_gradients_along(rung: str) -> None:
    """`Module.to` gives the parameters, and the gradients it finds on them, other storage."""

    def run(schedule: str) -> nn.Module:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
        x, y = torch.randn(8, 3, 4, 4), torch.randn(8, 2)
        with TrainStep(module, F.mse_loss, OPTIMIZERS["sgd"], ["cpu", "cpu"], schedule) as step:
            step(x, y)
            module.double().float()
            step(x, y)
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.data = parameter.grad.data.clamp(-1, 1)
            step(x, y)
        return module

    assert not differing(run("reference"), run(rung))


class Stateful(nn.Module):
    """A forward that depends on an attribute it writes.

    Torch's replicas forget it after every call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = self.seen + 1
        out: Tensor = self.layer(x) * self.calls * self.seen
        return out


class Moving(nn.Linear):
    """Its forward moves its weights to new memory, as `flatten_parameters` of RNNs does on GPUs."""

    def forward(self, x: Tensor) -> Tensor:
        for weight in (self.weight, self.bias):
            weight.data = weight.data.clone()
        return super().forward(x)


@rungs.every("schedule")
def test_weights_that_forward_moves_are_trained_on_every_schedule(schedule: str) -> None:
    torch.manual_seed(3)
    module = Moving(12, 5)
    alone = copy.deepcopy(module)
    batches = [(torch.randn(6, 12), torch.randint(5, (6,))) for _ in range(3)]
    optimizer = OPTIMIZERS["sgd"](alone.parameters())
    for inputs, target in batches:
        optimizer.zero_grad()
        F.cross_entropy(alone(inputs), target).backward()
        optimizer.step()
    devices = ["cpu", "cpu"]
    with TrainStep(module, F.cross_entropy, OPTIMIZERS["sgd"], devices, schedule) as step:
        for batch in batches:
            step(*batch)
    torch.testing.assert_close(dict(module.state_dict()), dict(alone.state_dict()))


@rungs.every("rung")
def test_what_forward_writes_into_a_replica_is_forgotten_on_every_rung(rung: str) -> None:
    torch.manual_seed(0)
    module, x = Stateful(), torch.randn(4, 4)
    with TrainStep(
        module, F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.0), ["cpu", "cpu"], rung
    ) as step:
        losses = {float(step(x, x)) for _ in range(4)}
    assert len(losses) == 1
    assert (module.calls, float(module.seen)) == (0, 0.0)


@pytest.mark.parametrize("schedule", ["pool", "cached", "fastest"])
def test_a_wrapper_trains_the_same_on_every_schedule_it_can_have(schedule: str) -> None:
    def run(name: str) -> nn.Module:
        module, loss, batches = problem("odd", 8)
        wrapped, optimizer = (
            DataParallel(module, ["cpu"] * 3, schedule=name),
            OPTIMIZERS["adam"](module.parameters()),
        )
        for inputs, target in batches:
            optimizer.zero_grad()
            loss(wrapped(inputs), target).backward()
            optimizer.step()
        again = copy.deepcopy(wrapped)
        assert torch.equal(again(batches[0][0]), wrapped(batches[0][0]))
        return module

    assert not differing(run("reference"), run(schedule))


def test_a_pooled_wrapper_ends_its_threads_with_itself() -> None:
    before = set(threading.enumerate())
    wrapped = DataParallel(nn.Linear(2, 2), ["cpu"] * 3, schedule="pool")
    wrapped(torch.zeros(3, 2))
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    del wrapped
    gc.collect()
    for thread in started:
        thread.join()
