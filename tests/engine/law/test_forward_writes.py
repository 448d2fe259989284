"""What forward writes besides weights and buffers in place: hooks, attributes, shared containers.

On every schedule the losses are those of a plain loop, and `note` names what is lost or shared.
"""

from __future__ import annotations

import copy
import functools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpbench.engine import DataParallel, TrainStep, data_parallel
from dpbench.engine.errors import Refused
from tests.engine import rungs
from tests.engine.law.compare import assert_same
from tests.engine.law.sides import Loop, pair
from tests.engine.law.test_noticed_changes import Plain
from tests.engine.nets import OPTIMIZERS, TWO, batch

every_schedule = rungs.every("rung")
wrapper_schedules = pytest.mark.parametrize("schedule", rungs.params([*rungs.WRAPPED, "copying"]))


# ---------------------------------------------------------------- hooks


class Tapped(Plain):
    """A forward that installs a hook once, as transformers do to capture hidden states."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if not getattr(self, "tapped", False):
            self.first.register_forward_hook(lambda module, args, out: out + 1)
            self.tapped = True
        return super().forward(x, ids)


class Capturing(Plain):
    """A forward that captures an activation with a hook, which it then removes."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handle = self.first.register_forward_hook(lambda module, args, out: seen.append(out))
        out = super().forward(x, ids)
        handle.remove()
        return out + seen[0][:, :3]


@every_schedule
@pytest.mark.parametrize("module", [Tapped, Capturing])
def test_hooks_that_forward_adds_are_those_of_its_replica(rung: str, module: Any) -> None:
    with pair(rung, module) as both:
        for number in range(4):
            both.step(*batch(number, 8))
            assert not both.ours.module.first._forward_hooks
    assert not both.ours.module.first._forward_hooks


@wrapper_schedules
def test_a_wrapper_leaves_hooks_that_forward_adds_to_its_replicas(schedule: str) -> None:
    module = Tapped()
    wrapped = DataParallel(module, TWO, schedule=schedule)
    for number in range(3):
        wrapped(*batch(number, 8)[0])
    assert not module.first._forward_hooks


@every_schedule
def test_one_device_keeps_the_hook_that_forward_adds(rung: str) -> None:
    with pair(rung, Tapped, devices=1) as both:
        for number in range(3):
            both.step(*batch(number, 8))
            assert len(both.ours.module.first._forward_hooks) == 1


def halve(loop: Loop) -> None:
    loop.handles.append(loop.module.first.register_forward_hook(lambda m, args, out: out * 0.5))


def replace(loop: Loop) -> None:
    loop.handles.pop().remove()
    loop.handles.append(loop.module.first.register_forward_hook(lambda m, args, out: out * 0.25))


def exchange(loop: Loop) -> None:
    hooks = loop.module.first._forward_hooks
    hooks[next(iter(hooks))] = lambda m, args, out: out * 2.0


def keyword(loop: Loop) -> None:
    def scaled(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (args[0] * 2, *args[1:]), kwargs

    loop.handles.append(loop.module.register_forward_pre_hook(scaled, with_kwargs=True))


def remove(loop: Loop) -> None:
    loop.handles.pop().remove()


@every_schedule
@pytest.mark.parametrize("module", [Plain, Tapped, Capturing])
def test_hooks_on_modules_that_change_between_steps_act_in_the_next(rung: str, module: Any) -> None:
    with pair(rung, module) as both:
        both.step(*batch(0, 8))
        for number, change in enumerate((halve, replace, exchange, keyword, remove, remove), 1):
            both.do(change)
            both.step(*batch(number, 8))


# ---------------------------------------------------------------- shared containers


class Stored(Plain):
    """A forward that reads what a hook of the constructor has stored, as U-Nets by hooks do."""

    store: Any

    def __init__(self) -> None:
        super().__init__()
        self.store = self.make_store()
        self.first.register_forward_hook(lambda module, args, out: self.put(self.store, out))

    def make_store(self) -> Any:
        return {}

    @staticmethod
    def put(store: Any, out: Tensor) -> None:
        store["first"] = out

    @staticmethod
    def get(store: Any) -> Tensor:
        out: Tensor = store["first"]
        return out

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        out = super().forward(x, ids)
        threading.Event().wait(0.02)  # another replica may write in between
        return out + self.get(self.store)[:, :3]


class StoredInList(Stored):
    def make_store(self) -> Any:
        return [None]

    @staticmethod
    def put(store: Any, out: Tensor) -> None:
        store[0] = out

    @staticmethod
    def get(store: Any) -> Tensor:
        out: Tensor = store[0]
        return out


class StoredInObject(Stored):
    def make_store(self) -> Any:
        return SimpleNamespace(inner=Holder())

    @staticmethod
    def put(store: Any, out: Tensor) -> None:
        store.inner.out = out

    @staticmethod
    def get(store: Any) -> Tensor:
        out: Tensor = store.inner.out
        return out


class Holder:
    out: Tensor


class StoredInTensor(Stored):
    """The store is a tensor that is neither parameter nor buffer."""

    def make_store(self) -> Any:
        return torch.zeros(8, 4)

    @staticmethod
    def put(store: Any, out: Tensor) -> None:
        store[: len(out)] = out.detach()

    @staticmethod
    def get(store: Any) -> Tensor:
        return store[:4].clone()  # type: ignore[no-any-return]


class StoredInClosure(Plain):
    """Two functions that share a variable, which is no attribute of the module."""

    def __init__(self) -> None:
        super().__init__()
        kept: Any = None

        def put(module: nn.Module, args: Any, out: Tensor) -> None:
            nonlocal kept
            kept = out

        def add(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            threading.Event().wait(0.02)
            return out + kept[:, :3]

        self.first.register_forward_hook(put)
        self.last.register_forward_hook(add)


STORES = [Stored, StoredInList, StoredInObject, StoredInTensor, StoredInClosure]


@every_schedule
@pytest.mark.parametrize("module", STORES)
def test_forwards_that_share_what_they_write_read_their_own(rung: str, module: Any) -> None:
    with pair(rung, module) as both:
        for number in range(3):
            both.step(*batch(number, 8))
            assert "one after another" in both.ours.train.note


@pytest.mark.parametrize("place", ["_Owned.written", "_Shared.change"])
def test_an_interrupted_comparison_leaves_the_next_step_in_turns(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Any) -> Any:
        raise KeyboardInterrupt

    with pair("reference", Stored) as both:
        with monkeypatch.context() as patched:
            patched.setattr(f"dpbench.engine.writes.{place}", interrupted)
            with pytest.raises(KeyboardInterrupt):
                both.ours.step(*batch(0, 8))
        both.ours.optimizer.zero_grad()
        both.step(*batch(1, 8))
        assert "one after another" in both.ours.train.note


@wrapper_schedules
@pytest.mark.parametrize("module", STORES)
def test_a_wrapper_lets_forwards_that_share_what_they_write_take_turns(
    schedule: str, module: Any
) -> None:
    net = module()
    wrapped = DataParallel(net, TWO, schedule=schedule)
    for number in range(2):
        x, ids = batch(number, 8)[0]
        expected = torch.cat([net(*piece) for piece in zip(x.chunk(2), ids.chunk(2), strict=True)])
        assert torch.equal(wrapped(x, ids), expected)
        assert torch.equal(data_parallel(net, (x, ids), TWO), expected)
    assert "one after another" in wrapped.note


class Growing(Plain):
    """A forward whose result depends on how many replicas have run before it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.calls.append(len(x))
        return super().forward(x, ids) * len(self.calls)


@every_schedule
def test_forwards_in_turns_run_in_the_order_of_their_replicas(rung: str) -> None:
    with pair(rung, Growing, devices=3) as both:
        for number in range(5):
            both.step(*batch(number, 9))


class Late(Stored):
    """A forward that begins to share in its second training batch."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if int(ids[0]) >= 200:
            return super().forward(x, ids)
        return Plain.forward(self, x, ids)

    @staticmethod
    def put(store: Any, out: Tensor) -> None:
        if len(out) in (1, 5):
            store["first"] = out


@every_schedule
def test_forwards_that_begin_to_share_later_are_refused_once(rung: str) -> None:
    with pair(rung, Late) as both:
        both.step(*batch(1, 8))
        before = copy.deepcopy(both.ours.module.state_dict())
        with pytest.raises(Refused, match="call the step again"):
            both.ours.step(*batch(2, 10))
        assert_same(dict(both.ours.module.state_dict()), dict(before), "module")
        for number in range(2, 5):
            both.step(*batch(number, 10))


@every_schedule
def test_a_batch_for_one_replica_is_not_refused(rung: str) -> None:
    with pair(rung, Late) as both:
        both.step(*batch(1, 8))
        x, ids = batch(2, 10)[0]
        both.step((x[:1], ids[:1]), torch.zeros(1, 3))
        both.step(*batch(3, 10))


class Logging(Plain):
    """A forward that writes down numbers, from its second batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[float] = []

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if int(ids[0]) >= 200:
            self.log.append(float(x[0, 0]))
        return super().forward(x, ids)


@every_schedule
def test_numbers_that_forward_begins_to_share_later_are_said(rung: str) -> None:
    with pair(rung, Logging) as both:
        both.step(*batch(1, 8))
        assert not both.ours.train.note
        both.step(*batch(2, 8))
        assert "log" in both.ours.train.note


class Meeting(Plain):
    """Forwards that wait for each other, and share a list on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.together, self.met = threading.Barrier(2), [0]

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.together.wait(5)
        self.met[0] += 1
        return super().forward(x, ids)


@every_schedule
def test_forwards_that_wait_for_each_other_are_not_kept_waiting(
    rung: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpbench.engine.turn.PATIENCE_S", 0.05)
    with TrainStep(Meeting(), nn.MSELoss(), OPTIMIZERS["sgd"], TWO, rung) as step:
        for number in range(3):
            step(*batch(number, 8))
        assert "wait for each other" in step.note


class Repeated(Stored):
    """A checkpoint around what reads the store."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        def read(out: Tensor) -> Tensor:
            return torch.tanh(out + self.get(self.store)[:, :3])

        out: Tensor = checkpoint(read, Plain.forward(self, x, ids), use_reentrant=False)
        return out


@every_schedule
def test_a_checkpoint_that_would_read_what_another_replica_wrote_is_refused(rung: str) -> None:
    with pair(rung, Repeated) as both, pytest.raises(Refused, match="checkpoint"):
        both.ours.step(*batch(1, 8))


def test_containers_that_no_forward_writes_cost_no_turns() -> None:
    module = Growing()
    module.forward = functools.partial(Plain.forward, module)  # type: ignore[method-assign]
    together = threading.Barrier(2)

    def meet(*_: Any) -> None:
        if module.training and together.n_waiting + 1:
            together.wait(10)

    with TrainStep(module, nn.MSELoss(), OPTIMIZERS["sgd"], TWO, "pool") as step:
        step(*batch(1, 8))
        module.first.register_forward_hook(meet)
        step(*batch(2, 8))  # it would break the barrier in turns
        assert not step.note


class StoredOnOriginal(Plain):
    """A hook that assigns to an attribute of the module from whose constructor it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.kept = out.detach()


@every_schedule
def test_an_attribute_that_a_hook_assigns_to_the_original_is_said(rung: str) -> None:
    with pair(rung, StoredOnOriginal) as both:
        for number in range(3):
            both.step(*batch(number, 8))
            assert "attributes" in both.ours.train.note


# ---------------------------------------------------------------- what is lost


class Rebinding(Plain):
    """A forward that may assign a buffer, `.data`, an attribute or a submodule, or delete one."""

    what = ""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.count, self.unused = 0, 1.0

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if self.what == "mean":
            self.mean = self.mean * 0.9 + x.detach().mean(0)
        if self.what == "first.weight.data":
            self.first.weight.data = self.first.weight.data * 0.5
        if self.what == "count":
            self.count += 1
        if self.what == "extra":
            self.extra = nn.Linear(4, 4)
        if self.what == "unused":
            del self.unused
        if self.what == "a hook":
            self.first.register_forward_hook(lambda module, args, out: None)
        return super().forward(x, ids)


@every_schedule
@pytest.mark.parametrize(
    "what", ["mean", "first.weight.data", "count", "extra", "unused", "a hook"]
)
def test_the_first_write_that_is_lost_is_named(rung: str, what: str) -> None:
    module = Rebinding()
    with TrainStep(module, nn.MSELoss(), OPTIMIZERS["sgd"], TWO, rung) as step:
        module.what = what
        step(*batch(1, 8))
        assert what in step.note
        assert "lost" in step.note


@every_schedule
@pytest.mark.parametrize("devices", [1, 2])
def test_writes_that_stay_are_not_called_lost(rung: str, devices: int) -> None:
    module = nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4), nn.Dropout(0.1)
    )
    with TrainStep(module, nn.MSELoss(), OPTIMIZERS["sgd"], ["cpu"] * devices, rung) as step:
        step(torch.randn(8, 4), torch.randn(8, 4))
        assert not step.note


class Normed(Plain):
    """ActNorm: the first batch sets a weight, past torch's counts of writes."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))
        self.register_buffer("done", torch.tensor(False))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if not self.done:
            self.shift.data.copy_(-x.mean(0))
            self.done.fill_(True)
        return super().forward(x + self.shift, ids)


@every_schedule
def test_a_weight_that_the_first_forward_writes_past_torch_is_that_of_replica_0(rung: str) -> None:
    with pair(rung, Normed) as both:
        for number in range(4):
            both.step(*batch(number, 8))
