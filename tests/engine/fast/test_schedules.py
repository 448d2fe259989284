"""Every schedule computes the weights of `reference` bit by bit."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench import DataParallel, models
from dpbench.engine.errors import Refused
from dpbench.engine.fast import update
from dpbench.engine.train_step import TrainStep
from dpbench.hardware.device import Device
from dpbench.records import Phase, registry
from dpbench.records.schedule import Schedule
from tests.engine import rungs
from tests.engine.law.sides import EVERYWHERE, KEPT
from tests.engine.nets import Odd

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw_two_groups": lambda p: two_groups(list(p)),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}
STEPS = 5


def two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW that decays half of the parameters, with another learning rate."""
    return torch.optim.AdamW(
        [{"params": parameters[::2], "lr": 1e-3}, {"params": parameters[1::2], "weight_decay": 0.1}]
    )


def problem(
    name: str, rows: int, steps: int = STEPS
) -> tuple[nn.Module, Any, list[tuple[Any, Any]]]:
    """Return module, loss and batches, the same ones every time."""
    if name != "odd":
        model = models.load(name, "small", 0)
        return model.module, model.loss, [model.batch(rows, seed) for seed in range(steps)]
    torch.manual_seed(0)
    module, generator = Odd(), torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(rows, 12, generator=generator), torch.randn(rows, 1, generator=generator))
        for _ in range(steps)
    ]
    return module, nn.MSELoss(), batches


def train(
    name: str,
    schedule: str,
    n: int,
    rows: int,
    optimizer: str = "sgd",
    steps: int = STEPS,
    **options: Any,
) -> tuple[nn.Module, list[float]]:
    """Return the module after some steps, and the losses."""
    module, loss, batches = problem(name, rows, steps)
    with TrainStep(module, loss, OPTIMIZERS[optimizer], ["cpu"] * n, schedule, **options) as step:
        losses = [float(step(inputs, target)) for inputs, target in batches]
    return module, losses


def differing(left: nn.Module, right: nn.Module) -> list[str]:
    """Return the names of the weights and buffers that are not bitwise equal."""
    theirs = right.state_dict()
    return [
        name for name, tensor in left.state_dict().items() if not torch.equal(tensor, theirs[name])
    ]


SMALL = ("odd", "mlp")
"""The models that are quick enough for every optimizer with every batch on every number of devices.

The others meet an optimizer with an uneven batch on three devices.
"""


def matrix() -> Iterable[tuple[str, int, str, int]]:
    """Yield (model, devices, optimizer, rows): rows that divide evenly, and rows that do not."""
    optimizers = ["sgd", "adam", "adamw_two_groups"]
    for name in ["odd", *registry.names("models")]:
        for n in (2, 3, 4):
            every = list(itertools.product(optimizers, (4 * n, 4 * n - 1)))
            if name not in SMALL:
                every = [(optimizers[len(name) % 3], 2 * n + 1)] if n == 3 else []
            yield from ((name, n, *one) for one in every)


@cache
def on_reference(
    name: str, n: int, rows: int, optimizer: str, steps: int
) -> tuple[nn.Module, list[float]]:
    return train(name, "reference", n, rows, optimizer, steps)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n", "optimizer", "rows"), list(matrix()))
@pytest.mark.parametrize("rung", rungs.params([*Schedule][1:]))
def test_every_schedule_makes_the_weights_of_reference(
    rung: str, name: str, n: int, optimizer: str, rows: int
) -> None:
    steps = STEPS if name in SMALL else 2
    expected, losses = on_reference(name, n, rows, optimizer, steps)
    found, ours = train(name, rung, n, rows, optimizer, steps)
    assert not differing(expected, found)
    assert ours == pytest.approx(losses, rel=2 * n * 2**-23 * 4)


@pytest.mark.parametrize("one_by_one", [True, False], ids=["one thread", "several threads"])
@pytest.mark.parametrize("rung", EVERYWHERE)
def test_an_update_in_one_thread_makes_the_weights_of_one_in_several(
    rung: str, one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()

    @contextmanager
    def mark(phase: Phase, device: int) -> Iterator[None]:
        if phase is Phase.OPTIMIZER:
            threads.add(threading.get_ident())
        yield

    if not one_by_one:
        monkeypatch.setattr(update, "ONE_BY_ONE_BYTES", 0)
    expected, _ = train("odd", "reference", 3, 10)
    assert not differing(expected, train("odd", rung, 3, 10, mark=mark)[0])
    assert len(threads) == (1 if one_by_one else 3)


@pytest.mark.parametrize("optimizer", ["adagrad", "rmsprop"])
def test_elementwise_optimizers_may_be_joined_and_cut(optimizer: str) -> None:
    expected, _ = train("odd", "reference", 3, 10, optimizer)
    assert not differing(expected, train("odd", "sharded", 3, 10, optimizer)[0])


@pytest.mark.parametrize("rung", KEPT)
def test_the_schedules_that_keep_replicas_need_train_step(rung: str) -> None:
    with pytest.raises(ValueError, match=rf"{rung}.* needs TrainStep"):
        DataParallel(nn.Linear(2, 2), ["cpu", "cpu"], schedule=rung)


SCALED: dict[str, Callable[[], dict[str, Any]]] = {
    "accumulate": lambda: {"accumulate": 2},
    "clip_norm": lambda: {"clip_norm": 0.05},
    "scaler": lambda: {
        "scaler": torch.amp.GradScaler("cpu", init_scale=1024.0),
        "clip_norm": 0.5,
    },
}
"""Options that read the complete gradients on one device."""


@pytest.mark.parametrize("name", list(SCALED))
@rungs.every("rung")
def test_accumulation_clipping_and_scaling_change_no_bit_against_reference(
    rung: str, name: str
) -> None:
    if rung in EVERYWHERE:
        with pytest.raises(Refused):
            train("mlp", rung, 3, 11, "adam", **SCALED[name]())
    else:
        expected, _ = train("mlp", "reference", 3, 11, "adam", **SCALED[name]())
        assert not differing(expected, train("mlp", rung, 3, 11, "adam", **SCALED[name]())[0])


@pytest.mark.parametrize("rung", ["reference", "cached", "local", "sharded"])
def test_chunk_sizes_equal_a_reference_with_those_chunks(rung: str) -> None:
    def run(schedule: str, weights: Any) -> tuple[nn.Module, list[int]]:
        module, loss, batches = problem("odd", 10)
        sizes: list[int] = []
        module.first.register_forward_hook(lambda m, args, out: sizes.append(len(args[0])))
        with TrainStep(
            module, loss, OPTIMIZERS["sgd"], ["cpu"] * 3, schedule, chunk_sizes=weights
        ) as step:
            for batch in batches:
                step(*batch)
        return module, sizes

    ours, sizes = run(rung, [1, 2, 2])
    assert sorted(sizes[:6]) == [2, 2, 4, 4, 4, 4]  # the tied layer runs twice
    assert not differing(run("reference", [1, 2, 2])[0], ours)
    assert differing(run("reference", None)[0], ours)
    for wrong in ([1, 2], [1, 2, 0], [1, 2, float("nan")], [1, 2, float("inf")]):
        with pytest.raises(ValueError, match="one weight above 0 per device, for 3 devices"):
            run(rung, wrong)


def test_losses_without_a_sum_are_refused_or_left_gathered() -> None:
    def contrastive(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
        return (output @ output.T).pow(2).sum() / len(output)

    x, module = torch.randn(6, 4), nn.Linear(4, 4)
    with pytest.raises(Refused, match="known divisor"):
        TrainStep(
            module,
            lambda o, t: (o - t).square().mean(),
            OPTIMIZERS["sgd"],
            ["cpu", "cpu"],
            "local",
        )
    with pytest.raises(Refused, match="known divisor"):
        TrainStep(module, contrastive, OPTIMIZERS["sgd"], ["cpu", "cpu"], "local")
    with pytest.raises(ValueError, match="not a sum over rows"):
        TrainStep(
            module,
            (contrastive, lambda o, t: len(o)),
            OPTIMIZERS["sgd"],
            ["cpu", "cpu"],
            "local",
        )(x, x)
    step = TrainStep(
        module, lambda o, t: (o - t).square().mean(), OPTIMIZERS["sgd"], ["cpu", "cpu"]
    )
    assert not step.schedule.keeps_replicas
    assert step.note
    with pytest.raises(ValueError, match="LBFGS"):
        TrainStep(module, F.mse_loss, torch.optim.LBFGS, ["cpu", "cpu"], "cached")


def test_numbers_that_replicas_exchange_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[Any] = []

    @contextmanager
    def mark(phase: Phase, device: int) -> Iterator[None]:
        log.append((phase, device))
        yield

    weigh = (lambda o, t: F.mse_loss(o, t, reduction="sum"), lambda o, t: torch.tensor(len(t)))
    monkeypatch.setattr(Device, "wait", lambda self, other: log.append((self.index, other.index)))
    with TrainStep(
        nn.Linear(4, 4), weigh, OPTIMIZERS["sgd"], ["cpu"] * 3, "local", mark=mark
    ) as step:
        step(torch.randn(6, 4), torch.randn(6, 4))
    took = max(log.index((Phase.LOSS, i)) for i in (1, 2))
    waited = log.index((0, 2), took)
    added = log.index((Phase.LOSS, 0), waited)
    assert (0, 1) in log[took:added]
    for i in (1, 2):
        assert (i, 0) in log[added : log.index((Phase.BACKWARD, i))]


@rungs.every("rung")
@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(ignore_index=1),
        (lambda o, t: F.cross_entropy(o, t, reduction="sum"), lambda o, t: len(t)),
    ],
    ids=["function", "sum", "ignore", "pair"],
)
def test_ragged_batches_weigh_every_row_alike(loss: Any, rung: str) -> None:
    def run(schedule: str) -> nn.Module:
        torch.manual_seed(0)
        module, x, y = nn.Linear(5, 3), torch.randn(7, 5), torch.tensor([0, 1, 2, 1, 1, 0, 2])
        with TrainStep(module, loss, OPTIMIZERS["sgd"], ["cpu"] * 3, schedule) as step:
            for _ in range(3):
                step(x, y)
        return module

    assert not differing(run("reference"), run(rung))
