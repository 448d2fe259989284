"""Rarer actions between steps: each works as in a plain loop, or a named schedule refuses it."""

from __future__ import annotations

import copy
import functools
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.optimizer import register_optimizer_step_post_hook

from dpbench.engine.train_step import TrainStep
from dpbench.records.schedule import Schedule
from tests.engine import rungs
from tests.engine.law.compare import assert_same
from tests.engine.law.sides import Loop, Pair, Plain, refusing
from tests.engine.nets import OPTIMIZERS, Net, Table, Writer, batch


def every_rung(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test on every schedule.

    Those that `REFUSALS` names for the test or its parameters must refuse.
    """

    @functools.wraps(test)
    def run(rung: str, **more: Any) -> None:
        with refusing(
            rung,
            test.__name__,
            *(getattr(value, "__name__", f"{name}={value}") for name, value in more.items()),
        ):
            test(rung=rung, **more)

    return rungs.every("rung")(run)


def trained(
    rung: str, module: Callable[[], nn.Module] = Net, criterion: Any = nn.MSELoss, **more: Any
) -> Pair:
    """Return both sides."""
    return Pair(
        module, lambda _: criterion(), schedule=rung, **{"watch": False, "between": False, **more}
    )


class Deep(Table):
    """A table with two layers of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.mid = nn.Linear(4, 4)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        out: Tensor = self.last(
            self.mid(torch.tanh(self.first(self.table((x[:, :2] * 9).long() % 6).mean(1))))
        )
        return out


# ---------------------------------------------------------------- changes between two steps


def tie(loop: Loop) -> None:
    loop.module.mid.weight = loop.module.first.weight


def share_data(loop: Loop) -> None:
    loop.module.mid.weight.data = loop.module.first.weight.data
    loop.sync()


def assign_parameters(loop: Loop) -> None:
    state = {name: value.clone() for name, value in loop.module.state_dict().items()}
    loop.module.load_state_dict(state, assign=True)


def replace_layer(loop: Loop) -> None:
    torch.manual_seed(5)
    loop.module.last = nn.Linear(4, 3)


def add_layer(loop: Loop) -> None:
    torch.manual_seed(5)
    loop.module.last = nn.Sequential(loop.module.last, nn.Linear(3, 3))
    loop.optimizer.add_param_group({"params": list(loop.module.last[1].parameters())})


def remove_layer(loop: Loop) -> None:
    loop.module.table.requires_grad_(False)
    loop.module.mid = nn.Identity()


def parametrize(loop: Loop) -> None:
    weight_norm(loop.module.first)


def prune_layer(loop: Loop) -> None:
    prune.l1_unstructured(loop.module.first, "weight", amount=0.5)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def change_class(loop: Loop) -> None:
    loop.module.first.__class__ = Doubled


def write_frozen_data(loop: Loop) -> None:
    loop.module.first.requires_grad_(False)
    loop.module.first.weight.data = loop.module.first.weight.data * 0.5


def set_storage(loop: Loop) -> None:
    with torch.no_grad():
        loop.module.first.weight.set_(torch.full((4, 4), 0.2))


def leave_group(loop: Loop) -> None:
    group = loop.optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if p is not loop.module.first.weight]


def split_group(loop: Loop) -> None:
    group, weight = loop.optimizer.param_groups[0], loop.module.first.weight
    group["params"] = [p for p in group["params"] if p is not weight]
    loop.optimizer.param_groups.append({**group, "params": [weight], "lr": 0.2})


def replace_state(loop: Loop) -> None:
    loop.optimizer.state = type(loop.optimizer.state)(dict)


def skip_every_other_step(loop: Loop) -> None:
    original, calls = loop.optimizer.step, []

    def step(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return None if len(calls) % 2 else original(*args, **kwargs)

    loop.optimizer.step = step


def keep_gradients(loop: Loop) -> None:
    loop.optimizer.zero_grad = lambda set_to_none=True: None


def step_in_backward(loop: Loop) -> None:
    for p in loop.names():
        own = torch.optim.SGD([p], lr=0.1)

        def fired(parameter: Tensor, own: Any = own) -> None:
            own.step()
            parameter.grad = None

        p.register_post_accumulate_grad_hook(fired)


def step_by_hand(loop: Loop) -> None:
    loop.optimizer.step()


def train_by_hand(loop: Loop) -> None:
    (x, ids), target = batch(50, 8)
    loop.optimizer.zero_grad()
    F.mse_loss(loop.module(x, ids), target).backward()
    loop.optimizer.step()


CHANGES = [
    tie,
    share_data,
    assign_parameters,
    replace_layer,
    add_layer,
    remove_layer,
    parametrize,
    prune_layer,
    change_class,
    write_frozen_data,
    set_storage,
    leave_group,
    split_group,
    replace_state,
    skip_every_other_step,
    keep_gradients,
    step_in_backward,
    step_by_hand,
    train_by_hand,
]


@pytest.mark.parametrize("change", CHANGES)
@every_rung
def test_a_change_between_steps(rung: str, change: Callable[[Loop], None]) -> None:
    with trained(rung, Deep) as both:
        both.step(*batch(1, 8))
        both.do(change)
        for number in range(2, 6):
            both.step(*batch(number, 8))


def scale_gradients(loop: Loop) -> None:
    for p in loop.module.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def zero_gradients(loop: Loop) -> None:
    loop.optimizer.zero_grad()


def add_gradients(loop: Loop) -> None:
    (x, ids), target = batch(50, 8)
    F.mse_loss(loop.module(x, ids), target).backward()


@pytest.mark.parametrize("change", [scale_gradients, zero_gradients, add_gradients])
@every_rung
def test_a_change_of_the_gradients_between_the_calls_of_one_update(
    rung: str, change: Callable[[Loop], None]
) -> None:
    with trained(rung, accumulate=2) as both:
        for number in range(6):
            both.step(*batch(number, 8))
            both.do(change)


@every_rung
def test_close_between_the_calls_of_one_update_leaves_the_gradients(rung: str) -> None:
    with trained(rung, accumulate=2) as both:
        both.step(*batch(1, 8))
        both.ours.close()
        both.do(step_by_hand)
        both.check(gradients=False)


# ---------------------------------------------------------------- tensors that the loop keeps


@every_rung
def test_data_that_the_loop_has_put_aside_stays_as_it_is(rung: str) -> None:
    def swap(loop: Loop) -> None:
        aside = loop.copies.setdefault(
            "aside", [torch.full_like(p, 0.1).detach() for p in loop.module.parameters()]
        )
        for i, p in enumerate(loop.module.parameters()):
            p.data, aside[i] = aside[i], p.data
        loop.sync()

    with trained(rung) as both:
        for number in range(4):
            both.step(*batch(number, 8))
            both.do(swap)
            assert_same(both.ours.copies["aside"], both.plain.copies["aside"], "data put aside")


@every_rung
def test_parameters_may_be_views_of_a_vector_that_the_loop_keeps(rung: str) -> None:
    def cut(loop: Loop) -> None:
        loop.copies["vector"] = parameters_to_vector(loop.module.parameters()).detach().clone()
        vector_to_parameters(loop.copies["vector"], loop.module.parameters())
        loop.sync()

    def halve(loop: Loop) -> None:
        loop.copies["vector"].mul_(0.5)
        loop.sync()

    with trained(rung) as both:
        for change in (cut, halve, halve):
            both.step(*batch(1, 8))
            both.do(change)
        both.step(*batch(2, 8))


@every_rung
@pytest.mark.parametrize("hooked", [False, True])
def test_a_gradient_that_the_loop_keeps_is_not_written_again(rung: str, hooked: bool) -> None:
    kept: dict[Loop, list[Any]] = {}

    def hook(loop: Loop) -> None:
        loop.module.first.weight.register_hook(
            lambda gradient: kept.setdefault(loop, [gradient]) and None
        )

    def keep(loop: Loop) -> None:
        kept[loop] = [p.grad for p in loop.module.parameters() if p.grad is not None]

    with trained(rung) as both:
        both.step(*batch(1, 8))
        both.do(hook if hooked else keep)
        both.step(*batch(2, 8))
        both.step(*batch(3, 8))
        if len(kept[both.ours]) == len(kept[both.plain]):  # sharded updates need not show all
            assert_same(kept[both.ours], kept[both.plain], "kept gradients")


# ---------------------------------------------------------------- one device


@every_rung
@pytest.mark.parametrize("module", [Net, Writer])
def test_one_device_runs_the_module_itself(rung: str, module: Callable[[], nn.Module]) -> None:
    with trained(rung, module, devices=1) as both:
        for number in range(4):
            both.step(*batch(number, 8))


# ---------------------------------------------------------------- attributes that forward changes
# in some steps


class Deleting(Table):
    def __init__(self) -> None:
        super().__init__()
        self.once = 2.0

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return super().forward(x, ids) * (
            self.__dict__.pop("once", 1.0) if int(ids[0]) // 100 % 2 else 1.0
        )


class Activating(Table):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if int(ids[0]) // 100 % 2:
            self.activation = nn.ReLU()
        out: Tensor = getattr(self, "activation", nn.Identity())(super().forward(x, ids))
        return out


class Evaluating(Net):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if int(ids[0]) // 100 % 2:
            self.norm.eval()
        return super().forward(x, ids)


@every_rung
@pytest.mark.parametrize("module", [Deleting, Activating, Evaluating])
def test_a_replica_forgets_any_change_of_its_own_tree(
    rung: str, module: Callable[[], nn.Module]
) -> None:
    with trained(rung, module) as both:
        for number in (2, 4, 3, 6, 5, 8):
            both.step(*batch(number, 8))


# ---------------------------------------------------------------- the criterion


class Counting(nn.MSELoss):
    """A loss that grows with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(output, target) * self.calls


class Coupling(nn.MSELoss):
    """A loss that becomes one over pairs of rows in its third call."""

    couples = False

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (
            (output @ output.T).square().sum() / len(output)
            if self.couples
            else super().forward(output, target)
        )


def couple(loop: Loop) -> None:
    loop.criterion.couples = True


def halve_by_a_hook(loop: Loop) -> None:
    loop.criterion.register_forward_hook(lambda module, args, out: out * 0.5)


@every_rung
@pytest.mark.parametrize(
    ("criterion", "change"),
    [(Counting, lambda loop: None), (Coupling, couple), (nn.MSELoss, halve_by_a_hook)],
)
def test_a_criterion_is_called_once_a_step_with_all_rows(
    rung: str, criterion: Any, change: Any
) -> None:
    with trained(rung, Net, criterion) as both:
        both.step(*batch(1, 8))
        both.do(change)
        for number in range(2, 5):
            both.step(*batch(number, 8))


@every_rung
def test_a_target_that_wants_gradients_gets_them(rung: str) -> None:
    with trained(rung) as both:
        (inputs, target), factors = (
            batch(1, 8),
            [torch.ones(3, requires_grad=True) for _ in range(2)],
        )
        both.ours.step(inputs, target * factors[0])
        both.plain.step(inputs, target * factors[1])
        both.check()
        assert_same(factors[0].grad, factors[1].grad, "gradient of the target")


@every_rung
@pytest.mark.parametrize("name", ["loss_fn", "optimizer"])
def test_an_attribute_of_the_step_that_is_replaced_counts_or_cannot_be_replaced(
    rung: str, name: str
) -> None:
    with trained(rung) as both:
        both.step(*batch(1, 8))
        try:
            if name == "loss_fn":
                both.ours.train.loss_fn, both.plain.criterion = nn.L1Loss(), nn.L1Loss()
            else:
                both.ours.train.optimizer = both.ours.make_optimizer(both.ours.module.parameters())
                both.plain.optimizer = both.plain.make_optimizer(both.plain.module.parameters())
        except AttributeError:
            return
        for number in range(2, 4):
            both.step(*batch(number, 8))


# ---------------------------------------------------------------- the process


@every_rung
def test_two_steps_may_train_one_module_in_turns(rung: str) -> None:
    options: dict[str, Any] = {"devices": 2, "accumulate": 1, "clip_norm": None, "hold": False}
    with trained(rung, Table) as both:
        plain = Plain(both.plain.module, nn.L1Loss(), OPTIMIZERS["adam"], **options)
        make = lambda parameters: OPTIMIZERS["adam"](list(parameters))  # noqa: E731
        with TrainStep(both.ours.module, nn.L1Loss(), make, ["cpu", "cpu"], rung) as other:
            for number in range(4):
                both.step(*batch(number, 8))
                plain.step(*batch(number + 10, 8))
                other(*batch(number + 10, 8))
                both.check(gradients=False)


@every_rung
def test_a_hook_on_all_optimizers_runs_once_a_step(rung: str) -> None:
    calls: list[Any] = []
    with trained(rung) as both:
        both.step(*batch(1, 8))
        handle = register_optimizer_step_post_hook(lambda *_: calls.append(None))
        try:
            both.ours.step(*batch(2, 8))
        finally:
            handle.remove()
        assert len(calls) == 1


@every_rung
def test_autocast_gives_the_bits_of_reference(rung: str) -> None:
    def run(schedule: str) -> nn.Module:
        torch.manual_seed(0)
        module = Net()  # its tied layer is cast twice
        make = lambda parameters: OPTIMIZERS["sgd"](list(parameters))  # noqa: E731
        with (
            TrainStep(module, nn.MSELoss(), make, ["cpu"] * 2, schedule) as step,
            torch.autocast("cpu", dtype=torch.bfloat16),
        ):
            for number in range(3):
                step(*batch(number, 8))
        return module

    assert_same(dict(run(rung).state_dict()), dict(run("reference").state_dict()), "module")


class Interrupting(Table):
    """Interrupts the main thread from the forward of another, which goes on until `done` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.armed, self.running, self.done = [False], [0], threading.Event()

    def __deepcopy__(self, memo: Any) -> Interrupting:
        return Interrupting()

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        out = super().forward(x, ids)
        if self.armed[0] and threading.current_thread() is not threading.main_thread():
            self._interrupt()
        return out

    def _interrupt(self) -> None:
        self.running[0] += 1
        # most likely the main thread has ended its own replica by then, and waits
        self.done.wait(0.05)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        self.done.wait(0.3)
        self.running[0] -= 1


@pytest.mark.parametrize("rung", rungs.params([*Schedule][1:]))
def test_an_interrupt_ends_the_step_when_no_replica_runs_any_more(rung: str) -> None:
    with trained(rung, Interrupting) as both:
        both.step(*batch(1, 8))
        module = both.ours.module
        module.armed[0] = True
        with pytest.raises(KeyboardInterrupt):
            both.ours.step(*batch(2, 8))
        still = module.running[0]
        module.armed[0] = False
        module.done.set()
        assert still == 0


@every_rung
def test_a_copy_of_the_module_is_free(rung: str) -> None:
    with trained(rung) as both:
        both.step(*batch(1, 8))
        for side in (both.ours, both.plain):
            other = copy.deepcopy(side.module)
            for p in other.parameters():
                p.data.zero_()
        both.step(*batch(2, 8))
