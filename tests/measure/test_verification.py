"""Verification: the reference is right, correct gradients pass, and a wrong one is named."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench import models
from dpbench.engine import resolve
from dpbench.measure import verification
from dpbench.measure.reference import chunked
from dpbench.records import Case, Verified, no_mark, rows_of_chunks
from dpbench.strategies import Split, begin, dp


def own(module: nn.Module, shape: tuple[int, ...], loss: Any = None) -> models.Model:
    """Return a user's model over normal inputs."""

    def batch(n: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(n, *shape, generator=generator), torch.randn(n, generator=generator)

    def default(out: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        return F.mse_loss(out.flatten(1).mean(1), y, reduction=reduction)

    return models.Model("own", module, batch, loss or default)


def checked(
    model: models.Model, devices: int = 2, rows: int = 9, **changed: Any
) -> verification.Verification:
    case = Case(model="own", strategy="dp", devices=devices, batch_size=rows, **changed)
    return verification.check(dp.strategy.start, case, model, resolve(["cpu"] * devices))


# ---------------------------------------------------------------- the reference


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_reference_gradients_are_those_of_the_whole_batch(chunks: int) -> None:
    """Without BatchNorm the chunks make no difference but rounding.

    In double precision there is hardly any.
    """
    model = own(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double(), (6,))
    x, y = (t.double() for t in model.batch(8, 0))
    whole = copy.deepcopy(model.module)
    model.loss(whole(x), y).backward()
    expected = chunked(
        model.module, model.loss, x, y, Split(rows_of_chunks(8, chunks)), torch.device("cpu")
    )
    for ours, theirs in zip(expected.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


def test_reference_normalises_each_chunk_by_itself_and_keeps_the_firsts_statistics() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    x, y = torch.randn(8, 3), torch.randn(8)
    model = own(module, (3,))
    alone = copy.deepcopy(module)
    alone(x[:4])
    expected = chunked(copy.deepcopy(module), model.loss, x, y, Split((4, 4)), torch.device("cpu"))
    assert torch.equal(expected[0].running_mean, alone[0].running_mean)
    whole = copy.deepcopy(module)
    model.loss(whole(x), y).backward()
    assert not torch.allclose(expected[1].weight.grad, whole[1].weight.grad, rtol=1e-3)


# ---------------------------------------------------------------- what is right


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 33)), (12,)),
        (
            lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Dropout2d(0.5)),
            (2, 5, 5),
        ),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)), (4,)),
        (lambda: nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)), (4,)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True), (3, 8)),
    ],
    ids=["mlp", "conv", "dropout", "frozen", "attention dropout"],
)
def test_the_engine_is_bitwise_on_users_models(
    module: Any, shape: tuple[int, ...], devices: int
) -> None:
    found = checked(own(module(), shape), devices)
    assert found.verified is Verified.BITWISE, str(found)


def test_dropout_between_recurrent_layers_is_off_too() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 5, num_layers=2, dropout=0.5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0]

    found = checked(own(Net(), (3, 4)))
    assert found.verified is Verified.BITWISE, str(found)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_batches_smaller_than_the_devices_are_verified(rows: int) -> None:
    found = checked(own(nn.Linear(4, 3), (4,)), devices=4, rows=rows)
    assert found.verified is Verified.BITWISE, str(found)


# ---------------------------------------------------------------- what is wrong


def tampered(tamper: Any) -> Any:
    """Return the engine's start with something done to the module after each step."""

    @contextmanager
    def start(case: Case, model: models.Model, devices: Any, mark: Any) -> Iterator[Any]:
        with dp.strategy.start(case, model, devices, no_mark) as step:

            def wrong(inputs: Any, target: Any) -> Tensor:
                loss = step(inputs, target)
                tamper(model.module)
                return loss

            yield wrong

    return start


def faulty(tamper: Any, *, buffers: bool = True, **changed: Any) -> verification.Verification:
    torch.manual_seed(0)
    model = own(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), (6,))
    case = Case(model="own", strategy="dp", devices=2, batch_size=8, **changed)
    return verification.check(tampered(tamper), case, model, resolve(["cpu"] * 2), buffers=buffers)


def scale(name: str, factor: float) -> Any:
    return lambda module: module.get_parameter(name).grad.mul_(factor)


@pytest.mark.parametrize(
    ("tamper", "worst"),
    [
        (scale("0.weight", 1.01), "0.weight"),
        (scale("2.bias", 0.5), "2.bias"),
        (scale("2.bias", -1.0), "2.bias"),
        (scale("2.weight", float("nan")), "2.weight"),
        (scale("2.weight", float("inf")), "2.weight"),
        (lambda m: setattr(m[2].weight, "grad", None), "2.weight"),
        (lambda m: m[1].running_mean.add_(0.01), "1.running_mean"),
        (lambda m: m[1].num_batches_tracked.add_(1), "1.num_batches_tracked"),
    ],
)
def test_wrong_gradients_and_buffers_are_refused_and_named(tamper: Any, worst: str) -> None:
    found = faulty(tamper)
    assert found.verified is Verified.NO
    assert found.worst == worst
    assert worst in str(found)
    assert "chunked reference" in str(found)


def test_a_large_buffer_hides_no_wrong_gradient() -> None:
    """Such a buffer is a mask of -1e9 or a table of positions.

    Its norm was the measure of all errors once.
    """
    model = own(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), (6,))
    model.module.register_buffer("mask", torch.full((4,), -1e9))
    case = Case(model="own", strategy="dp", devices=2, batch_size=8)
    found = verification.check(tampered(scale("0.weight", 0.0)), case, model, resolve(["cpu"] * 2))
    assert (found.verified, found.worst) == (Verified.NO, "0.weight")


def over_valid_items(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Return the mean over the samples with a positive target, as a mask does."""
    each = (output.flatten(1).mean(1) - target).square()
    return each[target > 0].mean()


def averaging_ranks(factor: float = 1.0) -> Any:
    """Return the start of a strategy with gradients `factor` times the mean of two ranks' own."""

    @contextmanager
    def start(case: Case, model: models.Model, devices: Any, mark: Any) -> Iterator[Any]:
        def step(inputs: Tensor, target: Tensor) -> Tensor:
            total = torch.zeros(())
            for x, y in zip(inputs.split(case.rows), target.split(case.rows), strict=True):
                total = total + model.loss(model.module(x), y) * (len(y) / len(target)) * factor
            total.backward()
            return total

        yield step

    return start


def of_ranks(
    loss: Any = over_valid_items, *, strategy: str = "ddp", factor: float = 1.0
) -> verification.Verification:
    torch.manual_seed(0)
    model = own(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (6,), loss)
    case = Case(model="own", strategy=strategy, devices=2, batch_size=8)
    return verification.check(averaging_ranks(factor), case, model, resolve(["cpu"]))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_average_their_own_losses_and_the_difference_to_the_whole_batch_is_measured(
    strategy: str,
) -> None:
    found = of_ranks(strategy=strategy)
    assert found.verified in (Verified.BITWISE, Verified.WITHIN_TOLERANCE)
    assert found.averaging
    assert found.averaging.rows == 7
    # by hand: the gradients of both losses, in double precision
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = (tensor.double() for tensor in own(module, (6,)).batch(7, 1))
    whole = torch.autograd.grad(over_valid_items(module(x), y), list(module.parameters()))
    halves = [
        torch.autograd.grad(over_valid_items(module(x[rows]), y[rows]), list(module.parameters()))
        for rows in (slice(4), slice(4, 7))
    ]
    mean = [(4 * one + 3 * other) / 7 for one, other in zip(*halves, strict=True)]
    errors = [
        float((ours - theirs).norm() / theirs.norm())
        for ours, theirs in zip(mean, whole, strict=True)
    ]
    assert (found.averaging.low, found.averaging.high) == pytest.approx(
        (min(errors), max(errors)), rel=1e-3
    )
    assert found.averaging.low > 0.01


@pytest.mark.parametrize("factor", [0.98, 1.02, 0.5, -1.0, float("nan")])
def test_a_wrong_gradient_of_ranks_is_refused_also_if_the_loss_is_no_mean(factor: float) -> None:
    found = of_ranks(factor=factor)
    assert (found.verified, found.averaging) == (Verified.NO, None)


def test_only_ranks_may_average_their_own_losses_and_a_mean_over_samples_has_no_label() -> None:
    assert of_ranks(strategy="dp").verified is Verified.NO
    plain = of_ranks(None)
    assert (plain.verified, plain.averaging) == (Verified.WITHIN_TOLERANCE, None)


def test_a_rank_without_a_valid_item_is_named() -> None:
    def only_first(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
        valid = target == target_of_first
        return ((output.flatten(1).mean(1) - target).square() * valid).sum() / valid.sum()

    target_of_first = own(nn.Identity(), (6,)).batch(7, 1)[1][0]
    with pytest.raises(
        ValueError, match=r"0\.weight contains NaN if each rank .*\(of 4, 3 samples\)"
    ):
        of_ranks(only_first)


def test_rounding_is_within_tolerance() -> None:
    found = faulty(scale("0.weight", 1 + 1e-5))
    assert (found.verified, found.worst) == (Verified.WITHIN_TOLERANCE, "0.weight")
    assert found.error == pytest.approx(1e-5, rel=0.1)


@pytest.mark.parametrize(
    ("changed", "limit"),
    [({}, 1e-3), ({"precision": "tf32"}, 1e-2), ({"precision": "bf16"}, 5e-2)],
)
def test_an_error_above_the_tolerance_of_the_precision_is_refused(
    changed: dict[str, str], limit: float
) -> None:
    """The limits are those of docs/measuring.md.

    Rounding in bf16 gives at most a part of the tolerance.
    """
    within, beyond = (
        faulty(scale("0.weight", 1 + share * limit), **changed) for share in (0.6, 1.5)
    )
    assert (within.verified, beyond.verified) == (Verified.WITHIN_TOLERANCE, Verified.NO)
    assert beyond.worst == "0.weight"


def test_buffers_count_only_where_they_are_compared() -> None:
    tamper = lambda m: m[1].running_mean.add_(1.0)  # noqa: E731
    assert faulty(tamper, buffers=False).verified is Verified.BITWISE
    assert faulty(tamper).verified is Verified.NO


def test_a_gradient_where_none_belongs_is_refused() -> None:
    model = own(nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)), (4,))
    case = Case(model="own", strategy="dp", devices=2, batch_size=8)
    start = tampered(lambda m: setattr(m[0].weight, "grad", torch.ones(4, 4)))
    assert verification.check(start, case, model, resolve(["cpu"] * 2)).verified is Verified.NO


def test_a_strategy_that_does_nothing_is_refused() -> None:
    @contextmanager
    def start(*_: Any) -> Iterator[Any]:
        yield lambda inputs, target: torch.zeros(())

    model = own(nn.Linear(4, 3), (4,))
    case = Case(model="own", strategy="dp", devices=2, batch_size=8)
    assert verification.check(start, case, model, resolve(["cpu"] * 2)).verified is Verified.NO


def test_an_output_that_is_no_tensor_is_refused_in_words() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.layer(x)}

    model = own(Net(), (4,), lambda out, y: F.mse_loss(out["logits"].mean(1), y))
    try:
        found = checked(model)
    except (TypeError, ValueError) as error:
        assert "tensor" in str(error)  # noqa: PT017
        assert "dict" in str(error)  # noqa: PT017
    else:
        assert found.verified is Verified.BITWISE


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda loss: loss * float("nan"), r"the gradient of \w+ contains NaN in the first step"),
        (
            lambda loss: loss * 1e38 * 1e38,
            r"the gradient of \w+ contains (NaN|infinity) in the first step",
        ),
        (
            lambda loss: loss.detach().requires_grad_(),
            "no parameter has a gradient after backward in the first step",
        ),
    ],
    ids=["nan", "infinite", "detached"],
)
def test_gradients_that_are_absent_or_not_finite_are_named(spoil: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked(own(nn.Linear(4, 3), (4,), lambda out, y: spoil(F.mse_loss(out.mean(1), y))))


def test_outputs_that_are_nan_are_named() -> None:
    model, case = (
        own(nn.Linear(4, 3), (4,)),
        Case(model="own", strategy="dp", devices=2, batch_size=9, mode="no_grad"),
    )
    nn.init.constant_(model.module.bias, float("nan"))
    devices = resolve(["cpu"] * 2)
    with pytest.raises(ValueError, match="output contains NaN, also without data parallelism"):
        verification.check_outputs(
            partial(begin, dp.strategy), case, model, devices, split=dp.strategy.split
        )


def test_a_model_that_draws_random_numbers_is_told_so() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * random.random())

    found = checked(own(Net(), (4,), lambda out, y: F.mse_loss(out.mean(1), y)))
    assert found.verified is Verified.NO
    assert "random numbers" in str(found)
