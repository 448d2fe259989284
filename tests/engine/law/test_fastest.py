"""The schedules that `fastest` avoids to stay exact, and named schedules that are refused.

A refusal comes before anything changes.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench import DataParallel
from dpbench.engine.errors import Refused
from dpbench.engine.train_step import TrainStep
from dpbench.records.schedule import COPYING, FASTEST, Schedule
from tests.engine import rungs
from tests.engine.law.compare import assert_same
from tests.engine.law.sides import (
    EVERYWHERE,
    Pair,
    must_refuse,
    pair,
    refusing,
)
from tests.engine.nets import OPTIMIZERS, Net, Regularised, Table, batch

# a parameter whose data was replaced by a transposed tensor gets gradients of another layout; torch
# warns of it once
pytestmark = pytest.mark.filterwarnings(
    "ignore:grad and param do not obey the gradient layout contract"
)

# ---------------------------------------------------------------- k, l: what fastest must avoid


@pytest.mark.parametrize(
    ("selected", "highest"), [(COPYING, Schedule.LOCAL), (FASTEST, Schedule.SHARDED)]
)
def test_the_highest_schedule_is_taken_where_nothing_forbids_it(
    selected: str, highest: Schedule
) -> None:
    with pair(selected) as both:
        both.step(*batch(1, 8))
        assert both.ours.train.schedule is highest
        assert both.ours.train.note == ""


def hooked_parameter(step: TrainStep) -> Any:
    return step.module.last.weight.register_hook(lambda gradient: None)


def hooked_optimizer(step: TrainStep) -> Any:
    return step.optimizer.register_step_post_hook(lambda *_: None)


def replaced_method(step: TrainStep) -> None:
    step.optimizer.step = types.MethodType(type(step.optimizer).step, step.optimizer)


def parameter_without_optimizer(step: TrainStep) -> None:
    group = step.optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if p is not step.module.last.weight]


COMPLETE: dict[str, tuple[dict[str, Any], Callable[[TrainStep], Any]]] = {
    "accumulate": ({"accumulate": 2}, lambda step: None),
    "clip_norm": ({"clip_norm": 1.0}, lambda step: None),
    "scaler": ({"scaler": torch.amp.GradScaler("cpu")}, lambda step: None),
    "hook on a gradient": ({}, hooked_parameter),
    "hook of the optimizer": ({}, hooked_optimizer),
    "replaced method": ({}, replaced_method),
    "parameter without optimizer": ({}, parameter_without_optimizer),
}
"""Options, and changes between steps, that need complete gradients on one device."""


@pytest.mark.parametrize("name", list(COMPLETE))
@pytest.mark.parametrize("schedule", [*EVERYWHERE, FASTEST])
def test_complete_gradients_are_refused_by_name_and_fastest_falls_back(
    schedule: str, name: str
) -> None:
    options, change = COMPLETE[name]
    inputs, target = batch(1, 8)
    module = Net()

    def begun() -> TrainStep:
        step = TrainStep(
            module,
            nn.MSELoss(),
            lambda p: OPTIMIZERS["adam"](list(p)),
            ["cpu"] * 2,
            schedule,
            **options,
        )
        step(inputs, target)
        return step

    if schedule == FASTEST:
        with begun() as step:
            change(step)
            step(inputs, target)
            assert step.schedule not in EVERYWHERE
            assert step.note
    elif options:
        before = copy.deepcopy(module.state_dict())
        with pytest.raises(Refused, match=schedule):
            begun()
        assert_same(dict(module.state_dict()), dict(before), "module")
    else:
        with begun() as step:
            change(step)
            before = copy.deepcopy(module.state_dict())
            with pytest.raises(Refused, match=schedule):
                step(inputs, target)
            assert_same(dict(module.state_dict()), dict(before), "module")


def assert_avoided(step: TrainStep) -> None:
    """Check that fastest does not do all that the highest schedule does, and says why.

    A step that computes its loss over the gathered batch stays on its schedule.
    """
    assert step.note


def test_fastest_stays_exact_with_bf16_parameters() -> None:
    with pair(FASTEST, lambda: Table().bfloat16()) as both:
        for number in range(6):
            both.step(*batch(number, 8, dtype=torch.bfloat16))
        assert_avoided(both.ours.train)


def test_fastest_stays_exact_with_a_fused_optimizer() -> None:
    with pair(FASTEST, Large, optimizer=lambda p: torch.optim.Adam(p, lr=1e-2, fused=True)) as both:
        for number in range(6):
            both.step(*batch(number, 8))
        assert_avoided(both.ours.train)


class Large(Net):
    """A layer whose size does not fill whole vector registers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.again = nn.Linear(4, 4)
        self.wide, self.back = nn.Linear(4, 37), nn.Linear(37, 4)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return super().forward(self.back(torch.tanh(self.wide(x))), ids)


@pytest.mark.parametrize(
    "criterion",
    [
        lambda: nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.7, 0.3, 2.9])),
        lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.7, 0.3, 2.9])),
        lambda: nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.BCEWithLogitsLoss,
        lambda: nn.SmoothL1Loss(beta=0.3),
        lambda: F.binary_cross_entropy_with_logits,
    ],
    ids=["pos_weight", "weighted", "smoothed", "bce", "beta", "bce function"],
)
def test_fastest_stays_exact_with_losses_whose_sum_rounds_otherwise(criterion: Any) -> None:
    with pair(FASTEST, criterion=criterion, devices=3) as both:
        for number in range(8):
            inputs, target = batch(number, 11, both.plain.criterion)
            both.step(inputs, target if target.dim() == 1 else (target > 0).float())


def contrastive(output: Tensor, target: Any, reduction: str = "mean") -> Tensor:
    """Couple all rows, whatever the reduction."""
    return (output @ output.T).pow(2).sum() / len(output)


def of_a_dict(output: Tensor, target: dict[str, Tensor], reduction: str = "mean") -> Tensor:
    return F.mse_loss(output, target["y"], reduction=reduction)


def without_target(output: Tensor, target: None, reduction: str = "mean") -> Tensor:
    return F.mse_loss(output, torch.zeros_like(output), reduction=reduction)


def ctc(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Divide each row by its own length before the mean, as CTC does."""
    logs = output.view(len(output), -1, 1).expand(-1, 3, 4).transpose(0, 1).log_softmax(2)
    lengths = torch.full((len(output),), 3), target.ne(0).sum(1)
    return F.ctc_loss(
        logs * torch.arange(1, 5), target, *lengths, reduction=reduction, zero_infinity=True
    )


def own_mean(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Take the mean over the positive targets alone."""
    chosen = (output - target).square()[target > 0]
    return chosen.mean() if reduction == "mean" else chosen.sum() if reduction == "sum" else chosen


LOSSES: dict[str, tuple[Any, Callable[[Tensor], Any]]] = {
    "weighted partial": (
        partial(F.cross_entropy, weight=torch.tensor([1.7, 0.3, 2.9])),
        lambda t: t.argmax(1),
    ),
    "dict": (of_a_dict, lambda t: {"y": t}),
    "none": (without_target, lambda t: None),
    "ctc": (ctc, lambda t: torch.tensor([[1, 2], [3, 0]]).repeat(len(t), 1)[: len(t)]),
    "contrastive": (contrastive, lambda t: t),
    "own mean": (own_mean, lambda t: t),
    "one": (lambda o, t: (o - t).square().mean(), lambda t: t),
}


@pytest.mark.parametrize("name", list(LOSSES))
def test_fastest_trains_any_loss_that_reference_trains(name: str) -> None:
    function, target_of = LOSSES[name]
    module = OneColumn if name == "ctc" else Net
    with pair(FASTEST, module, criterion=lambda: function) as both:
        for number in range(4):
            inputs, target = batch(number, 8)
            both.step(inputs, target_of(target))
        assert_avoided(both.ours.train)


class OneColumn(Net):
    """A net with one output a row."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return super().forward(x, ids)[:, :1]


@rungs.every("rung", Schedule.LOCAL)
def test_a_loss_that_couples_rows_is_refused_before_anything_changed(rung: str) -> None:
    inputs, target = batch(1, 8)
    module = Net()
    before = copy.deepcopy(module.state_dict())
    made = lambda p: OPTIMIZERS["sgd"](list(p))  # noqa: E731
    with (
        refusing(rung, "contrastive"),
        TrainStep(module, contrastive, made, ["cpu"] * 2, rung) as step,
    ):
        step(inputs, target)
    if must_refuse(rung, "contrastive"):
        assert_same(dict(module.state_dict()), dict(before), "module")


class Holed(Net):
    """A parameter with holes between its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight = nn.Parameter(torch.randn(4, 8)[:, ::2])


class SparseTable(nn.Module):
    """Sparse gradients from a function, which no attribute shows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(6, 4)), nn.Linear(4, 3)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        out: Tensor = self.last(
            F.embedding((x[:, :2] * 9).long() % 6, self.weight, sparse=True).mean(1)
        )
        return out


class Lookahead(torch.optim.Adam):
    """An optimizer whose step reads an attribute that only its constructor sets."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.pace = 0.5

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 1e-2 * self.pace
        return super().step(closure)


PROBLEMS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], torch.optim.Optimizer]]] = {
    "sparse function": (SparseTable, lambda p: torch.optim.SGD(p, lr=0.05)),
    "subclass": (Net, lambda p: Lookahead(p, lr=1e-2)),
}


@rungs.every("rung")
def test_parameters_with_holes_train_as_on_reference(rung: str) -> None:
    """A plain loop differs in the last bits: other replicas' copies have no holes, as in torch."""

    def train(schedule: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = Holed()
        with TrainStep(module, nn.MSELoss(), OPTIMIZERS["sgd"], ["cpu"] * 2, schedule) as step:
            for number in range(4):
                step(*batch(number, 8))
        return {name: value.clone() for name, value in module.state_dict().items()}

    with refusing(rung, "holes"):
        assert_same(train(rung), train("reference"), "module")


@pytest.mark.parametrize("name", list(PROBLEMS))
def test_fastest_trains_any_module_and_optimizer_that_reference_trains(name: str) -> None:
    module, optimizer = PROBLEMS[name]
    with pair(FASTEST, module, optimizer=optimizer) as both:
        for number in range(4):
            both.step(*batch(number, 8))
        assert_avoided(both.ours.train)


@rungs.every("rung", Schedule.ALLREDUCE)
@pytest.mark.parametrize("name", list(PROBLEMS))
def test_a_schedule_by_name_trains_it_too_or_refuses_it(rung: str, name: str) -> None:
    module, optimizer = PROBLEMS[name]
    with refusing(rung, name), pair(rung, module, optimizer=optimizer) as both:
        for number in range(3):
            both.step(*batch(number, 8))


# ---------------------------------------------------------------- m, n: lazy parameters,
# regularisers


@pytest.mark.parametrize("schedule", rungs.params([*rungs.WRAPPED, FASTEST]))
def test_lazy_parameters_are_refused_in_torchs_words(schedule: str) -> None:
    wrapped = DataParallel(nn.Sequential(nn.LazyLinear(3)), ["cpu", "cpu"], schedule=schedule)
    with pytest.raises(RuntimeError, match="Modules with uninitialized parameters can't be used"):
        wrapped(torch.zeros(4, 2))


@pytest.mark.parametrize("schedule", rungs.params([*rungs.WRAPPED, COPYING, FASTEST]))
@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_penalty_on_the_parameters_reaches_their_gradients_once(
    schedule: str, devices: int, accumulate: int
) -> None:
    with Pair(
        Net,
        Regularised,
        watch=False,
        schedule=schedule,
        devices=devices,
        accumulate=accumulate,
        between=False,
    ) as both:
        for number in range(4):
            both.step(*batch(number, 8))


@rungs.every("rung", Schedule.LOCAL)
def test_a_penalty_is_refused_where_replicas_take_their_own_loss(rung: str) -> None:
    with refusing(rung, "penalty"), Pair(Net, Regularised, watch=False, schedule=rung) as both:
        both.step(*batch(1, 8))
        assert_avoided(both.ours.train)
