"""On every schedule, ordinary code trains as in a plain loop or is refused before any change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from dpbench import DataParallel
from dpbench.engine.errors import Refused
from dpbench.engine.train_step import TrainStep
from dpbench.measure import verification
from tests.engine import rungs
from tests.engine.law.compare import assert_same
from tests.engine.law.sides import pair, refusing
from tests.engine.nets import OPTIMIZERS

TOKENS, STEPS = 7, 3


class Tokens(nn.Module):
    """A language model; all tokens of the batch are the rows of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(TOKENS, 4), nn.Linear(4, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.table(x)).flatten(0, 1)
        return out


class Selecting(nn.Module):
    """A net whose output has only the rows that a mask selects."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.last(x)[mask]
        return out


class Single(nn.Module):
    """A net whose output has one number a row, and thus one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(x)[:, 0]
        return out


def widened() -> nn.Module:
    """Return a layer whose gradients have another dtype than its parameters."""
    layer = nn.Linear(4, 3)
    for parameter in layer.parameters():
        parameter.grad_dtype = torch.float64
    return layer


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape)


def flattened_batch() -> Any:
    return (torch.randint(0, TOKENS, (4, 6)),), torch.randint(0, TOKENS, (24,))


def selected_batch(rows: int = 6) -> Any:
    mask = torch.arange(8) < rows
    return (drawn(8, 4), mask), torch.randint(0, 3, (rows,))


def class_batch() -> Any:
    return (drawn(8, 4),), torch.randint(0, 3, (8,))


ORDINARY: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Callable[[], Any]]] = {
    "flattened target": (Tokens, nn.CrossEntropyLoss, flattened_batch),
    "fewer rows": (Selecting, nn.CrossEntropyLoss, selected_batch),
    "as many rows as devices": (Selecting, nn.CrossEntropyLoss, lambda: selected_batch(2)),
    "probabilities of one row": (
        Single,
        nn.CrossEntropyLoss,
        lambda: ((drawn(8, 4),), torch.rand(8).softmax(0)),
    ),
    "a number as target": (
        lambda: nn.Linear(4, 3),
        nn.MSELoss,
        lambda: ((drawn(8, 4),), torch.tensor(0.5)),
    ),
    "weights of rows": (
        lambda: nn.Linear(4, 3),
        lambda: nn.BCEWithLogitsLoss(weight=torch.arange(1.0, 9.0)[:, None]),
        lambda: ((drawn(8, 4),), torch.rand(8, 3)),
    ),
    "weights of as many rows as devices": (
        lambda: nn.Linear(4, 3),
        lambda: nn.BCEWithLogitsLoss(weight=torch.tensor([[1.0], [3.0]])),
        lambda: ((drawn(2, 4),), torch.rand(2, 3)),
    ),
    "soft targets of an image": (
        lambda: nn.Conv2d(2, 3, 3),
        nn.CrossEntropyLoss,
        lambda: ((drawn(8, 2, 5, 5),), torch.rand(8, 3, 3, 3).softmax(1)),
    ),
    "grad_dtype": (widened, nn.CrossEntropyLoss, class_batch),
    "fp16": (
        lambda: nn.Linear(4, 3).half(),
        nn.MSELoss,
        lambda: ((drawn(800, 4).half(),), torch.full((800, 3), 20.0).half()),
    ),
}
needs_grad_dtype = pytest.mark.skipif(
    not hasattr(Tensor, "grad_dtype"), reason="this torch has no Tensor.grad_dtype"
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=needs_grad_dtype if one == "grad_dtype" else ()) for one in ORDINARY],
)
@pytest.mark.filterwarnings("ignore:Using a target size")  # as without the engine
@rungs.every("rung")
def test_ordinary_training_code_trains_as_in_a_plain_loop(rung: str, name: str) -> None:
    module, criterion, make = ORDINARY[name]
    with refusing(rung, name), pair(rung, module, criterion, between=False) as both:
        before = copy.deepcopy(both.ours.module.state_dict())
        for number in range(STEPS):
            torch.manual_seed(number)
            inputs, target = make()
            try:
                both.step(inputs, target)
            except Refused:
                assert_same(dict(both.ours.module.state_dict()), dict(before), "module")
                raise


@needs_grad_dtype
@rungs.every("rung")
def test_a_grad_dtype_that_is_set_between_steps_is_seen(rung: str) -> None:
    def widen(loop: Any) -> None:
        for parameter in loop.module.parameters():
            parameter.grad = None
            parameter.grad_dtype = torch.float64

    with (
        refusing(rung, "grad_dtype"),
        pair(rung, lambda: nn.Linear(4, 3), nn.CrossEntropyLoss) as both,
    ):
        for number in range(STEPS):
            torch.manual_seed(number)
            both.step(*class_batch())
            both.do(widen)


# ---------------------------------------------------------------- refused on every schedule


def made(
    rung: str, module: nn.Module, devices: int = 2, optimizer: Any = OPTIMIZERS["sgd"]
) -> TrainStep:
    return TrainStep(
        module, nn.CrossEntropyLoss(), lambda p: optimizer(list(p)), ["cpu"] * devices, rung
    )


class SharpnessAware(torch.optim.SGD):
    """An optimizer of the user's own whose step needs a closure."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        closure()
        return super().step()


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, SharpnessAware])
@pytest.mark.parametrize("devices", [1, 2])
@rungs.every("rung")
def test_an_optimizer_that_needs_a_closure_is_refused_at_once(
    rung: str, devices: int, optimizer: Any
) -> None:
    with pytest.raises(Refused, match=f"{optimizer.__name__} evaluates the loss several times"):
        made(rung, nn.Linear(4, 3), devices, lambda p: optimizer(p, lr=0.1))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("devices", [1, 2])
@rungs.every("rung")
def test_a_step_without_gradients_is_refused_and_the_next_one_trains(
    rung: str, devices: int, mode: Any
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    (x,), target = class_batch()
    with made(rung, module, devices) as step:
        for _ in range(2):
            before = copy.deepcopy(module.state_dict())
            with mode(), pytest.raises(Refused, match="needs gradients"):
                step(x, target)
            assert_same(dict(module.state_dict()), dict(before), "module")
            step(x, target)
            assert not torch.equal(module.state_dict()["0.weight"], before["0.weight"])


@rungs.every("rung")
def test_a_step_that_was_made_in_inference_mode_trains(rung: str) -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 3)
    plain = copy.deepcopy(module)
    (x,), target = class_batch()
    with torch.inference_mode():
        step = made(rung, module)
    with step, made("reference", plain) as reference:
        for _ in range(STEPS):
            step(x, target)
            reference(x, target)
    assert_same(dict(module.state_dict()), dict(plain.state_dict()), "module")
    assert not any(p.is_inference() for p in module.parameters())


@pytest.mark.parametrize("schedule", ["reference", "cached"])
def test_a_wrapped_module_that_was_first_called_in_inference_mode_trains(schedule: str) -> None:
    module = nn.Linear(4, 3)
    wrapped = DataParallel(module, ["cpu"] * 2, schedule=schedule)
    with torch.inference_mode():
        wrapped(drawn(8, 4))
    wrapped(drawn(8, 4)).sum().backward()
    with torch.no_grad():
        module.weight.sub_(module.weight.grad)
    assert not module.weight.is_inference()


def normed() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3))


@rungs.every("rung")
def test_cached_parametrizations_are_refused_because_replicas_would_share_them(rung: str) -> None:
    torch.manual_seed(0)
    (x,), target = class_batch()
    module = normed()
    with made(rung, module) as step:
        step(x, target)
        before = copy.deepcopy(module.state_dict())
        gradients = [p.grad for p in module.parameters()]
        with parametrize.cached(), pytest.raises(Refused, match=r"parametrize\.cached"):
            step(x, target)
        assert_same(dict(module.state_dict()), dict(before), "module")
        assert_same([p.grad for p in module.parameters()], gradients, "gradients")
        step(x, target)
    with made(rung, nn.Linear(4, 3)) as step, parametrize.cached():
        step(x, target)


def test_one_device_trains_with_cached_parametrizations_and_a_wrapper_of_two_refuses() -> None:
    (x,), target = class_batch()
    with made("reference", normed(), devices=1) as step, parametrize.cached():
        step(x, target)
    with parametrize.cached(), pytest.raises(Refused, match=r"parametrize\.cached"):
        DataParallel(normed(), ["cpu"] * 2)(x)


# ---------------------------------------------------------------- random numbers


class Dropping(nn.Module):
    """Dropout, checkpointed or not; 64 rows and columns: other masks change every gradient."""

    def __init__(self, *, use_reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.last, self.use_reentrant = (
            nn.Linear(4, 64),
            nn.Linear(64, 3),
            use_reentrant,
        )

    def _block(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.first(x)), training=self.training)

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant is None:
            hidden = self._block(x)
        else:
            hidden = checkpoint(self._block, x, use_reentrant=self.use_reentrant)
        out: Tensor = self.last(hidden)
        return out


def dropped(rung: str, *, use_reentrant: bool | None) -> dict[str, Tensor]:
    """Return the weights after some steps."""
    torch.manual_seed(0)
    module = Dropping(use_reentrant=use_reentrant)
    with made(rung, module) as step:
        for number in range(STEPS):
            torch.manual_seed(number)
            step(drawn(64, 4).requires_grad_(), torch.randint(0, 3, (64,)))
    return dict(module.state_dict())


@pytest.mark.parametrize("use_reentrant", [False, True])
@rungs.every("rung")
def test_dropout_inside_a_checkpoint_of_concurrent_replicas_is_refused(
    rung: str, use_reentrant: bool
) -> None:
    with pytest.raises(Refused, match="checkpointing"):
        dropped(rung, use_reentrant=use_reentrant)
    assert torch.get_rng_state.__module__ == "torch.random"


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("schedule", ["reference", "cached"])
def test_a_wrapper_refuses_dropout_inside_a_checkpoint(schedule: str, use_reentrant: bool) -> None:
    module = Dropping(use_reentrant=use_reentrant)
    x = drawn(64, 4).requires_grad_()
    with pytest.raises(Refused, match="checkpointing"):
        DataParallel(module, ["cpu"] * 2, schedule=schedule)(x)


@rungs.every("rung")
def test_checkpoints_without_random_numbers_and_dropout_without_checkpoints_train(
    rung: str,
) -> None:
    torch.manual_seed(0)
    dropped(rung, use_reentrant=None)
    module = Dropping(use_reentrant=False).eval()
    with made(rung, module) as step:
        step(drawn(64, 4), torch.randint(0, 3, (64,)))


@pytest.mark.parametrize("use_reentrant", [False, True, None])
def test_replicas_that_draw_numbers_one_after_the_other_are_not_refused(
    use_reentrant: bool | None,
) -> None:
    """The verification of a strategy runs one forward at a time, from a seed."""
    module = Dropping(use_reentrant=use_reentrant)
    assert verification.replay(module)
    wrapped = DataParallel(module, ["cpu"] * 3)
    for _ in range(20):  # some replica draws while another one ends
        wrapped(drawn(6, 4).requires_grad_())


# ---------------------------------------------------------------- denormal numbers


class Tiny(nn.Module):
    """An output that is denormal, and zero where denormal numbers are flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * torch.finfo(x.dtype).tiny / 2
        self.seen.append(bool((out == 0).all()))
        return x * self.scale


@pytest.mark.skipif(
    not torch.set_flush_denormal(False), reason="this processor cannot flush denormal numbers"
)
@rungs.every("rung")
def test_denormal_numbers_are_flushed_in_all_replicas_or_in_none(rung: str) -> None:
    module = Tiny()
    try:
        with TrainStep(module, nn.MSELoss(), OPTIMIZERS["sgd"], ["cpu"] * 3, rung) as step:
            for number, flush in enumerate((False, True, False, True)):
                torch.set_flush_denormal(flush)
                step(torch.ones(6, 2), torch.ones(6, 2))
                assert module.seen == [flush] * 3, f"step {number}"
                module.seen.clear()
    finally:
        torch.set_flush_denormal(False)
