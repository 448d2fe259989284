"""Writes, hooks and attributes that a schedule may fail to notice: each acts as in a plain loop.

Each test runs on every exact schedule and on those that TrainStep selects. A schedule on which each
device updates its own weights may need `sync()`, where `debug=True` must find that it was missing.
"""

from __future__ import annotations

import copy
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from dpbench.engine import DataParallel
from dpbench.engine.errors import Refused
from dpbench.engine.train_step import TrainStep
from dpbench.records.schedule import FASTEST, SELECTED, Schedule
from tests.engine import rungs
from tests.engine.law.compare import assert_same
from tests.engine.law.sides import EVERYWHERE, Loop, pair, refusing
from tests.engine.nets import OPTIMIZERS, Table, batch

every_schedule = rungs.every("rung")
wrapper_schedules = pytest.mark.parametrize("schedule", rungs.params([*rungs.WRAPPED, "copying"]))


class Plain(nn.Module):
    """Two layers whose forward takes, as those of the law do, the rows' numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)))
        return out


def steps(
    rung: str, module: Callable[[], nn.Module], change: Callable[[Loop], Any], **more: Any
) -> None:
    """Take steps on both sides, with `change` before the third."""
    with pair(rung, module, **more) as both:
        for number in range(5):
            if number == 2:
                both.do(change)
            both.step(*batch(number, 8, both.plain.criterion))


# ---------------------------------------------------------------- writes to weights


def adversaries(*schedule: str, debug: bool = False) -> list[float]:
    """Train a generator and a critic by turns, each by its own step, with fused optimizers.

    Return the losses.
    """
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 2)
    both = nn.Sequential(generator, critic)

    def fused(module: nn.Module) -> Callable[[Any], torch.optim.Optimizer]:
        return lambda _: torch.optim.Adam(module.parameters(), lr=0.05, fused=True)

    devices = ["cpu", "cpu"]
    loss = nn.CrossEntropyLoss()
    losses = []
    with (
        TrainStep(critic, loss, fused(critic), devices, *schedule, debug=debug) as criticise,
        TrainStep(both, loss, fused(both), devices, *schedule, debug=debug) as generate,
    ):
        for number in range(4):
            torch.manual_seed(number)
            x, y = torch.randn(8, 4), torch.randint(2, (8,))
            losses += [criticise(x, y).item(), generate(x, 1 - y).item()]
    return losses


def test_the_default_schedule_needs_no_sync() -> None:
    assert adversaries() == pytest.approx(adversaries("reference"), rel=1e-6)


@every_schedule
def test_two_steps_on_shared_weights_see_each_others_fused_updates(rung: str) -> None:
    if rung == Schedule.SHARDED:  # two flat buffers cannot both hold the same weights
        with pytest.raises(Refused):
            adversaries(rung)
    elif rung in (*EVERYWHERE, FASTEST):
        with pytest.raises(Refused):
            adversaries(rung, debug=True)
    else:
        assert adversaries(rung) == pytest.approx(adversaries("reference"), rel=1e-6)


class Codebook(Plain):
    """A codebook without gradients that forward moves towards the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        with torch.no_grad():
            self.codes.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return super().forward(x + self.codes, ids)


class Bounded(Table):
    """An embedding that forward renormalizes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table.max_norm = 0.5


class Halving(Plain):
    """A forward that halves a trained weight in the replica that has the first row."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        with torch.no_grad():
            if (ids == ids.min()).all() or int(ids[0]) % 2:
                self.first.weight.mul_(0.5)
        return super().forward(x, ids)


@every_schedule
@pytest.mark.parametrize("module", [Codebook, Bounded, Halving])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_that_forward_writes_are_those_of_replica_0(
    rung: str, module: Callable[[], nn.Module], accumulate: int
) -> None:
    """As in torch.nn.DataParallel: only replica 0 writes into the module's own memory.

    With max_norm, autograd refuses the write into a copy, in torch.nn.DataParallel as well.
    """
    options: Any = {"accumulate": accumulate}
    if module is Bounded and rung in rungs.WRAPPED:
        with pytest.raises(RuntimeError, match="modified inplace"):
            trained(module, rung, **options)
        return
    expected = "copying" if module is Bounded else "reference"
    with refusing(rung, f"accumulate={accumulate}"):
        found = [trained(module, schedule, **options) for schedule in (expected, rung)]
        assert_same(found[1], found[0], "state")


def trained(module: Callable[[], nn.Module], schedule: str, **options: Any) -> dict[str, Tensor]:
    """Train for six calls under a schedule; return the state of the module."""
    torch.manual_seed(0)
    net = module()
    with TrainStep(
        net, nn.MSELoss(), OPTIMIZERS["sgd"], ["cpu", "cpu"], schedule, **options
    ) as step:
        for number in range(6):
            step(*batch(number, 8, nn.MSELoss()))
    return net.state_dict()


# ---------------------------------------------------------------- the optimizer's step


def rated(loop: Loop) -> None:
    torch.optim.lr_scheduler.StepLR(loop.optimizer, 100)


def halves_gradients(loop: Loop, step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def halved(*args: Any, **kwargs: Any) -> Any:
        loop.log.append(("optimizer", "step", torch.zeros(())))
        for p in loop.module.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
        return step(*args, **kwargs)

    return halved


def wrap_after_scheduler(loop: Loop) -> None:
    rated(loop)
    loop.optimizer.step = halves_gradients(loop, loop.optimizer.step)  # type: ignore[method-assign]


def method_before_scheduler(loop: Loop) -> None:
    class_step = type(loop.optimizer).step
    replaced = halves_gradients(loop, class_step)
    loop.optimizer.step = replaced.__get__(loop.optimizer)  # type: ignore[attr-defined]
    rated(loop)


@every_schedule
@pytest.mark.parametrize("change", [wrap_after_scheduler, method_before_scheduler])
def test_a_step_wrapped_around_a_schedulers_acts_on_the_whole_gradient(
    rung: str, change: Callable[[Loop], None]
) -> None:
    with refusing(rung, change.__name__):
        steps(rung, Plain, change)


@every_schedule
def test_a_schedulers_own_wrapper_is_no_replaced_step(rung: str) -> None:
    with pair(rung, Plain) as both:
        both.do(rated)
        both.step(*batch(0, 8, both.plain.criterion))
        assert not both.ours.train.note


# ---------------------------------------------------------------- shared memory


class Aliased(Plain):
    """A buffer, a list, and an attribute in the memory of a weight; forward reads one of them."""

    def __init__(self, where: str) -> None:
        super().__init__()
        alias = self.first.weight.detach()
        if where == "buffer":
            self.register_buffer("alias", alias)
        elif where == "list":
            self.others = [alias]
        else:
            self.other = alias

    def read(self) -> Tensor:
        """Return the alias."""
        alias: Tensor = (
            self.alias
            if "alias" in self._buffers
            else getattr(self, "others", [self.__dict__.get("other")])[0]
        )
        return alias


@every_schedule
@pytest.mark.parametrize("where", ["buffer", "list", "attribute"])
def test_memory_that_the_module_itself_shares_stays_shared_or_is_refused(
    rung: str, where: str
) -> None:
    torch.manual_seed(0)
    net = Aliased(where)
    with (
        refusing(rung, "an alias of a weight in the module"),
        TrainStep(net, nn.MSELoss(), OPTIMIZERS["sgd"], ["cpu", "cpu"], rung) as step,
    ):
        step(*batch(0, 8, nn.MSELoss()))
        step(*batch(1, 8, nn.MSELoss()))
        assert torch.equal(net.read(), net.first.weight)
    assert net.read().data_ptr() == net.first.weight.data_ptr()


@every_schedule
def test_memory_that_processes_share_stays_shared_or_is_refused(rung: str) -> None:
    net = Plain()
    net.share_memory()
    with (
        refusing(rung, "share_memory"),
        TrainStep(net, nn.MSELoss(), OPTIMIZERS["sgd"], ["cpu", "cpu"], rung) as step,
    ):
        step(*batch(0, 8, nn.MSELoss()))
    assert all(p.is_shared() for p in net.parameters())


def test_a_checkpoint_of_a_layer_has_only_its_own_bytes() -> None:
    net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 3))
    with TrainStep(net, nn.MSELoss(), OPTIMIZERS["sgd"], ["cpu", "cpu"]) as step:
        step(torch.ones(4, 64), torch.ones(4, 3))
        for weight in net[2].state_dict().values():
            assert weight.untyped_storage().nbytes() == weight.nbytes


# ---------------------------------------------------------------- gradients


def transpose_gradients(loop: Loop) -> None:
    for p in loop.module.parameters():
        if p.grad is not None and p.dim() == 2:
            p.grad = p.grad.t().contiguous().t()


class Large(Plain):
    """A weight that three devices share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 40), nn.Linear(40, 3)


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@every_schedule
def test_strides_of_a_gradient_between_two_calls_do_not_matter(rung: str) -> None:
    with (
        refusing(rung, "accumulate=2"),
        pair(rung, Large, accumulate=2, devices=3) as both,
    ):
        for number in range(6):
            both.step(*batch(number, 8, both.plain.criterion))
            both.do(transpose_gradients)


def hook_nodes(loop: Loop) -> None:
    for p, name in loop.names().items():
        node = p.view_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        loop.handles.append(node)  # torch itself holds it only while a graph does

        def seen(*_: Any, p: Tensor = p, name: str = name) -> None:
            assert p.grad is not None
            loop.log.append((name, "node", p.grad.clone()))

        node.register_hook(seen)


def hook_before_nodes(loop: Loop) -> None:
    for p, name in loop.names().items():
        node = torch.autograd.graph.get_gradient_edge(p).node
        loop.handles.append(node)

        def halved(gradients: Any, name: str = name) -> Any:
            loop.log.append((name, "before node", gradients[0].clone()))
            return tuple(gradient * 0.5 for gradient in gradients)

        node.register_prehook(halved)


def hook_all(loop: Loop) -> None:
    names = list(loop.names().values())

    def seen(gradients: Any) -> None:
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None:
                loop.log.append((name, "all", gradient.clone()))

    loop.handles.append(register_multi_grad_hook(list(loop.module.parameters()), seen))


@every_schedule
@pytest.mark.parametrize("hook", [hook_nodes, hook_before_nodes, hook_all])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_on_nodes_see_the_reduced_gradients_once(
    rung: str, hook: Callable[[Loop], None], accumulate: int
) -> None:
    with refusing(rung, hook.__name__):
        steps(rung, Plain, hook, accumulate=accumulate)


@every_schedule
def test_a_hook_on_several_gradients_of_which_one_is_left_is_called(rung: str) -> None:
    """A backward whose only root is a leaf calls no such hook in torch."""

    def freeze_and_hook_all(loop: Loop) -> None:
        hook_all(loop)
        for parameter in [*loop.module.parameters()][1:]:
            parameter.requires_grad_(False)

    with refusing(rung, "hook_all"):
        steps(rung, Plain, freeze_and_hook_all)


class Counting(Plain):
    """A forward that lists its parameters and puts a hook on its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[int, int]] = []

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        listed, rows = len(list(self.parameters())), len(x)
        self.first.weight.register_hook(lambda _: self.log.append((listed, rows)))
        return super().forward(x, ids)


@every_schedule
def test_a_replica_lists_no_parameters_and_its_own_hooks_are_for_one_step(rung: str) -> None:
    net = Counting()
    with TrainStep(net, nn.MSELoss(), OPTIMIZERS["sgd"], ["cpu", "cpu"], rung) as step:
        for number in range(3):
            step(*batch(number, 7, nn.MSELoss()))
            assert sorted(net.log) == [(0, 3), (0, 4)]
            net.log.clear()


# ---------------------------------------------------------------- attributes


class Attributed(Plain):
    """A forward that reads attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.factor: Any = torch.ones(1)
        self.sign = 0.0

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        signed = 2.0 if str(self.sign) == "-0.0" else 1.0
        out = super().forward(x, ids) * self.factor.reshape(-1)[0].to(x.dtype)
        return out * signed * self.factor.dim()


def deeper_tensor(loop: Loop) -> None:
    loop.module.factor = torch.ones(1, 1, 1)


def other_equal_tensor(loop: Loop) -> None:
    loop.module.factor = torch.ones(1)


def negative_zero(loop: Loop) -> None:
    loop.module.sign = -0.0


def fill_other_tensor(loop: Loop) -> None:
    loop.module.factor.fill_(3.0)


@every_schedule
@pytest.mark.parametrize("change", [deeper_tensor, negative_zero])
def test_an_equal_attribute_is_still_another_object(
    rung: str, change: Callable[[Loop], None]
) -> None:
    steps(rung, Attributed, change)


@every_schedule
def test_an_equal_tensor_that_is_written_later_is_the_one_that_forward_reads(rung: str) -> None:
    with pair(rung, Attributed) as both:
        both.step(*batch(0, 8, both.plain.criterion))
        both.do(other_equal_tensor)
        both.step(*batch(1, 8, both.plain.criterion))
        both.do(fill_other_tensor)
        both.step(*batch(2, 8, both.plain.criterion))


class Filling(Plain):
    """A forward that fills a list if it has many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.maps: list[Tensor] = []

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if len(x) > 2:
            self.maps.append(x)
        return super().forward(x, ids)


@wrapper_schedules
def test_a_list_that_is_replaced_before_each_call_of_the_wrapper_is_filled(schedule: str) -> None:
    net = Filling()
    wrapped = DataParallel(net, ["cpu", "cpu"], schedule=schedule)
    for rows in (4, 4, 8, 8):
        net.maps = []
        wrapped(*batch(rows, rows, nn.MSELoss())[0])
        assert len(net.maps) == (2 if rows == 8 else 0)


@every_schedule
def test_a_list_that_is_replaced_before_each_step_is_filled(rung: str) -> None:
    net = Filling()
    with TrainStep(net, nn.MSELoss(), OPTIMIZERS["sgd"], ["cpu", "cpu"], rung) as step:
        for rows in (4, 4, 8, 8):
            net.maps = []
            step(*batch(rows, rows, nn.MSELoss()))
            assert len(net.maps) == (2 if rows == 8 else 0)


class Storing(Plain):
    """A forward that stores its rows, and reads them after other threads may have stored theirs."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.h = ids
        time.sleep(0.005)  # another thread runs
        return super().forward(x, ids) * 0 + self.h[:, None]


@wrapper_schedules
def test_threads_that_call_one_wrapper_get_their_own_rows(schedule: str) -> None:
    wrapped = DataParallel(Storing(), ["cpu", "cpu"], schedule=schedule)
    wrong: list[int] = []

    def call(caller: int) -> None:
        for number in range(20):
            ids = torch.arange(8) + 1000 * (caller * 20 + number)
            out = wrapped(torch.randn(8, 4), ids)
            if not torch.equal(out[:, 0].detach().long(), ids):
                wrong.append(number)

    threads = [threading.Thread(target=call, args=(caller,)) for caller in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@wrapper_schedules
def test_a_wrapper_whose_module_is_replaced_runs_the_new_one(schedule: str) -> None:
    inputs = batch(0, 8, nn.MSELoss())[0]
    wrapped = DataParallel(Plain(), ["cpu", "cpu"], schedule=schedule)
    before = wrapped(*inputs)
    wrapped.module = Plain()
    assert not torch.equal(wrapped(*inputs), before)
    assert torch.equal(wrapped(*inputs), DataParallel(wrapped.module, ["cpu", "cpu"])(*inputs))


@pytest.mark.parametrize("schedule", list(SELECTED))
def test_a_wrapper_that_has_run_can_still_be_copied(schedule: str) -> None:
    wrapped = DataParallel(Plain(), ["cpu", "cpu"], schedule=schedule)
    inputs = batch(0, 8, nn.MSELoss())[0]
    assert torch.equal(copy.deepcopy(wrapped)(*inputs), wrapped(*inputs))
