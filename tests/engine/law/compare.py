"""Bitwise comparison of the two sides of a training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def assert_same(ours: Any, plain: Any, where: str) -> None:
    """Compare nested values bit by bit; NaN equals NaN."""
    assert type(ours) is type(plain) or isinstance(plain, Tensor), (
        f"{where}: {type(ours)}, not {type(plain)}"
    )
    if isinstance(plain, Tensor):
        assert isinstance(ours, Tensor), f"{where}: {ours}, not a tensor"
        ours, plain = (
            t.detach().to_dense().cpu() if t.layout is not torch.strided else t.detach().cpu()
            for t in (ours, plain)
        )
        assert ours.dtype == plain.dtype, f"{where}: {ours.dtype}, not {plain.dtype}"
        assert ours.shape == plain.shape, (
            f"{where}: shape {tuple(ours.shape)}, not {tuple(plain.shape)}"
        )
        same = torch.equal(ours, plain) or bool(
            ((ours == plain) | (ours.isnan() & plain.isnan())).all()
        )
        assert same, f"{where}: {ours.tolist()}, not {plain.tolist()}"
    elif isinstance(plain, dict):
        assert ours.keys() == plain.keys(), (
            f"{where}: {sorted(map(str, ours))}, not {sorted(map(str, plain))}"
        )
        for key, part in plain.items():
            assert_same(ours[key], part, f"{where}, {key}")
    elif isinstance(plain, tuple | list):
        assert len(ours) == len(plain), f"{where}: {len(ours)} entries, not {len(plain)}"
        for i, (mine, part) in enumerate(zip(ours, plain, strict=True)):
            assert_same(mine, part, f"{where}, {i}")
    else:
        assert ours == plain, f"{where}: {ours}, not {plain}"


def same(left: Any, right: Any) -> bool:
    """Compare structures by type and tensors by value."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def sums_exactly(criterion: Any) -> bool:
    """Return whether the gradients of the mean are bitwise those of the sum divided at the end."""
    if isinstance(criterion, nn.SmoothL1Loss) and criterion.beta != 1:
        return False  # torch divides by beta otherwise in the vectors than in the rest of a chunk
    if getattr(criterion, "reduction", "mean") == "sum":
        return True
    if isinstance(criterion, nn.MSELoss | nn.SmoothL1Loss):
        return True
    return (
        isinstance(criterion, nn.CrossEntropyLoss)
        and criterion.weight is None
        and not criterion.label_smoothing
    )
