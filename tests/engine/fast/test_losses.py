"""A loss by parts: its divisor, its bits, and the cases in which it must be computed as a whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.engine.fast.losses import Bits, summed_form

CLASSES = 7


def made(kind: str, rows: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return outputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    output = torch.randn(rows, CLASSES, generator=generator).to(dtype)
    numbers = torch.randint(0, CLASSES, (rows,), generator=generator)
    between = torch.rand(rows, CLASSES, generator=generator).to(dtype)
    return {
        "classes": (output, numbers),
        "probabilities": (output, between.softmax(1)),
        "logs": (output.log_softmax(1), numbers),
        "values": (output, between),
        "shares": (output.sigmoid(), between),
    }[kind]


LOSSES: dict[str, tuple[str, Callable[[torch.dtype], nn.Module]]] = {
    "cross entropy": ("classes", lambda d: nn.CrossEntropyLoss()),
    "ignore": ("classes", lambda d: nn.CrossEntropyLoss(ignore_index=0)),
    "smoothed": ("classes", lambda d: nn.CrossEntropyLoss(label_smoothing=0.1)),
    "weighted": (
        "classes",
        lambda d: nn.CrossEntropyLoss(weight=torch.arange(1, CLASSES + 1, dtype=d)),
    ),
    "probabilities": ("probabilities", lambda d: nn.CrossEntropyLoss()),
    "nll": ("logs", lambda d: nn.NLLLoss()),
    "mse": ("values", lambda d: nn.MSELoss()),
    "l1": ("values", lambda d: nn.L1Loss()),
    "smooth l1": ("values", lambda d: nn.SmoothL1Loss(beta=0.3)),
    "huber": ("values", lambda d: nn.HuberLoss(delta=0.3)),
    "bce": ("shares", lambda d: nn.BCELoss()),
    "bce with logits": ("values", lambda d: nn.BCEWithLogitsLoss()),
    "pos_weight": (
        "values",
        lambda d: nn.BCEWithLogitsLoss(pos_weight=torch.arange(1, CLASSES + 1, dtype=d)),
    ),
    "sum": ("values", lambda d: nn.MSELoss(reduction="sum")),
}


def by_parts(loss: Any, output: Tensor, target: Tensor, parts: int = 3) -> Tensor:
    """Return the loss that the replicas' parts make."""
    summed = summed_form(loss)
    assert summed is not None
    pieces = list(zip(output.chunk(parts), target.chunk(parts), strict=True))
    total = sum(summed.total(*piece) for piece in pieces)
    weights = [summed.weight(*piece) for piece in pieces]
    return total if weights[0] is None else total / sum(weights)  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", list(LOSSES))
def test_parts_make_the_loss_and_the_gradients_keep_the_bits_that_are_promised(
    name: str, dtype: torch.dtype
) -> None:
    kind, make = LOSSES[name]
    module = make(dtype)
    summed = summed_form(module)
    assert summed is not None
    for scale in (1.0, 0.25, 1024.0, 1 / 3):
        for rows in (5, 13, 16, 37):
            output, target = made(kind, rows, rows, dtype)
            gradients = []
            for take in (module, lambda o, t: by_parts(module, o, t)):
                leaf = output.clone().requires_grad_()
                loss = take(leaf, target)
                (loss * scale).backward()
                gradients.append((leaf.grad, loss.detach()))
            (whole, value), (parts, same) = gradients
            torch.testing.assert_close(same, value, rtol=1e-5, atol=0.0)
            torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-7)
            if summed.keeps_bits(powers=scale != 1 / 3):
                assert torch.equal(parts, whole), (scale, rows)


def test_no_loss_is_said_to_keep_bits_beyond_those_tried() -> None:
    found = {name: summed_form(make(torch.float32)) for name, (_, make) in LOSSES.items()}
    exact = {name for name, summed in found.items() if summed and summed.bits is Bits.SAME}
    assert exact == {"cross entropy", "ignore", "probabilities", "nll", "l1"}


def test_settings_are_read_anew() -> None:
    criterion = nn.CrossEntropyLoss()
    output, target = made("classes", 9, 0, torch.float32)
    for change in (
        {"ignore_index": 1},
        {"label_smoothing": 0.2},
        {"weight": torch.rand(CLASSES)},
        {"reduction": "sum"},
    ):
        for name, value in change.items():
            setattr(criterion, name, value)
        torch.testing.assert_close(by_parts(criterion, output, target), criterion(output, target))
    partial = functools.partial(F.cross_entropy, ignore_index=0)
    partial.keywords["ignore_index"] = 2
    torch.testing.assert_close(by_parts(partial, output, target), partial(output, target))


class Own(nn.MSELoss):
    pass


def _hooked() -> nn.Module:
    criterion = nn.MSELoss()
    criterion.register_forward_hook(lambda *_: None)
    return criterion


def _patched() -> nn.Module:
    criterion = nn.MSELoss()
    criterion.forward = lambda output, target: output.sum()  # type: ignore[method-assign]
    return criterion


def with_reduction(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    return F.mse_loss(output, target, reduction=reduction)


@pytest.mark.parametrize(
    "loss",
    [
        Own(),
        _hooked(),
        _patched(),
        nn.CTCLoss(),
        nn.MSELoss(reduction="none"),
        with_reduction,
        functools.partial(F.ctc_loss, blank=1),
        functools.partial(F.mse_loss, torch.zeros(2)),
    ],
    ids=[
        "subclass",
        "hooked",
        "patched",
        "ctc",
        "none",
        "own function",
        "partial of another",
        "partial of positions",
    ],
)
def test_what_has_no_known_divisor_is_not_taken_by_parts(loss: Any) -> None:
    assert summed_form(loss) is None


def test_rows_that_broadcasting_couples_do_not_split() -> None:
    summed = summed_form(F.mse_loss)
    assert summed is not None
    assert summed.splits(torch.zeros(4, 3), torch.zeros(4, 3))
    assert summed.splits(torch.zeros(4, 3), torch.zeros(4, 1))
    assert not summed.splits(torch.zeros(4, 1), torch.zeros(4))
    assert not summed.splits(torch.zeros(4, 3), torch.zeros(3))
    assert not summed.splits({"out": torch.zeros(4)}, torch.zeros(4))
    classes = summed_form(F.cross_entropy)
    assert classes is not None
    assert classes.splits(torch.zeros(4, 3), torch.zeros(4, 3))
    assert classes.splits(torch.zeros(4, 3, 2), torch.zeros(4, 2, dtype=torch.long))
    assert not classes.splits(torch.zeros(4), torch.zeros(4))  # the probabilities of one row


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 3), (6, 5, 3, 2)], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_soft_targets_are_counted_once_per_place_whatever_their_weights(
    shape: tuple[int, ...], weighted: bool
) -> None:
    output, target = torch.randn(shape), torch.rand(shape).softmax(1)
    loss = nn.CrossEntropyLoss(weight=torch.arange(1.0, 6.0) if weighted else None)
    summed = summed_form(loss)
    assert summed is not None
    assert summed.weight(output, target) == output.numel() // 5
    torch.testing.assert_close(by_parts(loss, output, target), loss(output, target))


def test_weights_that_differ_between_rows_do_not_split() -> None:
    output = torch.zeros(4, 3)
    weights = {(3,): True, (1, 3): True, (): True, (4, 3): False, (4, 1): False}
    for shape, splits in weights.items():
        summed = summed_form(nn.BCEWithLogitsLoss(weight=torch.ones(shape)))
        assert summed is not None
        assert summed.splits(output, output) == splits, shape
