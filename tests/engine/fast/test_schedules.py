"""Every schedule computes the weights of `reference` bit by bit, unless it is marked as inexact."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench import DataParallel, models
from dpbench.engine.errors import Refused
from dpbench.engine.replicate import ReplicaCache
from dpbench.engine.train_step import TrainStep
from dpbench.engine.update import Update
from dpbench.hardware.devices.host import HostDevice
from dpbench.records import Phase, registry
from dpbench.records.schedule import RULES, RUNGS, SWITCHES, TRAIN_STEP, Schedule

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw_two_groups": lambda p: two_groups(list(p)),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}
LEGAL = [
    schedule
    for positions in itertools.product(*SWITCHES.values())
    if not (schedule := Schedule(**dict(zip(SWITCHES, positions, strict=True)))).missing()
]
STEPS = 5


def two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW that decays half of the parameters, with another learning rate."""
    return torch.optim.AdamW(
        [{"params": parameters[::2], "lr": 1e-3}, {"params": parameters[1::2], "weight_decay": 0.1}]
    )


class Odd(nn.Module):
    """Layers whose sizes fit no vector register, and tied, frozen and unused weights.

    A buffer counts the batches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(12, 7), nn.Linear(7, 33), nn.Linear(33, 1)
        self.norm, self.unused = nn.BatchNorm1d(33), nn.Linear(3, 3)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(x)
        x = self.second(torch.tanh(self.first(x)) + torch.sin(self.again(x)))
        out: Tensor = self.last(torch.relu(self.norm(x)))
        return out


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
    schedule: str | Schedule,
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


@pytest.fixture(autouse=True)
def _one_thread() -> Iterable[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n", "optimizer", "rows"), list(matrix()))
def test_every_rung_makes_the_weights_of_reference(
    name: str, n: int, optimizer: str, rows: int
) -> None:
    steps = STEPS if name in SMALL else 2
    expected, losses = train(name, "reference", n, rows, optimizer, steps)
    for rung in [*[*RUNGS][1:], "fastest"]:
        found, ours = train(name, rung, n, rows, optimizer, steps)
        assert not differing(expected, found), rung
        assert ours == pytest.approx(losses, rel=2 * n * 2**-23 * 4), rung


@pytest.mark.parametrize("optimizer", ["adagrad", "rmsprop"])
def test_elementwise_optimizers_may_be_joined_and_cut(optimizer: str) -> None:
    expected, _ = train("odd", "reference", 3, 10, optimizer)
    for rung in ("flat_optimizer", "zero1"):
        assert not differing(expected, train("odd", rung, 3, 10, optimizer)[0]), rung


@pytest.mark.slow
def test_every_legal_combination_makes_the_weights_of_reference() -> None:
    assert len(LEGAL) > 100
    expected, _ = train("odd", "reference", 2, 5)
    for schedule in LEGAL:
        assert not differing(expected, train("odd", schedule, 2, 5)[0]), str(schedule)


def test_every_rule_is_enforced_and_named() -> None:
    for switch, position, need in RULES:
        other, _, wanted = need.partition("=")
        against = (
            {other: next(p for p in reversed(SWITCHES[other]) if p != wanted)} if wanted else {}
        )
        schedule = Schedule(**{**against, switch: position})
        if need == TRAIN_STEP:
            with pytest.raises(ValueError, match=rf"{switch}={position} needs TrainStep"):
                DataParallel(nn.Linear(2, 2), ["cpu", "cpu"], schedule=schedule)
        else:
            with pytest.raises(ValueError, match=rf"{switch}={position} needs {need}"):
                TrainStep(nn.Linear(2, 2), F.mse_loss, OPTIMIZERS["sgd"], ["cpu", "cpu"], schedule)


@pytest.mark.parametrize("rung", RUNGS)
def test_accumulation_clipping_and_scaling_change_no_bit_against_reference(rung: str) -> None:
    for options in (
        {"accumulate": 2},
        {"clip_norm": 0.05},
        {"scaler": torch.amp.GradScaler("cpu", init_scale=1024.0), "clip_norm": 0.5},
    ):
        mine = {k: copy.deepcopy(v) for k, v in options.items()}
        expected, _ = train("mlp", "reference", 3, 11, "adam", **options)
        found, _ = train("mlp", rung, 3, 11, "adam", **mine)
        assert not differing(expected, found), options


def test_the_planted_faults_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = train("odd", "reference", 3, 8)
    with monkeypatch.context() as patch:  # sums in another order
        original = Update.collect
        patch.setattr(
            Update,
            "collect",
            lambda self, i, sources, numbers=None: original(self, i, sources[::-1], numbers),
        )
        assert differing(expected, train("odd", "persistent", 3, 8)[0])
    with monkeypatch.context() as patch:  # weights that are not exchanged
        patch.setattr(Update, "copy", lambda self, i: None)
        assert differing(expected, train("odd", "zero1", 3, 8)[0])
    with monkeypatch.context() as patch:  # trees that do not see a change
        patch.setattr(ReplicaCache, "_changed", lambda self: False)
        module, x = nn.Sequential(nn.BatchNorm1d(4)), torch.randn(8, 4)
        wrapped = DataParallel(module, ["cpu", "cpu"], schedule="cached")
        first = wrapped(x)
        module.eval()
        assert torch.equal(wrapped(x), first)


@pytest.mark.parametrize("rung", ["reference", "cached", "local_loss", "zero1"])
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
    assert not differing(run("workers=serial", [1, 2, 2])[0], ours)
    assert differing(run("reference", None)[0], ours)
    for wrong in ([1, 2], [1, 2, 0], [1, 2, float("nan")], [1, 2, float("inf")]):
        with pytest.raises(ValueError, match="one weight above 0 per device, for 3 devices"):
            run(rung, wrong)


def test_losses_without_a_sum_are_refused_or_left_gathered() -> None:
    def contrastive(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
        return (output @ output.T).pow(2).sum() / len(output)

    x, module = torch.randn(6, 4), nn.Linear(4, 4)
    with pytest.raises(Refused, match="loss=local needs a loss whose mean has a known divisor"):
        TrainStep(
            module,
            lambda o, t: (o - t).square().mean(),
            OPTIMIZERS["sgd"],
            ["cpu", "cpu"],
            "local_loss",
        )
    with pytest.raises(Refused, match="known divisor"):
        TrainStep(module, contrastive, OPTIMIZERS["sgd"], ["cpu", "cpu"], "local_loss")
    with pytest.raises(ValueError, match="not a sum over rows"):
        TrainStep(
            module,
            (contrastive, lambda o, t: len(o)),
            OPTIMIZERS["sgd"],
            ["cpu", "cpu"],
            "local_loss",
        )(x, x)
    step = TrainStep(
        module, lambda o, t: (o - t).square().mean(), OPTIMIZERS["sgd"], ["cpu", "cpu"]
    )
    assert (step.schedule.loss, step.schedule.backward) == ("gathered", "joint")
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
    monkeypatch.setattr(
        HostDevice, "wait", lambda self, other: log.append((self.index, other.index))
    )
    schedule = Schedule(workers="serial", replicas="persistent", loss="local", backward="local")
    with TrainStep(
        nn.Linear(4, 4), weigh, OPTIMIZERS["sgd"], ["cpu"] * 3, schedule, mark=mark
    ) as step:
        step(torch.randn(6, 4), torch.randn(6, 4))
    took = log.index((Phase.LOSS, 2))
    added = log.index((Phase.LOSS, 0), took)
    assert {(0, 1), (0, 2)} <= set(log[took:added])
    for i in (1, 2):
        assert (i, 0) in log[added : log.index((Phase.BACKWARD, i))]


@pytest.mark.parametrize("rung", [*RUNGS])
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
