"""Which of a batch's inputs forward gets by position, and which by name."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any

import pytest

from dpbench.records.arguments import arguments_of, call


@pytest.mark.parametrize(
    "inputs",
    ["x", ["x"], UserDict(x=1), OrderedDict(x=1), None],
    ids=lambda one: type(one).__name__,
)
def test_what_is_neither_a_tuple_nor_a_plain_dict_is_one_argument(inputs: Any) -> None:
    (only,), named = arguments_of(inputs)
    assert only is inputs
    assert named == {}


def test_a_tuple_has_positions_and_a_dict_has_names() -> None:
    def forward(*arguments: int, **named: int) -> Any:
        return arguments, named

    assert call(forward, (1, 2)) == ((1, 2), {})
    assert call(forward, {"x": 1}) == ((), {"x": 1})
    assert call(forward, ({"x": 1},)) == (({"x": 1},), {})
