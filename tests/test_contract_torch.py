"""The contract where torch is wrong: torch's faults beside the engine's answers, on emulated
devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.oracle import error_of, oracle, ours, theirs
from tests.oracle_nets import Net as Call
from tests.test_contract_scatter_gather import Batch, Whole


@pytest.fixture
def beside_torch() -> Iterator[None]:
    with oracle():
        yield


def errors(
    run: Callable[..., Any], *args: Any, ids: Sequence[int] = (0, 1), **kwargs: Any
) -> list[Any]:
    """Return the type and the message of the error of torch's wrapper, and of ours.

    None without an error.
    """
    wrapped = [wrap(Call(lambda _, *a, **k: run(*a, **k)), ids) for wrap in (theirs, ours)]
    return [error_of(lambda one=one: one(*args, **kwargs)) for one in wrapped]


def test_torch_drops_rows_of_unlike_inputs(beside_torch: None) -> None:
    whole, part = torch.arange(8.0), torch.zeros(2)
    output = theirs(Call(lambda _, x, y: x), range(4))(whole, part)
    assert output.tolist() == [0, 1, 2, 3]  # four of eight rows
    torchs, mine = errors(lambda x, y: x, whole, part, ids=range(4))
    assert (torchs, mine[0]) == (None, ValueError)


def test_keywords_that_are_shorter_or_longer_than_inputs_are_refused(beside_torch: None) -> None:
    whole, part = torch.arange(8.0), torch.zeros(2)
    torchs, mine = errors(lambda x, **_: x, whole, d=part, ids=range(4))
    assert (torchs[0], mine[0]) == (AssertionError, ValueError)
    torchs, mine = errors(
        lambda *x, **_: x, part, d=whole, ids=range(4)
    )  # in torch the rest get no inputs
    assert mine[0] is ValueError


def test_torch_shares_dataclasses_and_fails_on_defaultdicts(beside_torch: None) -> None:
    x = torch.arange(4.0)
    for wrap, rows in ((theirs, [4, 4]), (ours, [2, 2])):
        seen: list[int] = []
        wrap(Call(lambda _, x, batch, seen=seen: (seen.append(len(batch.x)), x)[1]), (0, 1))(
            x, Batch(x)
        )
        assert seen == rows
    torchs, mine = errors(lambda x, d: d["a"], x, defaultdict(list, a=x))
    assert torchs == (TypeError, "first argument must be callable or None")
    assert mine is None


def test_a_tensor_without_dimensions_begins_as_torchs_message(beside_torch: None) -> None:
    torchs, mine = errors(lambda x, y: x, torch.zeros(4), torch.tensor(1.0))
    assert torchs[0] is mine[0]
    assert mine[1].startswith(torchs[1])


def test_tensors_that_do_not_fit_are_refused_with_torchs_message(beside_torch: None) -> None:
    torchs, mine = errors(lambda x: x.new_zeros(2, 3 if x.get_device() else 2), torch.zeros(4))
    assert torchs[0] is mine[0] is RuntimeError
    assert mine[1].startswith(torchs[1])
    assert "the output may differ between replicas only along dim 0" in mine[1]


def test_outputs_left_on_the_host_are_refused(beside_torch: None) -> None:
    torchs, mine = errors(lambda x: torch.zeros(2), torch.zeros(4))
    assert torchs == (AssertionError, "Gather function not implemented for CPU tensors")
    assert mine[0] is TypeError
    assert mine[1].startswith(torchs[1])


def test_outputs_that_are_no_tensors_are_gathered_or_refused(beside_torch: None) -> None:
    torchs, mine = errors(lambda x: 1.5, torch.zeros(4))
    assert torchs == (TypeError, "'float' object is not iterable")
    torchs, mine = errors(lambda x: Whole(x, []), torch.zeros(4))
    assert torchs == (TypeError, "'Whole' object is not iterable")
    assert mine is None
    torchs, mine = errors(
        lambda x: {"a": x} if x.get_device() else {"a": x, "b": x}, torch.zeros(4)
    )
    assert torchs == (ValueError, "All dicts must have the same number of keys")
    assert mine[1].startswith(torchs[1])
    assert theirs(Call(lambda _, x: "text"), (0, 1))(torch.zeros(4)).startswith("<map object at 0x")
    assert theirs(Call(lambda _, x: x if x.get_device() else None), (0, 1))(torch.zeros(4)) is None
