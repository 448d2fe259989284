"""TrainStep compared with a hand-written training loop, and its marks around the phases."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.engine import TrainStep
from dpbench.hardware.device import Device
from dpbench.records import Phase
from dpbench.records.case import MOVING
from dpbench.records.errors import UsageError
from tests.engine import rungs
from tests.engine.chunked import PlainStep
from tests.engine.law.compare import same
from tests.engine.nets import NETS, TWO, conv, cpus, every_count, made, mlp
from tests.engine.plain.test_data_parallel import Awkward

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
}


def batches(net: str, count: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches and targets of a net's shape."""
    module, _ = made(net, rows)
    xs = [NETS[net][1](rows).detach() for _ in range(count)]
    with torch.no_grad():
        return [(x, torch.randn_like(module(x))) for x in xs]


def by_hand(
    module: nn.Module,
    make: Any,
    data: Any,
    n: int,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    decay: float = 1.0,
) -> list[float]:
    """Train as TrainStep should, on the plain reference; return the losses."""
    optimizer = make(module.parameters())
    plain = PlainStep(module, F.mse_loss, optimizer, n, accumulate=accumulate, clip_norm=clip)
    losses = []
    for x, y in data:
        losses.append(plain.step((x,), y).item())
        for group in optimizer.param_groups:
            group["lr"] *= decay
    return losses


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("net", ["mlp", "conv", "tied", "unused", "lstm", "spectral norm"])
@every_count
def test_training_equals_a_loop_by_hand(net: str, n: int, make: Any) -> None:
    ours, _ = made(net, 7)
    theirs = copy.deepcopy(ours)
    data = batches(net, 5, 7)
    losses = by_hand(theirs, make, data, n)
    with TrainStep(ours, F.mse_loss, make, cpus(n), schedule="reference") as step:
        assert [step(x, y).item() for x, y in data] == losses
    assert same(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize(("accumulate", "clip"), [(2, None), (3, 0.1), (1, 0.05)])
def test_accumulation_and_clipping_equal_a_loop_by_hand(
    accumulate: int, clip: float | None
) -> None:
    ours, _ = made("mlp", 6)
    theirs = copy.deepcopy(ours)
    data = batches("mlp", 7, 6)
    by_hand(theirs, OPTIMIZERS["sgd"], data, 2, accumulate=accumulate, clip=clip)
    step = TrainStep(
        ours,
        F.mse_loss,
        OPTIMIZERS["sgd"],
        cpus(2),
        schedule="reference",
        accumulate=accumulate,
        clip_norm=clip,
    )
    for x, y in data:
        step(x, y)
    assert same(ours.state_dict(), theirs.state_dict())


def test_schedulers_attach_to_the_optimizer() -> None:
    ours, _ = made("mlp", 6)
    theirs = copy.deepcopy(ours)
    data = batches("mlp", 5, 6)
    by_hand(theirs, OPTIMIZERS["adam"], data, 3, decay=0.5)
    step = TrainStep(ours, F.mse_loss, OPTIMIZERS["adam"], cpus(3), schedule="reference")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(step.optimizer, 0.5)
    for x, y in data:
        step(x, y)
        scheduler.step()
    assert same(ours.state_dict(), theirs.state_dict())


def test_a_scaler_changes_nothing_but_steps_that_overflow() -> None:
    ours, _ = made("mlp", 6)
    theirs = copy.deepcopy(ours)
    data = batches("mlp", 4, 6)
    by_hand(theirs, OPTIMIZERS["sgd"], data, 2, clip=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    step = TrainStep(
        ours,
        F.mse_loss,
        OPTIMIZERS["sgd"],
        cpus(2),
        schedule="reference",
        clip_norm=0.5,
        scaler=scaler,
    )
    for x, y in data:
        step(x, y)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-6, atol=1e-7)
    before = copy.deepcopy(ours.state_dict())
    step(torch.full((6, 12), float("inf")), data[0][1])
    assert same(ours.state_dict(), before)
    assert scaler.get_scale() == 2.0**9


def test_state_round_trips_through_another_count_of_devices() -> None:
    data = batches("conv", 6, 8)
    straight, _ = made("conv", 8)
    step = TrainStep(straight, F.mse_loss, OPTIMIZERS["adam"], cpus(2), schedule="reference")
    for x, y in data[:3]:
        step(x, y)
    saved = pickle.loads(pickle.dumps(step.state_dict()))
    assert not any(name.startswith("module.") for name in saved["module"])
    for x, y in data[3:]:
        step(x, y)
    resumed = TrainStep(conv(), F.mse_loss, OPTIMIZERS["adam"], cpus(2), schedule="reference")
    resumed.load_state_dict(saved)
    for x, y in data[3:]:
        resumed(x, y)
    assert same(resumed.module.state_dict(), straight.state_dict())


def test_loading_a_state_begins_a_new_accumulation() -> None:
    data = batches("mlp", 5, 6)
    ours, _ = made("mlp", 6)
    step = TrainStep(
        ours, F.mse_loss, OPTIMIZERS["sgd"], cpus(2), schedule="reference", accumulate=2
    )
    saved = copy.deepcopy(step.state_dict())
    step(*data[0])
    step.load_state_dict(saved)
    for x, y in data[1:]:
        step(x, y)
    theirs, _ = made("mlp", 6)
    by_hand(theirs, OPTIMIZERS["sgd"], data[1:], 2, accumulate=2)
    assert same(ours.state_dict(), theirs.state_dict())


def test_inputs_that_are_a_tuple_are_positional_arguments() -> None:
    module = nn.Bilinear(3, 4, 2)
    left, right, target = torch.randn(5, 3), torch.randn(5, 4), torch.randn(5, 2)
    loss = TrainStep(module, F.mse_loss, OPTIMIZERS["sgd"], cpus(2), schedule="reference")(
        (left, right), target
    )
    assert loss.shape == ()
    assert not loss.requires_grad


@pytest.mark.parametrize(
    "wrap", [lambda t: t, lambda t: (t, t), lambda t: {"y": t}], ids=["tensor", "tuple", "dict"]
)
def test_a_target_elsewhere_is_refused_naming_both_devices(wrap: Any) -> None:
    step = TrainStep(
        mlp(), lambda out, _: out.sum(), OPTIMIZERS["sgd"], cpus(2), schedule="reference"
    )
    with pytest.raises(RuntimeError, match=r"target.*meta.*cpu.*\.to\('cpu'\)"):
        step(torch.randn(4, 12), wrap(torch.zeros(4, 5, device="meta")))


def test_accumulate_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 1.*0"):
        TrainStep(mlp(), F.mse_loss, OPTIMIZERS["sgd"], cpus(2), schedule="reference", accumulate=0)


# ---------------------------------------------------------------- the mark seam


class Recorder:
    """A mark that records when phases open and close."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Phase, int]] = []

    @contextlib.contextmanager
    def __call__(self, phase: Phase, device: int) -> Iterator[None]:
        self.events.append(("open", phase, device))
        try:
            yield
        finally:
            self.events.append(("close", phase, device))

    def opened(self) -> list[tuple[str, int]]:
        return [(phase.value, device) for kind, phase, device in self.events if kind == "open"]

    def still_open(self) -> Counter[tuple[Phase, int]]:
        count: Counter[tuple[Phase, int]] = Counter()
        for kind, phase, device in self.events:
            count[phase, device] += 1 if kind == "open" else -1
        return +count + Counter({key: -value for key, value in count.items() if value < 0})


def test_marks_name_every_phase_on_its_device_in_order() -> None:
    mark = Recorder()
    module, x = made("conv", 7)
    TrainStep(module, F.mse_loss, OPTIMIZERS["sgd"], cpus(3), schedule="reference", mark=mark)(
        x, torch.randn(7, 5)
    )
    # the host starts threads
    first = [one for one in dict.fromkeys(mark.opened()) if one != ("forward", -1)]
    expected = [
        *[("optimizer", 0)],
        *[("scatter", i) for i in range(3)],
        *[("replicate", i) for i in range(3)],
        *[("forward", i) for i in range(3)],
        *[("gather", 0), ("loss", 0)],
        *[("backward", i) for i in range(3)],
        *[("reduce", 0)],
    ]
    threads = slice(7, 10)  # whichever starts first
    assert sorted(first[threads]) == expected[threads]
    assert [e for e in first if e[0] != "forward"] == [e for e in expected if e[0] != "forward"]
    assert mark.opened()[-1] == ("optimizer", 0)
    assert mark.still_open() == {}


def test_devices_that_send_are_marked_with_the_one_that_receives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def at_work(self: Device, sources: Sequence[Device]) -> list[int]:
        return [self.index, *(one.index for one in sources if one.index != self.index)]

    monkeypatch.setattr(Device, "at_work", at_work)
    mark = Recorder()
    module, x = made("conv", 7)
    TrainStep(module, F.mse_loss, OPTIMIZERS["sgd"], cpus(3), schedule="reference", mark=mark)(
        x, torch.randn(7, 5)
    )
    for phase in MOVING:
        opened = [device for name, device in mark.opened() if name == phase.value]
        assert {*opened} == {0, 1, 2}, phase
        if phase in (Phase.SCATTER, Phase.REPLICATE):  # the first device sends to each other
            assert opened.count(0) >= 3
    assert mark.still_open() == {}


def closed_before_reduce(mark: Recorder) -> bool:
    """Return whether every backward span is closed when the reduction opens."""
    opened = Counter()
    for kind, phase, _ in mark.events:
        if phase is Phase.BACKWARD:
            opened["backward"] += 1 if kind == "open" else -1
        if phase is Phase.REDUCE and kind == "open" and opened["backward"]:
            return False
    return True


@pytest.mark.parametrize("n", [2, 4])
def test_backward_ends_where_reduce_begins(n: int) -> None:
    mark = Recorder()
    module, x = made("mlp", 7)
    step = TrainStep(
        module, F.mse_loss, OPTIMIZERS["sgd"], cpus(n), schedule="reference", mark=mark
    )
    for _ in range(3):
        step(x, torch.randn(7, 5))
    assert mark.opened().count(("reduce", 0)) == 3
    assert closed_before_reduce(mark)
    assert mark.still_open() == {}


def test_one_device_has_no_replicas_to_join() -> None:
    mark = Recorder()
    module, x = made("mlp", 7)
    TrainStep(module, F.mse_loss, OPTIMIZERS["sgd"], cpus(1), schedule="reference", mark=mark)(
        x, torch.randn(7, 5)
    )
    assert mark.opened() == [
        (p, 0) for p in ("optimizer", "scatter", "forward", "loss", "backward", "optimizer")
    ]


@pytest.mark.parametrize("where", ["forward", "loss", "hook", "parameter hook"])
def test_marks_are_closed_when_something_raises_and_the_next_step_is_whole(where: str) -> None:
    mark, armed = Recorder(), [True]

    def fail(*_: Any) -> None:
        if armed[0]:
            raise Awkward(1, 2)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if where == "loss":
            fail()
        return F.mse_loss(output, target)

    module, x = made("mlp", 7)
    pristine = copy.deepcopy(module)
    if where == "forward":
        module[2].register_forward_hook(fail)
    elif where == "hook":
        module[2].register_full_backward_hook(fail)
    elif where == "parameter hook":
        module[2].weight.register_hook(fail)
    step = TrainStep(module, loss, OPTIMIZERS["sgd"], cpus(3), schedule="reference", mark=mark)
    target = torch.randn(7, 5)
    # a replica's error is made anew
    with pytest.raises(RuntimeError if where == "forward" else Awkward):
        step(x, target)
    assert mark.still_open() == {}
    assert closed_before_reduce(mark)
    assert (("reduce", 0) in mark.opened()) == (where == "parameter hook")
    armed[0] = False
    step(x, target)
    by_hand(pristine, OPTIMIZERS["sgd"], [(x, target)], 3)
    assert same(module.state_dict(), pristine.state_dict())


def test_a_gradient_inside_the_loss_keeps_the_phases_apart() -> None:
    mark = Recorder()
    module, x = made("mlp", 6)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        (inner,) = torch.autograd.grad(output.sum(), [module[0].weight], create_graph=True)
        return F.mse_loss(output, target) + inner.square().sum()

    TrainStep(module, loss, OPTIMIZERS["sgd"], cpus(2), schedule="reference", mark=mark)(
        x, torch.randn(6, 5)
    )
    assert mark.still_open() == {}
    assert closed_before_reduce(mark)


class Weighted(nn.Module):
    """The loss in forward, with weights of the classes beside the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return (self.last(x) * weights[0]).sum(1) + labels


def test_one_row_per_device_that_was_cut_is_said_once_in_the_note() -> None:
    x, weights = (torch.ones(8, 6), torch.arange(8)), torch.ones(2)
    make = lambda ps: torch.optim.SGD(ps, 0.1)  # noqa: E731
    with TrainStep(Weighted(), lambda out, _: out.mean(), make, TWO) as step:
        assert "one row" not in step.note
        for _ in range(2):
            step((*x, weights), None)
            assert step.note.count("one row") == 1


# -- arguments


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, *, scale: Tensor, steps: int = 1) -> Tensor:
        return self.last(torch.tanh(self.first(x * scale * steps)))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@rungs.every("schedule")
def test_a_dict_of_inputs_is_the_keyword_arguments_of_forward(schedule: str) -> None:
    torch.manual_seed(0)
    x, scale, target = torch.randn(8, 6), torch.rand(8, 1), torch.randint(3, (8,))
    plain, module = (Named() for _ in range(2))
    module.load_state_dict(plain.state_dict())
    optimizer = sgd(plain.parameters())
    with TrainStep(module, F.cross_entropy, sgd, cpus(2), schedule) as step:
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(plain(x, scale=scale, steps=2), target)
            loss.backward()
            optimizer.step()
            got = step({"x": x, "scale": scale, "steps": 2}, target)
            torch.testing.assert_close(got, loss.detach())
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("devices", [1, 2])
def test_names_that_forward_does_not_have_are_an_error_that_says_how_to_pass_the_dict(
    devices: int,
) -> None:
    class OfDict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.layer(batch["x"])

    inputs, target = {"x": torch.randn(4, 6)}, torch.randint(3, (4,))
    with TrainStep(OfDict(), F.cross_entropy, sgd, cpus(devices)) as step:
        with pytest.raises(UsageError, match=r"OfDict.*\(inputs,\)"):
            step(inputs, target)
        assert step((inputs,), target).isfinite()


def test_an_optimizer_in_place_of_a_function_is_an_error_with_the_way_out() -> None:
    module = nn.Linear(6, 3)
    given: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"optimizer_fn.*SGD.*lambda"):
        TrainStep(module, F.cross_entropy, given, cpus(1))
