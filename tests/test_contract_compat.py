"""The contract on `compat`: torch's faults, compared with torch's own code on emulated devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.oracle import error_of, oracle, ours, theirs, torch_faults_and_all
from tests.oracle_nets import Net as Call
from tests.test_contract_scatter_gather import Batch, Whole


@pytest.fixture
def beside_torch() -> Iterator[None]:
    with oracle():
        yield


def errors(run: Callable[..., Any], *args: Any, ids: Sequence[int] = (0, 1), **kwargs: Any) -> list[Any]:
    """Return the type and the message of the errors of torch's wrapper, of ours with `compat`, and of ours."""
    wrapped = [wrap(Call(lambda _, *a, **k: run(*a, **k)), ids) for wrap in (theirs, torch_faults_and_all, ours)]
    return [error_of(lambda one=one: one(*args, **kwargs)) for one in wrapped]


def test_compat_truncates_unlike_inputs_as_torch(beside_torch: None) -> None:
    outputs, shapes = [], []
    for wrap in (theirs, torch_faults_and_all):
        seen: list[Any] = []
        net = Call(lambda _, x, y, seen=seen: (seen.append((x.shape, y.shape)), x)[1])
        outputs.append(wrap(net, range(4))(torch.arange(8.0), torch.zeros(2)).cpu())
        shapes.append(sorted(seen))
    assert torch.equal(outputs[0], outputs[1])
    assert outputs[0].tolist() == [0, 1, 2, 3]  # four of eight rows
    assert shapes[0] == shapes[1]


def test_compat_fills_up_and_fails_as_torch_where_keywords_are_shorter(beside_torch: None) -> None:
    whole, part = torch.arange(8.0), torch.zeros(2)
    torchs, compat, mine = errors(lambda x, **_: x, whole, d=part, ids=range(4))
    assert torchs == compat
    assert "number of kwargs_tup 2" in torchs[1]
    assert mine[0] is ValueError
    torchs, compat, mine = errors(lambda *x, **_: x, part, d=whole, ids=range(4))  # the rest get no inputs
    assert torchs[0] is compat[0]
    assert torchs[1].partition("\n")[0] == compat[1].partition("\n")[0]
    assert mine[0] is ValueError


def test_compat_shares_dataclasses_and_fails_on_defaultdicts_as_torch(beside_torch: None) -> None:
    x = torch.arange(4.0)
    for wrap, rows in ((theirs, [4, 4]), (torch_faults_and_all, [4, 4]), (ours, [2, 2])):
        seen: list[int] = []
        wrap(Call(lambda _, x, batch, seen=seen: (seen.append(len(batch.x)), x)[1]), (0, 1))(x, Batch(x))
        assert seen == rows
    torchs, compat, mine = errors(lambda x, d: d["a"], x, defaultdict(list, a=x))
    assert torchs == compat == (TypeError, "first argument must be callable or None")
    assert mine is None


def test_a_tensor_without_dimensions_begins_as_torchs_message(beside_torch: None) -> None:
    torchs, _, mine = errors(lambda x, y: x, torch.zeros(4), torch.tensor(1.0))
    assert torchs[0] is mine[0]
    assert mine[1].startswith(torchs[1])


def test_tensors_that_do_not_fit_are_refused_with_torchs_message(beside_torch: None) -> None:
    torchs, compat, mine = errors(lambda x: x.new_zeros(2, 3 if x.get_device() else 2), torch.zeros(4))
    assert torchs[0] is compat[0] is mine[0] is RuntimeError
    assert mine[1].startswith(torchs[1])
    assert "the output may differ between replicas only along dim 0" in mine[1]


def test_outputs_left_on_the_host_are_refused(beside_torch: None) -> None:
    torchs, compat, mine = errors(lambda x: torch.zeros(2), torch.zeros(4))
    assert torchs == compat == (AssertionError, "Gather function not implemented for CPU tensors")
    assert mine[0] is TypeError
    assert mine[1].startswith(torchs[1])


def test_compat_gathers_what_is_no_tensor_as_torch(beside_torch: None) -> None:
    torchs, compat, mine = errors(lambda x: 1.5, torch.zeros(4))
    assert torchs == compat == (TypeError, "'float' object is not iterable")
    torchs, compat, mine = errors(lambda x: Whole(x, []), torch.zeros(4))
    assert torchs == compat == (TypeError, "'Whole' object is not iterable")
    assert mine is None
    torchs, compat, mine = errors(lambda x: {"a": x} if x.get_device() else {"a": x, "b": x}, torch.zeros(4))
    assert torchs == compat == (ValueError, "All dicts must have the same number of keys")
    assert mine[1].startswith(torchs[1])
    for wrap in (theirs, torch_faults_and_all):
        assert wrap(Call(lambda _, x: "text"), (0, 1))(torch.zeros(4)).startswith("<map object at 0x")
        assert wrap(Call(lambda _, x: x if x.get_device() else None), (0, 1))(torch.zeros(4)) is None
