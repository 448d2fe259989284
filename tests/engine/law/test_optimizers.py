"""Optimizers of which a plain loop needs little: they train, or a named schedule refuses them."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpbench.engine import TrainStep
from dpbench.engine.errors import Refused
from dpbench.records.errors import UsageError
from dpbench.records.schedule import SELECTED, Schedule
from tests.engine import rungs
from tests.engine.law.sides import KEPT, Pair
from tests.engine.nets import OTHERS, TWO, Net, batch, cpus


@rungs.every("rung")
@pytest.mark.parametrize("name", OTHERS)
def test_an_optimizer_with_zero_grad_and_step_trains_or_is_refused(name: str, rung: str) -> None:
    make = OTHERS[name]
    if rung in KEPT:
        with pytest.raises(Refused, match=make.__name__):
            TrainStep(Net(), nn.MSELoss(), lambda ps: make(list(ps)), TWO, rung)
        return
    with Pair(Net, lambda _: nn.MSELoss(), make, rung, watch=False) as both:
        for number in range(4):
            both.step(*batch(number, 8))
        if rung in SELECTED:
            assert both.ours.train.schedule == Schedule.CACHED
            assert make.__name__ in both.ours.train.note


class Complete(torch.optim.SGD):
    """An optimizer whose class zeroes gradients in its own way."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)


@rungs.every("rung")
def test_zero_grad_of_a_subclass_is_called(rung: str) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return Complete(parameters, lr=0.1)

    if rung in (Schedule.ALLREDUCE, Schedule.SHARDED):
        with pytest.raises(Refused):
            TrainStep(Net(), nn.MSELoss(), make, TWO, rung)
        return
    with Pair(Net, lambda _: nn.MSELoss(), make, rung, watch=False) as both:
        for number in range(3):
            both.step(*batch(number, 8))


class Sam(torch.optim.SGD):
    """An optimizer that needs a closure, although its signature says otherwise."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "this optimizer needs a closure"


class Declared(torch.optim.SGD):
    def step(self, *, closure: Any) -> None:  # type: ignore[override]
        closure()


class Broken(torch.optim.SGD):
    def step(self) -> None:  # type: ignore[override]
        raise ValueError("broken")


@pytest.mark.parametrize("rung", rungs.params(["reference", "cached", "local", *SELECTED]))
def test_the_error_of_an_undeclared_closure_names_the_way_out(rung: str) -> None:
    module = Net()
    before = [p.detach().clone() for p in module.parameters()]
    with TrainStep(module, nn.MSELoss(), lambda ps: Sam(ps, 0.1), TWO, rung) as step:
        for _ in range(2):
            with pytest.raises(AssertionError, match=r"(?s)needs a closure.*Sam.*DataParallel"):
                step(*batch(1, 8))
    assert all(map(torch.equal, before, module.parameters()))


def test_other_errors_of_an_optimizer_say_nothing_of_closures() -> None:
    step = TrainStep(Net(), nn.MSELoss(), lambda ps: Broken(ps, 0.1), TWO)
    with step, pytest.raises(ValueError, match=r"^broken$"):
        step(*batch(1, 8))


def test_a_closure_that_is_a_required_keyword_is_refused_at_once() -> None:
    with pytest.raises(Refused, match="closure"):
        TrainStep(Net(), nn.MSELoss(), lambda ps: Declared(ps, 0.1), TWO)


def test_a_result_that_is_no_optimizer_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(UsageError, match=r"NoneType.*zero_grad"):
        TrainStep(Net(), nn.MSELoss(), lambda _: None, TWO)  # type: ignore[arg-type, return-value]


class Hiding(nn.Module):
    """A frozen part that `parameters()` leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 3)

    def parameters(self, recurse: bool = True) -> Any:
        return self.last.parameters(recurse)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.frozen(x))
        return out


@rungs.every("rung")
def test_a_module_that_hides_parameters_is_replicated_whole(rung: str) -> None:
    def train(schedule: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        module = Hiding()
        make = lambda ps: torch.optim.SGD(ps, 0.1)  # noqa: E731
        with TrainStep(module, nn.MSELoss(), make, cpus(2), schedule) as step:
            for number in range(3):
                step(*batch(number, 8))
        return module.state_dict()

    want = train("reference")
    assert not torch.equal(want["last.weight"], Hiding().last.weight)
    assert all(torch.equal(value, want[name]) for name, value in train(rung).items())


class Twice(torch.Tensor):
    """A tensor whose linear counts twice."""

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, kinds, args, kwargs or {})
        return result * 2 if func is F.linear else result


class Subclassed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4).as_subclass(Twice))
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(F.linear(x, self.weight).as_subclass(torch.Tensor))
        return out


@rungs.every("rung")
def test_parameters_of_a_subclass_keep_their_operations(rung: str) -> None:
    def train(schedule: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        module = Subclassed()
        make = lambda ps: torch.optim.SGD(ps, 0.1)  # noqa: E731
        with TrainStep(module, nn.MSELoss(), make, TWO, schedule) as step:
            losses = [float(step(*batch(number, 8))) for number in range(3)]
        return losses, {name: value.detach() for name, value in module.state_dict().items()}

    if rung == Schedule.SHARDED:
        with pytest.raises(Refused, match="Twice"):
            train(rung)
        return
    losses, want = train("reference")
    ours, weights = train(rung)
    assert ours == pytest.approx(losses)
    assert all(torch.equal(value, want[name]) for name, value in weights.items())


def test_a_loss_in_bf16_is_added_in_fp32() -> None:
    module = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(module.weight)
    pair = (lambda output, target: output.sum(), lambda output, target: len(output))
    x = torch.tensor([[256.0], [1.0], [1.0], [1.0], [1.0]]).bfloat16()
    make = lambda ps: torch.optim.SGD(ps, 0.0)  # noqa: E731
    with TrainStep(module, pair, make, cpus(5)) as step:
        loss = step(x, torch.zeros(5))
        assert step.schedule.keeps_replicas
    assert loss.dtype == torch.bfloat16
    assert float(loss) == 52.0  # 256 + 1 is 256 in bf16


def test_a_pair_is_compared_with_the_whole_loss_now_and_then() -> None:
    wrong = False

    def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        rows = (output - target).square().sum()
        return rows * len(output) if wrong else rows

    pair = (total, lambda output, target: output.numel())
    make = lambda ps: torch.optim.SGD(ps, 0.01)  # noqa: E731
    with TrainStep(Net(), pair, make, TWO, "local") as step:
        for number in range(3):
            step(*batch(number, 8))
        wrong = True
        with pytest.raises(ValueError, match="not a sum over rows"):
            collections.deque((step(*batch(number, 8)) for number in range(3, 9)), maxlen=0)
